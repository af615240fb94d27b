"""From `Tenant` objects to the tenants that routers authenticate: the same form as the file's.

Keys come apart from the objects: those in Secrets are read by the operator alone, which hands
the routers their hashes in one Secret (`keys_json`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.objects import Key, Tenant
from mural_resolvers.tenants import KeyRecord, TenantsConfig, convert_key, convert_tenant
from mural_resolvers.tenants import Tenant as TenantRecord

__all__ = [
    "KeysRead",
    "inline_keys",
    "keys_json",
    "namespaces_of",
    "read_keys_json",
    "tenants_config",
]

MAX_KEYS_BYTES = 1 << 20
"""Of a Secret, as the API server has it."""


def tenants_config(
    tenants: Iterable[Tenant], keys: Mapping[str, Sequence[KeyRecord]]
) -> tuple[TenantsConfig, dict[str, str]]:
    """The tenants with their keys, and why objects are refused, by ``namespace/name``.

    ``keys`` are by tenant id. Of two objects for one id the oldest counts, even while it is
    refused, and of two keys of one id that of the older tenant: nobody takes over another's by
    making an object. A refused object takes no other with it.
    """
    accepted: dict[str, TenantRecord] = {}
    refused: dict[str, str] = {}
    holders: dict[str, str] = {}
    seen: set[str] = set()
    for tenant in sorted(tenants, key=lambda tenant: tenant.metadata.age):
        if tenant.id in holders:
            refused[tenant.metadata.key] = (
                f"{holders[tenant.id]} says who {tenant.id} is already, and is older: delete one "
                "of the two."
            )
            continue
        holders[tenant.id] = tenant.metadata.key
        try:
            record = _record(tenant)
        except InvalidInput as error:
            refused[tenant.metadata.key] = error.message
            continue
        own = tuple({key.id: key for key in keys.get(tenant.id, ()) if key.id not in seen}.values())
        seen.update(key.id for key in own)
        accepted[tenant.id] = replace(record, keys=own)
    return TenantsConfig(tuple(accepted.values())), refused


def namespaces_of(tenants: Iterable[Tenant]) -> dict[str, frozenset[str]]:
    """By tenant id, the namespaces whose adapters and aliases count; of refused objects none."""
    every = sorted(tenants, key=lambda tenant: tenant.metadata.age)
    _, refused = tenants_config(every, {})
    return {
        tenant.id: frozenset(tenant.spec.namespaces)
        for tenant in every
        if tenant.metadata.key not in refused
    }


def inline_keys(tenant: Tenant) -> tuple[KeyRecord, ...]:
    """The keys whose id and hash the object itself holds; raise `InvalidInput` for a bad one."""
    return tuple(
        _inline(f"keys[{at}]", key)
        for at, key in enumerate(tenant.spec.keys)
        if key.secret_ref is None
    )


def _inline(where: str, key: Key) -> KeyRecord:
    record = convert_key(where, {"id": key.id, "sha256": key.sha256})
    return replace(record, expires=key.expires_utc)


def _record(tenant: Tenant) -> TenantRecord:
    spec = tenant.spec
    limits = {
        field: value
        for field in spec.limits.__struct_fields__
        if (value := getattr(spec.limits, field)) is not None
    }
    if "bytes" in limits:
        limits["bytes"] = str(limits["bytes"])
    return convert_tenant(
        "spec",
        {
            "id": tenant.id,
            "weight": spec.weight,
            "grants": spec.grants,
            "public": spec.public,
            "base": spec.base,
            "sources": spec.sources,
            "limits": limits,
        },
    )


# -- the Secret that routers read -----------------------------------------------------------------


class _KeyEntry(msgspec.Struct, omit_defaults=True):
    id: str
    sha256: str
    expires: str | None = None


def keys_json(keys: Mapping[str, Sequence[KeyRecord]]) -> bytes:
    """The content for routers, by tenant id: equal for equal keys, whatever their order."""
    content = {
        tenant: [
            _KeyEntry(key.id, key.sha256, None if key.expires is None else key.expires.isoformat())
            for key in sorted(keys[tenant], key=lambda key: key.id)
        ]
        for tenant in sorted(keys)
    }
    return msgspec.json.encode(content)


class KeysRead(NamedTuple):
    """By tenant id: the keys, and why those of a tenant cannot be read."""

    keys: dict[str, tuple[KeyRecord, ...]]
    unreadable: dict[str, str]


def read_keys_json(data: bytes) -> KeysRead:
    """Read what `keys_json` wrote; raise `InvalidInput` where it is nothing of the kind.

    No message holds what was read. What is wrong with one tenant's keys is that tenant's alone.
    """
    if len(data) > MAX_KEYS_BYTES:
        raise InvalidInput(f"The keys take more than {MAX_KEYS_BYTES} bytes.")
    try:
        content = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise InvalidInput("The keys are not what the operator writes.") from None
    found = KeysRead({}, {})
    for tenant, entries in content.items():
        try:
            found.keys[tenant] = _read_entries(entries)
        except InvalidInput as error:
            found.unreadable[tenant] = error.message
    return found


def _read_entries(data: msgspec.Raw) -> tuple[KeyRecord, ...]:
    try:
        entries = msgspec.json.decode(data, type=list[_KeyEntry])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise InvalidInput("The tenant's keys are not what the operator writes.") from None
    return tuple(
        convert_key(f"{at}", msgspec.to_builtins(entry)) for at, entry in enumerate(entries)
    )
