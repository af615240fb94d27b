"""From `Tenant` objects and the Secrets they name to the hashes of keys for the routers. No key
leaves this module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mural_operator.conditions import Condition
from mural_operator.unreadable import Outdated, UnreadableTenant
from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.kubernetes.objects import Key, SecretKey, Tenant
from mural_resolvers.kubernetes.tenants import keys_json, tenants_config
from mural_resolvers.tenants import KeyRecord, convert_key, hash_key

__all__ = ["Tenancy", "TenantVerdict", "of_unreadable", "secrets_named", "tenancy"]

MAX_ENTRY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TenantVerdict:
    """The whole status of an object."""

    conditions: tuple[Condition, ...]
    keys: int
    """In force."""
    reason: str


@dataclass(frozen=True, slots=True)
class Tenancy:
    """All tenants."""

    keys: Mapping[str, tuple[KeyRecord, ...]]
    """By tenant id, all that are in force."""
    from_secrets: Mapping[str, tuple[KeyRecord, ...]]
    """Of those, what routers cannot read themselves."""
    verdicts: Mapping[str, TenantVerdict]
    """By ``namespace/name``."""

    def keys_json(self) -> bytes:
        """What the routers' Secret holds. Keys that stand in an object are not among them: taken
        out of it, they must stop at once, whether an operator runs or not."""
        return keys_json(self.from_secrets)


@dataclass(frozen=True, slots=True)
class _BadKey:
    reason: Literal["SecretMissing", "KeyMalformed", "DuplicateKeyId"]
    message: str


def secrets_named(tenants: Iterable[Tenant]) -> frozenset[str]:
    """Names of the Secrets that hold keys, in the tenants' own namespace."""
    return frozenset(
        key.secret_ref.name
        for tenant in tenants
        for key in tenant.spec.keys
        if key.secret_ref is not None
    )


def tenancy(
    tenants: Iterable[Tenant],
    secrets: Mapping[str, Mapping[str, bytes] | None],
    *,
    outdated: Mapping[str, Outdated] = MappingProxyType({}),
    unreadable: Iterable[UnreadableTenant] = (),
) -> Tenancy:
    """Judge all of them together; ``secrets`` are contents by name, None or left out: absent.

    A key that cannot be read is left out and told in its tenant's condition KeysAccepted; the
    tenant's other keys hold. Of two keys with one id that of the older tenant holds. A tenant that
    is ``outdated``, by its key, stands as it was, with its keys, and is told so. One of which
    nothing could ever be read is ``unreadable``: no younger one takes its id.
    """
    older = {
        each.id: each.metadata
        for each in sorted(unreadable, key=lambda each: each.metadata.age, reverse=True)
    }
    every = sorted(tenants, key=lambda tenant: tenant.metadata.age)
    second = {
        tenant.metadata.key: f"{first.key} says who {tenant.id} is already, cannot be read, and is "
        "older: mend it, or delete one of the two."
        for tenant in every
        if (first := older.get(tenant.id)) is not None and first.age < tenant.metadata.age
    }
    _, refused = tenants_config((t for t in every if t.metadata.key not in second), {})
    refused |= second
    keys: dict[str, tuple[KeyRecord, ...]] = {}
    from_secrets: dict[str, tuple[KeyRecord, ...]] = {}
    verdicts: dict[str, TenantVerdict] = {}
    seen: dict[str, str] = {}
    claimed = set[str]()
    for tenant in every:
        key, why = tenant.metadata.key, refused.get(tenant.metadata.key)
        if why is not None:
            conflicts = key in second or tenant.id in claimed
            verdicts[key] = _not_accepted("Conflict" if conflicts else "Malformed", why)
        else:
            inline, held, bad = _keys(tenant, secrets, seen)
            keys[tenant.id], from_secrets[tenant.id] = inline + held, held
            verdicts[key] = _accepted(keys[tenant.id], bad, outdated.get(key))
        claimed.add(tenant.id)
    return Tenancy(keys, from_secrets, verdicts)


def of_unreadable(tenant: UnreadableTenant) -> TenantVerdict:
    """Judge an object that never could be read."""
    return _not_accepted(
        "Malformed",
        "This object cannot be read: mend what is wrong in it. Until then nothing of its adapters "
        f"is unloaded. {tenant.message}",
    )


