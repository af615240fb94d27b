"""The custom resources as plain data, for whoever reads them: operator, router, and files.

The API server has held them to their schemas (charts/mural/crds); what an older schema let
through and the present one would not is `InvalidInput`, which becomes a condition of the object.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, TypeVar

import msgspec

from mural_resolvers.conversion import converted
from mural_resolvers.names import DEFAULT_ADAPTER, AdapterName, parse_name

__all__ = [
    "GROUP",
    "VERSION",
    "Adapter",
    "AdapterAlias",
    "AdapterSpec",
    "AdapterStatusFields",
    "AliasSpec",
    "Capacity",
    "ControlTls",
    "Engine",
    "Key",
    "Level",
    "Limits",
    "ObjectMeta",
    "Placement",
    "PoolSpec",
    "SecretKey",
    "Selector",
    "ServingPool",
    "Tenant",
    "TenantSpec",
    "WeightedVersion",
    "read_adapter",
    "read_alias",
    "read_pool",
    "read_tenant",
]

GROUP = "mural.dev"
VERSION = "v1alpha1"

Level = Literal["host", "slot"]
Engine = Literal["mural", "vllm"]

_LONG_AGO = datetime.min.replace(tzinfo=UTC)


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel"):
    """Of any object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = {}

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    @property
    def age(self) -> tuple[datetime, str]:
        """Sorts the oldest first, by name where they are of one age: of two that claim one thing
        the first has it."""
        return (self.creation_timestamp or _LONG_AGO, self.key)


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """Labels that a pod must have, all of them."""

    match_labels: dict[str, str] = {}


# -- Adapter --------------------------------------------------------------------------------------


class Placement(msgspec.Struct, frozen=True, rename="camel"):
    """On how many replicas and on which; see the Adapter's schema."""

    replicas: int | Literal["All"] | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    level: Level = "host"
    pinned: bool = True
    priority: int = 100
    pod_selector: Selector = Selector()


class AdapterSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What shall be resident, and where."""

    pool: str
    tenant: str
    version: str
    name: str = DEFAULT_ADAPTER
    digest: str | None = None
    """``sha256:`` and 64 hexadecimal digits."""
    source: str | None = None
    base: str | None = None
    placement: Placement = Placement()
    prewarm: Literal["None", "Disk"] = "None"


class AdapterStatusFields(msgspec.Struct, frozen=True, rename="camel"):
    """What is read of its status: by routers k, by the operator the facts of content that no
    replica holds at the moment."""

    desired_replicas: int | None = None
    digest: str = ""
    rank: int = 0
    bytes: int = 0


class Adapter(msgspec.Struct, frozen=True):
    """An `Adapter` object."""

    metadata: ObjectMeta
    spec: AdapterSpec
    status: AdapterStatusFields = AdapterStatusFields()

    @property
    def name(self) -> AdapterName:
        """The version that is meant; raises ``MalformedName``, though not after `read_adapter`."""
        return _name(self.spec.tenant, self.spec.name, self.spec.version)

    @property
    def exact(self) -> str:
        """``tenant/adapter:version``, the name that placement hashes and servers are told."""
        return self.name.exact

    @property
    def sha256(self) -> str | None:
        """The pinned digest as servers say it: 64 hexadecimal digits."""
        digest = self.spec.digest
        return None if digest is None else digest.removeprefix("sha256:")

    @property
    def is_deleted(self) -> bool:
        """Whether it goes as soon as its finalizers do."""
        return self.metadata.deletion_timestamp is not None


# -- AdapterAlias ---------------------------------------------------------------------------------


class WeightedVersion(msgspec.Struct, frozen=True):
    """One version behind an alias; its share is its weight over the sum of all."""

    version: str
    weight: int = 1


class AliasSpec(msgspec.Struct, frozen=True):
    """What stands behind ``tenant/name:alias``."""

    tenant: str
    alias: str
    versions: tuple[WeightedVersion, ...]
    name: str = DEFAULT_ADAPTER


class AdapterAlias(msgspec.Struct, frozen=True):
    """An `AdapterAlias` object."""

    metadata: ObjectMeta
    spec: AliasSpec


# -- ServingPool ----------------------------------------------------------------------------------


class SecretKey(msgspec.Struct, frozen=True):
    """One entry of a Secret in the operator's namespace."""

    name: str
    key: str


