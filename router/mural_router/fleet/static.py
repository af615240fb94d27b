"""Replicas that somebody listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from urllib.parse import SplitResult, urlsplit

from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.options import (
    read_engine,
    read_port,
    read_weight,
    split_options,
    url_port,
)

__all__ = ["StaticDiscovery", "parse_endpoint"]

OPTIONS = ("name", "engine", "control", "weight")
DEFAULT_PORTS = {"http": 80, "https": 443}


class StaticDiscovery(Discovery):
    """A list that does not change. Raises ValueError when two of it share a name."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._endpoints = tuple(endpoints)
        names = [endpoint.name for endpoint in self._endpoints]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two replicas are named {name!r}: give one another name=")

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        yield self._endpoints
        await asyncio.Event().wait()


def parse_endpoint(text: str) -> Endpoint:
    """Read ``http[s]://host:port[,engine=vllm][,name=…][,control=PORT][,weight=N]``.

    The control port of a Mural server is the next one after its port unless it is given; the name
    is ``host:port``. Raises ValueError with what is wrong.
    """
    url, options = split_options(text, OPTIONS)
    parts = _url(text, url)
    host, tls = _host(text, parts), parts.scheme == "https"
    port = url_port(text, parts) or DEFAULT_PORTS[parts.scheme]
    engine = read_engine(text, options.get("engine", "mural"))
    control_port: int | None = None
    if engine == "mural":
        control_port = read_port(text, options.get("control", str(port + 1)))
    elif "control" in options:
        raise ValueError(f"{text!r}: vLLM has no control port")
    return Endpoint(
        name=options.get("name") or Endpoint(name="", host=host, port=port).authority,
        host=host,
        port=port,
        engine=engine,
        control_port=control_port,
        tls=tls,
        weight=read_weight(text, options.get("weight", "1")),
    )


def _url(text: str, url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{text!r} is not http://host:port or https://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r}: a replica is a host and a port, nothing more")
    return parts


def _host(text: str, parts: SplitResult) -> str:
    """As it is looked up and stands in a Host header: in ASCII."""
    try:
        return (parts.hostname or "").encode("idna").decode("ascii")
    except UnicodeError:
        raise ValueError(f"{text!r}: this is no host's name") from None
