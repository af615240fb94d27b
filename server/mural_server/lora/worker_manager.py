"""What the step loop asks for before each forward pass."""

from __future__ import annotations

from collections.abc import Collection

from mural_server.lora.manager import (
    FreedAdapterBytes,
    LoRAModelManager,
    LRUCacheLoRAModelManager,
    Tier,
)
from mural_server.lora.mapping import LoRAMapping
from mural_server.lora.model import LoRAModel

__all__ = ["LRUCacheWorkerLoRAManager", "WorkerLoRAManager"]


class WorkerLoRAManager:
    """Sees that the adapters of a step are in slots; what a step does not need leaves its slot."""

    def __init__(self, manager: LoRAModelManager) -> None:
        self.manager = manager

    def add_adapter(self, model: LoRAModel, *, tenant: str = "", tier: Tier = "host") -> bool:
        """Register a loaded adapter, and with "slot" activate it; False if it was registered.

        See `LoRAModelManager.add_adapter` and `activate_adapter` for what is raised; an adapter
        that finds no slot stays registered.
        """
        added = self.manager.add_adapter(model, tenant=tenant)
        if tier == "slot":
            self.manager.activate_adapter(model.id)
        return added

    def remove_adapter(self, lora_id: int) -> FreedAdapterBytes:
        """See `LoRAModelManager.remove_adapter`."""
        return self.manager.remove_adapter(lora_id)

    def list_adapters(self) -> dict[int, LoRAModel]:
        """The registered adapters by id."""
        return self.manager.list_adapters()

    def set_active_adapters(self, lora_ids: Collection[int], mapping: LoRAMapping) -> int:
        """Put a step's adapters into slots and take up its rows; give how many were copied.

        Raises ``ValueError`` for more adapters than slots (those pinned by others counted) and for
        rows of an adapter that is not among ``lora_ids``, ``KeyError`` for one that is not
        registered: before anything is changed, since the alternative is a wrong answer.
        """
        needed = frozenset(lora_ids)
        self._check_step(needed, mapping)
        self.manager.begin_step(needed)
        self._make_way(needed)
        # Those in slots first, so that none of them is the oldest while the others are put in.
        missing = [lora_id for lora_id in sorted(needed) if not self.manager.touch_active(lora_id)]
        for lora_id in missing:
            self.manager.activate_adapter(lora_id, keep=needed)
        self.manager.set_adapter_mapping(mapping)
        return len(missing)

    def _check_step(self, needed: frozenset[int], mapping: LoRAMapping) -> None:
        slots = self.manager.config.max_loras
        if len(needed | self.manager.pinned_slots) > slots:
            raise ValueError(
                f"a step needs {len(needed)} adapters, and {slots} slots hold "
                f"{len(self.manager.pinned_slots)} pinned ones"
            )
        if not mapping.lora_ids <= needed:
            raise ValueError(f"rows of adapters {sorted(mapping.lora_ids - needed)} without a slot")
        for lora_id in needed:
            if self.manager.get_adapter(lora_id) is None:
                raise KeyError(lora_id)

    def _make_way(self, needed: frozenset[int]) -> None:
        for lora_id in self.manager.slot_of.keys() - needed - self.manager.pinned_slots:
            self.manager.deactivate_adapter(lora_id)


class LRUCacheWorkerLoRAManager(WorkerLoRAManager):
    """Leaves adapters in their slots until another one needs the slot."""

    manager: LRUCacheLoRAModelManager

    def __init__(self, manager: LRUCacheLoRAModelManager) -> None:
        super().__init__(manager)

    def _make_way(self, needed: frozenset[int]) -> None:
        """Nothing: `LRUCacheLoRAModelManager` evicts the oldest where a slot is missing."""
