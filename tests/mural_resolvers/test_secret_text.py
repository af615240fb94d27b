"""Tokens from files and from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.secret_text import read_secret, watch_secret


def test_the_end_of_a_line_is_no_part_of_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("  the-token\n")
    flag = str(tmp_path / "token")
    assert read_secret(flag, "router_token_file", "MURAL_ROUTER_TOKEN", {}) == "the-token"
    environment = {"MURAL_ROUTER_TOKEN": "other\n"}
    assert read_secret(None, "router_token_file", "MURAL_ROUTER_TOKEN", environment) == "other"
    assert read_secret(None, "router_token_file", "MURAL_ROUTER_TOKEN", {}) is None


@pytest.mark.parametrize("text", ["", " \n", "one\ntwo", "é", "two words", "x" * 5_000])
def test_what_is_no_single_word_is_refused_without_being_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match="--router-token-file") as caught:
        read_secret(str(tmp_path / "token"), "router_token_file", "MURAL_ROUTER_TOKEN", {})
    assert "two" not in caught.value.message


def empty(path: Path) -> None:
    path.write_text(" \n")


def two_words(path: Path) -> None:
    path.write_text("one\r\ntwo")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def large(path: Path) -> None:
    path.write_text("a" * 10_000)


@pytest.mark.parametrize("spoil", [empty, two_words, fifo, large, Path.unlink])
def test_a_renewed_secret_is_told_and_one_that_is_none_leaves_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / "token"
    path.write_text("first-token")
    told: list[str] = []
    watch = watch_secret(str(path), "router_token_file", told.append, what="router token")
    watch.poll()
    assert told == []
    spoil(path)
    for _ in range(4):
        watch.poll()
    assert told == []
    assert watch.numbers.stale
    said = [each for each in caplog.messages if "the router token cannot be used" in each]
    assert len(said) == 1
    assert "--router-token-file" in said[0]
    assert "two" not in said[0].replace(str(path), "")
    renewed = tmp_path / "next"
    renewed.write_text("second-token\n")
    renewed.replace(path)
    for _ in range(3):
        watch.poll()
    assert told == ["second-token"]
    assert not watch.numbers.stale
