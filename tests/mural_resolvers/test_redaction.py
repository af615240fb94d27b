"""Keys in texts: recognised, and taken out."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import MalformedName, quoted
from mural_resolvers.names import is_version, parse_name, validate_admin_name
from mural_resolvers.redaction import RedactingFormatter, holds_key, redacted
from mural_resolvers.tenants import mint_key

MINTED = mint_key(lambda n: bytes(range(n)))
SECRET = MINTED.key[-43:]


@given(st.text(max_size=60), st.text(max_size=60))
def test_the_secret_goes_and_all_else_stays(before: str, after: str) -> None:
    after = f" {after}"
    text = f"{before}{MINTED.key}{after}"

    assert holds_key(text)
    assert SECRET not in redacted(text)
    assert redacted(text).endswith(after)


@pytest.mark.parametrize("text", ["", "mural", "mural_server", "mural_assistant_v2", "mural_x_y"])
def test_what_is_no_key_stays(text: str) -> None:
    assert redacted(text) == text
    assert not holds_key(text)


@pytest.mark.parametrize("length", [24, 30, 43])
def test_a_key_cut_short_is_taken_for_one(length: int) -> None:
    cut = MINTED.key[: len(MINTED.key) - 43 + length]

    assert SECRET[:20] not in redacted(cut)


def test_a_capital_letter_hides_no_key() -> None:
    assert SECRET not in redacted(f"M{MINTED.key[1:]} is not a parameter.")


@pytest.mark.parametrize("padding", [0, 10, 40, 60, 70])
def test_a_quoted_text_holds_no_part_of_a_key(padding: int) -> None:
    assert SECRET[:8] not in quoted(f"{'x' * padding} {MINTED.key}")


def test_no_name_holds_a_key() -> None:
    for text in (f"acme:{MINTED.key}", f"acme/sql:v-{MINTED.key}"):
        with pytest.raises(MalformedName) as caught:
            parse_name(text)
        assert SECRET not in caught.value.message
    with pytest.raises(MalformedName) as caught:
        validate_admin_name(MINTED.key)
    assert SECRET not in caught.value.message
    assert not is_version(MINTED.key)


def test_a_traceback_in_the_log_holds_none() -> None:
    try:
        raise ValueError(MINTED.key)
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "%s", (MINTED.key,), info)

    told = RedactingFormatter("%(message)s").format(record)

    assert "Traceback" in told
    assert SECRET not in told


@pytest.mark.parametrize(
    "url",
    ["ftp://SECRET@x", "hub+https://me:SECRET@hub/a?b=c", "s3://KEY:SEC@RET@bucket", "x:/SECRET@y"],
)
def test_whom_a_url_names_is_told_nobody_whatever_its_scheme(url: str) -> None:
    told = redacted(f"cannot reach {url} today")
    assert "SEC" not in told
    assert "KEY" not in told
    assert told.startswith("cannot reach ")
    assert told.endswith(" today")
    assert "SEC" not in quoted(url)


@pytest.mark.parametrize(
    "text", ["https://host/a@b", "mail me@example.org", "acme:v1", "s3://bucket/x?y=a@b", "a:@b"]
)
def test_what_names_nobody_stays(text: str) -> None:
    assert redacted(text) == text
