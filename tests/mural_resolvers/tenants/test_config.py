"""``tenants.yaml``: what it may say, and the place of everything that it may not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import (
    TenantLimits,
    may_use,
    mint_key,
    parse_moment,
    parse_tenants,
)

SHA = "ab" * 32

WHOLE = f"""
# Who may use the server.
tenants:
  - id: acme
    weight: 2.5
    keys:
      - id: '12345678'            # digits alone, and still a text
        sha256: {SHA}
        created: 2026-11-01T09:30:00+01:00
        expires: 2027-01-31
        note: ci
      - {{id: 123e4567, sha256: {SHA}}}
    grants: [globex/sql:*, '@shared-*']
    base: no
    sources: [s3, uploads]
    limits:
      requests_per_minute: 60
      tokens_per_minute: 10000
      concurrency: 4
      queue_length: 20
      adapters: 10
      bytes: 2Gi
  - id: globex
    public: [sql, 'chat:v*']
admin_keys:
  - {{id: adminkey, sha256: {SHA}}}
"""


def test_a_whole_file_says_who_may_do_what() -> None:
    config = parse_tenants(WHOLE.replace("base: no", "base: false").encode())

    acme, globex = config.tenants
    assert (acme.weight, acme.base, acme.sources) == (2.5, False, frozenset({"s3", "uploads"}))
    assert acme.limits == TenantLimits(60, 10_000, 4, 20, 10, 2 << 30)
    assert [key.id for key in acme.keys] == ["12345678", "123e4567"]
    assert acme.keys[0].created == datetime(2026, 11, 1, 8, 30, tzinfo=UTC)
    assert acme.keys[0].expires == datetime(2027, 1, 31, tzinfo=UTC)
    assert (globex.weight, globex.base, globex.sources) == (1.0, True, None)
    ring = config.ring()
    assert ring["12345678"].principal.limits == acme.limits
    assert ring["adminkey"].principal.is_admin
    assert ring["adminkey"].principal.tenant is None
    assert not ring["123e4567"].principal.is_admin


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("globex/sql:v1", True),
        ("globex/sql:latest", True),
        ("globex/chat:v2", True),
        ("globex/chat:beta", False),
        ("globex:v1", False),
        ("initech:v1", True),
    ],
)
def test_what_a_tenant_publishes_everybody_may_use(name: str, allowed: bool) -> None:
    config = parse_tenants(
        f"""
tenants:
  - {{id: globex, public: [sql, 'chat:v*']}}
  - {{id: initech, keys: [{{id: '12345678', sha256: {SHA}}}]}}
