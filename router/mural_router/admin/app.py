"""The admin pages: for operators and scrapers, never on the clients' port. No prompt, no key."""

from __future__ import annotations

import dataclasses
import math

import msgspec
from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mural_resolvers.errors import InvalidInput, MuralError, Unavailable, error_body
from mural_resolvers.tenants import ADMIN, Principal
from mural_router.admin.collectors import RouterCollector
from mural_router.fleet.member import MemberView
from mural_router.fleet.report import Report
from mural_router.placement import PlacementRequest, Residency
from mural_router.routing.target import find_target
from mural_router.running import Router

__all__ = ["create_admin_app"]

EVERYBODY = Principal(tenant=None, rights=frozenset({ADMIN}))
"""Whoever reaches this port may ask about any name."""
MAX_ADAPTERS = 1_000
MAX_OBJECTS = 1_000


def create_admin_app(router: Router) -> FastAPI:
    """The routes over one router."""
    app = FastAPI(title="Mural router, admin", docs_url=None, redoc_url=None)
    router.metrics.add(RouterCollector(router))

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        reason = router.not_ready()
        if reason is not None:
            raise Unavailable(reason)
        return Response(status_code=200)

    @app.get("/debug/fleet")
    async def fleet() -> Response:
        return _json({"base": router.fleet.base._asdict(), "replicas": _replicas(router)})

    @app.get("/debug/placement")
    async def placement(
        model: str = Query(max_length=512),
        session: str | None = Query(default=None, max_length=512),
    ) -> Response:
        return _json(await _placement(router, model, session))

    @app.get("/debug/limits")
    async def limits() -> Response:
        snapshot = dataclasses.asdict(router.limiter.snapshot())
        queue = dataclasses.asdict(router.queue.snapshot())
        return _json({"limits": snapshot, "queue": queue})

    @app.get("/debug/objects")
    async def objects() -> Response:
        return _json(_objects(router))

    _install_errors(app)
    return app


def _replicas(router: Router) -> list[dict[str, object]]:
    states = router.breakers.states(router.dispatch.now)
    return [
        _replica(router, member, states.get(member.endpoint.name, "closed"))
        for member in router.fleet.snapshot()
    ]


def _replica(router: Router, member: MemberView, breaker: str) -> dict[str, object]:
    replica, name = member.replica, member.endpoint.name
    report = member.report or Report(ready=False)
    adapters = sorted(report.adapters)
    loads = router.dispatch.ledger.loads
    return {
        "name": name,
        "engine": member.endpoint.engine,
        "address": member.endpoint.authority,
        "weight": member.endpoint.weight,
        "ready": replica.ready,
        "why_not_ready": member.why_not_ready,
        "stale": replica.stale,
        "heard_s_ago": None if member.age_s is None else round(member.age_s, 3),
        "last_error": member.error,
        "restarts": member.restarts,
        "breaker": breaker,
        "in_flight": router.dispatch.ledger.in_flight(name),
        "sequences": loads.of(name),
        "cost": round(loads.cost(name), 3),
        "running": replica.running,
        "waiting": replica.waiting,
        "kv_usage": round(replica.kv_usage, 3),
        "tokens_per_s": round(replica.tokens_per_s, 3),
        "slots": replica.slots,
        "max_cpu_loras": replica.max_cpu_loras or None,
        "max_lora_rank": replica.max_lora_rank or None,
        "max_num_seqs": replica.max_num_seqs or None,
        "adapters_wanted": replica.use.wanted,
        "adapters_wanted_bytes": replica.use.wanted_bytes,
        "adapters_pinned_bytes": replica.use.pinned_bytes,
        "host_bytes": replica.host_bytes or None,
        "adapters": {at: _resident(report.adapters[at]) for at in adapters[:MAX_ADAPTERS]},
        "adapters_known": len(adapters),
    }


def _resident(residency: Residency) -> dict[str, object]:
    fields = dataclasses.asdict(residency)
    # What placement calls its load would read as the replica's here.
    fields["tokens_per_s"] = round(fields.pop("load"), 3)
    return fields


async def _placement(router: Router, model: str, session: str | None) -> dict[str, object]:
    """Where a request for a model would go now, and why, replica by replica."""
    target = await find_target(
        EVERYBODY,
        model,
        router.fleet.fleet,
        router.fleet.base,
        router.versions,
        shared_names=router.routing.options.shared_names,
        sticky=session,
    )
    request = PlacementRequest(adapter=target.adapter, session=session)
    explained = router.dispatch.explain(request)
    return {
        "model": target.model,
        "alias": target.alias,
        "declared": router.dispatch.declared(request),
        **dataclasses.asdict(explained),
    }


def _objects(router: Router) -> dict[str, object]:
    """What objects have put in force, and which of them do not count, and why."""
    objects = router.objects
    if objects is None:
        return {"source": None, "kinds": []}
    return {
        "source": router.config.settings.objects,
        "not_ready": objects.not_ready(),
        "kinds": [
            {
                "kind": state.kind,
                "in_force": state.in_force,
                "stale": state.stale,
                "trouble": state.trouble,
                "refused": dict(sorted(state.refused.items())[:MAX_OBJECTS]),
                "refused_known": len(state.refused),
                "kept": dict(sorted(state.kept.items())[:MAX_OBJECTS]),
                "kept_known": len(state.kept),
            }
            for state in objects.states()
        ],
    }


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _install_errors(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            error = InvalidInput("A query parameter is missing or not valid.")
        if isinstance(error, HTTPException):
            return Response(status_code=error.status_code)
        assert isinstance(error, MuralError)
        response = _json(error_body(error), error.status)
        if error.retry_after_s is not None:
            response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        return response

    for kind in (MuralError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
