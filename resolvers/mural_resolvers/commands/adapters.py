"""``mural adapters``: look at adapters on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import CONFIG_FILE, WEIGHTS_FILE
from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.errors import InvalidInput, UnusableAdapter, quoted
from mural_resolvers.files import contained, read_bounded
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import Manifest, build_manifest, check_same, read_manifest
from mural_resolvers.peft import PeftConfig, check_adapter, read_safetensors_header

__all__ = ["AdaptersCommand", "adapters"]


class AdaptersCommand:
    """``mural adapters inspect PATH`` and ``mural adapters list ROOT``."""

    help = "look at adapters on disk"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the two actions."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        inspect = actions.add_parser(
            "inspect",
            help="print an adapter's files, digest and facts, and whether it can be served",
        )
        inspect.add_argument("path", type=Path, metavar="PATH", help="the adapter's folder")
        inspect.add_argument(
            "--base-spec",
            type=Path,
            metavar="JSON",
            help="the base model that it must fit: what LLM(MODEL).info.base_spec.to_json() gives",
        )
        inspect.add_argument(
            "--admit-bin",
            action="store_true",
            help="accept a folder that has only a pickle (its tensors are not looked at)",
        )
        listing = actions.add_parser("list", help="list the versions in a directory of adapters")
        listing.add_argument(
            "root", type=Path, metavar="ROOT", help="holds tenant/adapter/version/"
        )

    def run(self, args: argparse.Namespace) -> int:
        """Exit status 0, or 1 for an adapter that cannot be served."""
        if args.action == "list":
            return _list(args.root)
        base = _read_base_spec(args.base_spec) if args.base_spec else None
        return _inspect(args.path, base, AdapterLimits(admit_bin=args.admit_bin))


def _read_base_spec(path: Path) -> BaseSpec:
    try:
        return BaseSpec.from_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}.") from None


def _list(root: Path) -> int:
    if not root.is_dir():
        raise InvalidInput(f"{root} is not a folder.")
    resolver = DirectoryResolver(root)
    for tenant in resolver.tenants():
        for listed in resolver.find_all(tenant):
            print(listed.name)
    return 0


def _inspect(path: Path, base: BaseSpec | None, limits: AdapterLimits) -> int:
    if not path.is_dir():
        raise InvalidInput(f"{path} is not a folder.")
    manifest = build_manifest(path, limits)
    _print_manifest(manifest)
    try:
        stated = read_manifest(path, limits)
        if stated is not None:
            check_same(manifest, stated)
        verdict = _verdict(path, base, limits)
    except UnusableAdapter as error:
        print(f"verdict   cannot be served: {error.message}")
        return 1
    print(f"verdict   {verdict}")
    return 0


def _print_manifest(manifest: Manifest) -> None:
    facts = manifest.facts
    for file in manifest.files:
        print(f"file      {file.sha256}  {file.size:>12,}  {file.path}")
    print(f"digest    {manifest.digest}")
    print(f"rank      {facts.rank}")
    print(f"alpha     {facts.alpha:g}{' (rank-stabilised)' if facts.use_rslora else ''}")
    # Both come from the file: quoted, so that they cannot steer a terminal.
    print(f"targets   {', '.join(quoted(target) for target in facts.targets)}")
    print(f"base      {quoted(facts.base_model_name or '')}")


def _verdict(path: Path, base: BaseSpec | None, limits: AdapterLimits) -> str:
    config_bytes = read_bounded(contained(path / CONFIG_FILE, path), limits.max_config_bytes)
    config = PeftConfig.from_json(config_bytes, limits)
    config.refuse_unsupported()
    weights = path / WEIGHTS_FILE
    if base is None:
        return "no unsupported feature; give --base-spec to check it against a base model"
    if not weights.exists():
        return "no unsupported feature; a pickle's tensors are checked when it is loaded"
    plan = check_adapter(config, read_safetensors_header(weights, limits), base, limits)
    copies = f", {len(plan.base_copies)} copies of base tensors" if plan.base_copies else ""
    return (
        f"fits {base.model_names[0]}: {len(plan.modules)} modules, rank {plan.max_rank}, "
        f"{plan.num_bytes:,} bytes{copies}"
    )


adapters = AdaptersCommand()
