"""Whether an adapter fits a base, and how each of its tensors is used: the one judgement of it.

Every tensor is consumed or the adapter is refused with the tensor's name, so that nothing in a
file is silently left out of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mural_resolvers.base_spec import BaseSpec, ModuleSpec
from mural_resolvers.errors import UnusableAdapter, quoted
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.peft.config import PeftConfig
from mural_resolvers.peft.header import TensorInfo
from mural_resolvers.peft.keys import ParsedKey, TensorKind, parse_tensor_name

__all__ = ["AdapterPlan", "BaseCopy", "ModulePlan", "check_adapter"]

_WEIGHT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One adapted module: where its halves are in the file and what to multiply them by.

    ``key_a`` has shape [rank, in_features] and ``key_b`` [out_features, rank], for both kinds;
    of an embedding ``in_features`` is the vocabulary. The output head is ``linear``.
    """

    module: str
    kind: Literal["linear", "embedding"]
    rank: int
    alpha: float
    scale: float
    key_a: str
    key_b: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """A whole tensor of the base in the adapter's file, of shape [vocabulary, hidden].

    It is consumed only if it equals the base's after the dtype conversion; else the loader
    refuses the adapter.
    """

    key: str
    module: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """How a checked adapter is loaded; ``modules`` is in the base's order and never empty."""

    modules: tuple[ModulePlan, ...]
    base_copies: tuple[BaseCopy, ...]
    max_rank: int
    num_bytes: int


def check_adapter(
    config: PeftConfig,
    header: dict[str, TensorInfo],
    base: BaseSpec,
    limits: AdapterLimits = DEFAULT_LIMITS,
) -> AdapterPlan:
    """Judge an adapter's configuration and tensors against a base.

    Matches the configuration's regular expressions, so what was uploaded is judged in the
    loader process, under its deadline. Raises ``UnusableAdapter`` with the reason.
    """
    config.refuse_unsupported()
    if len(header) > limits.max_tensors:
        raise UnusableAdapter(f"The adapter has more than {limits.max_tensors} tensors.")
    sorted_tensors = _sort(header, base)
    _check_targets(config, sorted_tensors, base)
    _check_saved(config, sorted_tensors.base_copies)
    modules = tuple(
        _plan_module(config, halves, base.modules[module], header)
        for module in base.modules
        if (halves := sorted_tensors.halves.get(module))
    )
    if not modules:
        raise UnusableAdapter("The adapter matches no module of the base model.")
    _check_ranks(modules, base.max_lora_rank)
    return AdapterPlan(
        modules=modules,
        base_copies=tuple(sorted_tensors.base_copies),
        max_rank=max(module.rank for module in modules),
        num_bytes=sum(header[key].num_bytes for m in modules for key in (m.key_a, m.key_b)),
    )


@dataclass(slots=True)
class _Halves:
    """The keys of one module's A and B."""

    module: str
    trained_module: str
    embedding: bool
    keys: dict[Literal["A", "B"], str] = field(default_factory=dict)


@dataclass(slots=True)
class _Sorted:
    halves: dict[str, _Halves] = field(default_factory=dict)
    base_copies: list[BaseCopy] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    adapters: set[str | None] = field(default_factory=set)


_HALF: dict[TensorKind, tuple[Literal["A", "B"], bool]] = {
    TensorKind.LORA_A: ("A", False),
    TensorKind.LORA_B: ("B", False),
    TensorKind.EMBEDDING_A: ("A", True),
    TensorKind.EMBEDDING_B: ("B", True),
}


def _sort(header: dict[str, TensorInfo], base: BaseSpec) -> _Sorted:
    """Give each tensor its place; refuse, by name, the ones that have none."""
    found = _Sorted()
    for key, info in header.items():
        parsed = parse_tensor_name(key)
        spec = base.modules.get(parsed.module)
        _refuse_by_kind(key, parsed.kind)
        if spec is not None and parsed.kind in _HALF and _fits(parsed.kind, spec):
            _place(found, key, parsed)
        elif spec is not None and parsed.kind is TensorKind.FULL and spec.kind != "linear":
            found.base_copies.append(_base_copy(key, parsed, spec, info))
        else:
            found.left_over.append(key)
    if found.left_over:
        raise UnusableAdapter(
            f"{len(found.left_over)} of the adapter's tensors have no place in the base model: "
            f"{_named(found.left_over)}."
        )
    if len(found.adapters) > 1:
        raise UnusableAdapter("The adapter's tensors belong to more than one adapter name.")
    unsupported = [m for m in found.halves if base.modules[m].kind not in base.supported_kinds]
    if unsupported:
        raise UnusableAdapter(f"Adapters on {_named(unsupported)} are not supported here.")
    return found


