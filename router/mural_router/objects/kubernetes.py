"""Objects of a Kubernetes API server, and the one Secret of key hashes that the operator writes."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import (
    Adapter,
    AdapterAlias,
    Tenant,
    read_adapter,
    read_alias,
    read_tenant,
)
from mural_resolvers.kubernetes.paths import ADAPTER_ALIASES, ADAPTERS, SECRETS, TENANTS, Resource
from mural_resolvers.kubernetes.tenants import inline_keys, read_keys_json
from mural_resolvers.kubernetes.watch import Changed, Watch, from_json
from mural_resolvers.tenants import KeyRecord
from mural_router.objects.source import KindState, Objects

__all__ = ["ALL_NAMESPACES", "KubernetesObjects"]

ALL_NAMESPACES: Final = "*"
KEYS_ENTRY: Final = "keys.json"
SECRET_WAIT_S: Final = 30.0
"""For a Secret that tenants' keys are said to be in, and that nobody has written yet."""

log = logging.getLogger("mural.router.objects")

Keys = Mapping[str, Sequence[KeyRecord]]
T = TypeVar("T")


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
        self._keys_of_secret: Keys = {}
        self._bad_keys: dict[str, str] = {}
        self._tenants = Watch(
            client, TENANTS.of(self._namespace), from_json(read_tenant), what="tenants"
        )
        self._keys = Watch(
            client,
            SECRETS.of(self._namespace),
            _read_secret,
            field_selector=f"metadata.name={keys_secret}",
            what="the tenants' keys",
        )
        namespaces = tuple(dict.fromkeys(watched)) or (self._namespace,)
        self._adapters = _watches(client, ADAPTERS, namespaces, read_adapter)
        self._aliases = _watches(client, ADAPTER_ALIASES, namespaces, read_alias)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for watch in (self._tenants, self._keys):
                tasks.create_task(watch.run(self._tenants_changed))
            for adapters in self._adapters:
                tasks.create_task(adapters.run(self._adapter_changed(adapters)))
            for aliases in self._aliases:
                tasks.create_task(aliases.run(self._aliases_changed))

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
            self._state(
                "tenants", len(declared.config.tenants), declared.refused_tenants, (self._tenants,)
            ),
            self._state("keys", len(declared.ring), self._bad_keys, (self._keys,)),
            self._state(
                "adapters", declared.num_adapters, declared.refused_adapters(), self._adapters
            ),
            self._state("aliases", declared.num_aliases, declared.refused_aliases, self._aliases),
        )

    # -- changes ------------------------------------------------------------------------------

    def _tenants_changed(self, key: str | None) -> None:
        """Once for all changes that have come in one piece: the ring is made as a whole."""
        if self._due is None and self._tenants.synced and self._keys.synced:
            self._due = asyncio.get_running_loop().call_soon(self._tell_tenants)

    def _tell_tenants(self) -> None:
        self._due = None
        self._read_secret()
        tenants = tuple(self._tenants.objects.values())
        self._bad_keys = {}
        self.declared.tell_tenants(tenants, self._keys_of(tenants))

    def _read_secret(self) -> None:
        """What cannot be read leaves the last good keys; a Secret that is gone takes them along."""
        key = f"{self._namespace}/{self._keys_secret}"
        if key not in self._keys.invalid:
            self._keys_of_secret = self._keys.objects.get(key, {})

    def _keys_of(self, tenants: Sequence[Tenant]) -> Keys:
        """Those of the Secret, and those that stand in the objects: they need no operator."""
        found: dict[str, list[KeyRecord]] = {}
        for tenant in tenants:
            try:
                found.setdefault(tenant.id, []).extend(inline_keys(tenant))
            except InvalidInput as error:
                self._bad_keys[tenant.metadata.key] = error.message
        for held_by, keys in self._keys_of_secret.items():
            # Last, so that of two with one id this one counts: the operator has chosen it.
            found.setdefault(held_by, []).extend(keys)
        return found

    def _adapter_changed(self, watch: Watch[Adapter]) -> Changed:
        def changed(key: str | None) -> None:
            if key is None:
                self.declared.tell_adapters(_together(self._adapters))
            else:
                self.declared.tell_adapter(key, watch.objects.get(key))

        return changed

    def _aliases_changed(self, key: str | None) -> None:
        self.declared.tell_aliases(_together(self._aliases))

    # -- how it is ----------------------------------------------------------------------------

    def _lacks_secret(self) -> bool:
        """Whether keys are said to be in Secrets, and the one of their hashes is not there."""
        return not (self._keys.objects or self._keys.invalid) and any(
            key.secret_ref is not None
            for tenant in self._tenants.objects.values()
            for key in tenant.spec.keys
        )

    def _watched(
        self,
    ) -> Iterable[tuple[Watch[Tenant] | Watch[Keys] | Watch[Adapter] | Watch[AdapterAlias], str]]:
        yield self._tenants, "tenants"
        yield self._keys, "tenants' keys"
        for adapters in self._adapters:
            yield adapters, "adapters"
        for aliases in self._aliases:
            yield aliases, "aliases"

    def _state(
        self, kind: str, in_force: int, refused: Mapping[str, str], watches: Sequence[Watch[T]]
    ) -> KindState:
        return KindState(
            kind,
            in_force,
            ChainMap(*(dict(watch.invalid) for watch in watches), dict(refused)),
            stale=not all(watch.fresh for watch in watches),
            trouble=next((watch.trouble for watch in watches if watch.trouble), ""),
        )


class _Secret(msgspec.Struct):
    data: dict[str, str] | None = None


def _read_secret(data: bytes) -> Keys:
    """The hashes by tenant. What is wrong is told without what it was: a hash is for nobody."""
    try:
        content = (msgspec.json.decode(data, type=_Secret).data or {}).get(KEYS_ENTRY)
        text = None if content is None else b64decode(content, validate=True)
    except ValueError:
        raise InvalidInput("The Secret is none that the API server writes.") from None
    if text is None:
        raise InvalidInput(f"The Secret has no entry {KEYS_ENTRY}.")
    return read_keys_json(text)


def _watches(
    client: KubeClient,
    resource: Resource,
    namespaces: Sequence[str],
    read: Callable[[object], T],
) -> tuple[Watch[T], ...]:
    if ALL_NAMESPACES in namespaces:
        return (Watch(client, resource.all(), from_json(read), what=resource.plural),)
    return tuple(
        Watch(client, resource.of(each), from_json(read), what=f"{resource.plural} of {each}")
        for each in namespaces
    )


def _together(watches: Iterable[Watch[T]]) -> Mapping[str, T]:
    """Namespaces differ, so no object hides another."""
    return {key: each for watch in watches for key, each in watch.objects.items()}
