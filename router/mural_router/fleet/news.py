"""Says in the log what becomes of replicas: what a person looks for first when requests fail."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from mural_router.fleet.member import MemberView
from mural_router.fleet.view import FleetView
from mural_router.placement import Fleet

__all__ = ["FleetNews"]

log = logging.getLogger("mural.router.fleet")

INTERVAL_S: Final = 1.0
"""Of looking: a replica that comes and goes all the time fills no log."""


class FleetNews:
    """A line for a replica that becomes ready, stops being so, or leaves; and for the last one.

    For one event loop. `begin` says how things are, then changes are told until `close`.
    """

    def __init__(self, view: FleetView, *, interval_s: float = INTERVAL_S) -> None:
        self._view = view
        self._interval_s = interval_s
        self._told: dict[str, str] = {}
        """By replica: how it was said to be."""
        self._seen: dict[str, tuple[bool, bool]] = {}
        self._some_ready = True
        self._next_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._unsubscribe = view.subscribe(self._changed)

    def begin(self) -> None:
        """Tell the state of every replica."""
        # Until then no base is agreed on, and it would be said that all serve another one.
        self._view.publish_now()
        self._tell()

    def close(self) -> None:
        """Tell nothing more."""
        self._unsubscribe()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _changed(self, fleet: Fleet) -> None:
        # Most new fleets are about loads and adapters.
        seen = {replica.name: (replica.ready, replica.stale) for replica in fleet.replicas}
        if seen == self._seen or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(self._next_s, loop.time()), self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._next_s = asyncio.get_running_loop().time() + self._interval_s
        fleet = self._view.fleet
        self._seen = {replica.name: (replica.ready, replica.stale) for replica in fleet.replicas}
        now = {member.endpoint.name: member for member in self._view.snapshot()}
        for name in [name for name in self._told if name not in now]:
            del self._told[name]
            log.info("replica %s has left the fleet", name)
        for name, member in now.items():
            state = _state(member)
            if self._told.get(name) != state:
                self._told[name] = state
                self._tell_one(member, state)
        self._tell_all(fleet, len(now))

    def _tell_one(self, member: MemberView, state: str) -> None:
        level = logging.INFO if state == "ready" else logging.WARNING
        # The last error is told beside it: it differs from time to time, and is no news by itself.
        error = f" ({member.error})" if member.error and state != "ready" else ""
        name, engine = member.endpoint.name, member.endpoint.engine
        log.log(level, "replica %s (%s): %s%s", name, engine, state, error)

    def _tell_all(self, fleet: Fleet, found: int) -> None:
        ready = len(fleet.accepting)
        if found and not ready and self._some_ready:
            log.error("none of %d replicas is ready: requests are answered 503", found)
        elif ready and not self._some_ready:
            log.info("%d of %d replicas are ready again", ready, found)
        self._some_ready = bool(ready) or not found


def _state(member: MemberView) -> str:
    if member.why_not_ready is not None:
        return f"not ready: {member.why_not_ready}"
    return "ready, but silent: what it said is not trusted" if member.replica.stale else "ready"
