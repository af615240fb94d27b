"""What the script in Redis counts and grants, one call at a time."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from mural_router.limits.lease import Answer, Call
from mural_router.limits.redis_limiter import _SCRIPT

NO_LIMIT = -1


class Store:
    """Calls the script as routers do; everything about a call can be chosen."""

    def __init__(self, server: Any) -> None:
        self.client = server.client
        self._script = self.client.script_load(_SCRIPT)
        self.bases: dict[str, int] = {}
        self._sequence = 0

    def call(
        self, router: str = "a", *, tenant: str = "acme", held_s: float = 60.0, **fields: Any
    ) -> Answer:
        self._sequence += 1
        call: dict[str, Any] = {
            "sequence": self._sequence,
            "base": self.bases.get(router, 0),
            "limit_requests": NO_LIMIT,
            "limit_tokens": NO_LIMIT,
            "limit_sequences": NO_LIMIT,
            "need_requests": 0,
            "want_requests": 0,
            "need_tokens": 0,
            "want_tokens": 0,
            "first_tokens": 0,
            "open": 0,
            "need_sequences": 0,
            "want_sequences": 0,
            "changes": [],
        }
        answer = self.send(router, tenant, Call(**(call | fields)), held_s)
        if answer.status == 0:
            self.bases[router] = fields.get("sequence", self._sequence)
        return answer

    def send(self, router: str, tenant: str, call: Call, held_s: float = 60.0) -> Answer:
        body = msgspec.msgpack.encode([self._sequence, 0, 0, held_s, [call]])
        raw = self.client.evalsha(self._script, 2, "routers", f"t:{tenant}", router, body)
        *_, answers = msgspec.msgpack.decode(raw, type=tuple[float, int, int, list[Answer]])
        return answers[0]

    def clock_goes_back(self, seconds: int, tenant: str = "acme") -> None:
        """As if the server had been set back: all that it keeps is of so much later."""
        key = f"t:{tenant}"
        moved: dict[bytes, Any] = {}
        for at, raw in self.client.hgetall(key).items():
            value = msgspec.msgpack.decode(raw)
            if at == b"m":
                moved[at] = [value[0] + seconds, *value[1:]]
            elif at == b"r":
                moved[at] = {
                    router: [
                        call[0],
                        call[1] + seconds,
                        *call[2:5],
                        *(t + seconds for t in call[5:]),
                    ]
                    for router, call in value.items()
                }
            else:
                moved[b"%d" % (int(at) + seconds)] = value
        self.client.delete(key)
        self.client.hset(key, mapping={at: msgspec.msgpack.encode(v) for at, v in moved.items()})
        for router, raw in self.client.hgetall("routers").items():
            beat, seen = msgspec.msgpack.decode(raw)
            self.client.hset("routers", router, msgspec.msgpack.encode([beat, seen + seconds]))

    def total(self, tenant: str = "acme") -> tuple[int, int]:
        """Requests and tokens that are counted."""
        _, requests, tokens = msgspec.msgpack.decode(self.client.hget(f"t:{tenant}", "m"))
        return requests, tokens

    def check_cells(self, tenant: str = "acme") -> None:
        fields = self.client.hgetall(f"t:{tenant}")
        cells = [
            msgspec.msgpack.decode(raw) for at, raw in fields.items() if at not in (b"m", b"r")
        ]
        assert self.total(tenant) == (sum(c[0] for c in cells), sum(c[1] for c in cells))


@pytest.fixture
def calls(store: Any) -> Store:
    return Store(store)


def test_what_is_needed_is_given_and_a_part_of_the_rest(calls: Store) -> None:
    answer = calls.call(limit_requests=100, need_requests=2, want_requests=90)
    assert answer.requests == 2 + 98 // 2

    # Two routers now, so each gets a quarter of what is left.
    answer = calls.call("b", limit_requests=100, need_requests=1, want_requests=90)
    assert answer.requests == 1 + 48 // 4
    assert calls.total() == (64, 0)


def test_over_the_limit_there_is_nothing_and_a_time_to_come_back(calls: Store) -> None:
    calls.call(limit_tokens=100, need_tokens=100, want_tokens=100, first_tokens=100)

    answer = calls.call("b", limit_tokens=100, need_tokens=30, want_tokens=60, first_tokens=30)

    assert answer.tokens == 0
    assert 59 < answer.wait_tokens_s <= 61


def test_what_is_a_minute_old_leaves_and_no_sooner(calls: Store) -> None:
    now = int(time.time())
    changes = [number for age in range(50, 75) for number in (now - age, 1, 10)]

    answer = calls.call(limit_requests=30, need_requests=1, changes=changes, want_requests=1)

    # Ages 50 to 60 count; the clock may have moved on by a second.
    assert calls.total()[0] in (11, 12)
    assert answer.requests == 1
    calls.check_cells()


def test_the_wait_is_until_the_amount_fits(calls: Store) -> None:
    now = int(time.time())
    calls.call(changes=[now - 50, 0, 40, now - 20, 0, 60])

    waits = [
        calls.call(limit_tokens=100, need_tokens=n, want_tokens=n, first_tokens=n).wait_tokens_s
        for n in (30, 41)
    ]

    assert 8 < waits[0] <= 11
    assert 38 < waits[1] <= 41


def test_cells_leave_the_store_with_time(calls: Store) -> None:
    now = int(time.time())
    calls.call(changes=[now, 1, 1])
    # As after a pause: the books begin long ago.
    for age in range(61, 120):
        calls.client.hset("t:acme", str(now - age), msgspec.msgpack.encode([1, 10]))
    calls.client.hset("t:acme", "m", msgspec.msgpack.encode([now - 119, 60, 591]))

    calls.call()

    assert calls.total() == (1, 1)
    calls.check_cells()
    assert calls.client.ttl("t:acme") > 61


def test_a_lease_is_taken_back_and_what_was_spent_is_told(calls: Store) -> None:
    first = calls.call(limit_requests=100, need_requests=10, want_requests=10)

    calls.call(limit_requests=100, changes=[first.second, -10, 0, first.second, 3, 50])

    assert calls.total() == (3, 50)
    calls.check_cells()


def test_a_call_that_came_already_is_answered_as_it_was_and_changes_nothing(calls: Store) -> None:
    wanted: dict[str, Any] = {
        "limit_requests": 100,
        "need_requests": 5,
        "want_requests": 5,
        "sequence": 77,
    }
    first = calls.call(**wanted, changes=[int(time.time()), 7, 0])
    calls.bases.clear()

    again = calls.call(**wanted, changes=[int(time.time()), 7, 0])

    assert again == first
    assert calls.total() == (12, 0)


def test_a_store_that_knows_nothing_of_a_call_says_so(calls: Store) -> None:
    calls.call(changes=[int(time.time()), 7, 0])
    calls.client.flushall()

    lost = calls.call(changes=[int(time.time()), 1, 0])

    assert lost.status == 1
    assert not calls.client.exists("t:acme")


def test_books_that_went_back_in_time_are_thrown_away_for_all(calls: Store) -> None:
    now = int(time.time())
    calls.call(changes=[now, 7, 0])
    calls.call("b", changes=[now, 5, 0])
    saved = calls.client.dump("t:acme")
    calls.call(changes=[now, 7, 0])
    calls.client.restore("t:acme", 0, saved, replace=True)

    assert calls.call().status == 1
    assert calls.call("b").status == 1
    for router, amount in (("a", 14), ("b", 5)):
        calls.bases.pop(router)
        assert calls.call(router, changes=[now, amount, 0]).status == 0
    assert calls.total() == (19, 0)


def test_books_of_a_time_to_come_are_thrown_away_and_told_again(calls: Store) -> None:
    """Else they would count until that time is over: hours, where a clock was wrong by hours."""
    calls.call(limit_requests=10, need_requests=10, want_requests=10)
    calls.call("b", limit_requests=10)
    calls.clock_goes_back(3600)

    assert [calls.call(router, need_requests=1).status for router in "ab"] == [1, 1]
    assert not calls.client.exists("t:acme")
    calls.bases.clear()
    told = [int(time.time()), 6, 0]
    answer = calls.call(limit_requests=10, need_requests=1, want_requests=1, changes=told)
    assert (answer.status, answer.requests) == (0, 1)
    assert calls.total() == (7, 0)
    calls.check_cells()
    # The routers are of this time, too: none that is gone has a share until then.
    for raw in calls.client.hgetall("routers").values():
        assert msgspec.msgpack.decode(raw)[1] < time.time() + 60


def test_a_clock_that_was_put_right_a_little_loses_nothing(calls: Store) -> None:
    calls.call(limit_requests=10, need_requests=10, want_requests=10)
    calls.clock_goes_back(1)

    answer = calls.call(limit_requests=10, need_requests=1, want_requests=1)

    assert (answer.status, answer.requests, calls.total()) == (0, 0, (10, 0))
    assert 58 < answer.wait_requests_s <= 63


def test_sequences_are_held_by_routers_up_to_the_limit(calls: Store) -> None:
    one = calls.call(limit_sequences=4, need_sequences=3, want_sequences=3)
    two = calls.call("b", limit_sequences=4, need_sequences=3, want_sequences=3)
    assert (one.held, two.held) == (3, 1)

    calls.call(limit_sequences=4, open=1)
    assert calls.call("b", limit_sequences=4, need_sequences=3, want_sequences=3).held == 3


def test_sequences_of_a_router_that_is_not_heard_of_are_free_again(calls: Store) -> None:
    calls.call(limit_sequences=4, need_sequences=4, want_sequences=4, held_s=0.0)

    assert calls.call("b", limit_sequences=4, need_sequences=4, want_sequences=4).held == 4
    # It is heard of again, with what it still has open.
    assert calls.call(limit_sequences=4, open=2, need_sequences=1, want_sequences=1).held == 2


def test_tenants_do_not_share(calls: Store) -> None:
    calls.call(limit_requests=1, need_requests=1, want_requests=1)
    calls.bases.clear()

    other = calls.call(tenant="globex", limit_requests=1, need_requests=1, want_requests=1)

    assert other.requests == 1


def test_limits_far_above_a_lua_integer_are_counted(calls: Store) -> None:
    most = 1 << 53

    answer = calls.call(limit_tokens=most, need_tokens=10, want_tokens=10, first_tokens=10)

    assert answer.tokens == 10
