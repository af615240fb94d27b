"""What the pods of a pool say of themselves: a follower for each, while it is in the pool."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from mural_operator.conditions import said
from mural_operator.credentials import CredentialsMissing, PoolCredentials
from mural_operator.vllm_client import VLLMClient, VLLMModels, served_names
from mural_resolvers.backoff import Backoff
from mural_resolvers.errors import MalformedName
from mural_resolvers.kubernetes.objects import Engine
from mural_resolvers.names import parse_name
from mural_server.protocol import (
    AdapterStatus,
    ControlClient,
    ControlError,
    Delta,
    Heartbeat,
    Limits,
    Load,
    Snapshot,
    StateEvent,
    StateGap,
    apply,
    decode_event,
)
from mural_server.protocol.caution import (
    MAX_ADAPTERS,
    MAX_READ_BYTES,
    EventBudget,
    count,
    is_name,
    rate,
    ratio,
    sha256,
    word,
)

__all__ = [
    "Follower",
    "MuralFollower",
    "Replicas",
    "Target",
    "VLLMFollower",
    "exact_state",
]

log = logging.getLogger(__name__)

STALE_AFTER_S: Final = 12.0
"""Silence after which what a pod said is not trusted any more; heartbeats come every 5 s."""
CONNECT_TIMEOUT_S: Final = 3.0
LOAD_TIMEOUT_S: Final = 120.0
RETRY_FIRST_S: Final = 0.05
RETRY_MOST_S: Final = 2.0
STEADY_S: Final = 5.0
"""A stream that held so long is tried again at once after it breaks."""
MODELS_INTERVAL_S: Final = 2.0

Changed = Callable[[bool], None]
"""Told after each change; True: of load alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a pod of a pool is spoken to."""

    pod: str
    uid: str
    host: str
    port: int
    control_port: int
    engine: Engine


class Follower(ABC):
    """Keeps what one pod last said, for as long as that can be trusted."""

    def __init__(
        self,
        target: Target,
        credentials: PoolCredentials,
        changed: Changed,
        *,
        stale_after_s: float = STALE_AFTER_S,
    ) -> None:
        self.target = target
        self.state: Snapshot | None = None
        """By exact names. None: not heard from, or not for too long, or it cannot say."""
        self.models: VLLMModels | None = None
        """What a vLLM pod lists. None: as for `state`."""
        self.error = ""
        """Why it was not heard, since it last was; fit for a status."""
        self.heard = 0
        """Times that it said something new."""
        self._credentials = credentials
        self._changed = changed
        self._stale_after_s = stale_after_s
        self._heard_s: float | None = None

    @property
    def tried(self) -> bool:
        """Whether it was heard once, or tried in vain."""
        return self._heard_s is not None or bool(self.error)

    async def run(self) -> None:
        """Follow until cancelled. Nothing that a pod does ends it."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            began = self._now()
            try:
                await self._follow()
            except ControlError as error:
                if error.status in (401, 403):
                    self.refused_credentials()
                self._lost(error.message, refused=error.refused)
            except CredentialsMissing as error:
                self._lost(str(error), refused=False)
            except StateGap:
                self._lost("its events do not follow each other", refused=False)
            if self._heard_s is not None and self._now() - began > STEADY_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    def refused_credentials(self) -> None:
        """It does not accept who we say we are."""
        self._credentials.suspect()

    def failed(self, error: Exception) -> None:
        """Following ended by a fault of ours: nothing is known until it is begun anew."""
        self._lost(f"following failed: {type(error).__name__}", refused=True)

    @abstractmethod
    async def _follow(self) -> None:
        """Follow until something is wrong, which is raised."""

    def _alive(self) -> None:
        self._heard_s = self._now()
        self.error = ""

    def _lost(self, error: str, *, refused: bool) -> None:
        """Forget what it said when that is too old, or when nobody is there who could know it."""
        error = said(error)
        news = self.error != error
        self.error = error
        old = self._heard_s is None or self._now() - self._heard_s >= self._stale_after_s
        if (refused or old) and (self.state is not None or self.models is not None):
            self.state, self.models = None, None
            news = True
        if news:
            self._changed(False)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class MuralFollower(Follower):
    """Reads a Mural server's state stream, from the last event on where that is kept."""

    _raw: Snapshot | None = None

    def client(self) -> ControlClient:
        """A client of its control API; raises `CredentialsMissing`."""
        credentials = self._credentials.now()
        return ControlClient(
            self.target.host,
            self.target.control_port,
            token=credentials.token,
            ssl=credentials.ssl,
            server_name=credentials.server_name,
            timeout_s=CONNECT_TIMEOUT_S,
            load_timeout_s=LOAD_TIMEOUT_S,
            idle_timeout_s=self._stale_after_s,
            max_event_bytes=MAX_READ_BYTES,
        )

    async def _follow(self) -> None:
        budget = EventBudget(self._now)
        # Nothing would come of a state that is kept but not trusted until it changes: ask for it.
        known = None if self.state is None else self._raw
        events = self.client().raw_events(None if known is None else known.seq)
        async with aclosing(events):
            async for data in events:
                try:
                    self._take(decode_event(data))
                except StateGap:
                    # What follows on nothing is asked for anew, as a whole.
                    self._raw = None
                    raise
                # One that talks without end is read slowly: it costs the others nothing.
                await budget.spend(len(data))

    def _take(self, event: StateEvent) -> None:
        before = self._raw
        self._raw = apply(before, event)
        if max(len(self._raw.adapters), len(self._raw.declared)) > MAX_ADAPTERS:
            self._raw = None
            raise ControlError(f"it tells of more than {MAX_ADAPTERS} adapters")
        was_known = self.state is not None
        self._alive()
        if isinstance(event, Heartbeat) and was_known:
            return
        self.state = exact_state(self._raw)
        self.heard += 1
        self._changed(was_known and before is not None and _is_load_only(before, event))