class ControlTls(msgspec.Struct, frozen=True, rename="camel"):
    """How the control API is reached over TLS: the CA that signed the pods' certificates."""

    ca_secret: SecretKey
    server_name: str
    """The name in the pods' certificates: they are reached by address."""


class Capacity(msgspec.Struct, frozen=True):
    """What declared adapters may take of one replica."""

    adapters: int | None = None
    bytes: int | None = None


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """Which pods serve one base, and how they are spoken to."""

    selector: Selector
    engine: Engine = "mural"
    port: int = 8000
    control_port: int = 8001
    control_token_secret: SecretKey | None = None
    control_tls: ControlTls | None = None
    api_key_secret: SecretKey | None = None
    """vLLM pods' own key."""
    sources: tuple[str, ...] | None = None
    capacity: Capacity = Capacity()


class ServingPool(msgspec.Struct, frozen=True):
    """A `ServingPool` object. Pools and tenants live in the operator's namespace."""

    metadata: ObjectMeta
    spec: PoolSpec


# -- Tenant ---------------------------------------------------------------------------------------


class Key(msgspec.Struct, frozen=True, rename="camel"):
    """A key of the tenant: in a Secret (``secret_ref``), or its id and hash (never the key)."""

    secret_ref: SecretKey | None = None
    id: str | None = None
    sha256: str | None = None
    expires: datetime | None = None

    @property
    def expires_utc(self) -> datetime | None:
        """``expires`` in UTC, or the end of time that it is beyond."""
        if self.expires is None:
            return None
        try:
            return self.expires.astimezone(UTC)
        except OverflowError:
            end = datetime.max if self.expires.year == datetime.max.year else datetime.min
            return end.replace(tzinfo=UTC)


class Limits(msgspec.Struct, frozen=True, rename="camel"):
    """What a tenant may use at most; None: no limit of its own."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    queue_length: int | None = None
    adapters: int | None = None
    bytes: str | int | None = None


class TenantSpec(msgspec.Struct, frozen=True):
    """Who a tenant is; see `mural_resolvers.tenants`, whose file says the same."""

    tenant: str | None = None
    """Its id where the object's name cannot be it (names of objects have no ``_``)."""
    weight: float = 1.0
    namespaces: tuple[str, ...] = ()
    """Those that may declare its adapters and aliases."""
    keys: tuple[Key, ...] = ()
    grants: tuple[str, ...] = ()
    public: tuple[str, ...] = ()
    base: bool = True
    sources: tuple[str, ...] | None = None
    limits: Limits = Limits()


class Tenant(msgspec.Struct, frozen=True):
    """A `Tenant` object."""

    metadata: ObjectMeta
    spec: TenantSpec = TenantSpec()

    @property
    def id(self) -> str:
        """What stands before the colon of its adapters' names."""
        return self.spec.tenant or self.metadata.name


@lru_cache(maxsize=16_384)
def _name(tenant: str, adapter: str, version: str) -> AdapterName:
    """Held to the grammar once, and not at each of the many times that a name is looked up."""
    return AdapterName(tenant=tenant, adapter=adapter, version=version)


# -- reading --------------------------------------------------------------------------------------

T = TypeVar("T", Adapter, AdapterAlias, ServingPool, Tenant)


def read_adapter(fields: object) -> Adapter:
    """Read the JSON of an `Adapter`; raise `InvalidInput`, naming the place."""
    adapter = _read(fields, Adapter)
    # The grammar has one parser: what it refuses cannot be asked of a server either.
    parse_name(adapter.exact)
    return adapter


def read_alias(fields: object) -> AdapterAlias:
    """Read the JSON of an `AdapterAlias`; raise `InvalidInput`, naming the place."""
    alias = _read(fields, AdapterAlias)
    spec = alias.spec
    for version in (spec.alias, *(each.version for each in spec.versions)):
        AdapterName(tenant=spec.tenant, adapter=spec.name, version=version)
    return alias


def read_pool(fields: object) -> ServingPool:
    """Read the JSON of a `ServingPool`; raise `InvalidInput`, naming the place."""
    return _read(fields, ServingPool)


def read_tenant(fields: object) -> Tenant:
    """Read the JSON of a `Tenant`; raise `InvalidInput`, naming the place."""
    return _read(fields, Tenant)


def _read(fields: object, kind: type[T]) -> T:
    return converted(fields, kind, strict=True)
