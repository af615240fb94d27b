"""Who of several operators acts: the holder of a Lease.

The algorithm is that of client-go (``k8s.io/client-go/tools/leaderelection``). The holder renews;
whoever has seen one version of the Lease stand for its whole duration, by its own monotonic clock,
takes it with the version that it saw, which the API server grants to one alone. Nobody's time of
day matters. Beyond client-go, the holder counts from before a renewal was sent, so that it has
stopped acting before the others may begin, whatever the network did to its renewals.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from mural_resolvers.kubernetes.client import JsonObject, KubeError
from mural_resolvers.kubernetes.complaint import Complaint
from mural_resolvers.kubernetes.paths import LEASES

__all__ = ["Clock", "Election", "ElectionTiming", "LeaseClient", "WorkGoesOn"]

CALL_S: Final = 2.0
"""For one attempt: a connection that hangs must leave the time for another."""
RETRY_S: Final = 0.4
LONGEST_S: Final = 60
"""A Lease that claims to hold for longer is believed for this long."""

log = logging.getLogger(__name__)


class LeaseClient(Protocol):
    """What is asked of a `KubeClient`."""

    async def get(self, path: str, /) -> bytes:
        """One object."""

    async def create(self, path: str, body: JsonObject, /) -> bytes:
        """Make it; 409 where it is there."""

    async def replace(self, path: str, body: JsonObject, /) -> bytes:
        """Put it in place of the version that it names; 409 where that is not the last."""


class Clock:
    """The event loop's own time, in which everything here is counted."""

    def now(self) -> float:
        """Seconds, monotonic."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Return after so long."""
        await asyncio.sleep(seconds)

    def timeout(self, seconds: float) -> asyncio.Timeout:
        """A bound on a block."""
        return asyncio.timeout(seconds)


@dataclass(frozen=True, slots=True)
class ElectionTiming:
    """How long a Lease holds, how often it is renewed, and when its holder stops in doubt.

    ``stop_s`` is what work has to end in. It is over ``duration_s - act_s - stop_s`` before anyone
    else may begin, which leaves room for clocks of different rates.
    """

    duration_s: int = 6
    renew_s: float = 1.5
    act_s: float = 4.0
    stop_s: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.renew_s < self.act_s < self.act_s + self.stop_s < self.duration_s:
            raise ValueError(f"these times cannot keep two from acting at once: {self}")


class WorkGoesOn(Exception):
    """Leadership is lost and the work would not end: the process must, and at once."""


