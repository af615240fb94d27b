"""Replicas behind a Kubernetes service: its EndpointSlices, listed once and then watched."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from mural_resolvers.backoff import Backoff
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.fleet.options import read_engine, split_options

__all__ = ["KubernetesDiscovery", "KubernetesPlace", "cluster_config", "parse_kubernetes"]

log = logging.getLogger(__name__)

OPTIONS = ("engine", "port", "control", "tls")
TIMEOUT_S = 10.0
WATCH_S = 300
"""After it the API server ends a watch, which goes on from where it was."""
SILENCE_S = 120.0
"""Bookmarks come every minute: after two without one the connection is given up."""
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 10.0

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


def parse_kubernetes(text: str) -> KubernetesPlace:
    """Read ``kubernetes://service[.namespace]`` with options.

    ``,engine=vllm``, ``,port=NAME``, ``,control=NAME`` (names or numbers of the service's ports;
    default ``http`` and ``control``) and ``,tls=on``. Raises ValueError with what is wrong.
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
    )


def cluster_config() -> SingleConfig:
    """The pod's own service account, else ``KUBECONFIG``, else ``~/.kube/config``.

    Raises ValueError where there is none.
    """
    try:
        config = KubeConfig.from_env().get()
    except ConfigError as error:
        raise ValueError(f"no Kubernetes to ask: {error}") from None
    if config is None:
        raise ValueError("no Kubernetes to ask: no context is chosen")
    return config


# -- what the API server sends, as far as it is of use --------------------------------------------


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""


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


class _List(msgspec.Struct):
    metadata: _Metadata
    items: tuple[_Slice, ...] = ()


class _Status(msgspec.Struct):
    message: str = ""
    code: int = 0


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Refused(Exception):
    """The API server answers with a status that is no success."""


class _SliceWatch:
    """Keeps a service's slices; a break goes on where it was, as long as the server knows it."""

    def __init__(self, client: httpx2.AsyncClient, namespace: str, service: str) -> None:
        self._client = client
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._version: str | None = None
        self._slices: dict[str, _Slice] = {}

    async def follow(self) -> AsyncGenerator[Mapping[str, _Slice], None]:
        """The slices after a list, when the watch begins and after every change, until it ends."""
        if self._version is None:
            await self._list()
            yield self._slices
        params = self._selector | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version or "",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = httpx2.Timeout(TIMEOUT_S, read=SILENCE_S)
        async with self._client.stream(
            "GET", self._path, params=params, timeout=timeout
        ) as response:
            if response.status_code != 200:
                await response.aread()
                self._refuse(_status(response.content, response.status_code))
            yield self._slices
            async for line in response.aiter_lines():
                if self._take(msgspec.json.decode(line, type=_Event)):
                    yield self._slices

    async def _list(self) -> None:
        response = await self._client.get(self._path, params=self._selector)
        if response.status_code != 200:
            self._refuse(_status(response.content, response.status_code))
        found = msgspec.json.decode(response.content, type=_List)
        self._slices = {each.metadata.name: each for each in found.items}
        self._version = found.metadata.resourceVersion

    def _take(self, event: _Event) -> bool:
        """Whether the event changes a slice."""
        if event.type == "ERROR":
            self._refuse(msgspec.json.decode(event.object, type=_Status))
        each = msgspec.json.decode(event.object, type=_Slice)
        self._version = each.metadata.resourceVersion
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._slices.pop(each.metadata.name, None)
        else:
            self._slices[each.metadata.name] = each
        return True

    def _refuse(self, status: _Status) -> None:
        if status.code == 410:
            # What lies between is forgotten there: list again.
            self._version = None
        raise _Refused(f"status {status.code}: {status.message}")


def _status(content: bytes, code: int) -> _Status:
    try:
        message = msgspec.json.decode(content, type=_Status).message
    except msgspec.MsgspecError:
        message = ""
    return _Status(message, code)


# -- discovery ------------------------------------------------------------------------------------


class KubernetesDiscovery(Discovery):
    """Needs ``list`` and ``watch`` on ``endpointslices`` of ``discovery.k8s.io``.

    A replica is named after its pod; one that is not ready, or ends, stays in the set and says so.
    While the API server is away, or refuses, what was found last stays.
    """

    def __init__(self, place: KubernetesPlace, config: SingleConfig) -> None:
        self._place = place
        self._config = config
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        self._trouble = ""

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        told: tuple[Endpoint, ...] | None = None
        namespace = self._place.namespace or self._config.namespace
        timeout = httpx2.Timeout(TIMEOUT_S)
        async with AsyncClient(self._config, ConnectionParams(timeout=timeout)) as client:
            slices = _SliceWatch(client, namespace, self._place.service)
            while True:
                try:
                    async for state in slices.follow():
                        self._well()
                        found = endpoints_of(state.values(), self._place)
                        if found != told:
                            told = found
                            yield found
                except (httpx2.HTTPError, msgspec.MsgspecError, _Refused, ConfigError) as error:
                    self._complain(error)
                    if told is None:
                        # Whoever waits for the first set may know that there is none yet.
                        told = ()
                        yield told
                await asyncio.sleep(self._backoff.next_s())

    def _well(self) -> None:
        self._backoff.reset()
        if self._trouble:
            log.info("endpoints of %s are watched again", self._place.service)
            self._trouble = ""

    def _complain(self, error: Exception) -> None:
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("endpoints of %s cannot be watched: %s", self._place.service, trouble)


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
                    ready=pod.accepts,
                )
    return tuple(found[name] for name in sorted(found))


def _port(each: _Slice, wanted: str) -> int | None:
    if wanted.isdecimal():
        return int(wanted)
    return next((port.port for port in each.ports or () if port.name == wanted), None)
