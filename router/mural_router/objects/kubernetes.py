"""Objects of a Kubernetes API server, and the one Secret of key hashes that the operator writes."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import (
    Adapter,
    AdapterAlias,
    ObjectMeta,
    Tenant,
    read_adapter,
    read_alias,
    read_tenant,
)
from mural_resolvers.kubernetes.paths import ADAPTER_ALIASES, ADAPTERS, SECRETS, TENANTS, Resource
from mural_resolvers.kubernetes.tenants import (
    KeysRead,
    inline_keys,
    read_keys_json,
    tenants_config,
)
from mural_resolvers.kubernetes.watch import Changed, Watch
from mural_resolvers.tenants import KeyRecord
from mural_router.objects.readable import LastReadable, or_spoilt
from mural_router.objects.source import KindState, Objects

__all__ = ["ALL_NAMESPACES", "KubernetesObjects"]

ALL_NAMESPACES: Final = "*"
KEYS_ENTRY: Final = "keys.json"
SECRET_WAIT_S: Final = 30.0
"""For a Secret that tenants' keys are said to be in, and that nobody has written yet."""

log = logging.getLogger("mural.router.objects")

Keys = Mapping[str, Sequence[KeyRecord]]


class _KeysSecret(NamedTuple):
    metadata: ObjectMeta
    read: KeysRead


T = TypeVar("T", Adapter, AdapterAlias, Tenant, _KeysSecret)


class KubernetesObjects(Objects):
    """Needs ``list`` and ``watch`` on ``tenants`` and, by its name, on one Secret of
    ``namespace``; on ``adapters`` and ``adapteraliases`` of those in ``watched``.
    """

    def __init__(
        self,
        client: KubeClient,
        *,
        namespace: str | None = None,
        watched: Iterable[str] = (),
        keys_secret: str,
    ) -> None:
        """``namespace``: None is the client's own; so it is in ``watched`` where that is empty."""
        super().__init__()
        self._namespace = namespace or client.namespace
        self._keys_secret = keys_secret
        self._began_s = asyncio.get_running_loop().time()
        self._due: asyncio.Handle | None = None
        self._keys_of_secret: Mapping[str, tuple[KeyRecord, ...]] = {}
        self._bad_keys: dict[str, str] = {}
        self._tenants = _watch(client, TENANTS.of(self._namespace), _read_whole_tenant, "tenants")
        self._keys = _watch(
            client,
            SECRETS.of(self._namespace),
            _read_secret,
            "the tenants' keys",
            field_selector=f"metadata.name={keys_secret}",
        )
        namespaces = tuple(dict.fromkeys(watched)) or (self._namespace,)
        self._adapters = _watches(client, ADAPTERS, namespaces, read_adapter)
        self._aliases = _watches(client, ADAPTER_ALIASES, namespaces, read_alias)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tenants.watch.run(self._tenants_changed))
            tasks.create_task(self._keys.watch.run(self._keys_changed))
            for adapters in self._adapters:
                tasks.create_task(adapters.watch.run(self._adapter_changed(adapters)))
            for aliases in self._aliases:
                tasks.create_task(aliases.watch.run(self._alias_changed(aliases)))

    def not_ready(self) -> str | None:
        for watch, what in self._watched():
            if not watch.synced:
                return f"The {what} are not known yet."
        waited_s = asyncio.get_running_loop().time() - self._began_s
        if self._lacks_secret() and waited_s < SECRET_WAIT_S:
            return "The tenants' keys are not known yet."
        return None

    def states(self) -> tuple[KindState, ...]:
        declared = self.declared
        return (
            _state(
                "tenants", len(declared.config.tenants), declared.refused_tenants, (self._tenants,)
            ),
            self._state_of_keys(),
            _state("adapters", declared.num_adapters, declared.refused_adapters(), self._adapters),
            _state("aliases", declared.num_aliases, declared.refused_aliases, self._aliases),
        )

    # -- changes ------------------------------------------------------------------------------

    def _tenants_changed(self, key: str | None) -> None:
        self._tenants.look(key)
        self._tell_tenants_soon()

    def _keys_changed(self, key: str | None) -> None:
        self._keys.look(key)
        self._tell_tenants_soon()

    def _tell_tenants_soon(self) -> None:
        """Once for all changes that have come in one piece: the ring is made as a whole."""
        if self._due is None and self._tenants.watch.synced and self._keys.watch.synced:
            self._due = asyncio.get_running_loop().call_soon(self._tell_tenants)

    def _tell_tenants(self) -> None:
        self._due = None
        tenants = tuple(self._tenants.objects.values())
        self._read_keys(tenants)
        unknown: dict[str, ObjectMeta] = {}
        for each in sorted(self._tenants.spoilt(), key=lambda each: each.metadata.age):
            if each.metadata.deletion_timestamp is None:
                unknown.setdefault(each.id, each.metadata)
        self.declared.tell_tenants(tenants, self._keys_of(tenants), unknown)

    def _read_keys(self, tenants: Sequence[Tenant]) -> None:
        """A Secret that is gone takes all keys along; what cannot be read of it stays as it was.

        So do the keys of a tenant that it has no word of: for one that the operator can read it
        holds a list at least, be it empty, and of a deleted one nobody asks.
        """
        secret = self._keys.objects.get(self._secret)
        if secret is None:
            self._keys_of_secret, self._bad_keys = {}, {}
            return
        found, bad = secret.read
        silent = {tenant.id for tenant in tenants} - found.keys()
        kept = {
            tenant: keys
            for tenant, keys in self._keys_of_secret.items()
            if tenant in bad or tenant in silent
        }
        for tenant, why in bad.items():
            if self._bad_keys.get(tenant) != why:
                stand = "the last ones hold" if tenant in kept else "none of them holds"
                log.warning("the keys of %s cannot be read, and %s: %s", tenant, stand, why)
        self._keys_of_secret, self._bad_keys = found | kept, bad

    def _keys_of(self, tenants: Sequence[Tenant]) -> Keys:
        """Those of the Secret, and those that stand in the objects: they need no operator."""
        found: dict[str, list[KeyRecord]] = {}
        for tenant in tenants:
            found.setdefault(tenant.id, []).extend(inline_keys(tenant))
        for held_by, keys in self._keys_of_secret.items():
            # Last, so that of two with one id this one counts: the operator has chosen it.
            found.setdefault(held_by, []).extend(keys)
        return found

    def _adapter_changed(self, adapters: LastReadable[Adapter]) -> Changed:
        def changed(key: str | None) -> None:
            adapters.look(key)
            if key is None:
                self.declared.tell_adapters(_together(self._adapters))
            else:
                self.declared.tell_adapter(key, adapters.objects.get(key))

        return changed

    def _alias_changed(self, aliases: LastReadable[AdapterAlias]) -> Changed:
        def changed(key: str | None) -> None:
            aliases.look(key)
            self.declared.tell_aliases(_together(self._aliases))

        return changed

    # -- how it is ----------------------------------------------------------------------------

    @property
    def _secret(self) -> str:
        return f"{self._namespace}/{self._keys_secret}"

    def _lacks_secret(self) -> bool:
        """Whether keys are said to be in Secrets, and the one of their hashes is not there."""
        watch = self._keys.watch
        return not (watch.objects or watch.invalid) and any(
            key.secret_ref is not None
            for tenant in self._tenants.objects.values()
            for key in tenant.spec.keys
        )

    def _watched(self) -> Iterable[tuple[_Synced, str]]:
        yield self._tenants.watch, "tenants"
        yield self._keys.watch, "tenants' keys"
        for adapters in self._adapters:
            yield adapters.watch, "adapters"
        for aliases in self._aliases:
            yield aliases.watch, "aliases"

    def _state_of_keys(self) -> KindState:
        """By the Secret where all of it is spoilt, else by ``Secret: tenant``."""
        kept: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for tenant, why in self._bad_keys.items():
            place = kept if tenant in self._keys_of_secret else unknown
            place[f"{self._secret}: {tenant}"] = why
        state = _state("keys", len(self.declared.ring), unknown, (self._keys,))
        return replace(state, kept={**kept, **state.kept})


