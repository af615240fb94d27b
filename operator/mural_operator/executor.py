"""Does what `reconcile` decided: in bounded parallel, each thing once at a time.

Every plan takes the place of the one before: what has not begun and is not in the new one is not
done. What failed, or was done and did not show, waits longer each time. Nothing here decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from mural_operator.credentials import CredentialsMissing
from mural_operator.reconcile import (
    FINALIZER,
    Action,
    AddFinalizer,
    Declare,
    Forget,
    Load,
    Prefetch,
    RemoveFinalizer,
    Unload,
    Warm,
)
from mural_operator.refusals import LYING, MOST_S, Refusals, delay_s
from mural_operator.replicas import Follower, MuralFollower, VLLMFollower
from mural_operator.troubles import Troubles
from mural_resolvers.kubernetes.client import JsonObject, KubeClient, KubeError
from mural_resolvers.kubernetes.objects import ObjectMeta
from mural_resolvers.kubernetes.paths import ADAPTERS
from mural_server.protocol import ControlClient, ControlError

__all__ = ["Executor", "Outcome", "PoolHands"]

log = logging.getLogger(__name__)

PARALLEL: Final = 16
"""Actions at a time over all pools."""
PARALLEL_PER_POD: Final = 2
"""Of those that bring something, and as many of those that take something away: what drains for
long must not keep a lost adapter from coming back."""
SLOW_S: Final = 10.0
"""An action that takes longer waits for its pod, and is not counted in `PARALLEL` any more: a few
pods that hang must not keep the others waiting."""
SHOWS_S: Final = 10.0
"""So long after a load a pod's state may still be the one before it."""
NOT_SHOWN: Final = 3
"""So often may a pod say that it has loaded what its state does not show."""
CONFLICT_S: Final = 0.5
"""Until the watch has brought the object that was changed meanwhile; twice as long each time."""

FINALIZERS: Final = "the finalizer of the adapters, without which none is loaded,"

DECLARED: Final = ""
"""The declared set among a pod's things; every adapter has a name."""

Failure = ControlError | KubeError | CredentialsMissing


class Outcome(NamedTuple):
    """What came of an action; ``error`` is None when it was done."""

    action: Action
    error: Failure | None
    seconds: float


@dataclass(frozen=True, slots=True)
class PoolHands:
    """What an executor needs of one pool."""

    follower: Callable[[str], Follower | None]
    """By a pod's name."""
    refusals: Refusals
    done: Callable[[Outcome], None]
    """Told after each action that came to its end; it may be time for another plan."""
    overtaken: Callable[[], None]
    """Told when an action was ended since the plan says otherwise: what it says can begin."""


class _Key(NamedTuple):
    """One thing at a time: an adapter on a pod, a pod's declared set, an object's finalizer."""

    pod: str
    what: str


class _Lane(NamedTuple):
    """What runs beside each other at most `PARALLEL_PER_POD` at a time."""

    pod: str
    """Empty: objects of the API server, which are bounded by `PARALLEL` alone."""
    takes: bool


@dataclass(slots=True)
class _Wait:
    action: Action
    until: float
    tries: int
    failed: bool


@dataclass(slots=True)
class _Running:
    action: Action
    lane: _Lane
    task: asyncio.Task[Outcome]
    follower: Follower | None
    counted: bool = True


@dataclass(slots=True)
class _Pool:
    hands: PoolHands
    planned: dict[_Key, Action] = field(default_factory=dict)
    queues: dict[_Lane, deque[Action]] = field(default_factory=dict)
    """Of the plan, what is neither under way nor waiting."""
    waits: dict[_Key, _Wait] = field(default_factory=dict)
    running: dict[_Key, _Running] = field(default_factory=dict)
    in_lane: Counter[_Lane] = field(default_factory=Counter)
    brought: dict[_Key, float] = field(default_factory=dict)
    """What is being loaded, or may have been and does not show yet: until when. It stays declared
    even if nothing wants it any more. Else what ends up there would not be known as ours, and
    would stay for ever."""


