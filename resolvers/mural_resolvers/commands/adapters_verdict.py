"""``mural adapters inspect`` and ``verify``: look at an adapter and hold it against a base."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.commands.adapters_arguments import (
    STORE_VARIABLE,
    Actions,
    UsageError,
    add_action,
    add_base_arguments,
    find_version,
    opened_store,
)
from mural_resolvers.commands.adapters_base import read_base
from mural_resolvers.commands.adapters_judgement import Judgement, SlotBytes, judge
from mural_resolvers.commands.adapters_output import ProgressBar, print_json, print_pairs, readable
from mural_resolvers.digest import FileEntry
from mural_resolvers.errors import InvalidInput, MalformedName, quoted
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.peft import AdapterPlan

__all__ = ["add_inspect", "add_verify"]


class Inspection(msgspec.Struct, frozen=True):
    """What ``inspect --json`` prints."""

    name: str | None
    path: str | None
    digest: str
    bytes: int
    files: tuple[FileEntry, ...]
    rank: int
    alpha: float
    use_rslora: bool
    targets: tuple[str, ...]
    base_model: str | None
    modules: int | None
    slot_bytes: SlotBytes | None
    checked_against: str | None
    servable: bool
    refusals: tuple[str, ...]


class Verdict(msgspec.Struct, frozen=True):
    """What ``verify --json`` prints."""

    name: str | None
    path: str | None
    digest: str
    base: str
    fits: bool
    modules: int | None
    rank: int
    slot_bytes: SlotBytes | None
    refusals: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """An adapter's files on this machine, and what they were asked for as."""

    folder: Path
    name: AdapterName | None
    path: str | None


def add_inspect(actions: Actions) -> None:
    """Add ``inspect PATH|NAME``."""
    parser = add_action(
        actions,
        "inspect",
        _inspect,
        "print an adapter's files, digest and facts, what of it would be refused, and its memory",
        "name, path, digest, bytes,\nfiles [{path, size, sha256}], rank, alpha, use_rslora, "
        "targets, base_model, modules,\nslot_bytes {bfloat16, float32}, checked_against, "
        "servable, refusals",
    )
    _add_target(parser)
    add_base_arguments(parser, required=False)
    parser.add_argument(
        "--admit-bin",
        action="store_true",
        help="accept a folder that has only a pickle (its tensors are not looked at)",
    )


def add_verify(actions: Actions) -> None:
    """Add ``verify PATH|NAME --base MODEL|SPEC.json``."""
    parser = add_action(
        actions,
        "verify",
        _verify,
        "tell whether an adapter fits a base model, which is not loaded",
        "name, path, digest, base, fits,\nmodules, rank, slot_bytes {bfloat16, float32}, refusals",
    )
    _add_target(parser)
    add_base_arguments(parser, required=True)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="PATH|NAME",
        help="a PEFT folder; else a name in the store (fetched for the while)",
    )


def _inspect(args: argparse.Namespace) -> int:
    base = read_base(args.base, args.max_lora_rank) if args.base else None
    with _found(args) as found:
        judgement = judge(found.folder, base, AdapterLimits(admit_bin=args.admit_bin))
    if args.json:
        print_json(_inspection(found, judgement, base))
    else:
        _print_inspection(found, judgement, base)
    return 1 if judgement.refusals else 0


def _verify(args: argparse.Namespace) -> int:
    base = read_base(args.base, args.max_lora_rank)
    with _found(args) as found:
        judgement = judge(found.folder, base, AdapterLimits())
    manifest, plan = judgement.manifest, judgement.plan
    if args.json:
        verdict = Verdict(
            name=str(found.name) if found.name else None,
            path=found.path,
            digest=manifest.digest,
            base=base.model_names[0],
            fits=not judgement.refusals,
            modules=len(plan.modules) if plan else None,
            rank=plan.max_rank if plan else manifest.facts.rank,
            slot_bytes=judgement.slot,
            refusals=judgement.refusals,
        )
        print_json(verdict)
    else:
        print_pairs([("digest", manifest.digest), *_verdict(judgement, base)])
    return 1 if judgement.refusals else 0


