"""API keys: made, told apart, and refused alike whatever is wrong with them."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import Unauthorized, error_body
from mural_resolvers.tenants import KeyRing, MintedKey, Principal, StoredKey, mint_key

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
ACME = Principal(tenant="acme", grants=("globex/sql",))
MINTED = mint_key(lambda n: bytes(range(n)))  # the same in every worker


def ring(minted: MintedKey = MINTED, expires: datetime | None = None) -> KeyRing:
    return KeyRing([StoredKey(minted.key_id, minted.sha256, ACME, expires)])


def test_a_minted_key_authenticates_as_its_tenant() -> None:
    minted = mint_key()

    assert ring(minted).authenticate(f"Bearer {minted.key}", NOW) == ACME


def test_keys_have_256_bits_and_are_all_different() -> None:
    minted = [mint_key() for _ in range(100)]

    assert len({m.key for m in minted}) == len({m.key_id for m in minted}) == 100
    assert all(len(m.key.split("_", 2)[2]) == 43 for m in minted)


@given(st.binary(min_size=40, max_size=40))
def test_every_draw_of_random_bytes_gives_a_key_that_authenticates(entropy: bytes) -> None:
    minted = mint_key(lambda n: entropy[:n] if n == 8 else entropy[8 : 8 + n])

    assert ring(minted).authenticate(f"bearer {minted.key}", NOW).tenant == "acme"


@pytest.mark.parametrize(
    ("after", "valid"),
    [(timedelta(days=-1), True), (timedelta(microseconds=-1), True), (timedelta(0), False)],
)
def test_a_key_is_valid_until_the_moment_that_it_expires(after: timedelta, valid: bool) -> None:
    keys = ring(expires=NOW)

    if valid:
        assert keys.authenticate(f"Bearer {MINTED.key}", NOW + after) == ACME
        return
    with pytest.raises(Unauthorized) as caught:
        keys.authenticate(f"Bearer {MINTED.key}", NOW + after)
    assert error_body(caught.value) == error_body(Unauthorized())


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
    with pytest.raises(Unauthorized) as caught:
        ring().authenticate(header, NOW)

    assert error_body(caught.value) == error_body(Unauthorized())


def test_a_secret_is_in_no_repr_no_error_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    minted = mint_key()
    keys = ring(minted)
    secret = minted.key[-43:]

    told = [repr(minted), str(minted), repr(keys), repr(dict(keys))]
    told.append(repr(keys.authenticate(f"Bearer {minted.key}", NOW)))
    with pytest.raises(Unauthorized) as caught:
        keys.authenticate(f"Bearer {minted.key}?", NOW)
    told += [str(caught.value), repr(caught.value), caplog.text]

    assert not [text for text in told if secret in text]
