"""YAML as settings need it; the oracle for everything else is PyYAML's own loader."""

from __future__ import annotations

import tracemalloc

import pytest
import yaml

from mural_resolvers import strict_yaml
from mural_resolvers.errors import InvalidInput
from mural_resolvers.strict_yaml import parse_yaml, parse_yaml_documents


def test_a_scalar_stays_the_text_that_was_written() -> None:
    text = b"[no, 0o17, 12:30:45, 1e3, 2027-01-01, .5, 'null', \"~\", 0x1F]"

    assert parse_yaml(text) == [
        *("no", "0o17", "12:30:45", "1e3", "2027-01-01", ".5", "null", "~", "0x1F")
    ]


def test_what_stands_empty_is_none() -> None:
    assert parse_yaml(b"a:\nb: ~\nc: null\nd: ''\n") == {"a": None, "b": None, "c": None, "d": ""}
    assert parse_yaml(b"# nothing\n") is None


@pytest.mark.parametrize(
    "text",
    [
        "a: [b, {c: d}]",
        "a: |\n  b\n  c\n",
        "- a\n- - b\n  - c\n",
        'é: "\\u00e9"',
        "{a: &x b, c: *x}",
    ],
)
def test_structure_is_what_pyyaml_reads(text: str) -> None:
    assert parse_yaml(text.encode()) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"a: 1\nb:\n  c: 1\n  c: 2\n", "^Line 3, column 3: a key stands twice"),
        (b"a: [\n", "^Line 2, column 1"),
        (b"\tb: 1", "^Line 1"),
        (b"a\n---\nb", "^Line 2"),
        (b"a: \xff", "UTF-8"),
        (b"a: \x00", "."),
        (b"[" * 100_000, "."),
        (b"[" * 5_000 + b"]" * 5_000, "."),
    ],
)
def test_the_line_of_an_error_is_told(text: bytes, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        parse_yaml(text)


def test_a_tag_makes_no_object() -> None:
    assert parse_yaml(b"!!python/object/apply:os.system [id]") == ["id"]


def test_several_documents_are_told_with_their_lines() -> None:
    text = b"# first\na: 1\n---\n---\n# third\n\n- b\n...\n---\nc\n"

    assert list(parse_yaml_documents(text)) == [(2, {"a": "1"}), (7, ["b"]), (10, "c")]
    assert list(parse_yaml_documents(b"# nothing\n")) == []


@pytest.mark.parametrize("text", [b"a: 1\n---\nb: [\n", b"a: 1\n---\nb: 1\nb: 2\n", b"\xff"])
def test_a_bad_document_refuses_them_all(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        list(parse_yaml_documents(text))


BOMB = "".join(
    [
        "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n",
        *(f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 10)}]\n" for at in range(1, 10)),
    ]
).encode()
LONG = b"a: &a " + b"x" * 4_096 + b"\nb: [" + b"*a, " * 4_096 + b"]\n"


@pytest.mark.parametrize("text", [BOMB, LONG])
def test_aliases_that_stand_for_much_more_than_the_text_are_refused(text: bytes) -> None:
    for parse in (parse_yaml, lambda data: list(parse_yaml_documents(data))):
        with pytest.raises(InvalidInput, match=r"^Line \d: aliases that stand for more"):
            parse(b"---\n" + text)


def test_aliases_of_one_document_are_not_counted_with_the_others() -> None:
    text = b"---\na: &a " + b"x" * 4_096 + b"\nb: [" + b"*a, " * 200 + b"]\n"
    assert len(list(parse_yaml_documents(text * 10))) == 10


@pytest.mark.parametrize("text", [b"&a [*a]", b"a: &a {b: *a}", b"a: *b", b"&a [&a 1, *a, *b]"])
def test_an_alias_of_itself_or_of_nothing_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_yaml(text)


def test_a_text_of_many_values_is_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each takes hundreds of bytes, and two of the text."""
    monkeypatch.setattr(strict_yaml, "MAX_DOCUMENT_NODES", 1_000)
    text = b"[" + b"a," * 20_000 + b"]"
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="Line 1: more values"):
            list(parse_yaml_documents(text))
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text)
    finally:
        tracemalloc.stop()