@contextmanager
def _found(args: argparse.Namespace) -> Iterator[_Found]:
    """The folder that was named, or a version of the store in a folder that then goes."""
    path = Path(args.target)
    if path.is_dir():
        yield _Found(path, None, str(path))
        return
    try:
        name = parse_name(args.target)
    except MalformedName:
        raise InvalidInput(f"{quoted(args.target)} is not a folder.") from None
    with tempfile.TemporaryDirectory(prefix="mural-") as folder:
        yield _Found(Path(folder), asyncio.run(_fetch(args, name, Path(folder))), None)


async def _fetch(args: argparse.Namespace, name: AdapterName, folder: Path) -> AdapterName:
    try:
        async with opened_store(args) as store:
            exact = await find_version(store, name)
            stated = await store.manifest(exact)
            with ProgressBar("fetch", stated.num_bytes if stated else 0) as bar:
                await store.fetch(exact, folder, bar.advance)
            return exact
    except UsageError:
        raise UsageError(
            f"{name} is not a folder here; to look the name up give --store, or set "
            f"{STORE_VARIABLE}"
        ) from None


def _inspection(found: _Found, judgement: Judgement, base: BaseSpec | None) -> Inspection:
    manifest, facts = judgement.manifest, judgement.manifest.facts
    return Inspection(
        name=str(found.name) if found.name else None,
        path=found.path,
        digest=manifest.digest,
        bytes=manifest.num_bytes,
        files=manifest.files,
        rank=facts.rank,
        alpha=facts.alpha,
        use_rslora=facts.use_rslora,
        targets=facts.targets,
        base_model=facts.base_model_name,
        modules=len(judgement.plan.modules) if judgement.plan else None,
        slot_bytes=judgement.slot,
        checked_against=base.model_names[0] if base else None,
        servable=not judgement.refusals,
        refusals=judgement.refusals,
    )


def _print_inspection(found: _Found, judgement: Judgement, base: BaseSpec | None) -> None:
    manifest, facts = judgement.manifest, judgement.manifest.facts
    if found.name:
        print_pairs([("name", str(found.name))])
    for file in manifest.files:
        print(f"file      {file.sha256}  {file.size:>12,}  {file.path}")
    print_pairs(
        [
            ("digest", manifest.digest),
            ("size", readable(manifest.num_bytes)),
            ("rank", str(facts.rank)),
            ("alpha", f"{facts.alpha:g}{' (rank-stabilised)' if facts.use_rslora else ''}"),
            # Both come from the file: quoted, so that they cannot steer a terminal.
            ("targets", ", ".join(quoted(target) for target in facts.targets)),
            ("base", quoted(facts.base_model_name or "")),
            *_verdict(judgement, base),
        ]
    )


def _verdict(judgement: Judgement, base: BaseSpec | None) -> Iterator[tuple[str, str]]:
    """The lines that say what it takes and whether it can be served."""
    if judgement.slot and not judgement.refusals:
        least = "" if base else "at least "
        yield (
            "slot",
            f"{least}{readable(judgement.slot.bfloat16)} in bfloat16, "
            f"{readable(judgement.slot.float32)} in float32",
        )
    for reason in judgement.refusals:
        yield "verdict", f"cannot be served: {reason}"
    if not judgement.refusals:
        yield "verdict", _praise(judgement, base)


def _praise(judgement: Judgement, base: BaseSpec | None) -> str:
    plan = judgement.plan
    if plan is None:
        return "no unsupported feature; a pickle's tensors are checked when it is loaded"
    if base is None:
        return (
            f"no unsupported feature in {_modules(plan)}; give --base to check it "
            "against a base model"
        )
    copies = f", {len(plan.base_copies)} copies of base tensors" if plan.base_copies else ""
    return (
        f"fits {quoted(base.model_names[0])}: {_modules(plan)}, rank {plan.max_rank}, "
        f"{plan.num_bytes:,} bytes{copies}"
    )


def _modules(plan: AdapterPlan) -> str:
    count = len(plan.modules)
    return "1 module" if count == 1 else f"{count} modules"
