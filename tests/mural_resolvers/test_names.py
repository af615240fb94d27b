"""The grammar of names."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import MalformedName
from mural_resolvers.names import AdapterName, parse_name, validate_admin_name

segments = st.from_regex(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?", fullmatch=True).filter(
    lambda text: ".." not in text
)
versions = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True).filter(
    lambda text: ".." not in text
)

HOSTILE = [
    "",
    ":",
    "/",
    ":v1",
    "acme:",
    "acme/",
    "/sql:v1",
    "acme/:v1",
    "acme//sql:v1",
    "acme/sql/x:v1",
    "a:b:c",
    "acme/sql:v1:v2",
    "acme:v1/../../etc",
    "..",
    "../acme:v1",
    "acme/..:v1",
    "acme:..",
    "acme:v1..2",
    "a..b:v1",
    ".:v1",
    ".hidden:v1",
    "acme.:v1",
    "acme/sql.:v1",
    "_reserved:v1",
    "acme/_aliases:v1",
    "acme:_manifest.json",
    "-acme:v1",
    "acme-:v1",
    "acme:-v1",
    "acme:.v1",
    "Acme:v1",
    "acme/SQL:v1",
    "acme:v1\n",
    "acme\n:v1",
    "acme/sql\n:v1",
    "\nacme:v1",
    "acme:v1 ",
    " acme:v1",
    "acme :v1",
    "acme:v1\r\n",
    "acme:v1\x00",
    "ac\x00me:v1",
    "%2e%2e:v1",
    "acme%2fsql:v1",
    "acme:%2e",
    "acme:v1?x=1",
    "acme:v1#x",
    "acme\\sql:v1",
    "acme:v1*",
    "\u0430cme:v1",  # Cyrillic a
    "acm\u0435:v1",  # Cyrillic e
    "acme\uff1av1",  # full-width colon
    "acme\u2215sql:v1",  # division slash
    "\uff41cme:v1",  # full-width a
    "acme:v\u0661",  # Arabic digit one
    "acme:v1\u200b",  # zero-width space
    "acme:v1\u202e",  # right-to-left override
    "acme:v1\u0301",  # combining accent
    "\ud800:v1",  # half a surrogate pair
    "a" * 64 + ":v1",
    "acme:" + "v" * 129,
    "a" * 10_240,
    "acme:" + "../" * 4000,
    "a:" * 5000,
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_hostile_name_is_malformed(text: str) -> None:
    with pytest.raises(MalformedName) as caught:
        parse_name(text)

    assert caught.value.status == 400
    assert len(caught.value.message) < 500
    assert caught.value.message.isascii()


@given(segments, segments, versions)
def test_a_name_prints_back_as_itself(tenant: str, adapter: str, version: str) -> None:
    name = AdapterName(tenant, adapter, version)

    assert parse_name(str(name)) == name
    assert parse_name(name.exact) == name
    assert parse_name(name.short) == name


@given(st.text(max_size=300))
def test_any_text_is_a_name_that_prints_back_or_malformed(text: str) -> None:
    try:
        name = parse_name(text)
    except MalformedName:
        return
    assert parse_name(str(name)) == name
    assert text in {str(name), name.exact, name.exact.removesuffix(":latest"), name.tenant}


@given(st.text(max_size=100), st.text(max_size=100), st.text(max_size=200))
def test_no_part_of_a_name_can_leave_a_folder(tenant: str, adapter: str, version: str) -> None:
    try:
        name = AdapterName(tenant, adapter, version)
    except MalformedName:
        return
    for part in (name.tenant, name.adapter, name.version):
        assert part.isascii()
        assert part not in {".", ".."}
        assert not set(part) & set("/\\:\x00\n%")
        assert part[0] not in "._-"


@pytest.mark.parametrize(
    ("text", "exact", "printed"),
    [
        ("acme:v1", "acme/default:v1", "acme:v1"),
        ("acme", "acme/default:latest", "acme:latest"),
        ("acme/sql", "acme/sql:latest", "acme/sql:latest"),
        ("acme/sql:v1", "acme/sql:v1", "acme/sql:v1"),
        ("acme/default:v1", "acme/default:v1", "acme:v1"),
        ("a:B", "a/default:B", "a:B"),
        ("0.a_b-c/9:1.0.0-rc.1", "0.a_b-c/9:1.0.0-rc.1", "0.a_b-c/9:1.0.0-rc.1"),
        ("a" * 63 + ":" + "v" * 128, "a" * 63 + "/default:" + "v" * 128, None),
    ],
)
def test_a_name_is_read_as_the_grammar_says(text: str, exact: str, printed: str | None) -> None:
    name = parse_name(text)

    assert name.exact == exact
    assert str(name) == (printed or text)


def test_a_name_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_name("acme:v1").tenant = "globex"  # type: ignore[misc] # what is tested


@pytest.mark.parametrize("text", ["sql", "Team/sql-v1", "a", "0", "a" * 128, "meta/llama.3_lora"])
def test_an_admin_may_register_plain_names(text: str) -> None:
    assert validate_admin_name(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "a:b", "../x", "a/../b", "/a", "_a", "-a", "a\n", "a\x00", "a b", "é", "a" * 129, "a%2e"],
    ids=ascii,
)
def test_an_admin_may_not_register_other_names(text: str) -> None:
    with pytest.raises(MalformedName):
        validate_admin_name(text)
