"""What follows from a key and a model alone, kept while nothing changes that it follows from.

Most requests of a tenant repeat its key and its model, and all that these two decide comes out the
same: who asks, what is meant, where that is at home. It is decided once, as for any request, and
kept as a `Flow`; what depends on the moment (limits, load, breakers, the queue) is asked each time.
A flow cache in front of the whole decision, as Open vSwitch has one (Pfaff et al., "The Design and
Implementation of Open vSwitch", NSDI 2015). What is not plain has no flow, and nothing is refused
for want of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Final, NamedTuple, Protocol

import msgspec

from mural_resolvers.errors import MuralError
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.tenants import KeyRing, Principal, authorize
from mural_router.fleet.endpoint import Address, Endpoint, Engine
from mural_router.limits.estimate import estimate_tokens
from mural_router.limits.limiter import Hold, Limiter
from mural_router.limits.queue import FairQueue
from mural_router.placement import Base, Fleet, OnlyHome, PlacementPolicy, only_home
from mural_router.routing.ask import Ask, Outcome, Routed, new_request_id
from mural_router.routing.dispatch import Attempt, Dispatch
from mural_router.routing.identity import Authenticator, Headers
from mural_router.routing.inspect_body import model_value
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.retry import RetryBudget
from mural_router.routing.target import Target, target_of
from mural_router.routing.versions import Exact, Versions

__all__ = ["Express", "Flow", "FlowRequest", "Flows", "Unfolding"]

MAX_FLOWS: Final = 8_192
"""Remembered, and as many again of those that have none."""


class Flow(msgspec.Struct, eq=False, kw_only=True):
    """A path, a key and an exact version whose adapter one replica holds as its only home."""

    fleet: int
    """The last in which that was found so, by its number: a flow keeps no old fleet in memory."""
    home: OnlyHome
    principal: Principal
    name: AdapterName
    """As it was asked for."""
    exact: Exact
    """What that means."""
    target: Target
    adapter: str
    """Its exact name."""
    path: str
    declared: int | None
    endpoint: Endpoint
    address: Address
    held: str | None
    """The digest of what the replica holds, as far as it says."""
    digest: str | None
    """Which content will serve, as far as is known."""
    cold: bool
    head: bytes
    """Of the request to the replica, up to the number of its body's bytes."""
    identity: bytes
    """What follows that number, up to the request id."""
    value: bytes
    """What takes the place of the model's value in a body."""
    value_of_stream: bytes
    """The same, where the stream does not ask for its usage and the router does."""
    answer: bytes
    """What follows the request id in an answer's head, and its end."""


class Unfolding(Protocol):
    """Whoever decides about requests of any kind."""

    def unfold(self, request: FlowRequest, ask: Ask) -> Routed:
        """Go on with an admitted one; it holds what it held."""

    def refuse(self, flow: Flow, ask: Ask, error: Exception) -> None:
        """Note one that its tenant's limits refuse, or that could not be asked about."""

    def finish(self, request: FlowRequest, outcome: Outcome) -> None:
        """Note one that was answered well."""

    def drop(self, request: FlowRequest) -> None:
        """Note one that a fault of ours has ended, and give back what it held."""


