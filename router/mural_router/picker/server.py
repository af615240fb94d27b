"""The gRPC server of the endpoint picker, with the health services that gateways ask."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from mural_router.http.errors import BrokenAnswer
from mural_router.picker.exchange import NotDuplex, PickerExchange
from mural_router.routing.ask import Routing

__all__ = ["Picker", "PickerSettings", "start_picker"]

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

logger = logging.getLogger("mural.router")


@dataclass(frozen=True, slots=True)
class PickerSettings:
    """Where Envoy finds the picker, and what it may send."""

    host: str
    port: int
    """0: any free one."""
    certfile: str | None = None
    """PEM; with a key it makes the port speak TLS."""
    keyfile: str | None = None
    max_body_bytes: int = 8 << 20
    max_streams: int = 16_384
    """Requests at one time; Envoy waits with more."""


class Picker:
    """A running server. For one event loop."""

    def __init__(
        self,
        server: grpc.aio.Server,
        host: str,
        port: int,
        certificate: _Certificate | None,
    ) -> None:
        self.host = host
        self.port = port
        self._server = server
        self._certificate = certificate

    def reload_certificates(self) -> None:
        """Read the files anew, for new connections. Raises `ValueError`, and keeps the old ones,
        when they do not fit."""
        if self._certificate is not None:
            self._certificate.reload()

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; those in flight may end within the grace period, then are cut."""
        await self._server.stop(grace_s)


async def start_picker(
    settings: PickerSettings, routing: Routing, *, not_ready: Callable[[], str | None]
) -> Picker:
    """Serve. Raises `OSError` for an address, `ValueError` for a file that cannot be used."""
    server = grpc.aio.server(
        options=(
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", settings.max_streams),
        )
    )
    add_ExternalProcessorServicer_to_server(
        _ExternalProcessor(routing, settings.max_body_bytes), server
    )
    add_HealthServicer_to_server(_Health(not_ready), server)
    address = f"[{settings.host}]" if ":" in settings.host else settings.host
    certificate = None
    if settings.certfile is not None and settings.keyfile is not None:
        certificate = _Certificate(settings.certfile, settings.keyfile)
    port = _bind(server, f"{address}:{settings.port}", certificate)
    await server.start()
    return Picker(server, settings.host, port, certificate)


def _bind(server: grpc.aio.Server, address: str, certificate: _Certificate | None) -> int:
    try:
        if certificate is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, certificate.credentials()))
    except RuntimeError as error:
        raise OSError(str(error)) from None


class _Certificate:
    """A certificate and its key, read from their files."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Raises `ValueError` when they cannot be read, or do not fit."""
        self._files = (certfile, keyfile)
        self.reload()

    def reload(self) -> None:
        """Read them anew; raises as the constructor."""
        certfile, keyfile = self._files
        try:
            pair = (Path(keyfile).read_bytes(), Path(certfile).read_bytes())
            # gRPC itself would tell of a key that does not fit in its own log alone.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or type(error).__name__
            raise ValueError(f"the certificate cannot be used: {reason}") from None
        self._current = grpc.ssl_server_certificate_configuration((pair,))

    def credentials(self) -> grpc.ServerCredentials:
        """Which show, on each new connection, what was read last."""
        return grpc.dynamic_ssl_server_credentials(self._current, lambda: self._current)


class _ExternalProcessor:
    def __init__(self, routing: Routing, max_body_bytes: int) -> None:
        self._routing = routing
        self._max_body_bytes = max_body_bytes

    async def Process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> None:
        # Written to, not yielded from: a stream that Envoy cancels ends in the exchange's finally.
        exchange = PickerExchange(
            self._routing,
            aiter(request_iterator),
            context.write,
            max_body_bytes=self._max_body_bytes,
        )
        try:
            await exchange.run()
        except NotDuplex as error:
            logger.error("the gateway's ext_proc filter: %s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except BrokenAnswer as error:
            # A part of it is with the client: Envoy cuts it off.
            logger.warning("a replica's answer: %s", error)
            await context.abort(grpc.StatusCode.INTERNAL, "The replica's answer is broken.")


class _Health(HealthServicer):  # type: ignore[misc]  # generated without types
    """Answers what is true when it is asked; gateways and kubelets ask again by themselves."""

    def __init__(self, not_ready: Callable[[], str | None]) -> None:
        self._not_ready = not_ready

    async def Check(
        self, request: HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> HealthCheckResponse:
        if request.service == LIVENESS:
            serving = True
        elif request.service in ("", READINESS, SERVICE):
            serving = self._not_ready() is None
        else:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service.")
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        )
