"""Puts the proxy together: the port, the paths, the replicas' connections, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from functools import partial
from typing import Final

import msgspec

from mural_resolvers.errors import MuralError, Unavailable
from mural_router.http.exchange import Exchange, Plan
from mural_router.http.head import RequestHead
from mural_router.http.server import Server
from mural_router.http.settings import HttpSettings
from mural_router.http.tls import client_side, replica_side
from mural_router.http.upstream import ReplicaPool
from mural_router.http.watch import Watch
from mural_router.proxy.content import refuse_other_content
from mural_router.proxy.express import open_express_lane
from mural_router.proxy.forward import ForwardRelay
from mural_router.proxy.paths import Answerer, Place, place_of
from mural_router.proxy.relay import InferenceRelay, ask_of
from mural_router.proxy.running import Proxy, ProxyState
from mural_router.routing.ask import Ask, Routing

__all__ = ["start"]

_log = logging.getLogger(__name__)
_STOPPING: Final = "The router is shutting down."


async def start(settings: HttpSettings, routing: Routing, *, version: str) -> Proxy:
    """Listen, and serve ``routing``'s decisions until the proxy is closed.

    Raises `OSError` when it cannot listen, `ValueError` when a certificate cannot be read.
    """
    running = _Running(settings, routing, version)
    try:
        await running.listen()
    except BaseException:
        await running.close()
        raise
    return running


class _LocalAnswer:
    """An answer that routing gives by itself, in a task that ends with its client."""

    def __init__(self, exchange: Exchange, ask: Ask, body: Awaitable[bytes]) -> None:
        self._exchange = exchange
        self._fields = ask.own_headers
        self._body = body
        exchange.reader = self
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            self._exchange.answer(200, await self._body, self._fields)
        except MuralError as error:
            self._exchange.fail(error, self._fields)
        except Exception:
            _log.exception("a request could not be answered")
            self._exchange.fail(
                MuralError("The router failed to answer this request."), self._fields
            )

    def gone(self) -> None:
        self._task.cancel()

    def paused(self) -> None:
        """One answer, written at once."""

    def resumed(self) -> None:
        """As `paused`."""

    def end_now(self, error: MuralError) -> None:
        self._task.cancel()
        self._exchange.fail(error, self._fields)


class _Running(Proxy):
    def __init__(self, settings: HttpSettings, routing: Routing, version: str) -> None:
        self._settings = settings
        self._routing = routing
        self._version = msgspec.json.encode({"version": version})
        self._client_context = client_side(settings.tls)
        self._replica_context = replica_side(settings.tls)
        self._watch = Watch(asyncio.get_running_loop())
        self._pool = ReplicaPool(settings, self._watch, lambda: self._replica_context)
        routing.on_silence(self._pool.fell_silent)
        lane = open_express_lane(settings, routing, self._pool)
        express = None if lane is None else lane.take
        self._server = Server(settings, self, self._watch, express)
        self._inference = Plan(settings.max_body_bytes, self._infer)
        self._closed = False

    async def listen(self) -> None:
        self.host, self.port = await self._server.listen(self._client_context)

    # -- the paths --------------------------------------------------------------------------------

    def plan(self, head: RequestHead) -> Plan:
        place = place_of(head)
        if place.answerer is Answerer.INFERENCE:
            refuse_other_content(head)
            return self._inference
        if place.answerer is Answerer.ADAPTERS:
            return Plan(None, partial(self._forward, place))
        return Plan(0, partial(self._answer, place))

    def _infer(self, exchange: Exchange) -> None:
        InferenceRelay(self._pool, self._routing, exchange)

    def _forward(self, place: Place, exchange: Exchange) -> None:
        ForwardRelay(self._pool, self._routing, exchange, place.name)

    def _answer(self, place: Place, exchange: Exchange) -> None:
        if place.answerer is Answerer.HEALTH:
            exchange.answer(200, b"", content_type="text/plain")
        elif place.answerer is Answerer.VERSION:
            exchange.answer(200, self._version)
        else:
            ask, routing = ask_of(exchange), self._routing
            models = place.answerer is Answerer.MODELS
            _LocalAnswer(
                exchange, ask, routing.models(ask) if models else routing.model(ask, place.name)
            )

    # -- the owner's side -------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> int:
        server = self._server
        server.stop_listening()
        try:
            async with asyncio.timeout(grace_s):
                # At an answer's end it may be so for a moment.
                while not server.idle.is_set():
                    await server.idle.wait()
        except TimeoutError:
            pass
        cut, taking = server.readers(), server.taking
        for reader in cut:
            reader.end_now(Unavailable(_STOPPING, retry_after_s=1.0))
        return len(cut) + taking

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._server.abort()
        self._pool.close()
        # Transports tell their protocols in the loop's next turns.
        await asyncio.sleep(0)
        self._watch.close()

    def state(self) -> ProxyState:
        server, pool = self._server, self._pool
        return ProxyState(
            connections=server.connections,
            requests=server.in_flight,
            buffered_bytes=server.buffered_bytes,
            replica_connections_opened=pool.opened_total,
            idle_replica_connections=pool.idle,
            requests_total=server.requests_total,
            refused_total=server.refused_total,
        )

    def reload_certificates(self) -> None:
        settings = self._settings.tls
        replica_context = replica_side(settings)
        # Read into a context of its own first: one that half fits would spoil the one in use.
        client_side(settings)
        if self._client_context is not None and settings.certfile is not None:
            self._client_context.load_cert_chain(settings.certfile, settings.keyfile)
        self._replica_context = replica_context
