"""One router's part of a tenant's shared account: what it leased, spent, and has yet to tell.

Pure: no I/O, told the time. Two clocks are in use: ``now`` is this process's, for ages; ``shared``
is the shared store's time, as far as it is known here, for what is counted by the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from mural_resolvers.tenants import TenantLimits
from mural_resolvers.tenants.limits import WINDOW_S, LimitKind
from mural_router.limits.account import RETRY_S, Account, Refusal

__all__ = ["LEASE_S", "Answer", "Call", "LeasedAccount", "Need"]

LEASE_S: Final = 10.0
"""Nothing of a lease is used when it is older."""
SPARE_REQUESTS: Final = 4
SPARE_S: Final = 4.0
"""A lease is to last so long at the pace of the last one."""
KNOWN_REFUSAL_S: Final = 1.0
KNOWN_CONCURRENCY_S: Final = 0.1
OK: Final = 0
NO_LIMIT: Final = -1


class Need(NamedTuple):
    """What requests that wait for a lease want, all together; ``first_tokens`` by the first."""

    requests: int = 0
    tokens: int = 0
    first_tokens: int = 0
    sequences: int = 0


class Call(msgspec.Struct, array_like=True, frozen=True):
    """What the store is told and asked about one tenant; the order is the script's.

    A limit of -1 is none.
    """

    sequence: int
    base: int
    """The last call that was acknowledged; 0: nothing is claimed."""
    limit_requests: int
    limit_tokens: int
    limit_sequences: int
    need_requests: int
    want_requests: int
    need_tokens: int
    want_tokens: int
    first_tokens: int
    open: int
    need_sequences: int
    want_sequences: int
    changes: list[int]
    """Second, requests, tokens, and so on: what to add to what is counted there."""


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What the store says to a call."""

    status: int
    second: int
    requests: int
    tokens: int
    held: int
    wait_requests_s: float
    wait_tokens_s: float


@dataclass(slots=True)
class _Lease:
    """What the store granted with one call, and what of it is left."""

    at: float
    second: int = 0
    requests: int = 0
    tokens: int = 0
    held: int = 0
    """Sequences that may be open at one time."""
    left_requests: int = 0
    left_tokens: int = 0


class _Known(NamedTuple):
    """A refusal that holds for a while, so that knocking makes no trips."""

    refusal: Refusal
    tokens: int
    """Fewer than these may fit."""
    at: float
    for_s: float


