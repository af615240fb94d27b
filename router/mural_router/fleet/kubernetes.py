"""Replicas behind a Kubernetes service: its EndpointSlices, listed once and then watched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass

import msgspec

from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.paths import ENDPOINT_SLICES
from mural_resolvers.kubernetes.watch import Watch
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.fleet.options import read_engine, read_weight, split_options

__all__ = ["KubernetesDiscovery", "KubernetesPlace", "parse_kubernetes"]

OPTIONS = ("engine", "port", "control", "tls", "weight")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PORT = re.compile(r"[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class KubernetesPlace:
    """A service, and which of its ports are which, by name or number."""

    service: str
    namespace: str | None = None
    """None: the one that the configuration names, in a pod its own."""
    engine: Engine = "mural"
    port: str = "http"
    control_port: str = "control"
    tls: bool = False
    weight: float = 1.0
    """Of every pod."""


def parse_kubernetes(text: str) -> KubernetesPlace:
    """Read ``kubernetes://service[.namespace]`` with options.

    ``,engine=vllm``, ``,port=NAME``, ``,control=NAME`` (names or numbers of the service's ports;
    default ``http`` and ``control``), ``,tls=on`` and ``,weight=N``. Raises ValueError with what is
    wrong.
    """
    url, options = split_options(text, OPTIONS)
    scheme, _, address = url.partition("://")
    service, dot, namespace = address.partition(".")
    if (
        scheme != "kubernetes"
        or not _LABEL.fullmatch(service)
        or (dot and not _LABEL.fullmatch(namespace))
    ):
        raise ValueError(f"{text!r} is not kubernetes://service or kubernetes://service.namespace")
    engine = read_engine(text, options.get("engine", "mural"))
    if engine == "vllm" and "control" in options:
        raise ValueError(f"{text!r}: vLLM has no control port")
    for key in ("port", "control"):
        if key in options and not _PORT.fullmatch(options[key]):
            raise ValueError(f"{text!r}: {options[key]!r} is not a port's name or number")
    if options.get("tls", "off") not in ("on", "off"):
        raise ValueError(f"{text!r}: tls is on or off")
    return KubernetesPlace(
        service=service,
        namespace=namespace or None,
        engine=engine,
        port=options.get("port", "http"),
        control_port=options.get("control", "control"),
        tls=options.get("tls") == "on",
        weight=read_weight(text, options.get("weight", "1")),
    )


# -- what the API server sends, as far as it is of use --------------------------------------------


class _Metadata(msgspec.Struct):
    name: str = ""


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct):
    addresses: tuple[str, ...]
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    targetRef: _Target | None = None

    @property
    def accepts(self) -> bool:
        """Unknown readiness is to be taken for ready, says the API; a pod that ends is not."""
        return self.conditions.ready is not False and not self.conditions.terminating


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct):
    metadata: _Metadata
    addressType: str = ""
    endpoints: tuple[_Endpoint, ...] | None = None
    ports: tuple[_Port, ...] | None = None


# -- discovery ------------------------------------------------------------------------------------


class KubernetesDiscovery(Discovery):
    """Needs ``list`` and ``watch`` on ``endpointslices`` of ``discovery.k8s.io``.

    A replica is named after its pod; one that is not ready, or ends, stays in the set and says so.
    While the API server is away, or refuses, what was found last stays.
    """

    def __init__(self, place: KubernetesPlace, client: Callable[[], KubeClient]) -> None:
        """``client`` is asked when it is watched."""
        self._place = place
        self._client = client

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        told: tuple[Endpoint, ...] | None = None
        place = self._place
        changed = asyncio.Event()
        client = self._client()
        slices = Watch(
            client,
            ENDPOINT_SLICES.of(place.namespace or client.namespace),
            msgspec.json.Decoder(_Slice).decode,
            label_selector=f"kubernetes.io/service-name={place.service}",
            what=f"endpoints of {place.service}",
        )
        running = asyncio.create_task(slices.run(lambda _: changed.set()))
        running.add_done_callback(lambda _: changed.set())
        try:
            while True:
                await changed.wait()
                changed.clear()
                if running.done():
                    # What no waiting can cure ends discovery.
                    running.result()
                found = endpoints_of(slices.objects.values(), place)
                if found != told:
                    told = found
                    # The empty set too: whoever waits may know that there is none yet.
                    yield found
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def endpoints_of(slices: Iterable[_Slice], place: KubernetesPlace) -> tuple[Endpoint, ...]:
    """Each pod once, by its name: IPv4 before IPv6, and of two entries the one that is ready."""
    found: dict[str, Endpoint] = {}
    for each in sorted(slices, key=lambda each: (each.addressType, each.metadata.name)):
        port = _port(each, place.port)
        control = _port(each, place.control_port) if place.engine == "mural" else None
        if port is None or (place.engine == "mural" and control is None):
            continue
        for pod in each.endpoints or ():
            name = pod.targetRef.name if pod.targetRef is not None else pod.addresses[0]
            known = found.get(name)
            if known is None or (pod.accepts and not known.ready):
                found[name] = Endpoint(
                    name=name,
                    # The API keeps it to the first one.
                    host=pod.addresses[0],
                    port=port,
                    engine=place.engine,
                    control_port=control,
                    tls=place.tls,
                    weight=place.weight,
                    ready=pod.accepts,
                )
    return tuple(found[name] for name in sorted(found))


def _port(each: _Slice, wanted: str) -> int | None:
    if wanted.isdecimal():
        return int(wanted)
    return next((port.port for port in each.ports or () if port.name == wanted), None)