def _not_accepted(reason: str, why: str) -> TenantVerdict:
    return TenantVerdict(
        (
            Condition("Accepted", "False", reason, why),
            Condition(
                "KeysAccepted",
                "False",
                reason,
                "None of its keys is in force while the object is not accepted.",
            ),
        ),
        keys=0,
        reason=reason,
    )


def _accepted(
    keys: tuple[KeyRecord, ...], bad: list[_BadKey], outdated: Outdated | None
) -> TenantVerdict:
    if outdated is None:
        accepted = Condition("Accepted", "True", "Accepted", "Routers know it.")
    else:
        accepted = Condition(
            "Accepted",
            "False",
            "Malformed",
            "This change of the object cannot be read: mend what is wrong in it. Until then "
            f"generation {outdated.generation} of it stays in force, with its keys; routers that "
            f"start meanwhile do not know it. {outdated.message}",
        )
    if bad:
        more = f" So do {len(bad) - 1} more of its keys." if len(bad) > 1 else ""
        known = Condition("KeysAccepted", "False", bad[0].reason, f"{bad[0].message}{more}")
    elif not keys:
        known = Condition(
            "KeysAccepted",
            "True",
            "NoKeys",
            "It has no keys, so nobody can ask as this tenant: mural tenants create-key makes one.",
        )
    else:
        known = Condition("KeysAccepted", "True", "Accepted", f"{len(keys)} keys are in force.")
    return TenantVerdict((accepted, known), len(keys), accepted.reason)


def _keys(
    tenant: Tenant, secrets: Mapping[str, Mapping[str, bytes] | None], seen: dict[str, str]
) -> tuple[tuple[KeyRecord, ...], tuple[KeyRecord, ...], list[_BadKey]]:
    """Those in the object, those in Secrets, and what is wrong with the others."""
    inline: list[KeyRecord] = []
    held: list[KeyRecord] = []
    bad: list[_BadKey] = []
    for at, key in enumerate(tenant.spec.keys):
        record = _read(at, key, secrets)
        if isinstance(record, KeyRecord) and record.id in seen:
            owner = seen[record.id]
            whose = "this tenant" if owner == tenant.id else f"the tenant {owner}"
            record = _BadKey(
                "DuplicateKeyId",
                f"spec.keys[{at}]: the key id {record.id} is taken by another key of {whose}: "
                "make a new one with mural tenants create-key.",
            )
        if isinstance(record, KeyRecord):
            seen[record.id] = tenant.id
            (inline if key.secret_ref is None else held).append(record)
        else:
            bad.append(record)
    return tuple(inline), tuple(held), bad


def _read(
    at: int, key: Key, secrets: Mapping[str, Mapping[str, bytes] | None]
) -> KeyRecord | _BadKey:
    where = f"spec.keys[{at}]"
    if key.secret_ref is None:
        fields = {"id": key.id, "sha256": key.sha256}
    else:
        found = _from_secret(where, key.secret_ref, secrets)
        if isinstance(found, _BadKey):
            return found
        fields = found
    if (expires := key.expires_utc) is not None:
        fields["expires"] = expires.isoformat()
    try:
        return convert_key(where, fields)
    except InvalidInput as error:
        return _BadKey("KeyMalformed", error.message)


def _from_secret(
    where: str, ref: SecretKey, secrets: Mapping[str, Mapping[str, bytes] | None]
) -> dict[str, str | None] | _BadKey:
    """Id and hash of the key that an entry holds. What it holds is in no message."""
    content = secrets.get(ref.name)
    if content is None:
        return _BadKey(
            "SecretMissing",
            f"{where}: there is no Secret {quoted(ref.name)} in the tenant's namespace: make it.",
        )
    entry = content.get(ref.key)
    if entry is None:
        return _BadKey(
            "SecretMissing",
            f"{where}: the Secret {quoted(ref.name)} has no entry {quoted(ref.key)}: add it.",
        )
    text = entry[:MAX_ENTRY_BYTES].decode("ascii", "replace").strip()
    if (hashed := hash_key(text)) is not None:
        return {"id": hashed[0], "sha256": hashed[1]}
    key_id, colon, sha256 = text.partition(":")
    if not colon:
        return _BadKey(
            "KeyMalformed",
            f"{where}: the entry {quoted(ref.key)} of the Secret {quoted(ref.name)} is no key: "
            "mural_<id>_<secret> is wanted, as mural tenants create-key makes it, or "
            "<id>:<sha256>.",
        )
    return {"id": key_id, "sha256": sha256}
