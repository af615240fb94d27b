"""The control API, on a port and with a token of its own."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from mural_resolvers.errors import AdapterNotFound
from mural_resolvers.names import parse_name, validate_admin_name
from mural_server.api.auditing import audited
from mural_server.api.body import read_body
from mural_server.api.control_gate import ControlGate
from mural_server.api.errors import BadParameter, install_error_handlers
from mural_server.api.sse import EventStream
from mural_server.api.state import AppState
from mural_server.api.state_feed import StateFeed, adapter_status
from mural_server.api.status import get_health, get_ready
from mural_server.catalog import OPERATOR, AdapterView, AdminActions
from mural_server.protocol.wire import (
    DeclaredAnswer,
    DeclaredRequest,
    DrainAnswer,
    Freed,
    FreedAnswer,
    ResidentRequest,
)

__all__ = ["create_control_app"]

MAX_BODY_BYTES = 4 << 20
MAX_DECLARED = 10_000

T = TypeVar("T")


def create_control_app(state: AppState, feed: StateFeed, gate: ControlGate) -> FastAPI:
    """The application of the control port."""
    app = FastAPI(title="Mural control", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app, state.metrics.error)
    _add_routes(app, state, feed, gate)

    @app.get("/health")
    async def health() -> Response:
        return get_health(state)

    @app.get("/ready")
    async def ready() -> Response:
        return get_ready(state)

    return app


def _add_routes(app: FastAPI, state: AppState, feed: StateFeed, gate: ControlGate) -> None:
    @app.get("/mural/v1/state")
    async def get_state(request: Request) -> Response:
        gate.check(request.headers)
        events = feed.read(_since(request))
        return EventStream(events)

    @app.put("/mural/v1/resident")
    async def put_resident(request: Request) -> Response:
        gate.check(request.headers)
        wanted = await _body(request, ResidentRequest)
        with audited(state.audit, OPERATOR, "make_resident", wanted.name) as about:
            view = await _make_resident(state.catalog.admin, wanted)
            about.digest = view.digest
        return _json(adapter_status(view))

    @app.delete("/mural/v1/resident/{name:path}")
    async def delete_resident(request: Request, name: str) -> Response:
        gate.check(request.headers)
        with audited(state.audit, OPERATOR, "remove_resident", name) as about:
            about.digest = state.catalog.digest_of(name)
            return _json(await _remove(state, name))

    @app.put("/mural/v1/declared")
    async def put_declared(request: Request) -> Response:
        gate.check(request.headers)
        wanted = await _body(request, DeclaredRequest)
        with audited(state.audit, OPERATOR, "declare", f"{len(wanted.names)} names"):
            return _json(_declare(state, wanted))

    @app.post("/mural/v1/drain")
    async def post_drain(request: Request) -> Response:
        gate.check(request.headers)
        with audited(state.audit, OPERATOR, "drain"):
            state.admission.close("The server is draining.")
            feed.refresh()
        return _json(DrainAnswer(accepting=False, open_sequences=state.admission.open_sequences))


def _since(request: Request) -> int | None:
    text = request.query_params.get("since")
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise BadParameter("since is a sequence number.", at="since")
    return int(text)


async def _body(request: Request, kind: type[T]) -> T:
    body = await read_body(request, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadParameter(f"The body is not what is wanted here: {str(error)[:300]}.") from None


async def _make_resident(admin: AdminActions, wanted: ResidentRequest) -> AdapterView:
    if wanted.level != "disk":
        return await admin.make_resident(
            wanted.name,
            digest=wanted.digest,
            level=wanted.level,
            pinned=wanted.pinned,
            source=wanted.source,
        )
    if wanted.pinned:
        raise BadParameter("Only what is resident can be pinned, not what is on disk.", at="pinned")
    return await admin.prefetch(wanted.name, digest=wanted.digest, source=wanted.source)


async def _remove(state: AppState, name: str) -> FreedAnswer:
    if name in state.catalog.served:
        raise BadParameter("The base model cannot be unloaded.", at="name")
    _check_name(name)
    try:
        freed = await state.catalog.admin.unload(name)
    except AdapterNotFound:
        # Idempotent: what is not here is gone.
        return FreedAnswer(name=name, freed=Freed())
    return FreedAnswer(
        name=name,
        freed=Freed(slot=freed.slot, host=freed.host, kv_blocks=freed.kv_blocks, disk=freed.disk),
    )


def _declare(state: AppState, wanted: DeclaredRequest) -> DeclaredAnswer:
    if len(wanted.names) > MAX_DECLARED:
        raise BadParameter(f"At most {MAX_DECLARED} names can be declared.", at="names")
    for name in wanted.names:
        _check_name(name)
    readiness = state.readiness
    readiness.declare(_canonical(name) for name in wanted.names)
    missing = readiness.missing(state.resident())
    return DeclaredAnswer(
        resident=tuple(sorted(readiness.declared.difference(missing))), missing=tuple(missing)
    )


def _check_name(name: str) -> None:
    if ":" in name:
        parse_name(name)
    else:
        validate_admin_name(name)


def _canonical(name: str) -> str:
    return parse_name(name).short if ":" in name else name


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
