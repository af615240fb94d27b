"""Flows decide as the whole decision does, whatever changes in between, and are bounded."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_resolvers.errors import MuralError
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.tenants import KeyRing, Principal, StoredKey, TenantLimits
from mural_resolvers.tenants.keys import hash_secret
from mural_resolvers.tenants.limits import MinuteWindow
from mural_resolvers.versions import AliasTarget
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.limits.account import Account, counts
from mural_router.limits.local import LocalLimiter
from mural_router.limits.queue import FairQueue
from mural_router.placement import (
    Base,
    Fleet,
    Loads,
    PlacementPolicy,
    PlacementRequest,
    Replica,
    Residency,
    choose,
    only_home,
)
from mural_router.placement.choose import has_room
from mural_router.routing import flows as flows_module
from mural_router.routing.ask import Ask, Outcome
from mural_router.routing.breaker import Breakers, BreakerSettings
from mural_router.routing.dispatch import Attempt, Dispatch
from mural_router.routing.flows import Flow, Flows
from mural_router.routing.identity import Authenticator
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.request import RoutedRequest
from mural_router.routing.retry import RetryBudget, RetrySettings
from mural_router.routing.router import FleetRouting
from mural_router.routing.versions import AliasOverlay, Versions

PATHS = ("/v1/completions", "/v1/chat/completions")
SECRET = "s" * 43
NAMES = ("acme:v1", "acme/sql:v2", "acme/default:v1", "globex:v1", "acme:latest", "acme", "tiny")
EXACT = [parse_name(name).exact for name in NAMES[:4]]


def bearer(key_id: str) -> str:
    return f"Bearer mural_{key_id}_{SECRET}"


KEYS = (
    None,
    bearer("acme0000"),
    bearer("globex00"),
    bearer("expires0"),
    "Bearer admin",
    "Bearer x",
)


def ring(*, revoked: bool = False) -> KeyRing:
    hashed = hash_secret(SECRET)
    acme = Principal(tenant="acme", key_id="acme0000", weight=3.0)
    later = datetime(2026, 1, 2, tzinfo=UTC)
    keys = [
        StoredKey("globex00", hashed, Principal(tenant="globex", key_id="globex00")),
        StoredKey("expires0", hashed, replace(acme, key_id="expires0"), later),
    ]
    return KeyRing(keys if revoked else [*keys, StoredKey("acme0000", hashed, acme)])


class Keys:
    def __init__(self) -> None:
        self.asked = 0
        self._ring = ring()

    @property
    def ring(self) -> KeyRing:
        return self._ring

    def use(self, other: KeyRing) -> None:
        self._ring = other


class Source:
    def __init__(self) -> None:
        self.base = Base(("tiny",), "")
        self.fleet = Fleet()
        self.endpoints: dict[str, Endpoint] = {}
        self._told: list[Callable[[Fleet], None]] = []

    def set(self, fleet: Fleet) -> None:
        for at, replica in enumerate(fleet.replicas):
            engine: Engine = "mural" if replica.reports else "vllm"
            endpoint = Endpoint(replica.name, f"10.0.0.{at}", 80, engine=engine)
            if self.endpoints.get(replica.name) != endpoint:
                self.endpoints[replica.name] = endpoint
        self.fleet = fleet
        for told in self._told:
            told(fleet)

    def endpoint(self, name: str) -> Endpoint | None:
        return self.endpoints.get(name)

    def suspect(self, name: str) -> None:
        """Nothing is sent here."""

    def subscribe(self, callback: Callable[[Fleet], None]) -> Callable[[], None]:
        self._told.append(callback)
        return lambda: self._told.remove(callback)


class Overlay(AliasOverlay):
    def targets(self, name: AdapterName) -> list[AliasTarget] | None:
        return [AliasTarget("v9", 1)] if name.version == "v1" else None


class Made:
    """A whole routing, whose slow decision and whose flows can be asked about one request."""

    def __init__(self, *, limits: TenantLimits | None = None) -> None:
        self.now = 1000.0
        self.today = datetime(2026, 1, 1, tzinfo=UTC)
        self.keys = Keys()
        if limits is not None:
            limited = Principal(tenant="acme", key_id="acme0000", limits=limits)
            self.keys.use(KeyRing([StoredKey("acme0000", hash_secret(SECRET), limited)]))
        self.source = Source()
        self.declared: dict[str, int] = {}
        self.auth = Authenticator(
            "keys", admin_keys=["admin"], tenants=self.keys, clock=lambda: self.today
        )
        self.versions = Versions(None, draw=lambda: 0.0)
        self.queue: FairQueue[Attempt] = FairQueue(clock=self.clock)
        self.breakers = Breakers(BreakerSettings(failures=1))
        self.limiter = LocalLimiter(self.clock)
        metrics = RouterMetrics(clock=self.clock)
        self.dispatch = Dispatch(
            self.source,
            self.breakers,
            metrics,
            policy=PlacementPolicy(),
            clock=self.clock,
            freed=self.queue.pump,
            declared=lambda name: self.declared.get(name),
        )
        self.routing = FleetRouting(
            auth=self.auth,
            versions=self.versions,
            limiter=self.limiter,
            queue=self.queue,
            dispatch=self.dispatch,
            budget=RetryBudget(RetrySettings()),
            metrics=metrics,
            log=None,
            tracing=None,
            options=RoutingOptions(router_token="token-0"),
            clock=self.clock,
        )
        express = self.routing.express
        assert express is not None
        self.flows: Flows = express.flows

        self.ranks: dict[str, int] = {}
        """As the ledger had them while the last that `admitted` took was under way."""

    def clock(self) -> float:
        return self.now

    def find(self, model: str, key: str | None = KEYS[1], path: str = PATHS[0]) -> Flow | None:
        sent = "" if key is None else f"={key}"
        return self.flows.find(f"{path}\n{sent}\n{model}".encode("latin-1"))

    def admitted(self, flow: Flow | None) -> bool:
        """Whether it would take one now; what that took is given back."""
        before = dict(self.dispatch.ledger._ranks)
        request = None if flow is None else self.flows.admit(flow, 10, 16, False, None)
        if request is None:
            return False
        self.ranks = dict(self.dispatch.ledger._ranks)
        request.hold.settle(0)
        request.hold.close()
        self.dispatch.left(request.flow.endpoint.name, request.rank, request)
        assert self.dispatch.ledger._ranks == before
        return True

    def slow(self, model: str, key: str | None, path: str, *, stream: bool) -> RoutedRequest | None:
        """The whole decision; None: it has to wait."""
        body = json.dumps({"model": model, "prompt": "hi", "stream": stream}).encode()
        routed = self.routing.route_now(Ask(path, () if key is None else (key,), body))
        assert callable(routed) or isinstance(routed, RoutedRequest)
        return None if callable(routed) else routed

    def compare(self, model: str, key: str | None, path: str) -> bool:
        """Ask in both ways; give whether the flow took it."""
        flow = self.find(model, key, path)
        if not self.admitted(flow):
            return False
        assert flow is not None
        before = dict(self.dispatch.ledger._ranks)
        for stream in (False, True):
            routed = self.slow(model, key, path, stream=stream)
            assert routed is not None
            attempt = routed._attempt
            assert (attempt.reason, attempt.endpoint) == ("resident", flow.endpoint)
            assert (attempt.digest or flow.target.digest, attempt.cold) == (flow.digest, flow.cold)
            self._same_bytes(flow, routed, model, path, stream=stream)
            assert self.dispatch.ledger._ranks == self.ranks
            routed.done(Outcome(status=200))
            assert self.dispatch.ledger._ranks == before
        return True

    def _same_bytes(
        self, flow: Flow, routed: RoutedRequest, model: str, path: str, *, stream: bool
    ) -> None:
        body = json.dumps({"model": model, "prompt": "hi", "stream": stream}).encode()
        value = flow.value_of_stream if stream else flow.value
        assert body.replace(json.dumps(model).encode(), value) == routed.body
        (number,) = (text for name, text in routed.request_headers if name == "x-request-id")
        lines = "".join(f"{name}: {text}\r\n" for name, text in routed.request_headers)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {routed.endpoint.authority}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(routed.body)}\r\n{lines}"
        )
        sent = b"%b%d%b%b\r\n" % (flow.head, len(routed.body), flow.identity, number.encode())
        assert sent == head.encode()
        (first, *others) = routed.answer_headers
        assert first == ("x-request-id", number)
        told = "".join(f"{name}: {text}\r\n" for name, text in others)
        assert flow.answer == f"\r\n{told}\r\n".encode()


# -- with the whole decision ----------------------------------------------------------------------

residencies = st.builds(
    Residency,
    level=st.sampled_from(["disk", "host", "slot", "slot", "slot"]),
    digest=st.sampled_from(["", "d" * 64, "e" * 64]),
    loading=st.booleans(),
    pinned=st.booleans(),
    rank=st.sampled_from([0, 8, 8, 8, 256]),
    bytes=st.sampled_from([0, 50, 50, 50, 200]),
    requests=st.sampled_from([0, 0, 1, 3]),
    load=st.sampled_from([0.0, 0.0, 10.0, 1000.0]),
)


@st.composite
def fleets(draw: st.DrawFn, most: int = 4) -> Fleet:
    names = sorted(draw(st.sets(st.sampled_from("abcd"), min_size=1, max_size=most)))
    return Fleet(
        tuple(
            Replica(
                name,
                weight=draw(st.sampled_from([0.5, 1.0, 1.0, 4.0])),
                ready=draw(st.sampled_from([True, True, True, False])),
                stale=draw(st.sampled_from([False, False, False, True])),
                reports=draw(st.sampled_from([True, True, False])),
                report=draw(st.integers(0, 3)),
                slots=draw(st.sampled_from([4, 4, 4, 4, 0])),
                host_bytes=draw(st.sampled_from([0, 100])),
                max_cpu_loras=draw(st.sampled_from([0, 1, 2])),
                max_lora_rank=draw(st.sampled_from([0, 64])),
                max_num_seqs=draw(st.sampled_from([0, 4, 8])),
                running=draw(st.sampled_from([0, 0, 1, 3, 5, 12])),
                waiting=draw(st.sampled_from([0, 0, 0, 1, 40])),
                kv_usage=draw(st.sampled_from([0.1, 0.1, 1.0])),
                tokens_per_s=draw(st.sampled_from([0.0, 10.0, 1000.0])),
                adapters={
                    name: draw(residencies)
                    for name in dict.fromkeys(EXACT)
                    if draw(st.sampled_from([True, True, True, False]))
                },
            )
            for name in names
        )
    )


policies = st.builds(
    PlacementPolicy,
    load_bound=st.sampled_from([1.0, 1.25, 2.0]),
    light=st.sampled_from([0.0, 0.0, 0.25]),
    light_sequences=st.sampled_from([0, 0, 8]),
    overcommit=st.sampled_from([1.0, 1.5]),
    rank_cost=st.sampled_from([0.0, 1 / 64, 0.3]),
    max_waiting=st.sampled_from([0, 1, 32]),
    kv_full=st.sampled_from([0.05, 0.95]),
)

Change = Callable[[Made], None]


def _set_load(made: Made, name: str, sequences: int) -> None:
    made.dispatch.ledger.add(name, sequences - made.dispatch.ledger.in_flight(name), 0)


def _set_policy(made: Made, policy: PlacementPolicy) -> None:
    made.dispatch.policy = policy


def _set_options(made: Made, number: int) -> None:
    made.routing.options = RoutingOptions(router_token=f"token-{number}", vllm_api_key="pod")


def _set_base(made: Made, names: tuple[str, ...]) -> None:
    made.source.base = Base(names, "")


def _declare(made: Made, name: str, k: int) -> None:
    made.declared[name] = k


def _overlay(made: Made, there: bool) -> None:
    made.versions.overlay = Overlay() if there else None


def _age(made: Made, days: int) -> None:
    made.today += timedelta(days=days)


def _trouble(made: Made, name: str) -> None:
    made.breakers.failed(name, object(), made.now)
    made.now += 0.5


def _calm(made: Made) -> None:
    made.breakers.keep(frozenset())
    for name in "abcd":
        _set_load(made, name, 0)


def _move(made: Made, name: str) -> None:
    """Between two fleets: to another place, or away and back."""
    endpoint = made.source.endpoints.pop(name, None)
    if endpoint is not None and made.now % 2:
        made.source.endpoints[name] = replace(endpoint, port=endpoint.port + 1)
    made.now += 1


changes = st.one_of(
    fleets().map(lambda fleet: lambda made: made.source.set(fleet)),
    st.builds(
        lambda name, sequences: lambda made: _set_load(made, name, sequences),
        st.sampled_from("abcd"),
        st.integers(0, 6),
    ),
    policies.map(lambda policy: lambda made: _set_policy(made, policy)),
    st.integers(0, 2).map(lambda number: lambda made: _set_options(made, number)),
    st.sampled_from([("tiny",), ("acme:v1",), ()]).map(
        lambda names: lambda made: _set_base(made, names)
    ),
    st.builds(
        lambda name, k: lambda made: _declare(made, name, k),
        st.sampled_from(EXACT),
        st.integers(0, 3),
    ),
    st.booleans().map(lambda there: lambda made: _overlay(made, there)),
    st.booleans().map(lambda revoked: lambda made: made.keys.use(ring(revoked=revoked))),
    st.integers(0, 1).map(lambda days: lambda made: _age(made, days)),
    st.sampled_from("abcd").map(lambda name: lambda made: _trouble(made, name)),
    st.just(_calm),
    st.just(_calm),
    st.sampled_from("abcd").map(lambda name: lambda made: _move(made, name)),
)

asked = st.tuples(st.sampled_from(NAMES), st.sampled_from(KEYS), st.sampled_from(PATHS))


@settings(deadline=None, max_examples=120)
@given(
    fleets(),
    st.lists(st.tuples(st.lists(changes, max_size=2), st.lists(asked, max_size=4)), max_size=8),
)
def test_what_a_flow_takes_the_whole_decision_sends_to_the_same_place(
    fleet: Fleet, steps: list[tuple[list[Change], list[tuple[str, str | None, str]]]]
) -> None:
    made = Made()
    made.source.set(fleet)
    for some, requests in steps:
        for change in some:
            change(made)
        for request in [*requests, (NAMES[0], KEYS[1], PATHS[0]), (NAMES[3], KEYS[4], PATHS[0])]:
            made.compare(*request)
        assert all(made.dispatch.ledger.in_flight(name) <= 6 for name in "abcd")


def one_home(**more: object) -> Fleet:
    held = {name: Residency("slot", digest="d" * 64) for name in EXACT}
    usual = {"slots": 4, "max_num_seqs": 4, "adapters": held, **more}
    return Fleet((Replica("a", **usual), Replica("b", slots=4, max_num_seqs=4)))  # type: ignore[arg-type] # fields by name


ALONE = Fleet(one_home().replicas[:1])


def test_a_request_counts_with_its_adapter_s_rank_whichever_way_it_goes() -> None:
    made = Made()
    held = {name: Residency("slot", digest="d" * 64, rank=48) for name in EXACT}
    made.source.set(one_home(adapters=held))
    assert made.compare("acme:v1", KEYS[1], PATHS[0])
    assert made.ranks == {"a": 48, "b": 0}
    flow = made.find("acme:v1")
    assert flow is not None
    request = made.flows.admit(flow, 10, 16, False, None)
    assert request is not None
    # It was counted so: that the adapter turns out another one changes nothing for it.
    made.source.set(one_home())
    assert made.find("acme:v1") is not None
    body = json.dumps({"model": "acme:v1", "prompt": "hi"}).encode()
    routed = made.routing.unfold(request, Ask(PATHS[0], (f"Bearer {KEYS[1]}",), body))
    assert made.dispatch.ledger._ranks["a"] == 48
    assert isinstance(routed, RoutedRequest)
    routed.done(Outcome(status=200))
    assert made.dispatch.ledger._ranks["a"] == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("model", "key", "taken"),
    [
        ("acme:v1", KEYS[1], True),
        ("acme/default:v1", KEYS[1], True),
        ("globex:v1", KEYS[2], True),
        ("globex:v1", KEYS[4], True),
        ("globex:v1", KEYS[1], False),
        ("acme:v1", KEYS[2], False),
        ("acme:v1", None, False),
        ("acme:v1", KEYS[3], False),
        ("acme:v1", KEYS[5], False),
        ("acme:v7", KEYS[1], False),
        ("acme:latest", KEYS[1], False),
        ("acme", KEYS[1], False),
        ("tiny", KEYS[1], False),
        ("No:Name", KEYS[1], False),
        ("acme:..", KEYS[1], False),
        (":", KEYS[1], False),
    ],
)
def test_a_flow_takes_exact_versions_of_keys_that_last(
    model: str, key: str | None, taken: bool, path: str
) -> None:
    made = Made()
    made.source.set(ALONE)
    assert [made.compare(model, key, path) for _ in range(2)] == [taken, taken]


def test_where_nobody_is_asked_for_keys_all_may_ask() -> None:
    made = Made()
    made.auth.mode = "open"
    made.source.set(ALONE)
    assert made.compare("acme:v1", None, PATHS[0])
    assert made.compare("acme:v1", "Bearer x", PATHS[0])


CHANGES: list[Change] = [
    lambda made: made.keys.use(ring(revoked=True)),
    lambda made: made.source.set(Fleet()),
    lambda made: made.source.set(Fleet((replace(ALONE.replicas[0], ready=False),))),
    lambda made: made.source.set(Fleet((replace(ALONE.replicas[0], adapters={}),))),
    lambda made: made.source.set(Fleet((replace(ALONE.replicas[0], running=9, report=1),))),
    lambda made: _set_base(made, ("acme:v1",)),
    lambda made: _overlay(made, True),
    lambda made: _trouble(made, "a"),
    lambda made: _trouble(made, "b"),
    lambda made: _set_load(made, "a", 6),
    lambda made: _set_policy(made, PlacementPolicy(kv_full=1e-9)),
    lambda made: made.source.endpoints.clear(),
    lambda made: setattr(made.queue, "waiting", 1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_no_flow_outlives_what_it_follows_from(change: Change) -> None:
    made = Made()
    kv = Fleet((replace(ALONE.replicas[0], waiting=1, kv_usage=0.5),))
    made.source.set(kv)
    assert made.compare("acme:v1", KEYS[1], PATHS[0])
    change(made)
    assert not made.compare("acme:v1", KEYS[1], PATHS[0])


def test_a_flow_says_what_holds_now() -> None:
    made = Made()
    made.source.set(ALONE)
    for change in (
        lambda: _set_options(made, 7),
        lambda: made.source.set(
            Fleet((replace(ALONE.replicas[0], adapters={EXACT[0]: Residency("host")}),))
        ),
        lambda: made.source.endpoints.update(a=Endpoint("a", "10.9.9.9", 81)),
        lambda: made.keys.use(
            KeyRing(
                [
                    replace(
                        ring()["acme0000"],
                        principal=replace(ring()["acme0000"].principal, weight=9.0),
                    )
                ]
            )
        ),
        lambda: _declare(made, EXACT[0], 1),
        lambda: made.source.set(Fleet((replace(ALONE.replicas[0], reports=False),))),
    ):
        before = made.find("acme:v1")
        change()
        made.find("acme:v1")  # What was declared may be seen only when it is asked about.
        assert made.compare("acme:v1", KEYS[1], PATHS[0])
        assert made.find("acme:v1") is not before


def test_reports_that_move_no_home_keep_a_flow() -> None:
    made = Made()
    made.source.set(ALONE)
    flow = made.find("acme:v1")
    assert flow is not None
    for report in range(1, 5):
        made.source.set(Fleet((replace(ALONE.replicas[0], running=report, report=report),)))
        assert made.find("acme:v1") is flow
        assert made.compare("acme:v1", KEYS[1], PATHS[0])


def test_a_flow_meets_its_tenants_limits_and_counts_once() -> None:
    made = Made(limits=TenantLimits(requests_per_minute=2))
    made.source.set(ALONE)
    flow = made.find("acme:v1")
    assert flow is not None
    for _ in range(2):
        assert made.flows.admit(flow, 10, 16, False, None) is not None
    with pytest.raises(MuralError) as fast:
        made.flows.admit(flow, 10, 16, False, None)
    with pytest.raises(MuralError) as slow:
        made.slow("acme:v1", KEYS[1], PATHS[0], stream=False)
    assert str(fast.value) == str(slow.value)
    assert made.dispatch.ledger.in_flight("a") == 2
    assert made.limiter.snapshot().refused == {"requests": 2}


def test_whoever_waits_is_looked_at_when_a_request_of_a_flow_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(limits=TenantLimits(tokens_per_minute=1000, concurrency=5))
    made.source.set(ALONE)
    flow = made.find("acme:v1")
    assert flow is not None
    request = made.flows.admit(flow, 10, 16, False, None)
    assert request is not None
    in_flight: list[int] = []
    look = lambda: in_flight.append(made.dispatch.ledger.in_flight("a"))  # noqa: E731
    monkeypatch.setattr(made.dispatch, "_freed", look)
    made.routing.finish(request, Outcome(200, 7, 5))
    assert in_flight == [0]
    (tenant,) = made.limiter.snapshot().tenants
    assert (tenant.tokens, tenant.sequences) == (12, 0)


# -- memory ---------------------------------------------------------------------------------------


def test_no_more_are_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows_module, "MAX_FLOWS", 8)
    made = Made()
    made.source.set(Fleet((Replica("a", reports=False),)))
    for at in range(50):
        assert made.find(f"acme:v{at}") is not None
        assert made.find(f"acme:v{at}", "Bearer wrong") is None
        assert made.find(f"globex:v{at}") is None
        assert len(made.flows._found) <= 8
        assert len(made.flows._without) <= 8


def test_made_up_keys_push_no_flow_out_and_no_secret_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flows_module, "MAX_FLOWS", 8)
    made = Made()
    made.source.set(ALONE)
    flow = made.find("acme:v1")
    assert flow is not None
    for at in range(50):
        assert made.find("acme:v1", f"Bearer wrong-{at}") is None
    assert made.find("acme:v1") is flow
    kept = repr((made.flows._found, made.flows._without))
    assert str(KEYS[1]).removeprefix("Bearer ") not in kept
    assert "wrong" not in kept


def test_what_has_no_flow_is_found_once_while_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made()
    made.source.set(ALONE)
    learned: list[str] = []
    lasting = made.auth.lasting

    def noted(sent):
        learned.append(sent[0])
        return lasting(sent)

    monkeypatch.setattr(made.auth, "lasting", noted)
    for _ in range(3):
        assert made.find("acme:v1", KEYS[5]) is None
    assert learned == [KEYS[5]]
    made.keys.use(ring())
    assert made.find("acme:v1", KEYS[5]) is None
    made.source.set(Fleet(ALONE.replicas))
    assert made.find("acme:v1", KEYS[5]) is None
    assert learned == [KEYS[5]] * 3


class Held(dict[str, Residency]):
    """What a replica holds; can be looked after."""


def test_flows_that_nobody_uses_keep_no_old_fleet() -> None:
    """Each report makes another fleet: thousands of them would stay with thousands of flows."""
    made = Made()
    alive: list[weakref.ref[object]] = []
    for at in range(20):
        name = f"acme:v{at}"
        held = Held({parse_name(name).exact: Residency("slot")})
        made.source.set(Fleet((replace(ALONE.replicas[0], adapters=held, report=at),)))
        alive += [weakref.ref(made.source.fleet), weakref.ref(held)]
        assert made.find(name) is not None
    del held
    gc.collect()
    assert len(made.flows._found) == 20
    assert sum(each() is not None for each in alive) == 2


# -- what the flows rest on -----------------------------------------------------------------------


@st.composite
def loads(draw: st.DrawFn, fleet: Fleet, policy: PlacementPolicy) -> Loads:
    by_name = {each.name: draw(st.integers(0, 5)) for each in fleet.replicas}
    ranks = {name: draw(st.sampled_from([0, 8, 64])) * count for name, count in by_name.items()}
    costs = {name: count + policy.rank_cost * ranks[name] for name, count in by_name.items()}
    return Loads(by_name, costs, sum(costs[name] for name in fleet.accepting_names))


@settings(deadline=None, max_examples=200)
@given(
    st.data(), fleets(most=3), policies, st.sampled_from([None, 1, 2]), st.sampled_from(["s", None])
)
def test_an_only_home_takes_what_a_choice_gives_it(
    data: st.DataObject,
    fleet: Fleet,
    policy: PlacementPolicy,
    declared: int | None,
    session: str | None,
) -> None:
    name = EXACT[0]
    there = data.draw(loads(fleet, policy))
    request = PlacementRequest(name, prefix=7, session=session)
    choice = choose(request, fleet, there, declared=declared, policy=policy)
    home = only_home(name, fleet, declared=declared, policy=policy)
    if home is None:
        assert choice is None or choice.reason != "resident" or choice.k > 1
        return
    assert fleet.replicas[home.place].name == home.name
    resident = choice is not None and choice.reason == "resident"
    assert home.takes_one_more(there) == resident
    if resident:
        assert choice is not None
        assert choice.replica.name == home.name


@settings(deadline=None, max_examples=120)
@given(fleets(most=2), policies, st.floats(0, 60), st.booleans())
def test_room_is_what_a_home_or_another_may_have(
    fleet: Fleet, policy: PlacementPolicy, load: float, home: bool
) -> None:
    for replica in fleet.replicas:
        if replica.kv_usage >= policy.kv_full and replica.waiting > 0:
            expected = False
        elif replica.max_num_seqs > 0:
            expected = load < (policy.overcommit if home else 1.0) * replica.max_num_seqs
        else:
            waits = load - replica.running if replica.waiting > 0 else 0.0
            expected = waits < (policy.max_waiting if home else 1)
        assert has_room(replica, load, policy, home=home) == expected


class Minute:
    """A window by its definition: what was counted, and when."""

    def __init__(self) -> None:
        self.counted: list[tuple[int, int]] = []

    def at(self, now: float) -> list[tuple[int, int]]:
        return [(second, amount) for second, amount in self.counted if now < second + 61]

    def add(self, amount: int, now: float) -> int:
        newest = max((second for second, _ in self.at(now)), default=-1)
        self.counted.append((max(math.floor(now), newest), amount))
        return self.counted[-1][0]

    def total(self, now: float) -> int:
        return sum(amount for _, amount in self.at(now))

    def wait_s(self, limit: int, now: float, amount: int) -> float:
        bound = max(0, limit - amount)
        moments = sorted({now, *(float(second + 61) for second, _ in self.at(now))})
        return next(at for at in moments if self.total(at) <= bound) - now


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.25, 1.0, 7.5, 59.0, 61.0]),
            st.integers(0, 9),
            st.integers(0, 3),
            st.integers(0, 30),
        ),
        max_size=25,
    )
)
def test_a_window_is_the_sum_of_a_minute(steps: list[tuple[float, int, int, int]]) -> None:
    window, expected, now = MinuteWindow(), Minute(), 1000.0
    for later, amount, what, limit in steps:
        now += later
        if what:
            # A clock that went back counts under the newest second.
            then = now - 0.5 if what == 2 and window.total(now) else now
            assert window.add(amount, then) == expected.add(amount, then)
        assert window.total(now) == expected.total(now)
        assert window.wait_s(limit, now, amount or 1) == expected.wait_s(limit, now, amount or 1)


limits_of = st.builds(
    TenantLimits,
    requests_per_minute=st.sampled_from([None, 1, 2, 5]),
    tokens_per_minute=st.sampled_from([None, 1, 10, 50]),
    concurrency=st.sampled_from([None, 1, 2, 5]),
)


@settings(max_examples=200)
@given(
    limits_of,
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40), st.booleans()), max_size=12),
)
def test_a_refusal_names_the_first_limit_that_is_met(
    limits: TenantLimits, routers: int, steps: list[tuple[int, int, bool]]
) -> None:
    account, now = Account(), 1000.0

    def share(limit: int, least: int = 1) -> int:
        return max(least, math.ceil(limit / routers))

    for sequences, tokens, ends in steps:
        now += 1.5
        if limits.concurrency is not None and sequences > limits.concurrency:
            with pytest.raises(MuralError):
                counts(limits, sequences)
            continue
        any_limit = {limits.concurrency, limits.requests_per_minute, limits.tokens_per_minute}
        assert counts(limits, sequences) == (any_limit != {None})
        expected = None
        most = limits.concurrency
        if most is not None and account.open_sequences + sequences > share(most, sequences):
            expected = "concurrency"
        elif limits.requests_per_minute is not None and account.requests.wait_s(
            share(limits.requests_per_minute), now
        ):
            expected = "requests"
        elif limits.tokens_per_minute is not None and account.tokens.wait_s(
            share(limits.tokens_per_minute), now, tokens
        ):
            expected = "tokens"
        refusal = account.refusal(limits, sequences, tokens, now, routers)
        assert (None if refusal is None else refusal.kind) == expected
        if refusal is None:
            account.admit(sequences, tokens, now)
            account.open_sequences -= sequences if ends else 0
