"""What a hub source may be told, and where its token is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.hub import HubSettings
from mural_resolvers.hub.settings import read_token
from mural_resolvers.sources import convert_options

CANARY = "hf_canarycanarycanary"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"organisations": ()}, "organisations"),
        ({"organisations": ("a/b",)}, "no organisation"),
        ({"endpoint": "ftp://hub"}, "endpoint"),
        ({"endpoint": "hub.example"}, "endpoint"),
        ({"endpoint": "https://hub.example:port"}, "endpoint"),
        ({"endpoint": "https://hub example"}, "endpoint"),
        ({"endpoint": f"https://user:{CANARY}@hub.example"}, "no user"),
        ({"endpoint": f"https://hub.example/?token={CANARY}"}, "no query"),
        ({"token_env": "A", "token_file": Path("b")}, "not in both"),
        ({"endpoint": "http://hub.example", "token_env": "A"}, "plain HTTP"),
        ({"read_timeout_s": 0}, "timeouts"),
        ({"answer_timeout_s": float("inf")}, "timeouts"),
        ({"connect_timeout_s": float("nan")}, "timeouts"),
        ({"max_connections": 0}, "max_connections"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refused:
        HubSettings(**({"organisations": ("acme",)} | wrong))

    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "https://hub.example/mirror/hf"},
        {"endpoint": "http://localhost:8090", "token_env": "A"},
        {"endpoint": "http://127.0.0.1", "token_env": "A"},
        {"endpoint": "http://[::1]:80", "token_env": "A"},
        {"endpoint": "http://hub.example", "token_env": "A", "plain_http_token": True},
        {"endpoint": "http://hub.example"},
    ],
)
def test_a_token_over_plain_http_is_for_this_machine_or_said(changes: dict[str, Any]) -> None:
    HubSettings(organisations=("*",), **changes)


def test_a_token_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURAL_HUB_TOKEN", f" {CANARY}\n")

    settings = HubSettings(organisations=("acme",), token_env="MURAL_HUB_TOKEN")

    assert read_token(settings) == CANARY
    assert CANARY not in repr(settings)


def test_a_token_is_read_from_a_file_that_may_be_a_link(tmp_path: Path) -> None:
    # As Kubernetes mounts a Secret.
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "token").write_text(f"{CANARY}\n")
    (tmp_path / "token").symlink_to(tmp_path / "..data" / "token")

    assert read_token(HubSettings(organisations=("acme",), token_file=tmp_path / "token")) == CANARY


@pytest.mark.parametrize("content", ["", "two words", "naïve", "a\nb", "x" * 5000])
def test_what_is_no_token_is_not_sent(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)

    with pytest.raises(InvalidInput, match="token"):
        read_token(HubSettings(organisations=("acme",), token_file=tmp_path / "token"))


def test_a_token_that_is_nowhere_is_named_by_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("MURAL_HUB_TOKEN", raising=False)

    with pytest.raises(InvalidInput, match="MURAL_HUB_TOKEN"):
        read_token(HubSettings(organisations=("acme",), token_env="MURAL_HUB_TOKEN"))
    with pytest.raises(InvalidInput, match="token_file") as refused:
        read_token(HubSettings(organisations=("acme",), token_file=tmp_path / "none"))
    assert str(tmp_path) not in str(refused.value)


def test_a_source_without_a_token_reads_none() -> None:
    assert read_token(HubSettings(organisations=("acme",))) is None


def test_paths_stand_in_a_file_of_sources_as_texts(tmp_path: Path) -> None:
    options = {"organisations": ["acme"], "token_file": str(tmp_path), "ca_bundle": "/etc/ca.pem"}
    settings = convert_options(options, HubSettings)
    assert (settings.token_file, settings.ca_bundle) == (tmp_path, Path("/etc/ca.pem"))
