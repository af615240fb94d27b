"""Sizes as people write them."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        (" 2k ", 2000),
        ("2Ki", 2048),
        ("3MB", 3_000_000),
        ("3mib", 3 << 20),
        ("10Gi", 10 << 30),
        ("1T", 10**12),
    ],
)
def test_a_size_has_a_unit_of_ten_or_of_two(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "Gi", "-1", "1.5G", "1i", "1 000", "1x", "٣", "9" * 19])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no size"):
        parse_size(text)