@dataclass(slots=True)
class LeasedAccount:
    """Admits requests out of its lease, keeps its own books, and speaks with the store.

    What it spends is counted in its own books by the second. The store counts a lease as spent
    when it gives it. With the next call the lease is taken back as a whole, and what was spent
    is told with its true seconds: so at any time the store counts at least what was spent.
    """

    limits: TenantLimits
    own: Account = field(default_factory=Account)
    _lease: _Lease = field(default_factory=lambda: _Lease(-LEASE_S))
    _changes: dict[int, list[int]] = field(default_factory=dict)
    """Second → requests and tokens that the store does not know of yet."""
    _base: int = 0
    _flight: tuple[Call, float] | None = None
    """The call that is not acknowledged, and when it was first sent."""
    _known: dict[LimitKind, _Known] = field(default_factory=dict)
    _spent_requests: int = 0
    _spent_tokens: int = 0
    """Since the last call."""
    _most_open: int = 0

    # -- admission -----------------------------------------------------------------------------

    def fits(self, sequences: int, tokens: int, now: float) -> bool:
        """Whether the lease has room for a request."""
        lease, limits = self._lease, self.limits
        return (
            now - lease.at < LEASE_S
            and (limits.requests_per_minute is None or lease.left_requests >= 1)
            and (
                limits.tokens_per_minute is None
                or lease.left_tokens >= min(tokens, limits.tokens_per_minute)
            )
            and (limits.concurrency is None or self.own.open_sequences + sequences <= lease.held)
        )

    def admit(self, sequences: int, tokens: int, shared: float) -> int:
        """Count a request; gives the second that it is counted under."""
        lease = self._lease
        lease.left_requests = max(0, lease.left_requests - 1)
        lease.left_tokens = max(0, lease.left_tokens - tokens)
        self._spent_requests += 1
        self._spent_tokens += tokens
        second = self.own.admit(sequences, tokens, shared)
        self._change(second, 1, tokens)
        self._most_open = max(self._most_open, self.own.open_sequences)
        return second

    def settle(self, estimated: int, used: int, second: int, shared: float) -> None:
        """Replace an estimate by what was used."""
        if used > estimated:
            self._change(self.own.tokens.add(used - estimated, shared), 0, used - estimated)
        elif used < estimated and self.own.tokens.take_back(estimated - used, second, shared):
            self._change(second, 0, used - estimated)
            self._known.pop("tokens", None)

    def leave(self, sequences: int) -> None:
        """Sequences ended."""
        self.own.open_sequences -= sequences
        self._known.pop("concurrency", None)

    def known_refusal(self, tokens: int, now: float) -> Refusal | None:
        """The refusal that a request would get, where the store said so lately."""
        for kind, known in self._known.items():
            age_s = now - known.at
            if age_s < known.for_s and (kind != "tokens" or tokens >= known.tokens):
                return known.refusal._replace(wait_s=known.refusal.wait_s - age_s)
        return None

    def refusal(self, sequences: int, tokens: int) -> Refusal:
        """Why a request that the store was asked for does not fit into the lease."""
        limits, lease = self.limits, self._lease
        kind: LimitKind = "tokens"
        most = limits.tokens_per_minute
        if limits.requests_per_minute is not None and lease.left_requests < 1:
            kind, most = "requests", limits.requests_per_minute
        if limits.concurrency is not None and self.own.open_sequences + sequences > lease.held:
            kind, most = "concurrency", limits.concurrency
        known = self._known.get(kind)
        wait_s = RETRY_S if known is None else known.refusal.wait_s
        return Refusal(kind, most or 0, wait_s)

    def shift(self, seconds: int) -> None:
        """Move what is counted to so many seconds later: the shared time was not known rightly.

        The lease stays where the store says that it counted it.
        """
        self.own.requests.shift(seconds)
        self.own.tokens.shift(seconds)
        self._changes = {second + seconds: change for second, change in self._changes.items()}

    # -- the store -----------------------------------------------------------------------------

    def has_to_tell(self) -> bool:
        """Whether the store counts something that is not so, or does not know something."""
        lease = self._lease
        return bool(
            self._flight
            or self._changes
            or lease.requests
            or lease.tokens
            or lease.held
            or (self.own.open_sequences and self.limits.concurrency is not None)
        )

    def is_idle(self, shared: float) -> bool:
        """Whether forgetting it would change nothing."""
        return not self.has_to_tell() and self.own.is_idle(shared)

    def call(self, sequence: int, need: Need, now: float, shared: float) -> Call:
        """Give what to tell the store now; a call that was not acknowledged is told again."""
        if self._flight is not None:
            return self._flight[0]
        lease, limits = self._lease, self.limits
        if lease.requests or lease.tokens:
            self._change(lease.second, -lease.requests, -lease.tokens)
        pace = SPARE_S / max(now - lease.at, 0.05)
        spare = 0 if not (self._spent_requests or need.requests) else SPARE_REQUESTS
        average = max(need.first_tokens, self._spent_tokens // max(self._spent_requests, 1))
        oldest = int(shared) - WINDOW_S
        call = Call(
            sequence=sequence,
            base=self._base,
            limit_requests=_or_none(limits.requests_per_minute),
            limit_tokens=_or_none(limits.tokens_per_minute),
            limit_sequences=_or_none(limits.concurrency),
            need_requests=need.requests,
            want_requests=need.requests + max(spare, round(self._spent_requests * pace)),
            need_tokens=need.tokens,
            want_tokens=need.tokens + max(spare * average, round(self._spent_tokens * pace)),
            first_tokens=need.first_tokens,
            open=self.own.open_sequences,
            need_sequences=need.sequences,
            want_sequences=max(need.sequences, self._most_open - self.own.open_sequences),
            changes=[
                number
                for second, change in self._changes.items()
                if second >= oldest
                for number in (second, *change)
            ],
        )
        self._flight = call, now
        self._changes = {}
        self._lease = _Lease(-LEASE_S)
        self._spent_requests = self._spent_tokens = 0
        self._most_open = self.own.open_sequences
        return call

    def accept(self, answer: Answer, now: float, shared: float) -> bool:
        """Take the answer to the call in flight; False: tell everything with a new one."""
        assert self._flight is not None
        call, sent = self._flight
        self._flight = None
        if answer.status != OK:
            self._base = 0
            self._changes = {}
            self._tell_everything(shared)
            return False
        self._base = call.sequence
        self._lease = _Lease(
            sent,
            answer.second,
            answer.requests,
            answer.tokens,
            answer.held,
            answer.requests,
            answer.tokens,
        )
        self._remember_refusals(answer, call, now)
        return True

    def _tell_everything(self, shared: float) -> None:
        for second, requests in self.own.requests.cells(shared).items():
            self._change(second, requests, 0)
        for second, tokens in self.own.tokens.cells(shared).items():
            self._change(second, 0, tokens)

    def _remember_refusals(self, answer: Answer, call: Call, now: float) -> None:
        waits: tuple[tuple[LimitKind, int, float], ...] = (
            ("requests", call.limit_requests, answer.wait_requests_s),
            ("tokens", call.limit_tokens, answer.wait_tokens_s),
        )
        self._known = {
            kind: _Known(
                Refusal(kind, limit, wait_s), call.first_tokens, now, min(wait_s, KNOWN_REFUSAL_S)
            )
            for kind, limit, wait_s in waits
            if wait_s > 0
        }
        short = answer.held < call.open + call.need_sequences
        if short and call.limit_sequences != NO_LIMIT:
            refusal = Refusal("concurrency", call.limit_sequences, RETRY_S)
            self._known["concurrency"] = _Known(refusal, 0, now, KNOWN_CONCURRENCY_S)

    def _change(self, second: int, requests: int, tokens: int) -> None:
        change = self._changes.get(second)
        if change is None:
            if len(self._changes) > 2 * WINDOW_S:
                self._changes = {
                    at: counted for at, counted in self._changes.items() if at >= second - WINDOW_S
                }
            change = self._changes[second] = [0, 0]
        change[0] += requests
        change[1] += tokens


def _or_none(limit: int | None) -> int:
    return NO_LIMIT if limit is None else limit