""".encode()
    )

    assert may_use(config.ring()["12345678"].principal, parse_name(name)) is allowed


def tenant(**fields: object) -> str:
    lines = "".join(f"    {name}: {value}\n" for name, value in fields.items())
    return f"tenants:\n  - id: acme\n{lines}"


def key(**fields: object) -> str:
    known = {"id": "'12345678'", "sha256": SHA} | fields
    return tenant(keys="[{" + ", ".join(f"{name}: {value}" for name, value in known.items()) + "}]")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "^a mapping is wanted, and nothing stands there"),
        ("[]", "^a mapping is wanted, not a list"),
        ("tenants: 1", "^tenants: a list is wanted, not '1'"),
        ("tenants:", "^tenants: a list is wanted, and nothing stands there"),
        ("tenant: []", "^tenant: there is no such field"),
        ("tenants: []\nmore: 1", "^more: there is no such field"),
        ("tenants: [{}]", r"^tenants\[0\].id: is missing"),
        ("tenants: [\n", "^Line 2, column 1: "),
        ("tenants: []\ntenants: []", "^Line 1, column 1: a key stands twice"),
        ("tenants: []\n--- \ntenants: []", "^Line 2"),
        ("? [a]\n: b", "^Line 1"),
        ("~: []", "."),
        ("[" * 100_000, "^Line 1"),
        ("&a [*a]", "."),
        ("tenants: !!python/object:os.system [id]", r"^tenants\[0\]"),
        (tenant(weight=0), r"^tenants\[0\].weight"),
        (tenant(weight="nan"), r"^tenants\[0\].weight"),
        (tenant(weight="heavy"), r"^tenants\[0\].weight: a number is wanted, not 'heavy'"),
        (tenant(base="perhaps"), r"^tenants\[0\].base: true or false is wanted, not 'perhaps'"),
        (tenant(grants="[globex, a/b/c]"), r"^tenants\[0\].grants\[1\]"),
        (tenant(grants="globexglobex"), r"^tenants\[0\].grants: .*, not a text of 12 characters"),
        (tenant(public="[globex/sql]"), r"^tenants\[0\].public\[0\]"),
        (tenant(public="['@x']"), r"^tenants\[0\].public\[0\]"),
        (tenant(sources="['']"), r"^tenants\[0\].sources\[0\]"),
        (tenant(colour="red"), r"^tenants\[0\].colour: there is no such field"),
        (tenant(limits="{requests_per_minute: 0}"), r"^tenants\[0\].limits.requests_per_minute"),
        (tenant(limits="{concurrency: -1}"), r"^tenants\[0\].limits.concurrency"),
        (tenant(limits="{queue_length: -1}"), r"^tenants\[0\].limits.queue_length"),
        (
            tenant(limits="{queue_length: 1.5}"),
            r"^tenants\[0\].limits.queue_length: a whole number is wanted",
        ),
        (tenant(limits="{tokens_per_minute: many}"), r"^tenants\[0\].limits.tokens_per_minute"),
        (tenant(limits="{bytes: 2 apples}"), r"^tenants\[0\].limits.bytes"),
        (tenant(limits="{requests: 1}"), r"^tenants\[0\].limits.requests: there is no such field"),
        (key(id="short"), r"^tenants\[0\].keys\[0\].id"),
        (key(sha256="0"), r"^tenants\[0\].keys\[0\].sha256"),
        (key(expires="tomorrow"), r"^tenants\[0\].keys\[0\].expires"),
        (key(created="2026-02-30"), r"^tenants\[0\].keys\[0\].created"),
        (key(note="x" * 201), r"^tenants\[0\].keys\[0\].note"),
        (key(note='"\\e[2J"'), r"^tenants\[0\].keys\[0\].note"),
        (key(secret="x"), r"^tenants\[0\].keys\[0\].secret: there is no such field"),
        ("tenants: [{id: Acme}]", r"^tenants\[0\].id"),
        ("tenants: [{id: a}, {id: b}, {id: a}]", r"^tenants\[2\].id: a stands at tenants\[0\]"),
        (key() + f"admin_keys: [{{id: '12345678', sha256: {SHA}}}]", "^admin_keys: .*tenant acme"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_an_error_names_its_place(text: str, where: str) -> None:
    with pytest.raises(InvalidInput, match=where):
        parse_tenants(text.encode())


def test_text_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(InvalidInput, match="UTF-8"):
        parse_tenants(b"tenants: []\n# \xff")


def test_a_key_that_was_put_in_whole_is_refused_and_not_quoted() -> None:
    minted = mint_key()

    with pytest.raises(InvalidInput, match="whole API key") as caught:
        parse_tenants(tenant(grants=f"[{minted.key}]").encode())
    assert minted.key[-43:] not in caught.value.message


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_are_a_config_or_a_refusal(data: bytes) -> None:
    try:
        told = str(parse_tenants(data))
    except InvalidInput as error:
        told = error.message
    assert told.isprintable()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2027-01-31", datetime(2027, 1, 31, tzinfo=UTC)),
        ("2027-01-31T12:00:00Z", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("2027-01-31 12:00", datetime(2027, 1, 31, 12, tzinfo=UTC)),
        ("2027-01-31T12:00:00-05:00", datetime(2027, 1, 31, 17, tzinfo=UTC)),
    ],
)
def test_times_without_a_zone_are_utc(text: str, moment: datetime) -> None:
    assert parse_moment(text) == moment


@pytest.mark.parametrize("text", ["", "soon", "0001-01-01T00:00:00+14:00", "2027-13-01"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_moment(text)