class Executor:
    """For one event loop. A pool is served from `open` to `close`.

    ``may_act`` is asked before each action begins: a process that slept through the end of its
    term must not do a thing more, even before it is told.
    """

    def __init__(self, client: KubeClient, may_act: Callable[[], bool], troubles: Troubles) -> None:
        self._client = client
        self._may_act = may_act
        self._troubles = troubles
        self._pools: dict[str, _Pool] = {}
        self._counted = 0

    def open(self, pool: str, hands: PoolHands) -> None:
        """Begin to serve a pool."""
        assert pool not in self._pools
        self._pools[pool] = _Pool(hands)

    async def close(self, pool: str) -> None:
        """End what is under way for a pool, and forget it."""
        ended = self._pools.pop(pool, None)
        if ended is None:
            return
        self._forget_troubles(ended.waits.keys())
        tasks = [running.task for running in ended.running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pump()

    def submit(self, name: str, actions: Sequence[Action]) -> None:
        """Take a pool's new plan. Returns at once."""
        pool = self._pools[name]
        pool.planned = {_key(action): action for action in actions}
        self._forget_troubles(pool.waits.keys() - pool.planned.keys())
        pool.waits = {
            key: wait for key, wait in pool.waits.items() if pool.planned.get(key) == wait.action
        }
        self._end_what_is_overtaken(pool)
        pool.queues = {}
        now = asyncio.get_running_loop().time()
        pool.brought = {key: until for key, until in pool.brought.items() if until > now}
        for key, action in pool.planned.items():
            wait = pool.waits.get(key)
            if key not in pool.running and (wait is None or wait.until <= now):
                queue = pool.queues.setdefault(_lane(key, action), deque())
                # What waits for a declaration must not stand before it.
                (queue.appendleft if isinstance(action, Declare) else queue.append)(action)
        self._pump()

    def next_due(self, name: str) -> float | None:
        """Of the loop's clock: when something that waits may be tried again."""
        now = asyncio.get_running_loop().time()
        times = (wait.until for wait in self._pools[name].waits.values())
        return min((until for until in times if until > now), default=None)

    def _forget_troubles(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if not key.pod:
                self._troubles.forget(FINALIZERS, key.what)

    @property
    def busy(self) -> int:
        """Actions under way."""
        return sum(len(pool.running) for pool in self._pools.values())

    # -- starting ---------------------------------------------------------------------------------

    def _end_what_is_overtaken(self, pool: _Pool) -> None:
        for key, running in pool.running.items():
            moved = key.pod and pool.hands.follower(key.pod) is not running.follower
            planned = pool.planned.get(key)
            unwanted = isinstance(planned, Unload | Forget) and not running.lane.takes
            if moved or unwanted:
                running.task.cancel()

    def _pump(self) -> None:
        """Start what may start, a lane's turn after another's."""
        started = self._may_act()
        while started:
            started = False
            for pool in self._pools.values():
                for lane, queue in pool.queues.items():
                    if self._counted >= PARALLEL:
                        return
                    if queue and self._may_start(pool, lane, queue[0]):
                        self._start(pool, lane, queue.popleft())
                        started = True

    def _may_start(self, pool: _Pool, lane: _Lane, action: Action) -> bool:
        if not lane.pod:
            return True
        if self._declaration_is_open(pool, lane.pod) and not isinstance(action, Declare):
            return False
        return pool.in_lane[lane] < PARALLEL_PER_POD

    def _declaration_is_open(self, pool: _Pool, pod: str) -> bool:
        """A pod is told first what it shall hold: what it loads before is not known as ours."""
        key = _Key(pod, DECLARED)
        wait = pool.waits.get(key)
        return key in pool.running or (key in pool.planned and (wait is None or wait.failed))

    def _start(self, pool: _Pool, lane: _Lane, action: Action) -> None:
        key = _key(action)
        follower = pool.hands.follower(key.pod) if key.pod else None
        doing = self._run(pool, key, action, follower)
        task = asyncio.create_task(doing, name=f"{type(action).__name__} {key.what} {key.pod}")
        running = _Running(action, lane, task, follower)
        pool.running[key] = running
        if isinstance(action, Load):
            pool.brought[key] = float("inf")
        pool.in_lane[lane] += 1
        self._counted += 1
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._is_slow, running)

        def ended(_: asyncio.Task[Outcome]) -> None:
            # Only now, so that whoever is told finds the way free for what comes next.
            slow.cancel()
            del pool.running[key]
            pool.in_lane -= Counter([lane])
            self._uncount(running)
            _note_brought(pool, key, action, None if task.cancelled() else task.result())
            if task.cancelled():
                pool.hands.overtaken()
            else:
                pool.hands.done(task.result())
            self._pump()

        task.add_done_callback(ended)

    def _is_slow(self, running: _Running) -> None:
        self._uncount(running)
        self._pump()

    def _uncount(self, running: _Running) -> None:
        if running.counted:
            running.counted = False
            self._counted -= 1

    # -- doing ------------------------------------------------------------------------------------

    async def _run(
        self, pool: _Pool, key: _Key, action: Action, follower: Follower | None
    ) -> Outcome:
        now = asyncio.get_running_loop().time
        began = now()
        error: Failure | None = None
        try:
            if isinstance(action, Declare):
                coming = {each.what for each in pool.brought if each.pod == action.pod}
                action_now = replace(action, names=tuple(sorted({*action.names, *coming})))
                await self._perform(action_now, follower)
            else:
                await self._perform(action, follower)
        except (ControlError, KubeError, CredentialsMissing) as refused:
            error = refused
        except Exception as fault:
            # Of ours: it must not end the pool's work, and must not be tried in a circle.
            log.exception("%s failed", action)
            error = ControlError(f"a fault of the operator: {type(fault).__name__}")
        self._judge(pool, key, action, error, follower)
        return Outcome(action, error, now() - began)

    async def _perform(self, action: Action, follower: Follower | None) -> None:
        match action:
            case AddFinalizer(adapter=adapter):
                await self._put_finalizers(
                    adapter.metadata, (*adapter.metadata.finalizers, FINALIZER)
                )
            case RemoveFinalizer(adapter=adapter):
                kept = tuple(each for each in adapter.metadata.finalizers if each != FINALIZER)
                await self._put_finalizers(adapter.metadata, kept)
            case Warm(name=name):
                await _vllm(follower).warm(name)
            case Forget(name=name):
                await _vllm(follower).forget(name)
            case Declare(names=names):
                await _control(follower).declare(names)
            case Unload(name=name):
                await _control(follower).remove(name)
            case Load() | Prefetch():
                await _bring(_control(follower), action)

    async def _put_finalizers(self, metadata: ObjectMeta, finalizers: tuple[str, ...]) -> None:
        """A list is replaced as a whole: only if the object is still the one that was seen."""
        body: JsonObject = {
            "metadata": {
                "resourceVersion": metadata.resource_version,
                "finalizers": list(finalizers),
            }
        }
        try:
            await self._client.patch(ADAPTERS.named(metadata.namespace, metadata.name), body)
        except KubeError as error:
            if error.status != 404:
                raise

    # -- afterwards -------------------------------------------------------------------------------

    def _judge(
        self,
        pool: _Pool,
        key: _Key,
        action: Action,
        error: Failure | None,
        follower: Follower | None,
    ) -> None:
        before = pool.waits.get(key)
        tries = before.tries + 1 if before is not None and before.action == action else 1
        if follower is not None:
            if isinstance(error, ControlError) and error.status in (401, 403):
                follower.refused_credentials()
            if isinstance(action, Load | Warm):
                _note(pool.hands.refusals, follower.target.uid, action.name, error, tries)
        self._say(key, action, error)
        until = asyncio.get_running_loop().time() + _wait_s(error, tries)
        pool.waits[key] = _Wait(action, until, tries, failed=error is not None)

    def _say(self, key: _Key, action: Action, error: Failure | None) -> None:
        """What pods refuse is in the statuses; that nothing can be done at all has no other place
        than the log."""
        if not isinstance(action, AddFinalizer | RemoveFinalizer):
            return
        if not isinstance(error, KubeError):
            self._troubles.over(FINALIZERS, key.what)
        elif error.status != 409:
            self._troubles.note(log, FINALIZERS, key.what, error)


def _note_brought(pool: _Pool, key: _Key, action: Action, outcome: Outcome | None) -> None:
    """What may be there after an action has ended; None: it was given up."""
    error = None if outcome is None else outcome.error
    if isinstance(action, Load):
        refused = isinstance(error, ControlError) and 400 <= error.status < 500
        if refused or isinstance(error, CredentialsMissing):
            del pool.brought[key]
        else:
            pool.brought[key] = asyncio.get_running_loop().time() + SHOWS_S
    elif isinstance(action, Unload) and outcome is not None and error is None:
        pool.brought.pop(key, None)


def _note(refusals: Refusals, uid: str, name: str, error: Failure | None, tries: int) -> None:
    if isinstance(error, ControlError):
        refusals.note(uid, name, error)
    elif error is None and (tries >= NOT_SHOWN or refusals.is_lying(uid, name)):
        said = "It says that it has loaded the adapter, and its state does not show it."
        refusals.note(uid, name, ControlError(said, LYING))
    elif error is None:
        refusals.clear(uid, name)


def _wait_s(error: Failure | None, tries: int) -> float:
    """Until the same is tried again, should it still be wanted then."""
    if isinstance(error, KubeError) and error.status == 409:
        return min(CONFLICT_S * 2.0 ** min(tries - 1, 16), MOST_S)
    if isinstance(error, ControlError | KubeError):
        return delay_s(error.status, error.retry_after_s, tries)
    return delay_s(0, None, tries)


def _key(action: Action) -> _Key:
    match action:
        case AddFinalizer(adapter=adapter) | RemoveFinalizer(adapter=adapter):
            return _Key("", adapter.metadata.uid)
        case Declare(pod=pod):
            return _Key(pod, DECLARED)
        case _:
            return _Key(action.pod, action.name)


def _lane(key: _Key, action: Action) -> _Lane:
    return _Lane(key.pod, isinstance(action, Unload | Forget))


async def _bring(client: ControlClient, action: Load | Prefetch) -> None:
    if isinstance(action, Prefetch):
        await client.set_resident(
            action.name, digest=action.digest, level="disk", source=action.source
        )
    else:
        await client.set_resident(
            action.name,
            digest=action.digest,
            level=action.level,
            pinned=action.pinned,
            source=action.source,
        )


def _control(follower: Follower | None) -> ControlClient:
    if not isinstance(follower, MuralFollower):
        raise ControlError("the pod has no address, or no control API")
    return follower.client()


def _vllm(follower: Follower | None) -> VLLMFollower:
    if not isinstance(follower, VLLMFollower):
        raise ControlError("the pod has no address, or is none of vLLM's")
    return follower
