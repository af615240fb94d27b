"""Tenant objects and the Secrets they name: who is known by which key, and what is told."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_operator.tenancy import Tenancy, secrets_named, tenancy
from mural_operator.unreadable import Outdated, UnreadableTenant
from mural_resolvers.kubernetes.objects import Tenant, read_tenant
from mural_resolvers.kubernetes.tenants import inline_keys, read_keys_json, tenants_config
from mural_resolvers.tenants import KeyRecord, hash_secret, mint_key

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
KEY = mint_key()
OTHER = mint_key()
SECRETS = {
    "keys": {"whole": f"{KEY.key}\n".encode(), "hash": f"{OTHER.key_id}:{OTHER.sha256}".encode()}
}
WHOLE = {"secretRef": {"name": "keys", "key": "whole"}}
HASH = {"secretRef": {"name": "keys", "key": "hash"}}


def make_tenant(name: str, created_s: float = 0, **spec: object) -> Tenant:
    read = read_tenant({"metadata": {"name": name, "namespace": "mural"}, "spec": spec})
    created = EPOCH + timedelta(seconds=created_s)
    return msgspec.structs.replace(
        read, metadata=msgspec.structs.replace(read.metadata, creation_timestamp=created)
    )


def told(found: Tenancy, key: str) -> dict[str, tuple[str, str, str]]:
    conditions = found.verdicts[key].conditions
    return {each.type: (each.status, each.reason, each.message) for each in conditions}


def test_keys_come_whole_or_hashed_from_secrets_or_hashed_from_the_object():
    inline = {"id": "inlinekey", "sha256": "a" * 64, "expires": "2027-01-31T12:00:00+02:00"}
    found = tenancy([make_tenant("acme", keys=[WHOLE, HASH, inline])], SECRETS)
    held = (KeyRecord(KEY.key_id, KEY.sha256), KeyRecord(OTHER.key_id, OTHER.sha256))
    ends = datetime(2027, 1, 31, 10, tzinfo=UTC)
    assert found.keys["acme"] == (KeyRecord("inlinekey", "a" * 64, expires=ends), *held)
    # Routers read the object themselves: what is taken out of it must be nowhere else.
    assert set(read_keys_json(found.keys_json()).keys["acme"]) == set(held)
    assert found.verdicts["mural/acme"].keys == 3
    assert told(found, "mural/acme")["KeysAccepted"][:2] == ("True", "Accepted")


@pytest.mark.parametrize(
    ("expires", "kept"),
    [
        ("9999-12-31T23:59:59-05:00", datetime.max.replace(tzinfo=UTC)),
        ("0001-01-01T00:00:00+05:00", datetime.min.replace(tzinfo=UTC)),
    ],
)
def test_a_key_that_expires_beyond_all_time_keeps_no_tenant_from_its_keys(expires, kept):
    inline = {"id": "inlinekey", "sha256": "a" * 64, "expires": expires}
    tenants = [make_tenant("acme", keys=[inline, WHOLE]), make_tenant("globex", 1, keys=[HASH])]
    found = tenancy(tenants, SECRETS)
    assert [key.expires for key in found.keys["acme"]] == [kept, None]
    assert [key.id for key in found.keys["globex"]] == [OTHER.key_id]
    assert inline_keys(tenants[0])[0].expires == kept
    assert read_keys_json(found.keys_json()).keys["globex"] == found.keys["globex"]


def test_routers_let_in_who_holds_the_key():
    tenants = [make_tenant("acme", keys=[WHOLE], grants=["globex/sql"])]
    found = tenancy(tenants, SECRETS)
    config, refused = tenants_config(tenants, read_keys_json(found.keys_json()).keys)
    principal = config.ring().authenticate(f"Bearer {KEY.key}", EPOCH)
    assert (principal.tenant, principal.grants, refused) == ("acme", ("globex/sql",), {})


RULES = [
    ([{"secretRef": {"name": "none", "key": "k"}}], "SecretMissing", "make it"),
    ([{"secretRef": {"name": "keys", "key": "none"}}], "SecretMissing", "add it"),
    ([{"secretRef": {"name": "odd", "key": "text"}}], "KeyMalformed", "create-key"),
    ([{"secretRef": {"name": "odd", "key": "bytes"}}], "KeyMalformed", "create-key"),
    ([{"secretRef": {"name": "odd", "key": "id"}}], "KeyMalformed", "lower-case letters"),
    ([{"secretRef": {"name": "odd", "key": "sha"}}], "KeyMalformed", "64 lower-case"),
    ([{"id": "inlinekey"}], "KeyMalformed", "sha256"),
    ([WHOLE, WHOLE], "DuplicateKeyId", "make a new one"),
]
ODD = {
    "text": b"hunter2hunter2",
    "bytes": b"\xff\x00\xfe",
    "id": f"X:{'a' * 64}".encode(),
    "sha": b"somekeyid:hunter2hunter2",
}


@pytest.mark.parametrize(("keys", "reason", "words"), RULES)
def test_a_bad_key_is_told_without_what_it_holds_and_the_others_hold(keys, reason, words):
    found = tenancy([make_tenant("acme", keys=[*keys, HASH])], SECRETS | {"odd": ODD})
    status, why, message = told(found, "mural/acme")["KeysAccepted"]
    assert (status, why) == ("False", reason)
    assert words in message
    assert "hunter2" not in message
    assert OTHER.key_id in {key.id for key in found.keys["acme"]}
    assert told(found, "mural/acme")["Accepted"][0] == "True"


def test_a_key_id_belongs_to_the_older_tenant():
    tenants = [make_tenant("young", 9, keys=[WHOLE]), make_tenant("old", 1, keys=[WHOLE])]
    found = tenancy(tenants, SECRETS)
    assert found.keys["young"] == ()
    _, reason, message = told(found, "mural/young")["KeysAccepted"]
    assert reason == "DuplicateKeyId"
    assert "the tenant old" in message


def test_of_two_objects_for_one_tenant_the_oldest_counts():
    old = make_tenant("acme", 1, namespaces=["team"], keys=[WHOLE])
    young = make_tenant("intruder", 2, tenant="acme", namespaces=["evil"], keys=[HASH])
    found = tenancy([young, old], SECRETS)
    assert [key.id for key in found.keys["acme"]] == [KEY.key_id]
    status, reason, message = told(found, "mural/intruder")["Accepted"]
    assert (status, reason) == ("False", "Conflict")
    assert "mural/acme" in message
    assert found.verdicts["mural/intruder"].keys == 0


def test_a_malformed_tenant_has_no_keys():
    found = tenancy([make_tenant("acme", tenant="No!", namespaces=["team"], keys=[WHOLE])], SECRETS)
    assert found.keys == {}
    assert told(found, "mural/acme")["Accepted"][:2] == ("False", "Malformed")


def test_no_younger_tenant_takes_the_id_of_one_that_is_being_mended():
    old = make_tenant("acme", 1, grants=["no!"], keys=[WHOLE])
    young = make_tenant("intruder", 2, tenant="acme", keys=[HASH])
    found = tenancy([young, old], SECRETS)
    assert found.keys == {}
    assert told(found, "mural/acme")["Accepted"][:2] == ("False", "Malformed")
    assert told(found, "mural/intruder")["Accepted"][:2] == ("False", "Conflict")


def test_no_younger_tenant_takes_the_id_of_one_that_never_could_be_read():
    young = make_tenant("intruder", 2, tenant="acme", keys=[HASH])
    other = make_tenant("globex", 2, keys=[WHOLE])
    unread = UnreadableTenant(make_tenant("acme", 1).metadata, "odd", "acme", frozenset())
    found = tenancy([young, other], SECRETS, unreadable=[unread])
    assert set(found.keys) == {"globex"}
    _, reason, message = told(found, "mural/intruder")["Accepted"]
    assert (reason, "mural/acme" in message) == ("Conflict", True)
    late = replace(unread, metadata=make_tenant("acme", 3).metadata)
    assert set(tenancy([young], SECRETS, unreadable=[late]).keys) == {"acme"}


def test_a_tenant_that_stands_as_it_was_keeps_its_keys_and_is_told_that_it_is_not_as_asked():
    tenant = make_tenant("acme", keys=[WHOLE, HASH])
    outdated = {"mural/acme": Outdated(7, "`expires` is no date")}
    found = tenancy([tenant], SECRETS, outdated=outdated)
    assert found.keys_json() == tenancy([tenant], SECRETS).keys_json()
    status, reason, message = told(found, "mural/acme")["Accepted"]
    assert (status, reason) == ("False", "Malformed")
    assert "generation 7" in message
    assert "`expires` is no date" in message
    assert told(found, "mural/acme")["KeysAccepted"][:2] == ("True", "Accepted")
    assert found.verdicts["mural/acme"].reason == "Malformed"


def test_a_tenant_without_keys_is_told_how_to_make_one():
    found = tenancy([make_tenant("acme")], {})
    status, reason, message = told(found, "mural/acme")["KeysAccepted"]
    assert (status, reason) == ("True", "NoKeys")
    assert "mural tenants create-key" in message


def test_only_secrets_that_hold_keys_are_asked_for():
    inline = {"id": "inlinekey", "sha256": "a" * 64}
    assert secrets_named([make_tenant("acme", keys=[WHOLE, HASH, inline])]) == {"keys"}


def test_what_routers_get_is_equal_for_equal_keys_in_any_order():
    one = tenancy([make_tenant("a", keys=[WHOLE, HASH]), make_tenant("b", 1)], SECRETS)
    two = tenancy([make_tenant("b", 1), make_tenant("a", keys=[HASH, WHOLE])], SECRETS)
    assert one.keys_json() == two.keys_json()
    assert KEY.key.encode() not in one.keys_json()


@given(st.binary(max_size=300))
def test_no_content_of_a_secret_is_in_a_message(content: bytes):
    found = tenancy(
        [make_tenant("acme", keys=[{"secretRef": {"name": "s", "key": "k"}}])],
        {"s": {"k": b"S3CRET" + content}},
    )
    assert all("S3CRET" not in each.message for each in found.verdicts["mural/acme"].conditions)
    assert all(key.sha256 != hash_secret("") for key in found.keys["acme"])
