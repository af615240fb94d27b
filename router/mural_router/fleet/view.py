"""The fleet as this router sees it: found by discovery, followed one by one, aged."""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from collections.abc import Callable
from dataclasses import dataclass, field

from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follow import MuralFollower
from mural_router.fleet.follower import Follower, Listener, TlsContext
from mural_router.fleet.member import Member, MemberView
from mural_router.fleet.scrape import VLLMFollower
from mural_router.placement import Base, Fleet, agreed_base

__all__ = ["FleetSettings", "FleetView"]

log = logging.getLogger(__name__)

MAX_REPLICAS = 1_000
PUBLISH_INTERVAL_S = 0.05

Subscriber = Callable[[Fleet], None]


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How replicas are followed."""

    control_token: str | None = None
    """For the control API of Mural servers."""
    ssl: tls.SSLContext = field(default_factory=tls.create_default_context)
    """For endpoints with TLS: what their certificates are checked with."""
    vllm_api_key: str | None = None
    """For the list of models of vLLM pods that ask for one."""
    scrape_interval_s: float = 1.0
    """Of vLLM pods."""
    stale_after_s: float = 12.0
    """Silence after which a replica is stale; a server's heartbeats are 5 s apart."""


class FleetView:
    """Holds the current `Fleet` and tells changes; `run` owns everything that goes on.

    All methods belong to the loop that `run` runs in. Replicas that were found and not heard yet
    are in the fleet, not ready.
    """

    def __init__(self, discovery: Discovery, settings: FleetSettings) -> None:
        self.fleet = Fleet()
        self.base = Base()
        """As most of the replicas say; those with another one are not ready."""
        self._discovery = discovery
        self._settings = settings
        self._ssl = settings.ssl
        self._control_tokens: tuple[str | None, ...] = (settings.control_token,)
        self._vllm_api_key = settings.vllm_api_key
        self._members: dict[str, Member] = {}
        self._subscribers: list[Subscriber] = []
        self._found = False
        self._published_s = float("-inf")
        self._telling = False
        self._pending: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def settled(self) -> bool:
        """Whether discovery has answered and every replica was heard, or tried in vain."""
        return self._found and all(member.tried for member in self._members.values())

    def endpoint(self, name: str) -> Endpoint | None:
        """Where a replica listens; None: it has left the fleet."""
        member = self._members.get(name)
        return None if member is None else member.endpoint

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Have every new fleet told, at most 20 a second; the answer ends it."""
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def suspect(self, name: str) -> None:
        """Nobody answered there: not ready until its port takes a connection again."""
        member = self._members.get(name)
        if member is not None and self._tasks is not None and member.suspect(self._tasks):
            # The next request must not go there, too.
            self.publish_now()

    def use_tls(self, context: tls.SSLContext) -> None:
        """Show and check other certificates on every connection that is made from now on."""
        self._ssl = context

    def use_control_token(self, token: str) -> None:
        """Show another token on every connection that is made from now on, and the last one to
        servers that do not know it yet."""
        if token != self._control_tokens[0]:
            self._control_tokens = (token, self._control_tokens[0])

    def use_vllm_api_key(self, key: str) -> None:
        """Show another key from now on."""
        self._vllm_api_key = key

    def snapshot(self) -> tuple[MemberView, ...]:
        """Every replica with what is known of it."""
        return tuple(self._members[name].view(self.base) for name in sorted(self._members))

    async def run(self) -> None:
        """Discover, follow and age until cancelled; a follower that fails is begun again.

        Raises ExceptionGroup with what ended discovery, without which a fleet only shrinks.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._discover(tasks), name="discovery")
                tasks.create_task(self._age(tasks), name="ageing")
        finally:
            self._tasks = None
            if self._pending is not None:
                self._pending.cancel()
                self._pending = None

    async def _discover(self, tasks: asyncio.TaskGroup) -> None:
        async for endpoints in self._discovery.watch():
            self._found = True
            self._update(tasks, endpoints)
        raise RuntimeError("discovery ended")

    def _update(self, tasks: asyncio.TaskGroup, endpoints: tuple[Endpoint, ...]) -> None:
        found = {endpoint.name: endpoint for endpoint in endpoints}
        if len(found) > MAX_REPLICAS:
            log.error("%d replicas found: only the first %d are used", len(found), MAX_REPLICAS)
            found = {name: found[name] for name in sorted(found)[:MAX_REPLICAS]}
        for name, member in list(self._members.items()):
            if name not in found or not member.moved_to(found[name]):
                member.close()
                del self._members[name]
        for name, endpoint in found.items():
            if name not in self._members:
                self._members[name] = Member(
                    endpoint,
                    make_follower=self._follower,
                    ssl=self._context_of(endpoint),
                    stale_after_s=self._settings.stale_after_s,
                    changed=self._touch,
                    tasks=tasks,
                )
        self._touch()

    async def _age(self, tasks: asyncio.TaskGroup) -> None:
        """Silence is no event: look for it."""
        while True:
            await asyncio.sleep(min(1.0, self._settings.stale_after_s / 4))
            for member in self._members.values():
                if member.aged():
                    member.doubt(tasks)
                    self._touch()

    def _touch(self) -> None:
        """Something has changed: publish at once, or together with what comes within 50 ms."""
        if self._pending is None:
            loop = asyncio.get_running_loop()
            due = self._published_s + PUBLISH_INTERVAL_S
            self._pending = loop.call_at(max(due, loop.time()), self._publish)

    def publish_now(self) -> None:
        """Take into the fleet at once what is known and was to come with it soon.

        Amid the telling of a fleet it stays with soon: what is told of hundreds of replicas that
        are cut off together may say of each that nobody answered there.
        """
        if self._pending is not None and not self._telling:
            self._pending.cancel()
            self._publish()

    def _publish(self) -> None:
        self._pending = None
        self._published_s = asyncio.get_running_loop().time()
        members = [self._members[name] for name in sorted(self._members)]
        base = agreed_base(
            member.report.base
            for member in members
            if member.report is not None and not member.stale
        )
        if base is not None and base != self.base:
            # The same object as long as it is the same: what was decided by it is kept.
            self.base = base
        self.fleet = Fleet(tuple(member.replica(self.base) for member in members))
        self._telling = True
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(self.fleet)
            except Exception:
                log.exception("a subscriber of the fleet failed")
        self._telling = False

    def _context_of(self, endpoint: Endpoint) -> TlsContext:
        return lambda: self._ssl if endpoint.tls else None

    def _follower(self, endpoint: Endpoint, listener: Listener) -> Follower:
        settings, ssl = self._settings, self._context_of(endpoint)
        if endpoint.engine == "vllm":
            return VLLMFollower(
                endpoint,
                listener,
                api_key=lambda: self._vllm_api_key,
                ssl=ssl,
                interval_s=settings.scrape_interval_s,
            )
        return MuralFollower(
            endpoint,
            listener,
            tokens=lambda: self._control_tokens,
            ssl=ssl,
            idle_timeout_s=settings.stale_after_s,
        )
