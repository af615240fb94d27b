"""The whole of routing: who asks, what is meant, within which limits, and where it goes."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, NamedTuple, NoReturn

from mural_resolvers.errors import AdapterNotFound, MuralError, Unavailable, quoted
from mural_resolvers.tenants import Principal
from mural_resolvers.tracing import Trace, Tracing
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.limits.estimate import estimate_tokens
from mural_router.limits.limiter import Hold, Limiter
from mural_router.limits.queue import FairQueue, Turn
from mural_router.placement import PlacementRequest, order
from mural_router.routing.access_log import AccessLog, for_log
from mural_router.routing.ask import Ask, Outcome, Routed
from mural_router.routing.dispatch import Attempt, Dispatch
from mural_router.routing.flows import Express, Flow, FlowRequest, Flows, Unfolding
from mural_router.routing.identity import (
    Authenticator,
    Headers,
    tenant_salt,
    upstream_identity,
)
from mural_router.routing.inspect_body import Inspected, inspect_body
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.models import ModelCards
from mural_router.routing.options import RoutingOptions
from mural_router.routing.request import Admitted, Forwarded, RoutedRequest, Story
from mural_router.routing.retry import RetryBudget
from mural_router.routing.target import Target, Targets, find_target
from mural_router.routing.uploads import tenant_of
from mural_router.routing.versions import Versions

__all__ = ["FleetRouting", "RoutingOptions"]

NOBODY_READY_S: Final = 2.0
COUNTED_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Where tokens are generated; the other paths use none."""


class _Asked(NamedTuple):
    """A request that was read: by whom, for what, and how much of it."""

    ask: Ask
    story: Story
    principal: Principal
    body: Inspected
    counted: bool
    sequences: int
    tokens: int
    sticky: str | None
    """What its client gave for it to meet with others."""


