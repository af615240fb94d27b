"""What can be said of an adapter's folder: whether it can be served, and what it costs."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from mural_resolvers.base_spec import BaseSpec, ModuleSpec
from mural_resolvers.digest import CONFIG_FILE, WEIGHTS_FILE
from mural_resolvers.errors import TooLarge, UnusableAdapter
from mural_resolvers.files import contained, read_bounded
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import Manifest, build_manifest, check_same, read_manifest
from mural_resolvers.peft import (
    AdapterPlan,
    PeftConfig,
    TensorInfo,
    TensorKind,
    check_adapter,
    parse_tensor_name,
    read_safetensors_header,
)

__all__ = ["Judgement", "SlotBytes", "judge", "own_spec", "slot_bytes"]

# Served as one layer each: an adapter on one of them takes its rank rows in all of them.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_MATCHING_S = 10.0

# No base has it, so that a file alone is never refused for its rank.
_ANY_RANK = 1 << 30


class SlotBytes(msgspec.Struct, frozen=True):
    """What the adapter takes in a slot, by the dtype in which the base is served."""

    bfloat16: int
    float32: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """``refusals`` are the reasons for which it would not be served; none: it can be.

    ``plan`` is None where there are refusals, or where the tensors are a pickle's.
    """

    manifest: Manifest
    refusals: tuple[str, ...]
    plan: AdapterPlan | None
    slot: SlotBytes | None


def judge(
    folder: Path, base: BaseSpec | None, limits: AdapterLimits, *, within: Path | None = None
) -> Judgement:
    """Judge a folder against a base, or (None) against what its own tensors say of one.

    Links may end anywhere inside ``within`` (default: the folder itself). Raises
    ``UnusableAdapter`` or ``TooLarge`` where the files cannot even be read as an adapter.
    """
    within = within or folder
    manifest = build_manifest(folder, limits, within=within)
    config_bytes = read_bounded(contained(folder / CONFIG_FILE, within), limits.max_config_bytes)
    config = PeftConfig.from_json(config_bytes, limits)
    refusals, plan = [], None
    try:
        stated = read_manifest(folder, limits)
        if stated is not None:
            check_same(manifest, stated)
    except UnusableAdapter as error:
        refusals.append(error.message)
    try:
        config.refuse_unsupported()
        with _deadline(_MATCHING_S):
            plan = _plan(folder, manifest, config, base, limits, within)
    except (UnusableAdapter, TooLarge) as error:
        refusals.append(error.message)
    slot = slot_bytes(plan, base) if plan else None
    return Judgement(manifest, tuple(refusals), None if refusals else plan, slot)


def _plan(
    folder: Path,
    manifest: Manifest,
    config: PeftConfig,
    base: BaseSpec | None,
    limits: AdapterLimits,
    within: Path,
) -> AdapterPlan | None:
    if not any(file.path == WEIGHTS_FILE for file in manifest.files):
        return None
    header = read_safetensors_header(contained(folder / WEIGHTS_FILE, within), limits)
    return check_adapter(config, header, base or own_spec(header), limits)


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Bound the matching of a file's regular expressions, which may take for ever.

    ``re`` looks for signals as it backtracks; they reach the main thread alone, which is where a
    command runs.
    """

    def expire(signum: int, frame: FrameType | None) -> None:
        raise UnusableAdapter(
            f"The expressions of {CONFIG_FILE} take more than {seconds:g} s to match."
        )

    before = signal.signal(signal.SIGALRM, expire)
    left = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)


def own_spec(header: dict[str, TensorInfo]) -> BaseSpec:
    """The base that an adapter's own shapes speak of, to hold the file against itself."""
    modules: dict[str, ModuleSpec] = {}
    for key, info in header.items():
        parsed = parse_tensor_name(key)
        known = modules.get(parsed.module)
        spec = _widened(known, parsed.kind, parsed.module, info.shape)
        if spec is not None:
            modules[parsed.module] = spec
    return BaseSpec(
        model_names=("the adapter's own base",),
        modules=modules,
        vocab_size=1,
        hidden_size=1,
        num_layers=1,
        max_lora_rank=_ANY_RANK,
    )


def _widened(
    known: ModuleSpec | None, kind: TensorKind, module: str, shape: tuple[int, ...]
) -> ModuleSpec | None:
    """What a further tensor says of its module; None where it says nothing."""
    if len(shape) != 2 or 0 in shape:
        return None
    rows, columns = shape
    fan_in, fan_out = (known.in_features, known.out_features) if known else (1, 1)
    is_head = module.rpartition(".")[2] == "lm_head"
    if kind is TensorKind.LORA_A:
        return ModuleSpec("lm_head" if is_head else "linear", columns, fan_out)
    if kind is TensorKind.LORA_B:
        return ModuleSpec("lm_head" if is_head else "linear", fan_in, rows)
    if kind is TensorKind.EMBEDDING_A:
        return ModuleSpec("embedding", columns, fan_out)
    if kind is TensorKind.EMBEDDING_B:
        return ModuleSpec("embedding", fan_in, rows)
    if kind is TensorKind.FULL and is_head:
        return ModuleSpec("lm_head", columns, rows)
    if kind is TensorKind.FULL and module.rpartition(".")[2] == "embed_tokens":
        return ModuleSpec("embedding", rows, columns)
    return None


def slot_bytes(plan: AdapterPlan, base: BaseSpec | None) -> SlotBytes:
    """Rank rows times the features of every layer that the adapter is on.

    Without a base the shapes are the file's, which does not know of the layers that are fused
    with its own: the least that it can be.
    """
    if base is None:
        features = sum(module.in_features + module.out_features for module in plan.modules)
    else:
        targeted = {name for module in plan.modules for name in _fused_with(module.module)}
        specs = [base.modules[name] for name in targeted if name in base.modules]
        features = sum(spec.in_features + spec.out_features for spec in specs)
    elements = plan.max_rank * features
    return SlotBytes(bfloat16=2 * elements, float32=4 * elements)


def _fused_with(module: str) -> Iterable[str]:
    parent, dot, leaf = module.rpartition(".")
    members = next((group for group in _FUSED if leaf in group), (leaf,))
    return (f"{parent}{dot}{member}" for member in members)