class VLLMFollower(Follower):
    """Asks a vLLM pod which models it lists: it cannot say what it holds."""

    def __init__(self, target: Target, credentials: PoolCredentials, changed: Changed) -> None:
        super().__init__(target, credentials, changed)
        self._changing = asyncio.Event()

    async def warm(self, name: str) -> None:
        """Have it load an adapter, and look at once whether it lists it."""
        await self.client().warm(name)
        self._changing.set()

    async def forget(self, name: str) -> None:
        """Have it unload an adapter, and look at once whether it lists it no more."""
        await self.client().forget(name)
        self._changing.set()

    def client(self) -> VLLMClient:
        """A client of its OpenAI API; raises `CredentialsMissing`."""
        credentials = self._credentials.now()
        return VLLMClient(
            self.target.host,
            self.target.port,
            api_key=credentials.api_key,
            ssl=credentials.ssl,
            server_name=credentials.server_name,
            timeout_s=CONNECT_TIMEOUT_S,
            warm_timeout_s=LOAD_TIMEOUT_S,
        )

    async def _follow(self) -> None:
        while True:
            self._changing.clear()
            models = await self.client().models()
            self._alive()
            if models != self.models:
                self.models = models
                self.heard += 1
                self._changed(False)
            with suppress(TimeoutError):
                async with asyncio.timeout(MODELS_INTERVAL_S):
                    await self._changing.wait()


