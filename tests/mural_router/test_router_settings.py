"""One file, flags over it, checked as a whole, and taken over when it changes."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.errors import InvalidInput
from mural_router.commands import PLACES, flag_settings, route
from mural_router.config import Config
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.static import StaticDiscovery, parse_endpoint
from mural_router.running import ConfiguredDiscovery
from mural_router.settings import RouterSettings, Secrets, convert_settings

KEYS = Secrets(api_keys=("admin",))


def config(tmp_path: Path, text: str, *, secrets: Secrets = KEYS, **flags: object) -> Config:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    return Config(path, flags, secrets)


def test_a_flag_holds_over_the_file_and_the_file_over_the_defaults(tmp_path):
    given: dict[str, Any] = {"http": {"port": 9000}}
    settings = config(
        tmp_path, "http: {port: 8000, max_body_bytes: 1000}\nqueue:\n  wait_s: 3\n", **given
    ).settings
    assert (settings.http.port, settings.http.max_body_bytes) == (9000, 1000)
    assert (settings.queue.wait_s, settings.queue.max_waiting) == (3.0, 10_000)


def test_every_flag_has_its_place_among_the_settings():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    route.add_arguments(parser)
    not_settings = {"config", "api_key", "no_admin", "no_access_log", "all_namespaces", "help"}
    secret_files = {name for name in vars(parser.parse_args([])) if name.endswith("_file")}
    known = {action.dest for action in parser._actions} - not_settings - secret_files
    secret = {dest for dest in known if dest.endswith("_file") and dest not in PLACES}
    assert known - secret == set(PLACES)
    assert secret == {
        "router_token_file",
        "control_token_file",
        "vllm_api_key_file",
        "redis_url_file",
    }
    args = parser.parse_args(
        ["--replica", "http://a:1", "--replica", "http://b:1", "--port", "7", "--no-admin"]
    )
    settings = convert_settings(flag_settings(vars(args)), KEYS)
    assert settings.replicas == ("http://a:1", "http://b:1")
    assert (settings.http.port, settings.admin_port) == (7, None)


def test_without_keys_only_this_machine_is_listened_to():
    assert convert_settings({}, Secrets()).http.host == "127.0.0.1"
    assert convert_settings({}, KEYS).http.host == "0.0.0.0"
    assert convert_settings({"http": {"host": "::1"}}, KEYS).http.host == "::1"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http: {port: 99999}", "http.port"),
        ("http: {port: x}", "http.port: a whole number is wanted, not 'x'"),
        ("http: {tls: {certfile: a}}", "tls.certfile"),
        ("nonsense: 1", "nonsense"),
        ("queue: {wait_s: 0}", "queue.wait_s"),
        ("placement: {load_bound: 0.5}", "load_bound"),
        ("replicas: ['ftp://x']", "replicas"),
        ("replicas: ['http://a:1', 'http://a:1']", "replicas"),
        ("tenants_file: /no/such/file", "tenants_file"),
        ("auth: open", "auth"),
        ("auth: opn", "auth: one of keys, open is wanted, not 'opn'"),
        ("admin_port: 8080", "8080"),
        ("retry: {ratio: -1}", "retry.ratio"),
        ("- a list", "a mapping is wanted, not a list"),
        ("[]", "a mapping is wanted, not a list"),
        ("a: {b", "router.yaml"),
        ("placement: {load_bound: nan}", "placement.load_bound: a finite number"),
        ("placement: {load_bound: inf}", "placement.load_bound: a finite number"),
        ("placement: {rank_cost: nan}", "0 <= rank_cost <= 1"),
        ("placement: {rank_cost: .nan}", "placement.rank_cost: a number is wanted, not '.nan'"),
        ("placement: {rank_cost: inf}", "0 <= rank_cost <= 1"),
        ("placement: {rank_cost: -0.1}", "0 <= rank_cost <= 1"),
        ("placement: {rank_costs: 0.1}", "placement.rank_costs: there is no such field"),
        ("retry: {atempts: 1}", "retry.atempts: there is no such field"),
        ("breaker: {failure: 1}", "breaker.failure: there is no such field"),
        ("versions: {ttl: 1}", "versions.ttl: there is no such field"),
        ("http: {idle_timeout_s: inf}", "http.idle_timeout_s: a finite number"),
        ("shutdown_grace_s: inf", "shutdown_grace_s: a finite number"),
        ("replicas: ['http://a:99999']", "'http://a:99999': a port is"),
        ("replicas: ['dns://a:99999']", "'dns://a:99999': a port is"),
        ("objects: /no/such/file", "objects: there is no file"),
        ("objects: /dev/null", "objects: /dev/null is no regular file"),
        ("{objects: router.yaml, tenants_file: router.yaml}", "tenants_file and objects"),
        ("{objects: router.yaml, aliases_file: router.yaml}", "aliases_file and objects"),
        ("{objects: router.yaml, watch_namespaces: [a]}", "go with objects: kubernetes"),
        ("objects_namespace: a", "go with objects: kubernetes"),
        ("{objects: kubernetes, watch_namespaces: [No Name]}", "is no namespace"),
        ("{objects: kubernetes, objects_namespace: '*'}", "objects_namespace: one namespace"),
        ("keys_secret: a/b", "keys_secret: a name"),
    ],
)
def test_what_cannot_work_is_refused_with_its_place(tmp_path, text, place, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput) as refused:
        config(tmp_path, text)
    assert place in refused.value.message
    assert refused.value.message.startswith(f"{tmp_path}/router.yaml: ")


def test_what_flags_say_is_not_laid_on_the_file(tmp_path):
    flags: dict[str, Any] = {"http": {"port": 99999}}
    with pytest.raises(InvalidInput, match=r"router\.yaml and the flags: http\.port is 99999"):
        config(tmp_path, "queue: {wait_s: 3}", **flags)
    with pytest.raises(InvalidInput, match=r"router\.yaml: queue\.wait_s: a number is wanted"):
        config(tmp_path, "queue: {wait_s: soon}", **flags)
    with pytest.raises(InvalidInput, match=r"^http\.port is 99999"):
        Config(None, flags, KEYS)


def test_objects_without_a_cluster_are_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(InvalidInput, match="no Kubernetes to ask"):
        config(tmp_path, "objects: kubernetes")


def test_all_namespaces_are_a_flag():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    route.add_arguments(parser)
    assert flag_settings(vars(parser.parse_args(["--all-namespaces"]))) == {
        "watch_namespaces": ["*"]
    }
    two = ["--watch-namespace", "a", "--watch-namespace", "b"]
    assert flag_settings(vars(parser.parse_args(two))) == {"watch_namespaces": ["a", "b"]}
    with pytest.raises(InvalidInput, match="exclude each other"):
        flag_settings(vars(parser.parse_args([*two, "--all-namespaces"])))


def test_with_objects_keys_are_asked_for(tmp_path):
    (tmp_path / "objects.yaml").touch()
    text = f"objects: {tmp_path}/objects.yaml"
    settings = config(tmp_path, text, secrets=Secrets()).settings
    assert settings.resolved_auth(Secrets()) == "keys"
    assert settings.http.host == "0.0.0.0"
    assert config(tmp_path, f"{text}\nauth: open", secrets=Secrets()).settings.auth == "open"


def test_a_secret_is_no_setting_of_the_file_and_in_no_message(tmp_path):
    key = f"mural_{'a' * 16}_{'s' * 43}"
    with pytest.raises(InvalidInput) as refused:
        config(tmp_path, f"auth: {key}")
    assert "s" * 10 not in refused.value.message
    with pytest.raises(InvalidInput):
        config(tmp_path, f"api_keys: [{key}]")


def test_who_a_replicas_url_names_is_in_no_message(tmp_path):
    with pytest.raises(InvalidInput) as refused:
        config(tmp_path, "replicas: ['http://me:hidden@a:1']")
    assert "a:1" in refused.value.message
    assert "hidden" not in refused.value.message


ROUTE = ["--port", "0", "--no-admin"]


def run_route(*flags: str) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    route.add_arguments(parser)
    return route.run(parser.parse_args([*ROUTE, *flags]))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"one\ntwo\n", "one word"),
        (b"one\r\nx-mural-tenant: acme", "one word"),
        (b"one two", "one word"),
        (b"o\x00ne", "one word"),
        (b"a" * 5000, "one word"),
        ("schlüssel".encode(), "is not ASCII"),
        (None, "No such file"),
    ],
)
def test_a_token_that_cannot_stand_in_a_header_is_refused_and_not_shown(
    tmp_path, capsys, content, problem
):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    assert run_route("--router-token-file", str(path)) == 1
    message = capsys.readouterr().err
    assert "--router-token-file" in message
    assert problem in message
    assert "one\n" not in message
    assert "tenant" not in message


def test_a_token_of_the_environment_is_held_to_the_same(monkeypatch, capsys):
    monkeypatch.setenv("MURAL_ROUTER_TOKEN", "one\ntwo")
    assert run_route() == 1
    message = capsys.readouterr().err
    assert "MURAL_ROUTER_TOKEN" in message
    assert "two" not in message


def test_an_access_log_that_cannot_be_written_is_told_at_the_start(tmp_path, capsys):
    assert run_route("--access-log", str(tmp_path / "no" / "log")) == 1
    message = capsys.readouterr().err
    assert "access_log" in message
    assert "no/log: No such file" in message


async def test_a_changed_file_is_taken_at_the_second_look_and_a_bad_one_changes_nothing(tmp_path):
    one, taken = config(tmp_path, "queue: {wait_s: 3}\n"), list[RouterSettings]()
    path = tmp_path / "router.yaml"
    path.write_text("queue: {wait_s: 4}\n")
    await one.poll(taken.append)
    assert not taken
    await one.poll(taken.append)
    assert [each.queue.wait_s for each in taken] == [4]
    path.write_text("queue: {wait_s: -4}\n")
    for _ in range(3):
        await one.poll(taken.append)
    assert len(taken) == 1
    assert (one.numbers.reloads, one.numbers.refused, one.numbers.stale) == (1, 1, True)
    assert one.settings.queue.wait_s == 4
    path.write_text("queue: {wait_s: 4}\n")
    await one.poll(taken.append)
    assert (len(taken), one.numbers.stale) == (1, False)


async def test_what_needs_a_restart_is_said_for_as_long_as_it_does(tmp_path, caplog):
    one, taken = config(tmp_path, "http: {port: 1}\n"), list[RouterSettings]()
    for wait_s in (5, 6):
        text = f"http: {{port: 2}}\nqueue: {{wait_s: {wait_s}}}\n"
        (tmp_path / "router.yaml").write_text(text)
        for _ in range(3):
            await one.poll(taken.append)
        assert (one.settings.http.port, one.settings.queue.wait_s) == (1, wait_s)
        assert taken[-1] == one.settings
        assert one.numbers.stale
    assert caplog.text.count("next start: http") == 2
    (tmp_path / "router.yaml").write_text("http: {port: 1}\nqueue: {wait_s: 6}\n")
    for _ in range(3):
        await one.poll(taken.append)
    assert not one.numbers.stale


@pytest.mark.parametrize("first", ["objects", "aliases_file"])
async def test_aliases_change_over_to_objects_and_back_with_a_restart(tmp_path, caplog, first):
    then = "aliases_file" if first == "objects" else "objects"
    for name in (first, then):
        (tmp_path / name).touch()
    one, taken = config(tmp_path, f"{first}: {tmp_path / first}"), list[RouterSettings]()
    before = one.settings
    (tmp_path / "router.yaml").write_text(f"{then}: {tmp_path / then}\nqueue: {{wait_s: 4}}\n")
    for _ in range(3):
        await one.poll(taken.append)
    assert (taken[0].objects, taken[0].aliases_file) == (before.objects, before.aliases_file)
    assert taken[0].queue.wait_s == 4
    assert "next start: aliases_file, " in caplog.text
    assert one.numbers.stale


async def test_settings_that_cannot_be_used_are_refused_once_and_taken_when_they_can(
    tmp_path, caplog
):
    one, taken, usable = config(tmp_path, "queue: {wait_s: 3}\n"), list[RouterSettings](), False

    def use(settings: RouterSettings) -> None:
        if not usable:
            raise InvalidInput("What they name is broken.")
        taken.append(settings)

    (tmp_path / "router.yaml").write_text("queue: {wait_s: 4}\n")
    for _ in range(4):
        await one.poll(use)
    assert (one.numbers.reloads, one.numbers.refused, one.numbers.stale) == (0, 1, True)
    assert one.settings.queue.wait_s == 3
    assert caplog.text.count("What they name is broken.") == 1
    usable = True
    await one.poll(use)
    assert [each.queue.wait_s for each in taken] == [4]
    assert (one.numbers.reloads, one.numbers.stale) == (1, False)


async def test_another_list_of_replicas_takes_the_place_of_the_first():
    def listed(*texts: str) -> Discovery:
        return StaticDiscovery(parse_endpoint(text) for text in texts)

    discovery = ConfiguredDiscovery(listed("http://a:1"))
    watch = discovery.watch()
    assert [each.name for each in await anext(watch)] == ["a:1"]
    following = asyncio.create_task(_names(watch))
    await asyncio.sleep(0)
    discovery.use(listed("http://b:1", "http://c:1"))
    assert await following == ["b:1", "c:1"]
    await watch.aclose()


async def _names(watch) -> list[str]:
    found: tuple[Endpoint, ...] = await anext(watch)
    return [each.name for each in found]


def test_settings_of_the_documentation_are_settings():
    """Whatever the how-to shows is read without an error."""
    text = Path("docs/how-to/run-a-router.md").read_text()
    blocks = [part.partition("```")[0] for part in text.split('```yaml title="router.yaml"\n')[1:]]
    assert blocks
    from mural_resolvers.strict_yaml import parse_yaml

    for block in blocks:
        raw = parse_yaml(block.encode())
        assert isinstance(raw, dict)
        names = {str(name) for name in raw}
        assert names <= set(RouterSettings.__struct_fields__)
        convert_settings({str(k): v for k, v in raw.items() if not str(k).endswith("_file")}, KEYS)
