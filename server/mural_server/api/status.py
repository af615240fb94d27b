"""``/health``, ``/ready``, ``/version``, ``/metrics``: for probes and scrapers, without a key."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from mural_resolvers.errors import Unavailable
from mural_server.api.state import AppState

__all__ = ["get_health", "get_metrics", "get_ready", "get_version"]


def get_health(state: AppState) -> Response:
    """200 while the core lives."""
    if not state.client.alive:
        raise Unavailable("The engine core has died.")
    return Response(status_code=200)


def get_ready(state: AppState) -> Response:
    """200 while requests are taken, from when the declared adapters were resident once."""
    reason = state.not_ready()
    if reason is not None:
        raise Unavailable(reason)
    return Response(status_code=200)


def get_version() -> Response:
    """The version of the distribution."""
    try:
        found = version("mural")
    except PackageNotFoundError:
        found = "unknown"
    return Response(msgspec.json.encode({"version": found}), media_type="application/json")


async def get_metrics(state: AppState) -> Response:
    """Prometheus' text format."""
    await state.sources.refresh()
    return Response(state.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})