class FlowRequest(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request of a flow, admitted: it holds its place until it is finished or unfolded."""

    flow: Flow
    hold: Hold
    stream: bool
    arrived: float
    """By the clock of routing."""
    request_id: str
    rank: int
    """That its sequence was counted with."""


class Flows:
    """For one event loop."""

    def __init__(
        self,
        *,
        auth: Authenticator,
        versions: Versions,
        limiter: Limiter,
        queue: FairQueue[Attempt],
        dispatch: Dispatch,
        budget: RetryBudget,
        metrics: RouterMetrics,
        options: RoutingOptions,
        clock: Callable[[], float],
        identity: Callable[[Principal, str | None, Endpoint], Headers],
        salt: Callable[[Principal, Engine], str | None],
    ) -> None:
        self.options = options
        """Others may be put here at any time."""
        self._auth = auth
        self._versions = versions
        self._limiter = limiter
        self._queue = queue
        self._dispatch = dispatch
        self._budget = budget
        self._metrics = metrics
        self._clock = clock
        self._identity = identity
        self._salt = salt
        self._found: dict[bytes, Flow] = {}
        """By the sha256 of what they are found by: there is a secret in it."""
        self._without: set[bytes] = set()
        """Those that have none in `_fleet`."""
        self._fleet: Fleet | None = None
        self._number = 0
        """Of `_fleet`."""
        self._base: Base | None = None
        """This and what follows: what was so when they were found."""
        self._policy: PlacementPolicy | None = None
        self._ring: KeyRing | None = None
        self._by_options: RoutingOptions | None = None

    def find(self, key: bytes) -> Flow | None:
        """The flow of a request; `mural_router.http.scan` says what its key is."""
        dispatch = self._dispatch
        source = dispatch.source
        if (
            self._auth.ring is not self._ring
            or source.base is not self._base
            or dispatch.policy is not self._policy
            or self.options is not self._by_options
        ):
            self._begin_anew()
        fleet = source.fleet
        if fleet is not self._fleet:
            self._fleet, self._number, self._without = fleet, self._number + 1, set()
        digest = sha256(key).digest()
        flow = self._found.get(digest)
        if (
            flow is None
            # It may have left, or moved, before a fleet says so.
            or source.endpoint(flow.endpoint.name) is not flow.endpoint
            or (flow.fleet != self._number and not self._stays(flow, fleet))
        ):
            flow = self._learn(key, digest, fleet)
            if flow is None:
                return None
        # What may change without any of those: the versions, and what is declared.
        try:
            exact = self._versions.resolve_now(flow.name)
        except MuralError:
            exact = None
        if exact != flow.exact or dispatch.declared_for(flow.adapter) != flow.declared:
            del self._found[digest]
            return None
        return flow

    def admit(
        self,
        flow: Flow,
        prompt_bytes: int,
        max_tokens: int | None,
        stream: bool,
        request_id: str | None,
    ) -> FlowRequest | None:
        """Take a place for a request; None: it is not one for here, and holds nothing.

        ``request_id`` is its own, or None: it is given one. Raises what `Limiter.enter` does.
        """
        dispatch = self._dispatch
        if (
            self._queue.waiting
            or dispatch.breakers.troubled
            or not flow.home.takes_one_more(dispatch.ledger.loads)
        ):
            return None
        tokens = estimate_tokens(prompt_bytes, max_tokens)
        hold = self._limiter.enter_now(flow.principal, 1, tokens)
        if hold is None:
            return None
        now, name, metrics = self._clock(), flow.endpoint.name, self._metrics
        rank = flow.home.rank
        self._budget.request(now)
        dispatch.ledger.add(name, 1, rank)
        metrics.choices["resident"] += 1
        metrics.replica(name).attempts += 1
        return FlowRequest(flow, hold, stream, now, request_id or new_request_id(), rank)

    # -- finding them -----------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        self._found, self._without = {}, set()
        self._base, self._policy = self._dispatch.source.base, self._dispatch.policy
        self._ring, self._by_options = self._auth.ring, self.options

    def _learn(self, key: bytes, digest: bytes, fleet: Fleet) -> Flow | None:
        if digest in self._without:
            return None
        self._found.pop(digest, None)
        path, sent, model = (part.decode("latin-1") for part in key.split(b"\n"))
        flow = None
        # Without a version it may be the base's name, or one that an admin gave.
        if ":" in model and model not in self._dispatch.source.base.model_names:
            principal, name = self._allowed((sent[1:],) if sent else (), model)
            if principal is not None and name is not None:
                try:
                    exact = self._versions.resolve_now(name)
                except MuralError:
                    exact = None
                if exact is None:
                    return None  # It has to be looked up first.
                flow = self._flow(path, principal, name, exact, fleet)
        # Apart, so that keys which somebody makes up push no flow out.
        kept = self._found if flow is not None else self._without
        if len(kept) >= MAX_FLOWS:
            kept.clear()
        if flow is None:
            self._without.add(digest)
        else:
            self._found[digest] = flow
        return flow

    def _stays(self, flow: Flow, fleet: Fleet) -> bool:
        """Whether it is the same in another fleet: reports come often, and seldom move a home."""
        home = only_home(flow.adapter, fleet, declared=flow.declared, policy=self._dispatch.policy)
        if (
            home is None
            or home.name != flow.endpoint.name
            or self._residency(flow.adapter, home, fleet) != (flow.held, flow.cold)
        ):
            return False
        flow.fleet, flow.home = self._number, home
        return True

    def _residency(self, adapter: str, home: OnlyHome, fleet: Fleet) -> tuple[str | None, bool]:
        return self._dispatch.residency(adapter, fleet.replicas[home.place])

    def _allowed(
        self, authorization: tuple[str, ...], model: str
    ) -> tuple[Principal | None, AdapterName | None]:
        """Who asks and for what, if that may be, and is so for as long as the keys are these."""
        principal = self._auth.lasting(authorization)
        if principal is None:
            return None, None
        try:
            name = parse_name(model)
            authorize(principal, name)
        except MuralError:
            return None, None
        return principal, name

    def _flow(
        self, path: str, principal: Principal, name: AdapterName, exact: Exact, fleet: Fleet
    ) -> Flow | None:
        if exact.alias is not None:
            return None  # It is drawn for each request.
        dispatch = self._dispatch
        declared = dispatch.declared_for(name.exact)
        home = only_home(name.exact, fleet, declared=declared, policy=dispatch.policy)
        endpoint = None if home is None else dispatch.source.endpoint(home.name)
        if home is None or endpoint is None:
            return None
        target = target_of(exact)
        held, cold = self._residency(name.exact, home, fleet)
        digest = held or target.digest
        salt = self._salt(principal, endpoint.engine)
        to_replica = self._identity(principal, target.digest, endpoint)
        to_client = [("x-mural-replica", endpoint.name), ("x-mural-adapter", target.model)]
        if digest is not None:
            to_client.append(("x-mural-digest", digest))
        return Flow(
            fleet=self._number,
            home=home,
            principal=principal,
            name=name,
            exact=exact,
            target=target,
            adapter=name.exact,
            path=path,
            declared=declared,
            held=held,
            endpoint=endpoint,
            address=endpoint.address,
            digest=digest,
            cold=cold,
            head=(
                f"POST {path} HTTP/1.1\r\nhost: {endpoint.authority}\r\n"
                "content-type: application/json\r\ncontent-length: "
            ).encode("latin-1"),
            identity=f"\r\n{_lines(to_replica)}x-request-id: ".encode("latin-1"),
            value=model_value(target.model, asks_usage=False, salt=salt),
            value_of_stream=model_value(target.model, asks_usage=True, salt=salt),
            answer=f"\r\n{_lines(to_client)}\r\n".encode("latin-1"),
        )


def _lines(fields: Iterable[tuple[str, str]]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in fields])


class Express(NamedTuple):
    """What the proxy asks about a request that may be of a flow, and tells of one that is."""

    flows: Flows
    routing: Unfolding
