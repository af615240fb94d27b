"""Routers in processes of their own: killed, frozen, and at work at the same time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Processes take seconds to start, and what they are about is the same for both servers.
pytestmark = pytest.mark.parametrize(
    "server",
    ["valkey-server", pytest.param("redis-server", marks=pytest.mark.full)],
    indirect=True,
)

PROGRAM = Path(__file__).with_name("limiter_process.py")
DEADLINE_S = 30


class Router:
    """One process with a limiter."""

    def __init__(self, url: str, limits: dict[str, int], lease_s: float, held_s: float) -> None:
        arguments = [url, json.dumps(limits), str(lease_s), str(held_s)]
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def send(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *words: object) -> Any:
        self.send(*words)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Router]


@pytest.fixture
def start(store: Any) -> Iterator[Start]:
    """``start(lease_s=…, held_s=…, **limits)``: a router at the store."""
    routers: list[Router] = []

    def start(lease_s: float = 10.0, held_s: float = 12.0, **limits: int) -> Router:
        routers.append(Router(store.url, limits, lease_s, held_s))
        return routers[-1]

    yield start
    for router in routers:
        router.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_two_processes_at_the_same_time_keep_one_limit(start: Start) -> None:
    limits = {"requests_per_minute": 300, "tokens_per_minute": 1_000_000, "concurrency": 250}
    routers = [start(**limits), start(**limits)]
    admitted = 0
    for _ in range(20):
        for router in routers:
            router.send("enter", 40, 1, 100)
        admitted += sum(router.answer() for router in routers)

    assert 200 <= admitted <= 250
    for router in routers:
        assert router.ask("close") == "closed"
    for router in routers:
        admitted += router.ask("enter", 400, 1, 100)
    assert admitted <= 300


def test_sequences_of_a_router_that_was_killed_are_free_after_a_while(start: Start) -> None:
    dying, other = (start(lease_s=0.5, held_s=1.0, concurrency=10) for _ in range(2))
    assert dying.ask("enter", 20, 1, 1) == 10
    assert other.ask("enter", 1, 1, 1) == 0

    dying.process.kill()

    got = 0

    def all_got() -> bool:
        nonlocal got
        got += other.ask("enter", 1, 1, 1)
        return got == 10

    until(all_got)
    assert other.ask("enter", 5, 1, 1) == 0


def test_what_a_killed_router_used_stays_counted(start: Start) -> None:
    dying, other = start(requests_per_minute=100), start(requests_per_minute=100)
    used = dying.ask("enter", 60, 1, 1)
    assert used == 60

    dying.process.kill()

    assert other.ask("enter", 100, 1, 1) <= 40


def test_a_router_that_was_frozen_uses_no_lease_of_before(start: Start) -> None:
    limits = {"requests_per_minute": 1000, "concurrency": 10}
    frozen, other = (start(lease_s=0.5, held_s=1.0, **limits) for _ in range(2))
    assert frozen.ask("enter", 6, 1, 1) == 6
    assert frozen.ask("close") == "closed"

    frozen.process.send_signal(signal.SIGSTOP)
    got = 0

    def all_got() -> bool:
        nonlocal got
        got += other.ask("enter", 1, 1, 1)
        return got == 10

    until(all_got)
    frozen.send("enter", 6, 1, 1)
    frozen.process.send_signal(signal.SIGCONT)

    # It had leased six sequences, which the other has now.
    assert frozen.answer() == 0
    assert other.ask("close") == "closed"
    until(lambda: frozen.ask("enter", 1, 1, 1) == 1)


def test_a_store_that_is_killed_under_load_costs_no_request_and_no_count(
    start: Start, server: Any
) -> None:
    limits = {"requests_per_minute": 1_000_000}
    routers = [start(**limits), start(**limits)]
    admitted = sum(router.ask("enter", 100, 1, 10) for router in routers)
    for _ in range(2):
        for router in routers:
            router.send("enter", 2000, 1, 10)
        server.kill()
        admitted += sum(router.answer() for router in routers)
        server.start()
        until(lambda: all(router.ask("usage") == [True, 2] for router in routers))

    assert admitted == 200 + 2 * 4000
