"""The core's adapters: which are wanted, being loaded, at hand, and in which slot.

Loads run beside the steps (`AdapterLoader`); what happens here, between two steps, is taking a
loaded adapter up and copying it into a slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Set
from concurrent.futures import Future
from itertools import chain
from typing import NamedTuple, Protocol

from mural_resolvers.errors import AdapterNotFound, MuralError, Unavailable
from mural_resolvers.request import LoRARequest
from mural_server.engine.messages import AdapterInfo, AdapterLevel, FreedBytes
from mural_server.engine.slot_share import SlotChange
from mural_server.lora.checkpoint import CheckpointHeader
from mural_server.lora.manager import LRUCacheLoRAModelManager
from mural_server.lora.mapping import LoRAMapping
from mural_server.lora.model import LoRAModel

logger = logging.getLogger(__name__)

MAX_AHEAD = 2
"""Adapters that are being loaded or wait, loaded, for a place in host memory."""


class Loader(Protocol):
    """What reads adapters beside the steps."""

    def submit(self, lora: LoRARequest) -> Future[LoRAModel]: ...
    def close(self) -> None: ...


class Checker(Protocol):
    """What judges adapters that nobody asks for yet, beside the loads."""

    def check(self, lora: LoRARequest) -> Future[CheckpointHeader]: ...
    def close(self) -> None: ...


class AdapterFailure(NamedTuple):
    """An adapter that cannot be used, and why."""

    lora_int_id: int
    error: MuralError


class SlotFailures(NamedTuple):
    """Adapters that were given a slot and could not take it."""

    unusable: list[AdapterFailure]
    crowded: list[int]
    """Loaded still: host memory has no room for them beside the adapters that are in use."""


class Adapters:
    """Keyed by ``lora_int_id``. The step loop's alone; only ``on_news`` is called elsewhere."""

    def __init__(self, manager: LRUCacheLoRAModelManager, loader: Loader, checker: Checker) -> None:
        self._manager = manager
        self._loader = loader
        self._checker = checker
        self._known: dict[int, LoRARequest] = {}
        self._tenants: dict[int, str] = {}
        self._loading: dict[int, Future[LoRAModel]] = {}
        self._loaded: dict[int, LoRAModel] = {}
        """Read and checked; host memory had no place for them yet."""
        self._preloads: dict[int, None] = {}
        self._retired: set[int] = set()
        self._next_up: frozenset[int] = frozenset()
        """Those whose turn for a slot comes next."""
        self.on_news: Callable[[], None] = lambda: None

    def close(self) -> None:
        self._loader.close()
        self._checker.close()

    def check(self, lora: LoRARequest) -> Future[CheckpointHeader]:
        """Judge a folder as a load would, apart from the loads; news when it is done."""
        future = self._checker.check(lora)
        future.add_done_callback(lambda _: self.on_news())
        return future

    # -- what is wanted ------------------------------------------------------------------------

    def want(self, lora: LoRARequest, tenant: str, *, keep: bool = False) -> None:
        """Note who an id is; ``keep``: load it though no request asks for it.

        Raises `AdapterNotFound` for an adapter that is being removed.
        """
        if lora.lora_int_id in self._retired:
            raise AdapterNotFound(f"The adapter {lora.lora_name} is being unloaded.")
        self._known[lora.lora_int_id] = lora
        self._tenants.setdefault(lora.lora_int_id, tenant)
        if keep and not self.is_registered(lora.lora_int_id):
            self._preloads[lora.lora_int_id] = None

    def knows(self, lora_int_id: int) -> bool:
        return self.is_registered(lora_int_id) and lora_int_id not in self._retired

    def retire(self, lora_int_id: int) -> None:
        """No new request may use it from now on."""
        self._retired.add(lora_int_id)
        self._preloads.pop(lora_int_id, None)

    @property
    def registered(self) -> Set[int]:
        return self._manager.list_adapters().keys()

    def is_registered(self, lora_int_id: int) -> bool:
        return self._manager.get_adapter(lora_int_id) is not None

    @property
    def ready(self) -> Set[int]:
        """Those that could be put into a slot now."""
        return self.registered | self._loaded.keys()

    # -- loads ---------------------------------------------------------------------------------

    def start_loads(self, queue: Iterable[int], *, busy: Set[int], in_use: Collection[int]) -> None:
        """Load the first of those that wait for a slot, then what was asked to be resident.

        ``busy`` adapters have unfinished requests. Those ``in_use`` keep their place in host
        memory; so do the next in the queue, lest they be evicted just before their turn. What
        stands further back is not loaded yet: it would only push out what comes before it.
        """
        waiting = list(queue)
        self._drop_unwanted({*waiting, *busy, *self._preloads})
        ready = self.ready
        spare = self._manager.config.max_cpu_loras - self._manager.config.max_loras
        # Places are left for what was asked to be resident, where there are enough.
        ahead = waiting[: max(spare - MAX_AHEAD, MAX_AHEAD)]
        self._next_up = frozenset(ahead[:spare]) & ready
        self._manager.set_in_use({*in_use, *self._next_up})
        for lora_int_id in chain(ahead, self._preloads):
            if len(self._loading) + len(self._loaded) >= MAX_AHEAD:
                break
            if lora_int_id not in ready and lora_int_id not in self._loading:
                self._load(lora_int_id)
        self._prune({*waiting, *busy})

    def _drop_unwanted(self, wanted: Set[int]) -> None:
        """What nobody asks for any more must not stand in the way of the next loads."""
        for lora_int_id in self._loaded.keys() - wanted:
            del self._loaded[lora_int_id]
        for lora_int_id in self._loading.keys() - wanted:
            # One that has begun is taken up: the work is done, and it may be asked for again.
            if self._loading[lora_int_id].cancel():
                del self._loading[lora_int_id]

    def _load(self, lora_int_id: int) -> None:
        future = self._loader.submit(self._known[lora_int_id])
        self._loading[lora_int_id] = future
        future.add_done_callback(lambda _: self.on_news())

    def _prune(self, wanted: Set[int]) -> None:
        """Forget who the adapters were that nobody asks for any more."""
        if len(self._known) <= 2 * (self._manager.config.max_cpu_loras + len(wanted)):
            return
        keep = {*wanted, *self.ready, *self._loading, *self._preloads}
        self._known = {i: lora for i, lora in self._known.items() if i in keep}
        self._tenants = {i: tenant for i, tenant in self._tenants.items() if i in keep}

    def take_loads(self) -> list[AdapterFailure]:
        """Take up what the loader has finished; returns what could not be loaded."""
        failures = []
        for lora_int_id in [i for i, future in self._loading.items() if future.done()]:
            future = self._loading.pop(lora_int_id)
            error = future.exception()
            # One on its way out may still have requests, which drain.
            if error is None:
                self._loaded[lora_int_id] = future.result()
                continue
            self._preloads.pop(lora_int_id, None)
            failures.append(AdapterFailure(lora_int_id, typed(error)))
        for lora_int_id in list(self._loaded):
            try:
                self._register(lora_int_id)
            except Unavailable:
                continue  # it goes on waiting for a place
            except MuralError as error:
                failures.append(self._give_up(lora_int_id, error))
        return failures

    @property
    def without_room(self) -> Set[int]:
        """Those that were asked to be resident, are loaded, and find all places in use."""
        return self._loaded.keys() & self._preloads.keys()

    def _register(self, lora_int_id: int) -> None:
        """Give a loaded adapter its place in host memory; raise `Unavailable` where none is."""
        tenant = self._tenants.get(lora_int_id, "")
        self._manager.add_adapter(self._loaded[lora_int_id], tenant=tenant)
        del self._loaded[lora_int_id]
        self._preloads.pop(lora_int_id, None)

    def _give_up(self, lora_int_id: int, error: MuralError) -> AdapterFailure:
        self.give_up(lora_int_id)
        return AdapterFailure(lora_int_id, error)

    def give_up(self, lora_int_id: int) -> None:
        """Drop what was read of one that cannot be used."""
        self._loaded.pop(lora_int_id, None)
        self._preloads.pop(lora_int_id, None)

    # -- slots ---------------------------------------------------------------------------------

    def change_slots(self, changes: Iterable[SlotChange], in_use: Collection[int]) -> SlotFailures:
        """Copy adapters into slots; returns those that did not get there."""
        changes = list(changes)
        for _, victim in changes:
            if victim is not None:
                self._manager.deactivate_adapter(victim)
        # One that gets its place in host memory now must not take another newcomer's.
        needed = {*in_use, *(adapter for adapter, _ in changes)}
        self._manager.set_in_use(needed | self._next_up)
        failures = SlotFailures([], [])
        for lora_int_id, _ in changes:
            try:
                if lora_int_id in self._loaded and not self._find_place(lora_int_id, needed):
                    failures.crowded.append(lora_int_id)
                    continue
                self._manager.activate_adapter(lora_int_id, keep=frozenset(in_use))
            except MuralError as error:
                failures.unusable.append(self._give_up(lora_int_id, error))
        return failures

    def _find_place(self, lora_int_id: int, needed: Set[int]) -> bool:
        """Register one that has a slot; False if those ``needed`` now leave it no room."""
        for keep in (needed | self._next_up, needed):
            self._manager.set_in_use(keep)
            try:
                self._register(lora_int_id)
            except Unavailable:
                continue
            return True
        return False

    @property
    def in_slots(self) -> Set[int]:
        return self._manager.slot_of.keys()

    def pin(self, lora_int_id: int, tier: AdapterLevel) -> None:
        """Keep one that is registered, or has a slot; see `LoRAModelManager.pin_adapter`."""
        self._manager.pin_adapter(lora_int_id, tier)

    def unpin(self, lora_int_id: int, tier: AdapterLevel) -> None:
        """Let it be evicted again; see `LoRAModelManager.unpin_adapter`."""
        self._manager.unpin_adapter(lora_int_id, tier)

    def is_pinned(self, lora_int_id: int) -> bool:
        """Whether it stays in host memory at least."""
        return self._manager.is_pinned(lora_int_id)

    def remove(self, lora_int_id: int) -> FreedBytes:
        """Free all that it holds; nothing may use it any more."""
        self._loaded.pop(lora_int_id, None)
        if (load := self._loading.pop(lora_int_id, None)) is not None:
            # What is read already is dropped: it must not come back after it was removed.
            load.cancel()
        self._known.pop(lora_int_id, None)
        self._tenants.pop(lora_int_id, None)
        # The same content may come back later, under the same id.
        self._retired.discard(lora_int_id)
        self._manager.unpin_adapter(lora_int_id)
        self._manager.set_in_use(())
        freed = self._manager.remove_adapter(lora_int_id)
        return FreedBytes(slot=freed.slot, host=freed.host)

    def set_mapping(self, mapping: LoRAMapping) -> None:
        """Say whose rows the coming forward pass has."""
        self._manager.set_adapter_mapping(mapping)

    def set_logits_mapping(self, lora_int_ids: tuple[int, ...]) -> None:
        """Say whose rows the coming ``compute_logits`` has, where they are not the step's."""
        self._manager.set_logits_mapping(lora_int_ids)

    # -- looking -------------------------------------------------------------------------------

    def info(
        self, lora_int_id: int, *, level: AdapterLevel, pinned: bool, running: int, waiting: int
    ) -> AdapterInfo:
        lora = self._known[lora_int_id]
        model = self._manager.get_adapter(lora_int_id)
        assert model is not None, "told of an adapter that is not registered"
        return AdapterInfo(
            name=lora.lora_name,
            lora_int_id=lora_int_id,
            digest=lora.digest or model.digest,
            rank=model.rank,
            bytes=model.nbytes,
            level=level,
            pinned=pinned,
            running=running,
            waiting=waiting,
        )

    def check_integrity(self, holders: Set[int]) -> None:
        """Raise `AssertionError` when the tiers or the slot table are not as they must be."""
        self._manager.check_integrity()
        assert holders == self.in_slots, "the scheduler and the slot table disagree"
        assert not self._loaded.keys() & self.registered, "an adapter is held twice"


def typed(error: BaseException) -> MuralError:
    """What a load or a check failed with, as a caller may be told."""
    if isinstance(error, MuralError):
        return error
    logger.error("an adapter could not be loaded", exc_info=error)
    return Unavailable("The adapter could not be loaded now.")
