"""Tokens from files and from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.secret_text import read_secret


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
