"""``mural operate``: what its flags mean, and what it says when it cannot start."""

from __future__ import annotations

import argparse
import socket

import msgspec
import pytest

from mural_operator import operating
from mural_operator.commands import operate
from mural_operator.settings import OperatorSettings


@pytest.fixture
def started_with(monkeypatch):
    """``started_with(*flags)``: the settings with which an operator would run."""
    found: list[OperatorSettings] = []

    async def run_operator(settings: OperatorSettings) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(operating, "run_operator", run_operator)

    def start(*flags: str) -> OperatorSettings:
        assert operate.run(parse(*flags)) == 0
        return found[-1]

    return start


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    operate.add_arguments(parser)
    return parser.parse_args(flags)


def test_without_flags_the_settings_defaults_hold(started_with, monkeypatch):
    monkeypatch.delenv("MURAL_POD_NAME", raising=False)
    assert started_with() == OperatorSettings()


def test_every_flag_has_its_setting(started_with, monkeypatch):
    monkeypatch.setenv("MURAL_POD_NAME", "operator-0")
    settings = started_with(
        *("--namespace", "mural", "--watch-namespace", "a", "--watch-namespace", "b"),
        *("--lease", "other", "--keys-secret", "keys", "--admin-host", "::", "--admin-port", "0"),
        *("--log-level", "debug"),
    )
    assert settings == OperatorSettings(
        namespace="mural",
        watch_namespaces=("a", "b"),
        pod_name="operator-0",
        lease="other",
        keys_secret="keys",
        admin_host="::",
        admin_port=0,
        log_level="debug",
    )
    assert started_with("--all-namespaces").all_namespaces
    assert started_with("--no-admin").admin_port is None


def test_help_tells_the_default_of_everything_that_has_one():
    parser = argparse.ArgumentParser()
    operate.add_arguments(parser)
    text = " ".join(parser.format_help().split()).replace("- ", "-")
    for field in msgspec.structs.fields(OperatorSettings):
        if isinstance(field.default, str) and field.name != "admin_host":
            assert f"default {field.default}" in text
        if field.name == "admin_port":
            assert f"default {field.default}" in text


@pytest.mark.parametrize(
    "flags",
    [
        ("--namespace", "Not_A_Name"),
        ("--watch-namespace", "a/b"),
        ("--lease", ".."),
        ("--admin-port", "65536"),
    ],
)
def test_what_can_be_no_name_or_port_is_refused_at_once(flags, capsys):
    with pytest.raises(SystemExit):
        parse(*flags)
    assert flags[1] in capsys.readouterr().err


def test_namespaces_are_all_or_some(capsys):
    assert operate.run(parse("--all-namespaces", "--watch-namespace", "a")) == 1
    assert "exclude each other" in capsys.readouterr().err


def test_where_there_is_no_cluster_that_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    assert operate.run(parse("--no-admin")) == 1
    assert "no Kubernetes to ask" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(monkeypatch, tmp_path, capsys):
    config = tmp_path / "kubeconfig"
    config.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "contexts: [{name: c, context: {cluster: c, user: u, namespace: n}}]\n"
        "users: [{name: u, user: {}}]\n"
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--admin-host", "127.0.0.1", "--admin-port", str(port))
        assert operate.run(parse(*flags)) == 1
    assert f"127.0.0.1:{port} cannot be listened on" in capsys.readouterr().err
