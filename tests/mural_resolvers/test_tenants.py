"""Who may use what, and keys."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import Forbidden, InvalidInput, Unauthorized, error_body
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import (
    ADMIN,
    ANYONE,
    KeyFile,
    KeyRecord,
    Principal,
    authorize,
    hash_secret,
    is_grant,
    may_use,
    mint_key,
)


@pytest.mark.parametrize(
    ("grants", "name", "allowed"),
    [
        ((), "acme:v1", True),
        ((), "acme/sql:latest", True),
        ((), "globex:v1", False),
        ((), "acme.evil:v1", False),
        (("globex",), "globex/sql:v9", True),
        (("globex",), "globex2:v1", False),
        (("globex/sql",), "globex/sql:v1", True),
        (("globex/sql",), "globex/sql:latest", True),
        (("globex/sql",), "globex:v1", False),
        (("globex/sql:v1",), "globex/sql:v1", True),
        (("globex/sql:v1",), "globex/sql:v2", False),
        (("globex/sql:v1",), "globex/sql:latest", False),
        (("globex:v1",), "globex:v1", True),
        (("globex:v1",), "globex/sql:v1", False),
        (("globex/*:v1",), "globex/sql:v1", True),
        (("glob*",), "globex:v1", True),
        (("g*:v1",), "globex/sql:v1", False),
        (("*/sql",), "globex/sql:v3", True),
        (("*/sql",), "globex/sql2:v3", False),
        (("@*",), "globex:v1", False),
    ],
)
def test_a_tenant_may_use_its_own_and_what_it_was_granted(
    grants: tuple[str, ...], name: str, allowed: bool
) -> None:
    principal = Principal(tenant="acme", grants=grants)

    assert may_use(principal, parse_name(name)) is allowed
    if not allowed:
        with pytest.raises(Forbidden):
            authorize(principal, parse_name(name))


@pytest.mark.parametrize(
    ("principal", "shared", "allowed"),
    [
        (Principal(tenant="acme"), False, False),
        (Principal(tenant="acme"), True, True),
        (Principal(tenant="acme", grants=("@sql*",)), False, True),
        (Principal(tenant="acme", grants=("@team/*",)), False, False),
        (Principal(tenant="sql-bot"), False, False),
        (Principal(tenant="acme", grants=("sql-bot", "*")), False, False),
        (Principal(tenant=None, rights=frozenset({ADMIN})), False, True),
        (ANYONE, False, True),
    ],
)
def test_a_registered_name_belongs_to_no_tenant(
    principal: Principal, shared: bool, allowed: bool
) -> None:
    assert may_use(principal, "sql-bot", shared=shared) is allowed


def test_an_admin_may_use_everything_and_anyone_too_without_being_admin() -> None:
    authorize(Principal(tenant=None, rights=frozenset({ADMIN})), parse_name("globex:v1"))
    authorize(ANYONE, parse_name("globex:v1"))
    assert not ANYONE.is_admin


def test_a_principal_without_a_tenant_owns_nothing() -> None:
    assert not may_use(Principal(tenant=None), parse_name("none:v1"))


def record(key_id: str = "a1b2c3d4", **fields: object) -> dict[str, object]:
    return {"id": key_id, "sha256": hash_secret("x"), "tenant": "acme", **fields}


def key_file(*records: dict[str, object]) -> KeyFile:
    return KeyFile.from_bytes(json.dumps({"keys": records}).encode())


def test_a_minted_key_authenticates_as_its_tenant() -> None:
    minted = mint_key()
    keys = key_file(
        record(
            minted.key_id, sha256=minted.sha256, rights=["admin"], weight=2, grants=["globex/sql"]
        )
    )

    principal = keys.authenticate(f"Bearer {minted.key}")

    assert principal == Principal("acme", frozenset({"admin"}), 2.0, ("globex/sql",), minted.key_id)


def test_keys_have_256_bits_and_are_all_different() -> None:
    minted = [mint_key() for _ in range(100)]

    assert len({m.key for m in minted}) == len({m.key_id for m in minted}) == 100
    assert all(len(m.key.split("_", 2)[2]) == 43 for m in minted)


@given(st.binary(min_size=40, max_size=40))
def test_every_draw_of_random_bytes_gives_a_key_that_authenticates(entropy: bytes) -> None:
    minted = mint_key(lambda n: entropy[:n] if n == 8 else entropy[8 : 8 + n])

    keys = KeyFile([KeyRecord(id=minted.key_id, sha256=minted.sha256, tenant="acme")])

    assert keys.authenticate(f"bearer {minted.key}").tenant == "acme"


MINTED = mint_key(lambda n: bytes(range(n)))  # the same in every worker


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        MINTED.key,
        f"Basic {MINTED.key}",
        f"Bearer {MINTED.key}x",
        f"Bearer {MINTED.key}\n",
        f"Bearer {MINTED.key[:-1]}",
        f"Bearer {MINTED.key[:-1]}{'A' if MINTED.key[-1] != 'A' else 'B'}",
        f"Bearer mural_unknown0_{MINTED.key[-43:]}",
        f"Bearer mural_{MINTED.key_id}_",
        f"Bearer {MINTED.sha256}",
        f"Bearer mural_{MINTED.key_id}_{MINTED.sha256[:43]}",
        "Bearer \ud800",
        "Bearer é",
        "Bearer " + "x" * 100_000,
    ],
    ids=lambda header: ascii(header)[:40],
)
def test_every_wrong_key_is_told_the_same(header: str | None) -> None:
    keys = key_file(record(MINTED.key_id, sha256=MINTED.sha256))

    with pytest.raises(Unauthorized) as caught:
        keys.authenticate(header)

    assert error_body(caught.value) == error_body(Unauthorized())


def test_a_secret_is_in_no_repr_no_error_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    minted = mint_key()
    keys = key_file(record(minted.key_id, sha256=minted.sha256))
    secret = minted.key[-43:]

    told = [repr(minted), str(minted), repr(keys), repr(keys.authenticate(f"Bearer {minted.key}"))]
    with pytest.raises(Unauthorized) as caught:
        keys.authenticate(f"Bearer {minted.key}?")
    told += [str(caught.value), repr(caught.value), caplog.text]

    assert not [text for text in told if secret in text]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "key file"),
        (b"[]", "key file"),
        (b'{"keys": 1}', "keys"),
        (b'{"keys": [], "more": 1}', "more"),
        (b"\xff", "key file"),
        (b"[" * 100_000, "key file"),
        (json.dumps({"keys": [record("short")]}).encode(), r"keys\[0\].id"),
        (json.dumps({"keys": [record(sha256="0")]}).encode(), r"keys\[0\].sha256"),
        (json.dumps({"keys": [record(tenant="../x")]}).encode(), r"keys\[0\].tenant"),
        (json.dumps({"keys": [record(rights=["root"])]}).encode(), r"keys\[0\].rights"),
        (json.dumps({"keys": [record(weight=0)]}).encode(), r"keys\[0\].weight"),
        (json.dumps({"keys": [record(weight=-1)]}).encode(), r"keys\[0\].weight"),
        (json.dumps({"keys": [record(grants=["a/b/c"])]}).encode(), r"keys\[0\].grants"),
        (json.dumps({"keys": [record(secret="x")]}).encode(), "secret"),
        (json.dumps({"keys": [record(), record()]}).encode(), r"keys\[1\]"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_a_wrong_key_file_is_refused_with_the_place(body: bytes, where: str) -> None:
    with pytest.raises(InvalidInput, match=where):
        KeyFile.from_bytes(body)


def test_an_absent_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        KeyFile.load(tmp_path / "absent.json")


@pytest.mark.parametrize("text", ["", "a b", "a/b/c", "a:b:c", "@", "a\n", "é", "A"], ids=ascii)
def test_what_is_no_grant_is_told_apart(text: str) -> None:
    assert not is_grant(text)