class FleetRouting(Unfolding):
    """Routing over a fleet. For one event loop; what it is given is closed by its owner."""

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
        log: AccessLog | None,
        tracing: Tracing | None,
        options: RoutingOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dispatch = dispatch
        self.budget = budget
        self.metrics = metrics
        self._auth = auth
        self._versions = versions
        self._targets = Targets(versions)
        self._limiter = limiter
        self._queue = queue
        self._log = log
        self._tracing = tracing
        self._clock = clock
        self._models = ModelCards(dispatch.source)
        self._salt_secret = secrets.token_bytes(32)
        # A trace has a span for each request, which is no plain one then.
        self._options = options
        self._flows = Flows(
            auth=auth,
            versions=versions,
            limiter=limiter,
            queue=queue,
            dispatch=dispatch,
            budget=budget,
            metrics=metrics,
            options=options,
            clock=clock,
            identity=self._identity,
            salt=self._salt,
        )
        # A request that is traced has a span of its own, and so has nothing of a flow.
        self.express = None if tracing is not None else Express(self._flows, self)

    def on_silence(self, fell_silent: Callable[[Endpoint], None]) -> None:
        self.dispatch.fell_silent = fell_silent

    @property
    def options(self) -> RoutingOptions:
        """Others may be put here at any time."""
        return self._options

    @options.setter
    def options(self, options: RoutingOptions) -> None:
        self._options = self._flows.options = options

    # -- inference ----------------------------------------------------------------------------

    async def route(self, ask: Ask) -> Routed:
        routed = self.route_now(ask)
        return await routed() if callable(routed) else routed

    def route_now(self, ask: Ask) -> Routed | Callable[[], Awaitable[Routed]]:
        story = self._begin(ask)
        try:
            asked = self._read(ask, story)
            routed = self._admit_now(asked)
        except Exception as error:
            self._ended(story, error)
            raise
        return partial(self._admit, asked) if routed is None else routed

    def _read(self, ask: Ask, story: Story) -> _Asked:
        return self._asked(ask, story, self._identify(ask, story))

    def _asked(self, ask: Ask, story: Story, principal: Principal) -> _Asked:
        body = inspect_body(ask.body)
        story.asked, story.stream = body.model, body.stream
        counted = ask.path in COUNTED_PATHS
        tokens = 1
        if counted:
            tokens = estimate_tokens(body.prompt_bytes, body.max_tokens, samples=body.sequences)
        return _Asked(
            ask,
            story,
            principal,
            body,
            counted,
            body.sequences if counted else 1,
            tokens,
            ask.headers.get("x-session-id") or body.user,
        )

    def _admit_now(self, asked: _Asked) -> Routed | None:
        """Admit a request that need not wait; None: it must, and holds nothing yet."""
        source, story = self.dispatch.source, asked.story
        target = story.target = self._targets.find_now(
            asked.principal,
            asked.body.model,
            source.fleet,
            source.base,
            self.options.shared_names,
            asked.sticky,
        )
        if target is None:
            return None
        placement = self._placement(asked, target)
        # The seat first: it can be given back as if it had never been taken.
        attempt = self._queue.seat_now(partial(self.dispatch.take, placement))
        if attempt is None:
            return None
        hold: Hold | None = None
        try:
            hold = self._limiter.enter_now(asked.principal, asked.sequences, asked.tokens)
            if hold is not None:
                return self._routed(asked, target, placement, hold, Turn(attempt, 0.0, None))
        except BaseException:
            _give_back(hold)
            self.dispatch.end(attempt)
            raise
        self.dispatch.end(attempt)
        return None

    async def _admit(self, asked: _Asked) -> Routed:
        """Admit a request that has to wait for something."""
        story, source = asked.story, self.dispatch.source
        hold: Hold | None = None
        try:
            target = story.target = await find_target(
                asked.principal,
                asked.body.model,
                source.fleet,
                source.base,
                self._versions,
                shared_names=self.options.shared_names,
                sticky=asked.sticky,
            )
            hold = await self._limiter.enter(asked.principal, asked.sequences, asked.tokens)
            placement = self._placement(asked, target)
            turn = await self._wait(asked, placement)
            story.queued_s = turn.waited_s or None
            return self._routed(asked, target, placement, hold, turn)
        except (Exception, asyncio.CancelledError) as error:
            _give_back(hold)
            self._ended(story, error)
            raise

    def _routed(
        self,
        asked: _Asked,
        target: Target,
        placement: PlacementRequest,
        hold: Hold,
        turn: Turn[Attempt],
        *,
        sent: bool = False,
    ) -> Routed:
        body = asked.body
        return RoutedRequest(
            Admitted(asked.principal, target, placement, hold, turn, asked.counted),
            body_for=partial(self._body, asked, target.model),
            stream=body.stream,
            hide_usage=body.hides_usage,
            story=asked.story,
            dispatch=self.dispatch,
            budget=self.budget,
            identity=partial(self._identity, asked.principal, target.digest),
            clock=self._clock,
            sent=sent,
        )

    def _placement(self, asked: _Asked, target: Target) -> PlacementRequest:
        candidates = asked.ask.candidates
        if candidates is not None:
            candidates = self.dispatch.names_of(candidates)
            if not candidates:
                raise Unavailable("None of the endpoints that may serve this is known here.")
        return PlacementRequest(
            adapter=target.adapter,
            prefix=asked.body.prefix,
            session=asked.sticky,
            sequences=asked.sequences,
            candidates=candidates,
        )

    async def _wait(self, asked: _Asked, placement: PlacementRequest) -> Turn[Attempt]:
        wait_s = self.options.queue_wait_s
        if not self.dispatch.source.fleet.accepting:
            # Nobody to wait for: a restart may be over in a moment, but a client is told soon.
            wait_s = min(wait_s, NOBODY_READY_S)
        try:
            return await self._queue.wait(
                asked.principal.tenant,
                asked.principal.weight,
                asked.tokens,
                partial(self.dispatch.take, placement),
                timeout_s=wait_s,
                release=self.dispatch.end,
                group=self.dispatch.group(placement),
                max_waiting=asked.principal.limits.queue_length,
            )
        except Unavailable as error:
            if self.dispatch.source.fleet.accepting:
                raise
            # More capacity would not help: whoever reads this should look for the replicas.
            raise Unavailable("No replica is ready.", retry_after_s=error.retry_after_s) from None

    # -- requests of flows --------------------------------------------------------------------

    def unfold(self, request: FlowRequest, ask: Ask) -> Routed:
        flow = request.flow
        self.metrics.express["unfolded"] += 1
        story = self._story(ask, request.arrived)
        story.principal, story.target = flow.principal, flow.target
        asked = self._asked(ask, story, flow.principal)
        attempt = Attempt(flow.endpoint, 1, request.rank, "resident", flow.digest, flow.cold)
        placement = self._placement(asked, flow.target)
        turn = Turn(attempt, 0.0, None)
        return self._routed(asked, flow.target, placement, request.hold, turn, sent=True)

    def refuse(self, flow: Flow, ask: Ask, error: Exception) -> None:
        self.metrics.express["refused"] += 1
        story = self._begin(ask)
        story.principal, story.target = flow.principal, flow.target
        story.stream = inspect_body(ask.body).stream
        self._ended(story, error)

    def finish(self, request: FlowRequest, outcome: Outcome) -> None:
        flow, hold = request.flow, request.hold
        self.metrics.express["whole"] += 1
        if outcome.prompt_tokens is not None:
            hold.settle(outcome.prompt_tokens + (outcome.completion_tokens or 0))
        hold.close()
        self.dispatch.left(flow.endpoint.name, request.rank, request)
        self._story_of(request).finish(outcome)

    def drop(self, request: FlowRequest) -> None:
        request.hold.close()
        self.dispatch.dropped(request.flow.endpoint.name, request.rank)
        self._story_of(request).end(status=0, error="internal_error")

    def _story_of(self, request: FlowRequest) -> Story:
        flow = request.flow
        return Story(
            request_id=request.request_id,
            path=flow.path,
            arrived=request.arrived,
            clock=self._clock,
            metrics=self.metrics,
            log=self._log,
            trace=None,
            passed_on=(),
            principal=flow.principal,
            target=flow.target,
            stream=request.stream,
            digest=flow.digest,
            replica=flow.endpoint.name,
            reason="resident",
            attempts=1,
        )

    # -- a tenant's own adapters --------------------------------------------------------------

    async def forward(self, ask: Ask) -> Routed:
        story = self._begin(ask)
        try:
            principal = self._identify(ask, story)
            tenant = tenant_of(ask) if principal.is_admin else principal.tenant
            endpoints = self._servers(tenant)
            if not endpoints:
                raise Unavailable("No Mural server is ready to take this.")
            identity = partial(self._identity, principal, None, acts_for=tenant)
            changed: Callable[[], None] | None = None
            if tenant is not None and ask.method != "GET":
                changed = partial(self._versions.changed, tenant)
            return Forwarded(endpoints, identity, story, changed)
        except MuralError as error:
            self._refused(story, error)

    def _servers(self, tenant: str | None) -> list[Endpoint]:
        """Ready Mural servers; a tenant's come in one order, since each counts its uploads."""
        source = self.dispatch.source
        ordered = order(f"{tenant or ''}/", source.fleet)
        found = [source.endpoint(replica.name) for replica in ordered if replica.ready]
        return [each for each in found if each is not None and each.engine == "mural"]

    # -- models -------------------------------------------------------------------------------

    async def models(self, ask: Ask) -> bytes:
        story = self._begin(ask)
        try:
            principal = self._identify(ask, story)
            data = self._models.listed(principal, self.options.shared_names)
        except MuralError as error:
            self._refused(story, error)
        story.end(status=200)
        return data

    async def model(self, ask: Ask, name: str) -> bytes:
        story = self._begin(ask)
        hold: Hold | None = None
        try:
            principal = self._identify(ask, story)
            # It may ask the store, so it counts as the other requests do.
            hold = await self._limiter.enter(principal, 1, 1)
            source = self.dispatch.source
            story.asked = name
            story.target = await find_target(
                principal,
                name,
                source.fleet,
                source.base,
                self._versions,
                shared_names=self.options.shared_names,
            )
            data = self._models.card(story.target)
            if data is None:
                raise AdapterNotFound(f"The model {quoted(name)} does not exist.")
        except MuralError as error:
            self._refused(story, error)
        finally:
            _give_back(hold)
        story.end(status=200)
        return data

    # -- what all share -----------------------------------------------------------------------

    def _begin(self, ask: Ask) -> Story:
        now = self._clock()
        self.budget.request(now)
        return self._story(ask, now)

    def _story(self, ask: Ask, arrived: float) -> Story:
        trace: Trace | None = None
        if self._tracing is not None:
            trace = self._tracing.start(f"{ask.method} {ask.path}", ask.headers)
        return Story(
            request_id=ask.request_id,
            # The other paths hold names.
            path=ask.path if ask.path in COUNTED_PATHS else for_log(ask.path),
            arrived=arrived,
            clock=self._clock,
            metrics=self.metrics,
            log=self._log,
            trace=trace,
            passed_on=_trace_headers(ask, trace) if ask.headers or trace else (),
        )

    def _identify(self, ask: Ask, story: Story) -> Principal:
        principal = self._auth.principal(ask.authorization)
        story.principal = principal
        return principal

    def _identity(
        self,
        principal: Principal,
        digest: str | None,
        endpoint: Endpoint,
        *,
        acts_for: str | None = None,
    ) -> Headers:
        options = self.options
        token = options.vllm_api_key if endpoint.engine == "vllm" else options.router_token
        return upstream_identity(
            endpoint.engine, principal, token=token, digest=digest, acts_for=acts_for
        )

    def _body(self, asked: _Asked, model: str, engine: Engine) -> bytes:
        salt = None
        if asked.counted:
            salt = self._salt(asked.principal, engine, asked.body.cache_salt)
        return asked.body.for_replica(model, salt)

    def _salt(
        self, principal: Principal, engine: Engine, cache_salt: str | None = None
    ) -> str | None:
        if engine != "vllm" or principal.tenant is None:
            return None
        # Routers that share a token share the pods' prefix blocks, too.
        token = self.options.router_token
        secret = self._salt_secret if token is None else token.encode()
        return tenant_salt(secret, principal.tenant, cache_salt)

    def _refused(self, story: Story, error: MuralError) -> NoReturn:
        self._ended(story, error)
        raise error

    def _ended(self, story: Story, error: BaseException) -> None:
        """It ends before any replica was asked."""
        if isinstance(error, MuralError):
            self.metrics.refusals[error.code] += 1
            story.end(status=error.status, error=error.code)
        elif isinstance(error, asyncio.CancelledError):
            story.end(status=0, error="the client left")
        else:
            story.end(status=500, error="internal_error")


def _give_back(hold: Hold | None) -> None:
    if hold is not None:
        hold.settle(0)
        hold.close()


def _trace_headers(ask: Ask, trace: Trace | None) -> tuple[tuple[str, str], ...]:
    """The router's own span in place of the client's, where there is one."""
    headers = ask.headers if trace is None else trace.headers
    names = ("traceparent", "tracestate")
    return tuple((name, headers[name]) for name in names if name in headers)
