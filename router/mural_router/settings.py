"""Every setting of the router: one YAML file, flags over it, checked together.

A field says its unit in its name. What `RELOADED` names takes effect when the file changes, the
rest at the next start.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from mural_resolvers.conversion import converted, in_file, read_yaml, wanted
from mural_resolvers.errors import InvalidInput
from mural_resolvers.redaction import redacted
from mural_router.cluster import Cluster
from mural_router.fleet.places import open_discovery
from mural_router.http.settings import HttpSettings
from mural_router.placement import PlacementPolicy
from mural_router.routing.breaker import BreakerSettings
from mural_router.routing.identity import RouterAuth
from mural_router.routing.retry import RetrySettings
from mural_router.routing.versions import VersionSettings

__all__ = [
    "KUBERNETES",
    "RELOADED",
    "Discovered",
    "Queueing",
    "RouterSettings",
    "Secrets",
    "SharedLimits",
    "convert_settings",
    "is_loopback",
    "merged",
    "read_config",
]

MAX_CONFIG_BYTES: Final = 1 << 20

RELOADED: Final = frozenset(
    {"replicas", "shared_names", "aliases_file", "versions", "queue", "retry", "breaker"}
    | {"placement"}
)
"""Settings that a running router takes over from a changed file."""

KUBERNETES: Final = "kubernetes"

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

LogLevel = Literal["debug", "info", "warning", "error"]


class Queueing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests that wait while the fleet is full."""

    wait_s: float = 10.0
    """Longest wait for capacity, then 503."""
    max_waiting: int = 10_000
    max_waiting_per_tenant: int = 200
    """Beyond it 429; a tenant may have a queue length of its own."""


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """What is never in the file: from the environment, or files of their own."""

    api_keys: tuple[str, ...] = ()
    """Admin keys of the router."""
    router_token: str | None = None
    """Shown to Mural servers, which then believe who the router says is asking."""
    control_token: str | None = None
    vllm_api_key: str | None = None
    router_token_file: str | None = None
    """Where it was read from, and is read again when it changes; so the next two."""
    control_token_file: str | None = None
    vllm_api_key_file: str | None = None
    redis_url: str | None = None
    """``redis[s]://[user:password@]host:port/db``: limits are counted there, over all routers."""


class SharedLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Redis in which routers count limits together, where a secret says where it is."""

    namespace: str = "mural"
    """Routers share limits where it is the same; the keys begin with it."""
    timeout_s: float = 0.5
    """Of a round trip; over it the router goes on alone, with its share of each limit."""
    routers: int = 1
    """How many share the limits, as long as the store has not said."""
    ca_certs: str | None = None
    """A file of certificates to trust for ``rediss://``; None: the system's."""
    certfile: str | None = None
    keyfile: str | None = None


