"""Limits that several routers count together, in a Redis that no request waits for."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Final

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from mural_resolvers.errors import RateLimited
from mural_resolvers.tenants import Principal, TenantLimits
from mural_resolvers.tenants.limits import LimitKind
from mural_router.limits.account import UNCOUNTED, Refusal, busiest, counts
from mural_router.limits.lease import Answer, Call, LeasedAccount, Need
from mural_router.limits.limiter import Hold, Limiter, LimitsSnapshot

__all__ = ["RedisLimiter", "RedisSettings"]

LOG = logging.getLogger("mural.router.limits")

MAX_CALLS: Final = 256
"""Tenants in one round trip; the store serves nobody else for about 10 µs each."""
HELD_S: Final = 12.0
"""So long the store believes in the sequences of a router that it hears nothing of; more than
a lease lives."""
MAX_WAITING: Final = 1000
"""Requests of one tenant that wait for a lease."""
REVIEW_S: Final = 2.0
"""So often a tenant's books are gone through, and what lies idle is given back."""
GATHER_S: Final = 0.1
BEAT_S: Final = 2.0
"""So often the store hears of a router at least."""
GRACE_S: Final = 2.0
"""After the store lost what it knew, the time in which all routers tell it again."""
CLOCK_ERROR_S: Final = 1
"""A second under which something is counted may be wrong by so much; over it, it is moved."""
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 1.0
CANCEL_AGAIN_S: Final = 0.05

