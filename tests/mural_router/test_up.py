"""`mural up`: what it starts, in which order it ends, and what happens when a part of it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from mural_resolvers.errors import InvalidInput
from mural_router.up import Child, Plan, Supervisor, make_plan

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
    return Plan((child("one"), child("two")), child("router"), environment)


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
    with pytest.raises(InvalidInput, match="one could not start"):
        await Supervisor(plan_of(tmp_path, broken=True)).run()
    assert "router starts" not in await events(tmp_path)


def test_servers_believe_only_this_router_and_share_a_store_and_the_cores(tmp_path):
    store = tmp_path / "store"
    plan = make_plan({"adapters": str(store), "replicas": 3, "model": "m", "port": 1234})
    assert store.is_dir()
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