def _refuse_by_kind(key: str, kind: TensorKind) -> None:
    if kind is TensorKind.MAGNITUDE:
        raise UnusableAdapter(f"DoRA is not supported: tensor {quoted(key, 200)}.")
    if kind is TensorKind.BIAS:
        raise UnusableAdapter(f"lora_bias is not supported: tensor {quoted(key, 200)}.")


def _fits(kind: TensorKind, spec: ModuleSpec) -> bool:
    return _HALF[kind][1] == (spec.kind == "embedding")


def _place(found: _Sorted, key: str, parsed: ParsedKey) -> None:
    half, embedding = _HALF[parsed.kind]
    halves = found.halves.setdefault(
        parsed.module, _Halves(parsed.module, parsed.trained_module, embedding)
    )
    if half in halves.keys or halves.trained_module != parsed.trained_module:
        raise UnusableAdapter(
            f"Two tensors say the same: {_named([halves.keys.get(half, key), key])}."
        )
    halves.keys[half] = key
    found.adapters.add(parsed.adapter)


def _base_copy(key: str, parsed: ParsedKey, spec: ModuleSpec, info: TensorInfo) -> BaseCopy:
    vocabulary_first = (
        (spec.in_features, spec.out_features)
        if spec.kind == "embedding"
        else (spec.out_features, spec.in_features)
    )
    _check_tensor(key, info, vocabulary_first)
    return BaseCopy(key=key, module=parsed.module, shape=info.shape)


def _check_targets(config: PeftConfig, found: _Sorted, base: BaseSpec) -> None:
    """Tensors on a module that the configuration does not target: PEFT would not use them."""
    untargeted = [
        halves.trained_module
        for module, halves in found.halves.items()
        if not config.targets(
            halves.trained_module, is_linear=base.modules[module].kind == "linear"
        )
    ]
    if untargeted:
        raise UnusableAdapter(
            f"The file has tensors for modules that target_modules leaves out: "
            f"{_named(untargeted)}."
        )


def _check_saved(config: PeftConfig, copies: list[BaseCopy]) -> None:
    """A module that was trained in full, and whose weights the file lacks: PEFT cannot load it."""
    present = {copy.module.rpartition(".")[2] for copy in copies}
    missing = [name for name in config.modules_to_save if name not in present]
    if missing:
        raise UnusableAdapter(
            f"modules_to_save names {_named(missing)}, of which the file has no tensor."
        )


def _plan_module(
    config: PeftConfig, halves: _Halves, spec: ModuleSpec, header: dict[str, TensorInfo]
) -> ModulePlan:
    if len(halves.keys) != 2:
        only = next(iter(halves.keys.values()))
        raise UnusableAdapter(f"Tensor {quoted(only, 200)} lacks its other half.")
    key_a, key_b = halves.keys["A"], halves.keys["B"]
    rank = config.rank_for(halves.trained_module)
    _check_tensor(key_a, header[key_a], (rank, spec.in_features))
    _check_tensor(key_b, header[key_b], (spec.out_features, rank))
    return ModulePlan(
        module=halves.module,
        kind="embedding" if halves.embedding else "linear",
        rank=rank,
        alpha=config.alpha_for(halves.trained_module),
        scale=config.scale_for(halves.trained_module),
        key_a=key_a,
        key_b=key_b,
        in_features=spec.in_features,
        out_features=spec.out_features,
    )


def _check_tensor(key: str, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.dtype not in _WEIGHT_DTYPES:
        raise UnusableAdapter(f"Tensor {quoted(key, 200)} has the dtype {info.dtype}.")
    if info.shape != shape:
        raise UnusableAdapter(
            f"Tensor {quoted(key, 200)} has the shape {list(info.shape)}; the configuration and "
            f"the base model want {list(shape)}."
        )


def _check_ranks(modules: tuple[ModulePlan, ...], max_lora_rank: int) -> None:
    highest = max(modules, key=lambda module: module.rank)
    if highest.rank > max_lora_rank:
        raise UnusableAdapter(
            f"The adapter has rank {highest.rank} on {highest.module}; at most {max_lora_rank} "
            "is served here (max_lora_rank)."
        )


def _named(names: list[str]) -> str:
    told = ", ".join(quoted(name, 200) for name in names[:_NAMED_AT_MOST])
    return f"{told}, …" if len(names) > _NAMED_AT_MOST else told