_SCRIPT: Final = files("mural_router.limits").joinpath("leases.lua").read_text("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """Where the store is and how it is spoken to."""

    url: str = field(repr=False)
    """``redis://host:port/db`` or ``rediss://`` for TLS; may hold a user name and a password."""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_certs: str | None = None
    """A file of certificates to trust for ``rediss://``; None: the system's."""
    certfile: str | None = None
    keyfile: str | None = None
    """The router's own certificate, where the store asks for one."""
    namespace: str = "mural"
    """Routers share limits where it is the same; the keys begin with it."""
    timeout_s: float = 0.5
    """Of a round trip and of a connection; over it the router goes on alone."""
    routers: int = 1
    """How many share the limits, as long as the store has not said."""


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    now: float
    routers: int
    kept: int
    """0: the store does not remember what it acknowledged."""
    answers: list[Answer]


@dataclass(slots=True, eq=False)
class _Waiter:
    sequences: int
    tokens: int
    future: asyncio.Future[Hold]


@dataclass(slots=True, eq=False)
class _Entry:
    """A tenant whose requests are counted here."""

    tenant: str
    account: LeasedAccount
    waiters: deque[_Waiter] = field(default_factory=deque)
    asked: int = 0
    """Of the waiters, the first so many are asked for by the call in flight."""
    again: bool = False
    """The call in flight was sent before, so what came up since is still to be told."""
    due: bool = False


class _RedisHold(Hold):
    __slots__ = ("_account", "_estimated", "_limiter", "_second", "_sequences", "_settled")

    def __init__(
        self,
        limiter: RedisLimiter,
        account: LeasedAccount,
        sequences: int,
        estimated: int,
        second: int,
    ) -> None:
        self._limiter, self._account = limiter, account
        self._sequences, self._estimated = sequences, estimated
        self._second = second - limiter.shifted_s
        self._settled = False

    def settle(self, tokens: int) -> None:
        if not self._settled:
            self._settled = True
            limiter = self._limiter
            second = self._second + limiter.shifted_s
            self._account.settle(self._estimated, tokens, second, limiter.shared_now())

    def close(self) -> None:
        if self._sequences:
            self._account.leave(self._sequences)
            self._sequences = 0


class RedisLimiter(Limiter):
    """Admits requests out of leases that one task takes from Redis for many at a time.

    A request waits for a round trip only where its tenant's lease does not cover it. While
    Redis does not answer, each tenant has the limit divided by the number of routers here, and
    what it uses is told when Redis is back. For one event loop; `start` before the first
    request, `close` at the end.
    """

    def __init__(
        self, settings: RedisSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connects to nothing yet. ``clock`` gives seconds and runs while the process does not.

        Raises ``ValueError``, without the URL, for one that cannot be used.
        """
        try:
            _client(settings)
        except ValueError:
            # What the client says quotes parts of the URL, which may be a secret.
            raise ValueError(
                "redis://host:port/number or rediss://host:port/number is wanted"
            ) from None
        self._settings = settings
        self._clock = clock
        self._id = uuid.uuid4().hex[:16]
        self._offset = time.time() - clock()
        """From the clock to the store's time; until that is known, to this machine's."""
        self.shifted_s = 0
        """What was counted before may have been moved so far since; for holds."""
        self._entries: dict[str, _Entry] = {}
        self._due: deque[_Entry] = deque()
        self._reviews: deque[tuple[float, _Entry]] = deque()
        self._wake = asyncio.Event()
        self._attempted = asyncio.Event()
        """The first try to reach the store is over."""
        self._sequences = itertools.count(1)
        self._beat = 0
        self._beat_at = -BEAT_S
        self._routers = settings.routers
        self._away_since: float | None = clock()
        self._trips = 0
        self._refused: Counter[LimitKind] = Counter()
        self._client: Redis | None = None
        self._script = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin; returns when the store was reached, or was not within its time."""
        self._task = asyncio.create_task(self._run(), name="limits")
        self._task.add_done_callback(self._ended)
        await self._attempted.wait()

    async def enter(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        hold = self.enter_now(principal, sequences, tokens)
        if hold is not None:
            return hold
        assert principal.tenant is not None
        entry = self._entry(principal.tenant, principal.limits)
        return await self._ask(entry, sequences, tokens)

    def enter_now(self, principal: Principal, sequences: int, tokens: int) -> Hold | None:
        tenant, limits = principal.tenant, principal.limits
        if tenant is None or not counts(limits, sequences):
            return UNCOUNTED
        entry = self._entry(tenant, limits)
        account = entry.account
        if self._away_since is not None:
            return self._enter_alone(account, sequences, tokens)
        if not entry.waiters:
            now = self._clock()
            if account.fits(sequences, tokens, now):
                return self._admit(account, sequences, tokens)
            refusal = account.known_refusal(tokens, now)
            if refusal is not None:
                raise self._refuse(refusal)
        return None

    def snapshot(self, max_tenants: int = 100) -> LimitsSnapshot:
        accounts = ((tenant, entry.account.own) for tenant, entry in self._entries.items())
        return LimitsSnapshot(
            shared=True,
            away_s=None if self._away_since is None else self._clock() - self._away_since,
            routers=self._routers,
            trips=self._trips,
            refused=dict(self._refused),
            tenants=busiest(accounts, self.shared_now(), max_tenants),
        )

    async def close(self) -> None:
        if self._task is not None:
            # Again where it is swallowed: asyncio.wait_for, which the client waits with, does so
            # in Python 3.11 when what it waits for ends in the same moment.
            while not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task], timeout=CANCEL_AGAIN_S)
        self._decide_alone()
        if self._away_since is None:
            # The connection may hold half of an answer.
            await self._disconnect()
            self._client = _client(self._settings)
            try:
                await self._tell(self._entries.values(), leaving=True)
            except (RedisError, OSError) as error:
                LOG.warning("unused leases were not given back: %s", _reason(error))
        await self._disconnect()

    def shared_now(self) -> float:
        """The store's time, as far as it is known here (seconds)."""
        return self._clock() + self._offset

    # -- one request ---------------------------------------------------------------------------

    def _entry(self, tenant: str, limits: TenantLimits) -> _Entry:
        entry = self._entries.get(tenant)
        if entry is None:
            entry = self._entries[tenant] = _Entry(tenant, LeasedAccount(limits))
            self._reviews.append((self._clock() + REVIEW_S, entry))
        entry.account.limits = limits
        return entry

    def _admit(self, account: LeasedAccount, sequences: int, tokens: int) -> Hold:
        second = account.admit(sequences, tokens, self.shared_now())
        return _RedisHold(self, account, sequences, tokens, second)

    def _enter_alone(self, account: LeasedAccount, sequences: int, tokens: int) -> Hold:
        refusal = account.own.refusal(
            account.limits, sequences, tokens, self.shared_now(), self._routers
        )
        if refusal is not None:
            raise self._refuse(refusal)
        return self._admit(account, sequences, tokens)

    def _refuse(self, refusal: Refusal) -> RateLimited:
        self._refused[refusal.kind] += 1
        return refusal.error()

    async def _ask(self, entry: _Entry, sequences: int, tokens: int) -> Hold:
        if len(entry.waiters) >= MAX_WAITING:
            raise RateLimited("This tenant sends more requests at once than can be counted.")
        waiter = _Waiter(sequences, tokens, asyncio.get_running_loop().create_future())
        entry.waiters.append(waiter)
        self._set_due(entry)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                # Admitted in the very moment in which the caller went away.
                future.result().settle(0)
                future.result().close()
            raise

    def _answer(self, entry: _Entry, count: int) -> None:
        """Decide on the first so many waiters by the lease that was just taken for them."""
        account, now = entry.account, self._clock()
        for _ in range(count):
            waiter = entry.waiters.popleft()
            if waiter.future.done():
                continue
            if account.fits(waiter.sequences, waiter.tokens, now):
                waiter.future.set_result(self._admit(account, waiter.sequences, waiter.tokens))
            else:
                refusal = account.refusal(waiter.sequences, waiter.tokens)
                waiter.future.set_exception(self._refuse(refusal))

    def _decide_alone(self) -> None:
        """Let nobody wait for a store that does not answer."""
        for entry in self._entries.values():
            entry.asked = 0
            while entry.waiters:
                waiter = entry.waiters.popleft()
                if waiter.future.done():
                    continue
                try:
                    hold = self._enter_alone(entry.account, waiter.sequences, waiter.tokens)
                except RateLimited as error:
                    waiter.future.set_exception(error)
                else:
                    waiter.future.set_result(hold)

    # -- the task ------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._connect()
                backoff_s = FIRST_BACKOFF_S
                self._attempted.set()
                await self._serve()
            except (RedisError, OSError) as error:
                self._go_away(_reason(error))
            except Exception:
                # A fault of ours: limits go on alone, and the next connection tells everything.
                LOG.exception("counting limits together failed")
                self._go_away("see above")
            self._attempted.set()
            await self._disconnect()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect(self) -> None:
        self._client = _client(self._settings)
        async with asyncio.timeout(self._settings.timeout_s):
            self._script = await self._client.script_load(_SCRIPT)
        kept = await self._exchange([])
        await self._come_back(kept)

    async def _come_back(self, kept: bool) -> None:
        """Tell the store what was used meanwhile, and let the others do so where it forgot."""
        await self._tell(self._entries.values())
        if not kept:
            await asyncio.sleep(GRACE_S)
            await self._tell(self._entries.values())
        if self._away_since is not None:
            LOG.info("limits are counted together with %d other routers", self._routers - 1)
            self._away_since = None

    def _go_away(self, why: str) -> None:
        if self._away_since is None or not self._attempted.is_set():
            LOG.warning(
                "the store of limits is out of reach (%s): tenants have 1/%d of their limits here",
                why,
                self._routers,
            )
        if self._away_since is None:
            self._away_since = self._clock()
        self._decide_alone()

    async def _serve(self) -> None:
        while True:
            pause_s = min(self._next_review_at(), self._beat_at + BEAT_S) - self._clock()
            if not self._due and pause_s > 0:
                self._wake.clear()
                try:
                    async with asyncio.timeout(pause_s):
                        await self._wake.wait()
                except TimeoutError:
                    self._review()
            else:
                self._review()
            if self._due or self._clock() >= self._beat_at + BEAT_S:
                kept = await self._exchange(self._take_due())
                if not kept:
                    LOG.warning("the store of limits lost what it knew; it is told again")
                    await self._come_back(kept)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            LOG.error("the task of limits ended: tenants have their share here from now on")
            self._away_since = self._clock()
            self._attempted.set()
            self._decide_alone()

    def _next_review_at(self) -> float:
        # Not sooner than a while after the last trip, so that tenants' reviews share one.
        now = self._clock()
        return (
            max(self._reviews[0][0], self._beat_at + GATHER_S) if self._reviews else now + REVIEW_S
        )

    def _review(self) -> None:
        """Give back what lies idle, refresh what is held, forget who is gone."""
        now, shared = self._clock(), self.shared_now()
        while self._reviews and self._reviews[0][0] <= now:
            _, entry = self._reviews.popleft()
            if entry.account.is_idle(shared) and not entry.waiters:
                del self._entries[entry.tenant]
                continue
            if entry.account.has_to_tell():
                self._set_due(entry)
            self._reviews.append((now + REVIEW_S, entry))

    def _set_due(self, entry: _Entry) -> None:
        if not entry.due:
            entry.due = True
            self._due.append(entry)
            self._wake.set()

    def _take_due(self) -> list[_Entry]:
        taken = [self._due.popleft() for _ in range(min(len(self._due), MAX_CALLS))]
        for entry in taken:
            entry.due = False
        return taken

    async def _tell(self, entries: Iterable[_Entry], *, leaving: bool = False) -> None:
        """Make the store know everything that is known here; what it forgot is told again."""
        for entry in entries:
            self._set_due(entry)
        while self._due or leaving:
            await self._exchange(self._take_due(), leaving=leaving)
            leaving = leaving and bool(self._due)

    async def _exchange(self, entries: list[_Entry], *, leaving: bool = False) -> bool:
        """One round trip. False: the store had forgotten this router."""
        assert self._client is not None
        sent = self._clock()
        calls = [self._call(entry, sent) for entry in entries]
        beat = next(self._sequences)
        last_beat = 0 if leaving else self._beat
        body = msgspec.msgpack.encode([beat, last_beat, int(leaving), HELD_S, calls])
        keys = [self._key("routers"), *(self._key(f"t:{entry.tenant}") for entry in entries)]
        self._trips += 1
        async with asyncio.timeout(self._settings.timeout_s):
            raw = await self._evaluate(self._client, keys, body)
        reply = msgspec.msgpack.decode(raw, type=_Reply)
        now = self._clock()
        self._learn_offset(reply.now - (sent + now) / 2)
        self._beat, self._beat_at = beat, now
        if reply.kept:
            self._routers = reply.routers
        else:
            # What it grants now is without what the other routers have yet to tell it.
            self._routers = max(self._routers, reply.routers)
            self._away_since = now if self._away_since is None else self._away_since
            self._decide_alone()
        for entry, answer in zip(entries, reply.answers, strict=True):
            self._accept(entry, answer, now)
        return bool(reply.kept)

    def _learn_offset(self, offset: float) -> None:
        """Go by the store's time, with what was counted by a wrong one: of a router that began
        without the store, or whose store came back on another machine."""
        moved_s = round(offset - self._offset)
        self._offset = offset
        if abs(moved_s) > CLOCK_ERROR_S:
            self.shifted_s += moved_s
            for entry in self._entries.values():
                entry.account.shift(moved_s)

    async def _evaluate(self, client: Redis, keys: list[str], body: bytes) -> bytes:
        try:
            raw = await client.evalsha(self._script, len(keys), *keys, self._id, body)
        except NoScriptError:
            # Scripts are forgotten when a server restarts behind a proxy, or by SCRIPT FLUSH.
            self._script = await client.script_load(_SCRIPT)
            raw = await client.evalsha(self._script, len(keys), *keys, self._id, body)
        if not isinstance(raw, bytes):
            raise RedisError("the script's answer is of an unknown kind")
        return raw

    def _call(self, entry: _Entry, now: float) -> Call:
        sequence = next(self._sequences)
        waiting = [waiter for waiter in entry.waiters if not waiter.future.done()]
        need = Need()
        if waiting:
            most = entry.account.limits.tokens_per_minute
            wanted = [w.tokens if most is None else min(w.tokens, most) for w in waiting]
            need = Need(len(waiting), sum(wanted), wanted[0], sum(w.sequences for w in waiting))
        call = entry.account.call(sequence, need, now, self.shared_now())
        entry.again = call.sequence != sequence
        entry.asked = 0 if entry.again else len(entry.waiters)
        return call

    def _accept(self, entry: _Entry, answer: Answer, now: float) -> None:
        done = entry.account.accept(answer, now, self.shared_now())
        if done and self._away_since is None:
            self._answer(entry, entry.asked)
        entry.asked = 0
        if not done or entry.again or entry.waiters:
            self._set_due(entry)

    def _key(self, name: str) -> str:
        # One hash tag: a script's keys have to be in one slot of a cluster.
        return f"{{{self._settings.namespace}:limits}}:{name}"

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                await client.aclose()
            except (RedisError, OSError) as error:
                LOG.debug("closing the connection failed: %s", _reason(error))


def _client(settings: RedisSettings) -> Redis:
    options: dict[str, Any] = {
        "username": settings.username,
        "password": settings.password,
        "ssl_ca_certs": settings.ca_certs,
        "ssl_certfile": settings.certfile,
        "ssl_keyfile": settings.keyfile,
    }
    return Redis.from_url(
        settings.url,
        socket_timeout=settings.timeout_s,
        socket_connect_timeout=settings.timeout_s,
        # Whoever has to wait goes on alone instead; the task connects again by itself.
        retry=Retry(NoBackoff(), 0),
        max_connections=1,
        client_name="mural-router",
        **{name: value for name, value in options.items() if value is not None},
    )


def _reason(error: BaseException) -> str:
    """An error without what it may quote (an address with a password)."""
    return type(error).__name__
