"""One replica of the fleet: where it is, what it said last, and when."""

from __future__ import annotations

import asyncio
import logging
import ssl as tls
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mural_resolvers.backoff import Backoff
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follower import Follower, Listener, TlsContext
from mural_router.fleet.report import Report
from mural_router.placement import Base, Replica

__all__ = ["Member", "MemberView"]

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0
SILENCE_TIMEOUT_S = 2.0
"""For an answer of any kind from a replica that is stale: then it is silent."""
SILENCE_INTERVAL_S = 2.0
MAX_ERROR_CHARS = 300


class MemberView(NamedTuple):
    """One replica as the debug page shows it."""

    endpoint: Endpoint
    replica: Replica
    report: Report | None
    age_s: float | None
    """Since it was last heard; None: never."""
    error: str | None
    """The last one, since it was last heard."""
    why_not_ready: str | None
    restarts: int
    """Other processes that were seen in its place."""


class Member(Listener):
    """One replica: where it is, what it said last, and when."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        make_follower: Callable[[Endpoint, Listener], Follower],
        ssl: TlsContext,
        stale_after_s: float,
        changed: Callable[[], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.endpoint = endpoint
        self.report: Report | None = None
        self.stale = True
        self.silent = False
        self._ssl = ssl
        self._stale_after_s = stale_after_s
        self._changed = changed
        self._make_follower = make_follower
        self._heard_s: float | None = None
        self._error: str | None = None
        self._gone = False
        self._suspected = False
        self._restarts = 0
        self._heard_reports = 0
        self._replica: Replica | None = None
        """As placement was last told, and what that was made of."""
        self._replica_of: tuple[object, ...] = ()
        self._probe: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        self._follower = tasks.create_task(self._follow(), name=f"following {endpoint.name}")

    @property
    def tried(self) -> bool:
        """Whether it was heard once, or tried in vain."""
        return self._heard_s is not None or self._error is not None

    def moved_to(self, endpoint: Endpoint) -> bool:
        """Take over what may change while it is followed; False: it is another place."""
        if replace(endpoint, ready=True, weight=1.0) != replace(
            self.endpoint, ready=True, weight=1.0
        ):
            return False
        self.endpoint = endpoint
        return True

    def close(self) -> None:
        """Stop following."""
        self._follower.cancel()
        for task in (self._probe, self._asking):
            if task is not None:
                task.cancel()

    # -- told by the follower -----------------------------------------------------------------

    def heard(self, report: Report) -> None:
        if self.report is not None and report.boot_id != self.report.boot_id:
            self._restarts += 1
        self.report = report
        self._heard_reports += 1
        self._alive()
        self._changed()

    def alive(self) -> None:
        if self.stale or self._gone:
            self._changed()
        self._alive()

    def _alive(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        self._error, self._gone, self.stale, self.silent = None, False, False, False

    def lost(self, error: str, *, refused: bool) -> None:
        if self._error is None or (refused and not self._gone):
            self._changed()
        self._error = error[:MAX_ERROR_CHARS]
        self._gone = self._gone or refused

    def aged(self) -> bool:
        """Mark a silence; True when it is news."""
        if self.stale or self._heard_s is None:
            return False
        silence = asyncio.get_running_loop().time() - self._heard_s
        self.stale = silence > self._stale_after_s
        return self.stale

    def doubt(self, tasks: asyncio.TaskGroup) -> None:
        """It is stale: find out whether it answers anything at all, until it is heard again."""
        if self._asking is None:
            self._asking = tasks.create_task(self._ask(), name=f"asking {self.endpoint.name}")

    async def _ask(self) -> None:
        while self.stale:
            answers = await self._answers()
            if self.stale and (self.silent or not answers):
                self.silent = not answers
                # Each time that it is silent: more may have begun to wait for it.
                self._changed()
            await asyncio.sleep(SILENCE_INTERVAL_S)
        self._asking = None

    async def _answers(self) -> bool:
        """Whether anything comes back from where requests are sent, if only a refusal."""
        endpoint, context, writer = self.endpoint, self._ssl(), None
        try:
            async with asyncio.timeout(SILENCE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(
                    endpoint.host, endpoint.port, ssl=context
                )
                writer.write(
                    b"GET /health HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n"
                    % endpoint.authority.encode("latin-1")
                )
                await reader.read(1)
        except (ConnectionError, tls.SSLError):
            # Those who wait are told as much by their own connections.
            return True
        except OSError:
            # In time; or there is no way to it, of which a connection learns nothing.
            return False
        finally:
            if writer is not None:
                writer.close()
        return True

    # -- told by the proxy --------------------------------------------------------------------

    def suspect(self, tasks: asyncio.TaskGroup) -> bool:
        """Not ready until its port takes a connection; whether that is news."""
        if self._probe is not None:
            return False
        self._suspected = True
        self._probe = tasks.create_task(self._clear(), name=f"probing {self.endpoint.name}")
        self._changed()
        return True

    async def _clear(self) -> None:
        backoff = Backoff(0.2, 2.0)
        connects = False
        while not connects:
            # At first too: just now nobody answered.
            await asyncio.sleep(backoff.next_s())
            connects = await self._connects()
        self._suspected, self._probe = False, None
        self._changed()

    async def _connects(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                _, writer = await asyncio.open_connection(self.endpoint.host, self.endpoint.port)
        except OSError:
            return False
        writer.close()
        return True

    async def _follow(self) -> None:
        """Follow; a follower that fails for a fault of ours is noticed and begun again."""
        backoff = Backoff(1.0, 30.0)
        while True:
            try:
                await self._make_follower(self.endpoint, self).run()
            except Exception as error:
                log.exception("following %s failed", self.endpoint.name)
                self.lost(f"following failed: {type(error).__name__}", refused=False)
                await asyncio.sleep(backoff.next_s())

    # -- what others see ----------------------------------------------------------------------

    def replica(self, base: Base) -> Replica:
        """What placement is told."""
        endpoint, report = self.endpoint, self.report
        if report is None:
            return Replica(
                name=endpoint.name,
                weight=endpoint.weight,
                ready=False,
                stale=True,
                reports=endpoint.engine == "mural",
            )
        ready = self.why_not_ready(base) is None
        # Most members have nothing new to say when one of them has.
        of = (self._heard_reports, report, endpoint, ready, self.stale, self.silent)
        if self._replica is None or self._replica_of != of:
            self._replica_of, self._replica = of, self._make_replica(report, ready=ready)
        return self._replica

    def _make_replica(self, report: Report, *, ready: bool) -> Replica:
        endpoint = self.endpoint
        return Replica(
            name=endpoint.name,
            weight=endpoint.weight,
            ready=ready,
            stale=self.stale,
            silent=self.silent,
            reports=report.reports,
            report=self._heard_reports,
            slots=report.slots,
            host_bytes=report.host_bytes,
            max_cpu_loras=report.max_cpu_loras,
            max_lora_rank=report.max_lora_rank,
            max_num_seqs=report.max_num_seqs,
            running=report.running,
            waiting=report.waiting,
            kv_usage=report.kv_usage,
            tokens_per_s=report.tokens_per_s,
            adapters=report.adapters,
        )

    def why_not_ready(self, base: Base) -> str | None:
        """In words for the debug page; None: it is ready."""
        report = self.report
        if report is None:
            return "not heard yet"
        if not self.endpoint.ready:
            return "its pod is not ready"
        if self._gone:
            return "nobody listens there"
        if self._suspected:
            return "no connection to its port"
        if self.silent:
            return "it answers nothing any more"
        if not report.ready:
            return "not ready, or draining, by its own word"
        if not report.base.same_model(base):
            return "serves another base model"
        if not report.base.same_spec(base):
            return "its base model takes other adapters"
        return None

    def view(self, base: Base) -> MemberView:
        age_s = None
        if self._heard_s is not None:
            age_s = asyncio.get_running_loop().time() - self._heard_s
        return MemberView(
            endpoint=self.endpoint,
            replica=self.replica(base),
            report=self.report,
            age_s=age_s,
            error=self._error,
            why_not_ready=self.why_not_ready(base),
            restarts=self._restarts,
        )
