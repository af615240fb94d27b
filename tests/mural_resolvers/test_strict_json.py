"""JSON from people who may mean harm."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.strict_json import JsonRefused, JsonValue, parse_object

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=8,
)


def parse(data: bytes) -> dict[str, JsonValue]:
    return parse_object(data, max_bytes=100_000, max_depth=16)


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), values, max_size=4))
def test_ordinary_objects_are_read_as_the_standard_library_reads_them(
    value: dict[str, JsonValue],
) -> None:
    for ascii_only in (True, False):
        assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    try:
        parse(data)
    except JsonRefused:
        return


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"{}{}",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"x": {"a": 1, "a": 1}}',
        b'{"a": 1, "\\u0061": 2}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": -' + b"1" * 20 + b"}",
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ["\\ud800"]}',
        b'{"a": ' * 50 + b"1" + b"}" * 50,
        b'{"a": ' + b"[" * 40_000 + b"]" * 40_000 + b"}",
        b"[" * 99_000,
        b"{" * 99_000,
        b'{"a": "' + b"x" * 100_000 + b'"}',
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": "\n"}',
        b'{"a": 01}',
        b'{"a": 1} trailing',
    ],
    ids=lambda data: ascii(data[:24]),
)
def test_hostile_json_is_refused(data: bytes) -> None:
    with pytest.raises(JsonRefused):
        parse(data)


def test_brackets_in_strings_are_no_depth() -> None:
    text = "[{" * 500 + '\\"' + '"' * 3
    assert parse(json.dumps({"a": text}).encode()) == {"a": text}


@pytest.mark.parametrize("ending", [b"", b"\\", b"\\\\", b'"}', b'" "'])
def test_escapes_cost_no_more_than_their_length(ending: bytes) -> None:
    """A string without an end was scanned again from each of its quotes: hours for a megabyte."""
    data = b'{"a": "' + b'\\"' * 2_000_000 + ending

    try:
        assert parse_object(data, max_bytes=len(data), max_depth=16) == {"a": '"' * 2_000_000}
    except JsonRefused:
        assert ending != b'"}'


def test_a_float_that_overflows_is_left_to_whoever_reads_the_number() -> None:
    assert parse(b'{"a": 1e999}') == {"a": float("inf")}