class _Synced(Protocol):
    synced: bool


class _Secret(msgspec.Struct):
    metadata: ObjectMeta
    data: dict[str, str] | None = None


def _read_whole_tenant(fields: object) -> Tenant:
    """One that routers can use: what `tenants_config` would refuse by itself is spoilt too."""
    tenant = read_tenant(fields)
    inline_keys(tenant)
    for why in tenants_config([tenant], {})[1].values():
        raise InvalidInput(why)
    return tenant


def _read_secret(fields: object) -> _KeysSecret:
    """The hashes by tenant. What is wrong is told without what it was: a hash is for nobody."""
    try:
        secret = msgspec.convert(fields, _Secret)
        content = (secret.data or {}).get(KEYS_ENTRY)
        text = None if content is None else b64decode(content, validate=True)
    except ValueError:
        raise InvalidInput("The Secret is none that the API server writes.") from None
    if text is None:
        raise InvalidInput(f"The Secret has no entry {KEYS_ENTRY}.")
    return _KeysSecret(secret.metadata, read_keys_json(text))


def _watch(
    client: KubeClient,
    path: str,
    read: Callable[[object], T],
    what: str,
    *,
    field_selector: str | None = None,
) -> LastReadable[T]:
    watch = Watch(client, path, or_spoilt(read), field_selector=field_selector, what=what)
    return LastReadable(watch, what=what)


def _watches(
    client: KubeClient,
    resource: Resource,
    namespaces: Sequence[str],
    read: Callable[[object], T],
) -> tuple[LastReadable[T], ...]:
    if ALL_NAMESPACES in namespaces:
        return (_watch(client, resource.all(), read, resource.plural),)
    return tuple(
        _watch(client, resource.of(each), read, f"{resource.plural} of {each}")
        for each in namespaces
    )


def _together(watched: Iterable[LastReadable[T]]) -> Mapping[str, T]:
    """Namespaces differ, so no object hides another."""
    return {key: each for readable in watched for key, each in readable.objects.items()}


def _state(
    kind: str, in_force: int, refused: Mapping[str, str], watched: Sequence[LastReadable[T]]
) -> KindState:
    watches = [each.watch for each in watched]
    return KindState(
        kind,
        in_force,
        ChainMap(*(each.unknown for each in watched), dict(refused)),
        ChainMap(*(each.kept for each in watched)),
        stale=not all(watch.fresh for watch in watches),
        trouble=next((watch.trouble for watch in watches if watch.trouble), ""),
    )