class Replicas:
    """The followers of one pool. For one event loop."""

    def __init__(self, credentials: PoolCredentials, changed: Callable[[str, bool], None]) -> None:
        self._credentials = credentials
        self._changed = changed
        self._followed: dict[str, tuple[Follower, asyncio.Task[None]]] = {}

    def follow(self, targets: Iterable[Target]) -> None:
        """Follow exactly these pods; who moved is followed anew."""
        wanted = {target.pod: target for target in targets}
        for pod, (follower, task) in list(self._followed.items()):
            if wanted.get(pod) != follower.target:
                task.cancel()
                del self._followed[pod]
        for pod, target in wanted.items():
            if pod not in self._followed:
                follower = self._make(target)
                task = asyncio.create_task(_run(follower), name=f"following {pod}")
                self._followed[pod] = (follower, task)

    def get(self, pod: str) -> Follower | None:
        """The follower of a pod; None: it is not of the pool, or has no address yet."""
        found = self._followed.get(pod)
        return None if found is None else found[0]

    def __iter__(self) -> Iterator[Follower]:
        return iter([follower for follower, _ in self._followed.values()])

    @property
    def settled(self) -> bool:
        """Whether each was heard once, or tried in vain."""
        return all(follower.tried for follower in self)

    async def close(self) -> None:
        """End all of them."""
        tasks = [task for _, task in self._followed.values()]
        self._followed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make(self, target: Target) -> Follower:
        kind: type[MuralFollower | VLLMFollower]
        kind = MuralFollower if target.engine == "mural" else VLLMFollower
        return kind(
            target, self._credentials, lambda load_only: self._changed(target.pod, load_only)
        )


async def _run(follower: Follower) -> None:
    """Follow; a follower that fails for a fault of ours is noticed and begun again."""
    backoff = Backoff(1.0, 30.0)
    while True:
        try:
            await follower.run()
        except Exception as error:
            log.exception("following %s failed", follower.target.pod)
            follower.failed(error)
            await asyncio.sleep(backoff.next_s())


# -- what they say, in the operator's words -------------------------------------------------------


def exact_state(state: Snapshot) -> Snapshot:
    """The state with every name in its exact form, every number within what can be added up, and
    every text fit for a status.

    Names that are none of a tenant's stay as they are: they are nobody's business here. What no
    adapter can be called is left out.
    """
    return msgspec.structs.replace(
        state,
        boot_id=word(state.boot_id),
        base=msgspec.structs.replace(
            state.base,
            model_names=served_names(state.base.model_names),
            spec_hash=word(state.base.spec_hash),
        ),
        limits=_clean_limits(state.limits),
        load=_clean_load(state.load),
        declared=tuple(_exact(name) for name in state.declared if is_name(name)),
        adapters={
            (name := _exact(status.name)): _clean(name, status)
            for status in state.adapters.values()
            if is_name(status.name)
        },
    )


@lru_cache(maxsize=65_536)
def _exact(text: str) -> str:
    try:
        return parse_name(text).exact if ":" in text else text
    except MalformedName:
        return text


def _clean(name: str, status: AdapterStatus) -> AdapterStatus:
    return msgspec.structs.replace(
        status,
        name=name,
        digest=sha256(status.digest),
        rank=count(status.rank),
        bytes=count(status.bytes),
        requests=count(status.requests),
        load=rate(status.load),
    )


def _clean_limits(limits: Limits) -> Limits:
    return Limits(
        slots=count(limits.slots),
        max_cpu_loras=count(limits.max_cpu_loras),
        host_bytes=count(limits.host_bytes),
        max_lora_rank=count(limits.max_lora_rank),
        max_num_seqs=count(limits.max_num_seqs),
        max_model_len=count(limits.max_model_len),
    )


def _clean_load(load: Load) -> Load:
    return Load(
        running=count(load.running),
        waiting=count(load.waiting),
        paused=count(load.paused),
        kv_usage=ratio(load.kv_usage),
        tokens_per_s=rate(load.tokens_per_s),
    )


def _is_load_only(before: Snapshot, event: StateEvent) -> bool:
    """Whether a change says nothing of what is resident, declared or ready."""
    if not isinstance(event, Delta):
        return isinstance(event, Heartbeat)
    said = (event.accepting, event.ready, event.awaits_declared, event.declared)
    if event.removed or any(each is not None for each in said):
        return False
    return all(
        _standing(status) == _standing(before.adapters.get(status.name)) for status in event.changed
    )


def _standing(status: AdapterStatus | None) -> tuple[object, ...] | None:
    if status is None:
        return None
    return (
        status.digest,
        status.level,
        status.loading,
        status.pinned,
        status.rank,
        status.bytes,
    )
