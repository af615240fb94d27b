"""Followers of simulated servers: what is trusted, for how long, and what wakes whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mural_operator.credentials import Credentials, CredentialsMissing, PoolCredentials
from mural_operator.replicas import Follower, Replicas, Target
from mural_server.protocol import Load
from tests.mural_operator.simulated_server import Knobs, SimulatedServer

WAIT_S = 20


class Keys(PoolCredentials):
    """Stands for a pool's credentials."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.missing = ""
        self.suspected = 0

    def now(self) -> Credentials:
        if self.missing:
            raise CredentialsMissing(self.missing)
        return Credentials(**self.fields)

    def suspect(self) -> None:
        self.suspected += 1


class Followed:
    """A running set of followers, and what it told."""

    def __init__(self, keys: Keys) -> None:
        self.replicas = Replicas(keys, self._take)
        self.told: list[bool] = []
        self._changed = asyncio.Event()

    def _take(self, pod: str, load_only: bool) -> None:
        self.told.append(load_only)
        self._changed.set()

    def follow(self, *servers: SimulatedServer) -> None:
        self.replicas.follow(target_of(server, f"pod-{at}") for at, server in enumerate(servers))

    async def until(self, holds: Callable[[Follower], object], pod: str = "pod-0") -> Follower:
        async with asyncio.timeout(WAIT_S):
            while True:
                follower = self.replicas.get(pod)
                if follower is not None and holds(follower):
                    return follower
                await self._changed.wait()
                self._changed.clear()


def target_of(server: SimulatedServer, pod: str) -> Target:
    return Target(
        pod, f"uid of {pod}", server.host, server.port, server.control_port, server.engine
    )


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
async def followed(keys) -> AsyncIterator[Followed]:
    followed = Followed(keys)
    yield followed
    await followed.replicas.close()


async def test_what_a_server_holds_is_known_by_exact_names(start_simulated, followed):
    server = await start_simulated()
    server.hold("acme:v1")
    server.hold("acme/support:v2")
    server.hold("shared-by-an-admin")
    followed.follow(server)
    follower = await followed.until(lambda one: one.state)
    assert set(follower.state.adapters) == {
        "acme/default:v1",
        "acme/support:v2",
        "shared-by-an-admin",
    }
    assert follower.state.adapters["acme/default:v1"].name == "acme/default:v1"


async def test_a_change_of_load_alone_is_told_apart_from_a_change_of_what_is_held(
    start_simulated, followed
):
    server = await start_simulated()
    server.hold("acme:v1")
    followed.follow(server)
    await followed.until(lambda one: one.state)
    followed.told.clear()
    server.set_load(Load(running=3))
    server.set_rate("acme:v1", 12.0)
    await followed.until(lambda one: one.state.adapters["acme/default:v1"].load == 12.0)
    assert followed.told
    assert all(followed.told)
    server.lose("acme:v1")
    await followed.until(lambda one: one.state.adapters["acme/default:v1"].level == "disk")
    assert not all(followed.told)


async def test_a_process_that_is_gone_holds_nothing_and_its_successor_is_found_by_itself(
    start_simulated, followed
):
    server = await start_simulated()
    server.hold("acme:v1")
    followed.follow(server)
    await followed.until(lambda one: one.state)
    await server.stop()
    lost = await followed.until(lambda one: one.state is None)
    assert lost.error
    await server.restart()
    again = await followed.until(lambda one: one.state)
    assert again.state.adapters == {}
    assert again.error == ""


async def test_a_silent_server_is_trusted_for_a_bounded_time(start_simulated, keys):
    server = await start_simulated(knobs=Knobs(heartbeat_s=0.05))
    changed = asyncio.Event()
    from mural_operator.replicas import MuralFollower

    follower = MuralFollower(
        target_of(server, "pod-0"), keys, lambda _: changed.set(), stale_after_s=0.5
    )
    running = asyncio.create_task(follower.run())
    async with asyncio.timeout(WAIT_S):
        while follower.state is None:
            await changed.wait()
            changed.clear()
        server.freeze()
        while follower.state is not None:
            await changed.wait()
            changed.clear()
    server.thaw()
    async with asyncio.timeout(WAIT_S):
        while follower.state is None:
            await changed.wait()
            changed.clear()
    running.cancel()


async def test_a_token_that_is_not_accepted_has_the_secret_read_again(start_simulated):
    server = await start_simulated(token="right")
    keys = Keys(token="wrong")
    followed = Followed(keys)
    followed.follow(server)
    await followed.until(lambda one: one.error)
    assert keys.suspected
    keys.fields["token"] = "right"
    await followed.until(lambda one: one.state)
    await followed.replicas.close()


async def test_a_missing_secret_is_told_as_the_pod_s_trouble(start_simulated, followed, keys):
    server = await start_simulated()
    keys.missing = "the Secret control cannot be read"
    followed.follow(server)
    follower = await followed.until(lambda one: one.error)
    assert follower.error == keys.missing
    assert follower.tried


async def test_a_vllm_pod_s_adapters_are_those_that_it_lists_with_a_parent(
    start_simulated, followed
):
    server = await start_simulated(engine="vllm")
    followed.follow(server)
    follower = await followed.until(lambda one: one.models is not None)
    assert follower.models.base_names == ("tiny",)
    assert follower.models.adapters == frozenset()
    await follower.warm("acme/default:v1")
    await followed.until(lambda one: one.models.adapters == {"acme/default:v1"})
    assert server.count("complete", "acme:v1") == 1
    await follower.forget("acme/default:v1")
    await follower.forget("acme/default:v1")
    await followed.until(lambda one: one.models.adapters == frozenset())


async def test_pods_that_leave_are_not_followed_and_one_that_moved_is_followed_anew(
    start_simulated, followed
):
    first, second = await start_simulated(), await start_simulated()
    followed.follow(first)
    before = await followed.until(lambda one: one.state)
    followed.follow(second)
    after = await followed.until(lambda one: one.state and one is not before)
    assert after.target.control_port == second.control_port
    followed.follow()
    assert followed.replicas.get("pod-0") is None
    assert followed.replicas.settled