class _Spec(msgspec.Struct, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    resource_version: str


class _Lease(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A version of the Lease, and since when it has been known here."""

    lease: _Lease
    fields: dict[str, object]
    """All of it, for the parts that are not ours."""
    since: float

    @property
    def holder(self) -> str:
        return self.lease.spec.holder_identity or ""

    @property
    def version(self) -> str:
        return self.lease.metadata.resource_version

    def lapses_at(self, duration_s: int) -> float:
        """When it may be taken from whoever holds it."""
        if not self.holder:
            return -math.inf
        claimed = self.lease.spec.lease_duration_seconds or duration_s
        return self.since + min(max(claimed, duration_s), LONGEST_S)


class Election:
    """One candidate. ``run`` stands for the office for ever, ``lead`` works while in it.

    Never two act at once while the Lease is there; deleting it puts that off for a renewal.
    """

    def __init__(
        self,
        client: LeaseClient,
        *,
        name: str,
        namespace: str,
        identity: str,
        timing: ElectionTiming | None = None,
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
        able: Callable[[], bool] = lambda: True,
    ) -> None:
        """``name`` is the Lease's. ``identity`` must be this process's alone, for ever: a pod's
        name and something random. Who is not ``able`` yet leaves the Lease to others."""
        self._client = client
        self._path = LEASES.named(namespace, name)
        self._all = LEASES.of(namespace)
        self._metadata = {"name": name, "namespace": namespace}
        self._identity = identity
        self._timing = timing or ElectionTiming()
        self._clock = clock or Clock()
        self._jitter = jitter
        self._seen: _Seen | None = None
        self._deadline = -math.inf
        self._gained = asyncio.Event()
        self._taken_away = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._able = able
        self._complaint = Complaint(
            log,
            f"the Lease {namespace}/{name} cannot be reached",
            mended="the Lease can be reached again",
        )

    @property
    def leading(self) -> bool:
        """Whether this one may act, now. Past the deadline it may not, whoever still sleeps."""
        return self._clock.now() < self._deadline

    @property
    def leader(self) -> str:
        """Who holds the Lease as far as is known; empty for nobody."""
        return self._seen.holder if self._seen is not None else ""

    @property
    def trouble(self) -> str:
        """Why the Lease cannot be looked at or taken; empty: it can."""
        return self._complaint.trouble

    async def wait_leading(self) -> None:
        """Return when this one may act."""
        while not self.leading:
            self._gained.clear()
            await self._gained.wait()

    async def lead(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work whenever this one leads, for ever; return or raise what the work does.

        When leadership ends, the work is cancelled and waited for. Raises `WorkGoesOn` when it
        has not ended in time: then nobody but the end of the process keeps two from acting.
        """
        while True:
            await self.wait_leading()
            if await self._lead_once(work):
                return

    async def run(self) -> None:
        """Take and renew the Lease for ever. Cancelled, it gives the Lease back, unless the work
        does not end: then the Lease lapses by itself."""
        try:
            while True:
                await self._turn()
                await self._clock.sleep(self._pause_s())
        finally:
            await self._release()

    # -- the work ---------------------------------------------------------------------------------

    async def _lead_once(self, work: Callable[[], Awaitable[None]]) -> bool:
        """Whether the work has come to its own end."""
        self._idle.clear()
        task = asyncio.ensure_future(_awaited(work))
        over = asyncio.ensure_future(self._until_over())
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            log.warning("leadership is lost: the work is stopped")
            return False
        finally:
            over.cancel()
            await self._end(task)

    async def _end(self, task: asyncio.Future[None]) -> None:
        """Cancel the work and wait for it: at a graceful end while the Lease is sure, too."""
        task.cancel()
        most_s = max(self._deadline - self._clock.now(), 0.0) + self._timing.stop_s
        with suppress(TimeoutError):
            async with self._clock.timeout(most_s):
                await asyncio.wait({task})
        if not task.done():
            raise WorkGoesOn(f"the work has not ended {most_s:.1f} s after it was told to")
        self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _until_over(self) -> None:
        """Return as soon as this one may not act any more."""
        while (left_s := self._deadline - self._clock.now()) > 0:
            with suppress(TimeoutError):
                async with self._clock.timeout(left_s):
                    await self._taken_away.wait()

    # -- the Lease --------------------------------------------------------------------------------

    def _pause_s(self) -> float:
        if self.leading:
            # From when the last renewal was sent: an API server that is slow leaves less time.
            at = self._deadline - self._timing.act_s + self._timing.renew_s
            return max(at - self._clock.now(), RETRY_S * self._jitter())
        usual_s = self._timing.renew_s * (1.0 + 0.2 * self._jitter())
        if self._seen is None or self.trouble or not self._able():
            return usual_s
        lapses_in_s = self._seen.lapses_at(self._timing.duration_s) - self._clock.now()
        # Several may have seen the same renewal at the same moment.
        return min(usual_s, max(lapses_in_s, 0.0) + 0.2 * self._jitter())

    async def _turn(self) -> None:
        """Renew, take, or look who holds it."""
        left_s = self._deadline - self._clock.now()
        try:
            # Who does not lead looks and takes, in two calls.
            async with self._clock.timeout(min(CALL_S, left_s) if left_s > 0 else 2 * CALL_S):
                await self._renew_or_take()
        except TimeoutError:
            self._complaint.note(KubeError(0, "NoAnswer", "the API server did not answer in time"))
        except KubeError as error:
            self._complaint.note(error)
        except msgspec.MsgspecError as error:
            self._complaint.note(KubeError(0, "Garbled", f"it is none that can be read: {error}"))
        else:
            self._complaint.over()

    async def _renew_or_take(self) -> None:
        seen = self._seen
        if self.leading and seen is not None:
            try:
                await self._put(seen)
                return
            except KubeError as error:
                if error.status == 404:
                    # Deleted: whoever makes it anew need not wait for this one.
                    self._lose()
                elif error.status != 409:
                    raise
                # Else someone has written it, or an attempt of ours whose answer was lost.
        seen = await self._look()
        if seen is None:
            if self._able():
                await self._make()
        elif seen.holder == self._identity or (self._able() and self._may_take(seen)):
            await self._put(seen)
        else:
            self._lose()

    def _may_take(self, seen: _Seen) -> bool:
        return self._clock.now() >= seen.lapses_at(self._timing.duration_s)

    async def _look(self) -> _Seen | None:
        """The Lease as it is now; None: there is none."""
        try:
            data = await self._client.get(self._path)
        except KubeError as error:
            if error.status != 404:
                raise
            self._seen = None
            return None
        return self._see(data)

    def _see(self, data: bytes) -> _Seen:
        lease = msgspec.json.decode(data, type=_Lease)
        before = self._seen
        if before is None or before.version != lease.metadata.resource_version:
            fields = msgspec.json.decode(data, type=dict[str, object])
            seen = _Seen(lease, fields, self._clock.now())
            if before is None or before.holder != seen.holder:
                log.info("the Lease is held by %s", seen.holder or "nobody")
            self._seen = before = seen
        return before

    async def _make(self) -> None:
        began = self._clock.now()
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": self._metadata,
            "spec": self._spec(None),
        }
        try:
            data = await self._client.create(self._all, body)
        except KubeError as error:
            if error.status == 409:
                # Another one was quicker; the next turn sees it.
                return
            raise
        self._hold(data, began)

    async def _put(self, seen: _Seen) -> None:
        """Write it as ours in place of a version; 409 when there is a later one."""
        # From before it is sent: the others may count from when it arrives.
        began = self._clock.now()
        data = await self._client.replace(self._path, seen.fields | {"spec": self._spec(seen)})
        self._hold(data, began)

    def _spec(self, seen: _Seen | None) -> dict[str, object]:
        now = _micro_time()
        spec = _Spec() if seen is None else seen.lease.spec
        ours = spec.holder_identity == self._identity
        transitions = spec.lease_transitions or 0
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._timing.duration_s,
            "acquireTime": spec.acquire_time if ours and spec.acquire_time else now,
            "renewTime": now,
            "leaseTransitions": transitions if ours or seen is None else transitions + 1,
        }

    def _hold(self, data: bytes, began: float) -> None:
        self._see(data)
        if not self.leading:
            log.info("this one leads from now on: %s", self._identity)
        self._deadline = began + self._timing.act_s
        self._taken_away.clear()
        self._gained.set()

    def _lose(self) -> None:
        """Someone else holds it."""
        self._deadline = -math.inf
        self._taken_away.set()

    async def _release(self) -> None:
        """Give it back, so that the next one need not wait; what fails here lapses."""
        seen = self._seen
        if seen is None or seen.holder != self._identity:
            return
        self._lose()
        with suppress(TimeoutError):
            async with self._clock.timeout(self._timing.stop_s):
                await self._idle.wait()
        if not self._idle.is_set():
            return
        try:
            async with self._clock.timeout(CALL_S):
                await self._give_back(seen)
        except (KubeError, TimeoutError) as error:
            log.info("the Lease could not be given back: %s", error or "no answer in time")

    async def _give_back(self, seen: _Seen) -> None:
        try:
            await self._put_nobody(seen)
        except KubeError as error:
            if error.status != 409:
                raise
            # A renewal was under way when the end came, and has arrived.
            last = await self._look()
            if last is not None and last.holder == self._identity:
                await self._put_nobody(last)

    async def _put_nobody(self, seen: _Seen) -> None:
        spec = self._spec(seen) | {"holderIdentity": "", "leaseDurationSeconds": 1}
        await self._client.replace(self._path, seen.fields | {"spec": spec})


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _micro_time() -> str:
    """The time of day as Kubernetes writes it, for people: nothing here is counted from it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