class Discovered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How replicas are followed."""

    stale_after_s: float = 12.0
    """Silence after which a replica's state is not trusted any more."""
    scrape_interval_s: float = 1.0
    """How often vLLM pods are asked for their metrics."""


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a router is started with."""

    http: HttpSettings = HttpSettings()
    """The clients' port. Its host is, unless given, every interface, except loopback under
    ``auth: open``."""
    admin_host: str = "127.0.0.1"
    admin_port: int | None = 9090
    """Of metrics and debug pages; None: none."""
    ext_proc_port: int | None = None
    """Of the endpoint picker for Envoy gateways, on the clients' host and with its certificate;
    None: there is none."""

    replicas: tuple[str, ...] = ()
    """Where they are looked for: ``http[s]://host:port``, ``dns://…``, ``dns+srv://…`` and
    ``kubernetes://…``, each with options (docs/how-to/find-replicas.md)."""
    fleet: Discovered = Discovered()

    auth: RouterAuth | None = None
    """None: keys where a tenants file or an admin key is given, else open."""
    tenants_file: str | None = None
    shared_names: tuple[str, ...] = ()
    """Names that an admin registered on the replicas and that every tenant may use."""

    store: str | None = None
    """Where aliases and versions are looked up: a folder or ``s3://…``."""
    aliases_file: str | None = None
    """Aliases by adapter, in place of those of the store."""
    objects: str | None = None
    """Tenants, Adapters and AdapterAliases in place of the two files: ``kubernetes``, or a YAML
    file of the same objects."""
    objects_namespace: str | None = None
    """Of the Tenants and the keys' Secret on Kubernetes; None: the pod's own."""
    watch_namespaces: tuple[str, ...] = ()
    """Of the Adapters and AdapterAliases; none: `objects_namespace`; ``*``: every one."""
    keys_secret: str = "mural-router-keys"
    """The Secret of key hashes that the operator writes."""
    versions: VersionSettings = VersionSettings()

    redis: SharedLimits = SharedLimits()
    queue: Queueing = Queueing()
    retry: RetrySettings = RetrySettings()
    breaker: BreakerSettings = BreakerSettings()
    placement: PlacementPolicy = PlacementPolicy()

    access_log: str | None = "-"
    """A file, ``-`` for standard output; None: none is written."""
    otlp_traces_endpoint: str | None = None
    trace_sample_ratio: float = 1.0
    metrics_adapters: int = 50
    """Versions with a label of their own; the rest are ``other``."""
    shutdown_grace_s: float = 30.0
    log_level: LogLevel = "info"

    def resolved_auth(self, secrets: Secrets) -> RouterAuth:
        """The mode that holds."""
        if self.auth is not None:
            return self.auth
        return "keys" if self.tenants_file or self.objects or secrets.api_keys else "open"

    def validate(self, secrets: Secrets) -> None:
        """Raise ``InvalidInput`` with the first thing that cannot work, and what to change."""
        for holds, message in (
            *self._address_rules(),
            *self._object_rules(),
            *self._bound_rules(),
        ):
            if not holds:
                raise InvalidInput(message)
        keys = bool(self.tenants_file or secrets.api_keys)
        if self.auth == "keys" and not keys and not self.objects:
            raise InvalidInput(
                "auth is keys, but there is no key: give a tenants_file, or objects."
            )
        if self.auth == "open" and keys:
            raise InvalidInput("auth is open, but keys are given: leave one of them out.")
        try:
            open_discovery(self.replicas, Cluster())
        except ValueError as error:
            raise InvalidInput(f"replicas: {redacted(str(error))}.") from None
        if self.objects == KUBERNETES:
            try:
                Cluster().check()
            except ValueError as error:
                raise InvalidInput(f"objects: {redacted(str(error))}.") from None

    def _address_rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                0 <= self.http.port < 1 << 16,
                f"http.port is {self.http.port}: set it from 0 to 65535.",
            ),
            (
                self.admin_port is None or 0 <= self.admin_port < 1 << 16,
                f"admin_port is {self.admin_port}: set it from 0 to 65535.",
            ),
            (
                self.ext_proc_port is None or 0 <= self.ext_proc_port < 1 << 16,
                f"ext_proc_port is {self.ext_proc_port}: set it from 0 to 65535.",
            ),
            (
                not self.ext_proc_port
                or self.ext_proc_port not in (self.http.port, self.admin_port),
                f"The endpoint picker needs a port of its own, not {self.ext_proc_port}.",
            ),
            (
                not self.http.port or self.http.port != self.admin_port,
                f"The admin pages need a port of their own, but both are {self.http.port}.",
            ),
            *(
                (path is None or Path(path).is_file(), f"{name}: {_no_file(path)}.")
                for name, path in (
                    ("tenants_file", self.tenants_file),
                    ("aliases_file", self.aliases_file),
                    ("objects", None if self.objects == KUBERNETES else self.objects),
                )
            ),
        )

    def _object_rules(self) -> tuple[tuple[bool, str], ...]:
        """Objects and files are never merged: who reads one must not have to look at the other."""
        names = (*self.watch_namespaces, *filter(None, (self.objects_namespace,)))
        wrong = [name for name in names if name != "*" and not _NAMESPACE.fullmatch(name)]
        files = {"tenants_file": self.tenants_file, "aliases_file": self.aliases_file}
        return (
            *(
                (not (self.objects and path), f"{name} and objects: give one of the two.")
                for name, path in files.items()
            ),
            (
                self.objects == KUBERNETES or not names,
                "objects_namespace and watch_namespaces go with objects: kubernetes.",
            ),
            (not wrong, f"{wrong[:1]} is no namespace."),
            (self.objects_namespace != "*", "objects_namespace: one namespace is wanted."),
            (_NAME.fullmatch(self.keys_secret) is not None, "keys_secret: a name is wanted."),
        )

    def _bound_rules(self) -> tuple[tuple[bool, str], ...]:
        positive = {
            "queue.wait_s": self.queue.wait_s,
            "queue.max_waiting": self.queue.max_waiting,
            "queue.max_waiting_per_tenant": self.queue.max_waiting_per_tenant,
            "versions.ttl_s": self.versions.ttl_s,
            "versions.timeout_s": self.versions.timeout_s,
            "versions.max_adapters": self.versions.max_adapters,
            "retry.attempts": self.retry.attempts,
            "breaker.failures": self.breaker.failures,
            "breaker.open_s": self.breaker.open_s,
            "fleet.stale_after_s": self.fleet.stale_after_s,
            "fleet.scrape_interval_s": self.fleet.scrape_interval_s,
            "redis.timeout_s": self.redis.timeout_s,
            "redis.routers": self.redis.routers,
        }
        not_negative = {
            "retry.ratio": self.retry.ratio,
            "retry.min_per_s": self.retry.min_per_s,
            "metrics_adapters": self.metrics_adapters,
            "shutdown_grace_s": self.shutdown_grace_s,
        }
        return (
            *(
                (value > 0, f"{name}: {wanted('a number above 0', value)}.")
                for name, value in positive.items()
            ),
            *(
                (value >= 0, f"{name}: {wanted('0 or more', value)}.")
                for name, value in not_negative.items()
            ),
            (
                0 <= self.trace_sample_ratio <= 1,
                f"trace_sample_ratio: {wanted('0 to 1', self.trace_sample_ratio)}.",
            ),
        )


def _no_file(path: str | None) -> str:
    there = path is not None and os.path.lexists(path)
    return f"{path} is no regular file" if there else f"there is no file {path}"


def read_config(path: Path) -> dict[str, object]:
    """The file as text and mappings; raise ``InvalidInput`` for what is no mapping in YAML."""
    raw = read_yaml(path, MAX_CONFIG_BYTES)
    with in_file(path):
        return {} if raw is None else converted(raw, dict[str, object])


def merged(under: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Both together: where both say something, ``over`` holds; mappings are gone into."""
    result = dict(under)
    for name, value in over.items():
        below = result.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            result[name] = merged(below, value)
        else:
            result[name] = value
    return result


def convert_settings(raw: Mapping[str, object], secrets: Secrets) -> RouterSettings:
    """Read settings and check them; raise ``InvalidInput`` naming the place."""
    settings = converted(dict(raw), RouterSettings)
    http = raw.get("http")
    if not (isinstance(http, dict) and http.get("host")):
        host = "127.0.0.1" if settings.resolved_auth(secrets) == "open" else "0.0.0.0"
        settings = msgspec.structs.replace(
            settings, http=msgspec.structs.replace(settings.http, host=host)
        )
    settings.validate(secrets)
    return settings


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
