"""Which adapters are registered (host memory) and which are active (in a slot)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from mural_resolvers.base_spec import BaseSpec, ModuleSpec
from mural_resolvers.errors import Conflict, TooLarge, Unavailable, UnusableAdapter, quoted
from mural_server.layers.embedding import ParallelLMHead
from mural_server.layers.logits import LogitsProcessor
from mural_server.lora.cache import AdapterCache
from mural_server.lora.config import LoRAConfig
from mural_server.lora.eviction import Tenancy, choose_victim
from mural_server.lora.layers import (
    BaseLayerWithLoRA,
    StackSpace,
    wrap_layer,
    wrap_logits_processor,
)
from mural_server.lora.mapping import LoRAMapping
from mural_server.lora.model import LoRAModel
from mural_server.lora.punica import PunicaWrapper, get_punica_wrapper
from mural_server.lora.rank_rows import RankRowAllocator, RankRows
from mural_server.lora.targets import admits
from mural_server.lora.weights import LoRALayerWeights, PackedLoRALayerWeights
from mural_server.ops.base import Ops

__all__ = [
    "AdapterInUse",
    "FreedAdapterBytes",
    "LRUCacheLoRAModelManager",
    "LoRAModelManager",
    "Tier",
    "replace_submodule",
]

Tier = Literal["host", "slot"]
LayerWeights = LoRALayerWeights | PackedLoRALayerWeights


class FreedAdapterBytes(NamedTuple):
    """What a removal gave back in each tier."""

    slot: int
    host: int


class AdapterInUse(RuntimeError):
    """An adapter of a running or paused request was to be removed: drain first."""


@dataclass(frozen=True, slots=True)
class _Registered:
    model: LoRAModel
    layers: Mapping[str, LayerWeights]
    tenant: str


class LoRAModelManager:
    """Wraps a model's layers and fills their slots; full tiers are an error, nothing is evicted.

    Not thread-safe: it is the step loop's. ``modules`` has every wrapped layer once, by the name
    of the layer (fused) or ``lm_head``. ``lora_index_to_id`` is the slot table.
    """

    def __init__(
        self,
        model: nn.Module,
        base_spec: BaseSpec,
        config: LoRAConfig,
        ops: Ops,
        *,
        packed_modules_mapping: Mapping[str, tuple[str, ...]],
        max_rows: int,
        device: torch.device | None = None,
    ) -> None:
        """``max_rows``: rows of the largest step, padding included."""
        self.config = config
        self._packed_modules_mapping = dict(packed_modules_mapping)
        self._targets = {
            name: spec
            for name, spec in base_spec.modules.items()
            if spec.kind in base_spec.supported_kinds and admits(config.target_modules, name)
        }
        device = device or torch.device("cpu")
        space = StackSpace(config.num_rank_rows, ops.stack_dtype(config.dtype), device)
        self.punica: PunicaWrapper = get_punica_wrapper(ops, max_rows, config.max_loras, device)
        self.modules: dict[str, BaseLayerWithLoRA] = {}
        self._wrap_layers(model, space)
        if not self.modules:
            has = sorted({name.rpartition(".")[2] for name in base_spec.modules})
            raise ValueError(
                "lora_target_modules match no module of the base model, which has " + ", ".join(has)
            )
        self.lora_index_to_id: list[int | None] = [None] * config.max_loras
        self._rank_rows = RankRowAllocator(config.max_loras, config.max_lora_rank)
        self._registered: AdapterCache[_Registered] = AdapterCache(self._on_unregister)
        self._active: AdapterCache[int] = AdapterCache(self._on_deactivate)
        self._in_use: frozenset[int] = frozenset()
        self._step_ids: frozenset[int] = frozenset()
        self._last_mapping: tuple[object, ...] | None = None

    # Wrapping

    def _wrap_layers(self, model: nn.Module, space: StackSpace) -> None:
        wrapped_by_id: dict[int, BaseLayerWithLoRA] = {}
        heads: set[int] = set()
        # A module may be reachable by several names: it is wrapped once, and every name leads to
        # the one wrapper. Two would each clear the slots that the other had filled.
        for name, module in list(model.named_modules(remove_duplicate=False)):
            if (known := wrapped_by_id.get(id(module))) is not None:
                replace_submodule(model, name, known)
            elif not self._is_target(name):
                continue
            elif isinstance(module, ParallelLMHead):
                heads.add(id(module))
            elif (wrapper := wrap_layer(module, space, self.punica)) is not None:
                wrapped_by_id[id(module)] = wrapper
                self.modules[name] = replace_submodule(model, name, wrapper)
        if heads:
            self._wrap_logits(model, heads, space)

    def _is_target(self, name: str) -> bool:
        return any(member in self._targets for member in self._members(name))

    def _members(self, layer: str) -> tuple[str, ...]:
        """The base's names of what is fused into a layer; itself where nothing is."""
        parent, dot, leaf = layer.rpartition(".")
        members = self._packed_modules_mapping.get(leaf, (leaf,))
        return tuple(f"{parent}{dot}{member}" for member in members)

    def _wrap_logits(self, model: nn.Module, heads: set[int], space: StackSpace) -> None:
        for name, module in list(model.named_modules()):
            if isinstance(module, LogitsProcessor) and id(module.lm_head) in heads:
                wrapper = wrap_logits_processor(module, space, self.punica)
                self.modules["lm_head"] = replace_submodule(model, name, wrapper)
                return
        raise ValueError("the model has an lm_head and no logits processor over it")

    # Host tier

    def add_adapter(self, model: LoRAModel, *, tenant: str = "") -> bool:
        """Register an adapter; False if its id is registered already.

        It is judged first and room is made after, so that a bad one evicts nothing. Raises
        ``UnusableAdapter`` if it does not fit the wrapped layers, ``TooLarge`` if it never can
        fit in the host memory for adapters, ``Unavailable`` if there is no room now.
        """
        if model.id in self._registered:
            self._registered.touch(model.id)
            return False
        layers = model.packed(self._packed_modules_mapping)
        self._check(model, layers)
        budget = self.config.max_cpu_lora_bytes
        if budget is not None and model.nbytes > budget:
            raise TooLarge(
                f"The adapter takes {model.nbytes} bytes of host memory; adapters may take "
                f"{budget} in all."
            )
        self._make_host_room(model, tenant)
        self._registered.put(model.id, _Registered(model, layers, tenant))
        return True

    def _check(self, model: LoRAModel, layers: Mapping[str, LayerWeights]) -> None:
        if not model.loras:
            raise UnusableAdapter("The adapter matches no module of the base model.")
        if not 1 <= model.rank <= self.config.max_lora_rank:
            raise UnusableAdapter(
                f"The adapter has rank {model.rank}; at most {self.config.max_lora_rank} is "
                "served here (max_lora_rank)."
            )
        for name, weights in model.loras.items():
            self._check_weights(name, weights, self._targets.get(name), model.rank)
        for layer in layers:
            if layer not in self.modules:
                raise UnusableAdapter(f"The base model has no layer {quoted(layer, 200)}.")

    def _check_weights(
        self, name: str, weights: LoRALayerWeights, spec: ModuleSpec | None, rank: int
    ) -> None:
        if spec is None:
            raise UnusableAdapter(f"{quoted(name, 200)} is no module that adapters target here.")
        shapes = (tuple(weights.lora_a.shape), tuple(weights.lora_b.shape))
        wanted = ((weights.rank, spec.in_features), (weights.rank, spec.out_features))
        dtypes = {weights.lora_a.dtype, weights.lora_b.dtype}
        if shapes != wanted or weights.rank > rank or dtypes != {self.config.dtype}:
            raise UnusableAdapter(f"The adapter's weights for {quoted(name, 200)} do not fit.")

    def _make_host_room(self, model: LoRAModel, tenant: str) -> None:
        if not self._has_host_room(model):
            raise self._no_host_room()

    def _has_host_room(self, model: LoRAModel) -> bool:
        if len(self._registered) >= self.config.max_cpu_loras:
            return False
        budget = self.config.max_cpu_lora_bytes
        return budget is None or self._host_bytes(model) <= budget

    def _host_bytes(self, newcomer: LoRAModel | None = None) -> int:
        storages = {
            id(entry.model.storage): entry.model.nbytes for _, entry in self._registered.items()
        }
        if newcomer is not None:
            storages[id(newcomer.storage)] = newcomer.nbytes
        return sum(storages.values())

    def _no_host_room(self) -> Unavailable:
        return Unavailable(
            f"The host memory for adapters is full ({len(self._registered)} adapters, "
            f"{self._host_bytes()} bytes), and none of them can be evicted now."
        )

    def remove_adapter(self, lora_id: int) -> FreedAdapterBytes:
        """Take an adapter out of both tiers and give its memory back; unknown ids free nothing.

        Raises ``AdapterInUse`` while a running or paused request needs it: the caller drains.
        """
        if lora_id not in self._registered:
            return FreedAdapterBytes(0, 0)
        if lora_id in self._in_use:
            raise AdapterInUse(f"adapter {lora_id} is in use")
        entry = self._registered[lora_id]
        slot_bytes = 0
        if lora_id in self._active:
            slot = self._active[lora_id]
            rows = self._rank_rows.blocks[slot]
            slot_bytes = self._slot_bytes(slot)
            self._active.remove(lora_id)
            for module in self.modules.values():
                module.stack.release(rows)
        before = self._host_bytes()
        self._registered.remove(lora_id)
        del entry
        return FreedAdapterBytes(slot_bytes, before - self._host_bytes())

    def _on_unregister(self, lora_id: int, entry: _Registered) -> None:
        del entry
        if lora_id in self._active:
            self._active.remove(lora_id)

    # Slot tier

    def activate_adapter(self, lora_id: int, *, keep: frozenset[int] = frozenset()) -> bool:
        """Copy a registered adapter into a free slot; False if it has one.

        ``keep``: adapters that must not lose their slot for it. Raises ``KeyError`` if it is not
        registered, ``Unavailable`` if no slot is free.
        """
        if self.touch_active(lora_id):
            return False
        entry = self._registered[lora_id]
        self._make_slot_room(keep)
        slot = self.lora_index_to_id.index(None)
        rows = self._rank_rows.allocate(slot, entry.model.rank)
        for name, module in self.modules.items():
            weights = entry.layers.get(name)
            if weights is None:
                module.reset_lora(slot, rows)
            else:
                module.set_lora(slot, rows, weights)
        self.lora_index_to_id[slot] = lora_id
        self._active.put(lora_id, slot)
        self._registered.touch(lora_id)
        return True

    def _make_slot_room(self, keep: frozenset[int]) -> None:
        del keep
        if None not in self.lora_index_to_id:
            raise self._no_slot()

    def _no_slot(self) -> Unavailable:
        return Unavailable(f"All {self.config.max_loras} slots hold adapters that must stay there.")

    def touch_active(self, lora_id: int) -> bool:
        """Note that an adapter is used; False if it is in no slot."""
        if lora_id not in self._active:
            return False
        self._active.touch(lora_id)
        self._registered.touch(lora_id)
        return True

    def deactivate_adapter(self, lora_id: int) -> bool:
        """Take an adapter out of its slot, registered as it stays; False if it is in none."""
        if lora_id not in self._active:
            return False
        self._active.remove(lora_id)
        return True

    def _on_deactivate(self, lora_id: int, slot: int) -> None:
        self._rank_rows.free(slot)
        for module in self.modules.values():
            module.stack.clear(slot)
        self.lora_index_to_id[slot] = None
        self._step_ids -= {lora_id}

    # Pins and use

    def pin_adapter(self, lora_id: int, tier: Tier = "slot") -> None:
        """Keep an adapter from being evicted from host memory, and with "slot" from its slot too.

        ``"slot"`` activates it. Raises ``KeyError`` if it is not registered, ``Unavailable`` if no
        slot is free, ``Conflict`` for a pin that would leave no slot, or no place in host memory,
        to all other adapters.
        """
        if lora_id not in self._registered:
            raise KeyError(lora_id)
        self._check_host_pin(lora_id)
        if tier == "slot":
            self._pin_slot(lora_id)
        self._registered.pin(lora_id)

    def _check_host_pin(self, lora_id: int) -> None:
        if self._registered.is_pinned(lora_id):
            return
        count, limit = self._registered.num_pinned, self.config.max_cpu_loras
        if count + 1 >= limit:
            raise Conflict(
                f"{count} of {limit} adapters in host memory are pinned: one more would leave no "
                "place to the others. Unpin one, or raise max_cpu_loras."
            )

    def _pin_slot(self, lora_id: int) -> None:
        already = lora_id in self._active and self._active.is_pinned(lora_id)
        if not already and self._active.num_pinned >= self.config.max_loras - 1:
            raise Conflict(
                f"{self._active.num_pinned} of {self.config.max_loras} slots are pinned: one more "
                "would leave none to the other adapters. Unpin one, or raise max_loras."
            )
        self.activate_adapter(lora_id)
        self._active.pin(lora_id)

    def unpin_adapter(self, lora_id: int, tier: Tier = "host") -> None:
        """Let an adapter be evicted again: from its slot, and with "host" from host memory too."""
        self._active.unpin(lora_id)
        if tier == "host":
            self._registered.unpin(lora_id)

    def is_pinned(self, lora_id: int, tier: Tier = "host") -> bool:
        return (self._registered if tier == "host" else self._active).is_pinned(lora_id)

    @property
    def pinned_slots(self) -> frozenset[int]:
        """Adapters that keep their slot: what is left of ``max_loras`` is for all others."""
        return frozenset(lora_id for lora_id in self._active if self._active.is_pinned(lora_id))

    def set_in_use(self, lora_ids: Collection[int]) -> None:
        """Say which adapters running and paused requests need: they stay in host memory.

        Of these, the ones of the last step also keep their slot against whatever happens between
        two steps (a pin, a preload).
        """
        self._in_use = frozenset(lora_ids)

    # The step

    def begin_step(self, lora_ids: frozenset[int]) -> None:
        """Say which adapters the coming step needs; those of the last one give way to them."""
        self._step_ids = lora_ids

    def set_adapter_mapping(self, mapping: LoRAMapping) -> bool:
        """Take up a step's rows; True if the metadata had to be worked out anew.

        The slots count as well as the rows: an adapter may have been given another slot, or other
        rank rows, between two steps with the same rows.
        """
        key = (mapping, tuple(self.lora_index_to_id), self._rank_rows.blocks)
        if key == self._last_mapping:
            return False
        self._last_mapping = None
        self.punica.update_metadata(mapping, self.slot_of, self._rank_rows.blocks)
        self._last_mapping = key
        for lora_id in sorted(mapping.lora_ids):
            self.touch_active(lora_id)
        return True

    def set_logits_mapping(self, lora_ids: tuple[int, ...]) -> None:
        """Say whose the rows of the next ``compute_logits`` are, where they are not the step's."""
        self._last_mapping = None
        self.punica.update_logits_metadata(lora_ids, self.slot_of, self._rank_rows.blocks)

    @property
    def slot_of(self) -> dict[int, int]:
        return dict(self._active.items())

    # Looking

    def list_adapters(self) -> dict[int, LoRAModel]:
        """The registered adapters, least recently used first."""
        return {lora_id: entry.model for lora_id, entry in self._registered.items()}

    def get_adapter(self, lora_id: int) -> LoRAModel | None:
        return self._registered[lora_id].model if lora_id in self._registered else None

    def is_active(self, lora_id: int) -> bool:
        return lora_id in self._active

    @property
    def host_bytes(self) -> int:
        """Host memory of the registered adapters."""
        return self._host_bytes()

    @property
    def slot_bytes(self) -> int:
        """Memory of the rank rows in use."""
        return sum(self._slot_bytes(slot) for slot in self.slot_of.values())

    @property
    def slot_capacity_bytes(self) -> int:
        """Memory of all rank rows: what adapters of the largest rank in every slot would take."""
        return self.config.num_rank_rows * sum(
            module.stack.bytes_per_rank_row for module in self.modules.values()
        )

    def _slot_bytes(self, slot: int) -> int:
        start, end = self._rank_rows.blocks[slot]
        return (end - start) * sum(
            module.stack.bytes_per_rank_row
            for module in self.modules.values()
            if module.stack.slots >> slot & 1
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if slot table, tiers, rank rows and layers disagree."""
        self._registered.check_integrity()
        self._active.check_integrity()
        self._rank_rows.check_integrity()
        table = {
            lora_id: slot
            for slot, lora_id in enumerate(self.lora_index_to_id)
            if lora_id is not None
        }
        assert table == self.slot_of, (table, self.slot_of)
        assert len(table) == sum(lora_id is not None for lora_id in self.lora_index_to_id)
        assert all(lora_id in self._registered for lora_id in table), table
        assert len(self._registered) <= self.config.max_cpu_loras
        budget = self.config.max_cpu_lora_bytes
        assert budget is None or self._host_bytes() <= budget
        for slot, rows in enumerate(self._rank_rows.blocks):
            self._check_slot(slot, rows)

    def _check_slot(self, slot: int, rows: RankRows) -> None:
        lora_id = self.lora_index_to_id[slot]
        if lora_id is None:
            assert rows == (0, 0), f"free slot {slot} keeps rank rows {rows}"
            filled: set[str] = set()
        else:
            entry = self._registered[lora_id]
            assert rows.end - rows.start == entry.model.rank, (slot, rows)
            filled = set(entry.layers)
        for name, module in self.modules.items():
            assert bool(module.stack.slots >> slot & 1) == (name in filled), (slot, name)


class LRUCacheLoRAModelManager(LoRAModelManager):
    """Evicts the least recently used where a tier is full; never what is pinned or in use."""

    def _make_host_room(self, model: LoRAModel, tenant: str) -> None:
        if self._has_host_room(model):
            return
        newcomer = Tenancy(model.id, tenant, model.nbytes)
        for lora_id in self._victims(model, newcomer):
            self._registered.remove(lora_id)

    def _victims(self, model: LoRAModel, newcomer: Tenancy) -> list[int]:
        """Whom to evict, decided in full before anyone goes; raise if it would not be enough."""
        held = [
            Tenancy(lora_id, entry.tenant, entry.model.nbytes)
            for lora_id, entry in self._registered.items()
        ]
        evictable = {
            lora_id
            for lora_id in self._registered
            if lora_id not in self._in_use and not self._registered.is_pinned(lora_id)
        }
        victims: list[int] = []
        while not self._fits_without(victims, model):
            victim = choose_victim(held, evictable, newcomer)
            if victim is None:
                raise self._no_host_room()
            victims.append(victim)
            evictable.remove(victim)
            held = [entry for entry in held if entry.lora_id != victim]
        return victims

    def _fits_without(self, victims: Collection[int], model: LoRAModel) -> bool:
        stay = [
            entry.model for lora_id, entry in self._registered.items() if lora_id not in victims
        ]
        budget = self.config.max_cpu_lora_bytes
        storages = {id(other.storage): other.nbytes for other in (*stay, model)}
        return len(stay) < self.config.max_cpu_loras and (
            budget is None or sum(storages.values()) <= budget
        )

    def _make_slot_room(self, keep: frozenset[int]) -> None:
        if None in self.lora_index_to_id:
            return
        oldest = self._active.oldest(keep=keep | (self._step_ids & self._in_use))
        if oldest is None:
            raise self._no_slot()
        self._active.remove(oldest)


def replace_submodule(model: nn.Module, name: str, module: BaseLayerWithLoRA) -> BaseLayerWithLoRA:
    """Put ``module`` where ``name`` leads in ``model``, and return it."""
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, leaf, module)
    return module
