"""Changed settings reach the running router, and a file with an error changes nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.names import parse_name
from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.placement import PlacementPolicy
from mural_router.routing.breaker import BreakerSettings
from mural_router.routing.options import RoutingOptions
from mural_router.routing.retry import RetrySettings
from mural_router.routing.versions import VersionSettings
from mural_router.running import Router
from mural_router.settings import RELOADED, Queueing, Secrets

BOUND_S = 60.0
SECRETS = Secrets(api_keys=("admin",), router_token="the-token")
FIRST = "replicas: ['http://127.0.0.1:1,name=first']\nbreaker: {failures: 3}\n"
CHANGED = """
replicas: ['http://127.0.0.1:1,name=second', 'http://127.0.0.1:2,name=third']
shared_names: [sql-expert]
aliases_file: %s
versions: {ttl_s: 7, timeout_s: 3, max_adapters: 77}
queue: {wait_s: 4, max_waiting: 44, max_waiting_per_tenant: 14}
retry: {attempts: 5, ratio: 0.5, min_per_s: 9}
breaker: {failures: 1, open_s: 60}
placement: {load_bound: 2, fill: 0.9}
"""


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    """By the settings of ``router.yaml``, as it follows its fleet."""
    (tmp_path / "router.yaml").write_text(FIRST)
    (tmp_path / "aliases.yaml").write_text("acme: {stable: [{version: v9}]}\n")
    router = Router(Config(tmp_path / "router.yaml", {}, SECRETS), LocalLimiter())
    following = asyncio.create_task(router.fleet.run())
    await names(router, "first")
    yield router
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await router.close()


async def names(router: Router, *wanted: str) -> None:
    """Until these are the fleet's replicas."""
    async with asyncio.timeout(BOUND_S):
        while [each.name for each in router.fleet.fleet.replicas] != list(wanted):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


async def reload(router: Router, path: Path, text: str) -> None:
    await asyncio.to_thread((path / "router.yaml").write_text, text)
    for _ in range(2):
        await router.config.poll(router.take_over)


async def test_every_setting_that_can_change_reaches_what_goes_by_it(
    router: Router, tmp_path: Path
) -> None:
    breaker = router.breakers.of("first")
    await reload(router, tmp_path, CHANGED % (tmp_path / "aliases.yaml"))
    stable = router.versions.resolve_now(parse_name("acme:stable"))
    arrived = {
        "shared_names, queue": router.routing.options
        == RoutingOptions(
            queue_wait_s=4.0, shared_names=frozenset({"sql-expert"}), router_token="the-token"
        ),
        "queue": (router.queue.max_waiting, router.queue.max_waiting_per_tenant) == (44, 14),
        "retry": router.routing.budget.settings
        == RetrySettings(attempts=5, ratio=0.5, min_per_s=9),
        "breaker": router.breakers.of("other").settings == BreakerSettings(failures=1, open_s=60),
        "placement": router.dispatch.policy == PlacementPolicy(load_bound=2, fill=0.9),
        "versions": router.versions.settings
        == VersionSettings(ttl_s=7, timeout_s=3, max_adapters=77),
        "aliases_file": stable is not None and stable.name.version == "v9",
    }
    assert [name for name, so in arrived.items() if not so] == []
    await names(router, "second", "third")
    tested = {part for name in arrived for part in name.split(", ")} | {"replicas"}
    assert tested == RELOADED
    now = router.dispatch.now
    breaker.failed(object(), now)
    assert breaker.state(now + 40) == "open", "one that was there before goes by them, too"
    # And back again: what is no longer said is the default once more.
    await reload(router, tmp_path, FIRST)
    await names(router, "first")
    assert router.routing.options == RoutingOptions(router_token="the-token")
    assert router.versions.overlay is None
    assert router.breakers.settings == BreakerSettings(failures=3)


@pytest.mark.parametrize("broken", ["queue: {wait_s: 0}", "acme: {stable: []}"])
async def test_an_error_in_the_file_or_in_what_it_names_changes_nothing(
    router: Router, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    def in_force() -> tuple[object, ...]:
        return (
            router.config.settings,
            router.routing.options,
            router.routing.budget.settings,
            router.breakers.settings,
            router.dispatch.policy,
            (router.queue.max_waiting, router.queue.max_waiting_per_tenant),
            router.versions.settings,
            router.versions.overlay,
        )

    before, changed = in_force(), CHANGED % (tmp_path / "aliases.yaml")
    if broken.startswith("queue"):
        changed = re.sub("queue: .*", broken, changed)
    else:
        (tmp_path / "aliases.yaml").write_text(broken)
    await reload(router, tmp_path, changed)
    assert in_force() == before
    assert [each.name for each in router.fleet.fleet.replicas] == ["first"]
    assert "the last good ones hold" in caplog.text
    numbers = router.config.numbers
    assert (numbers.reloads, numbers.refused, numbers.stale) == (0, 1, True)
    # What it names is put right; the settings themselves are as they were.
    (tmp_path / "aliases.yaml").write_text("acme: {stable: [{version: v9}]}\n")
    await reload(router, tmp_path, changed.replace("wait_s: 0", "wait_s: 4"))
    assert router.routing.options.queue_wait_s == 4.0
    await names(router, "second", "third")


async def test_a_file_that_says_nothing_any_more_takes_no_replica_away(
    router: Router, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for nothing in ("", "# as a full disk leaves it\n"):
        for _ in range(2):
            await reload(router, tmp_path, nothing)
    numbers = router.config.numbers
    assert (numbers.reloads, numbers.refused, numbers.stale) == (0, 1, True)
    assert caplog.text.count("says nothing any more") == 1
    assert router.config.settings.replicas
    assert router.breakers.settings == BreakerSettings(failures=3)
    await reload(router, tmp_path, FIRST)
    assert not numbers.stale


async def test_replicas_that_cannot_be_looked_for_change_nothing(router: Router) -> None:
    changed = msgspec.structs.replace(
        router.config.settings, queue=Queueing(wait_s=1), replicas=("ftp://nobody",)
    )
    with pytest.raises(InvalidInput):
        router.take_over(changed)
    assert router.routing.options == RoutingOptions(router_token="the-token")


# -- a process ------------------------------------------------------------------------------------


@dataclass
class Pod:
    """As much of a vLLM pod as a router looks at, and answers."""

    answered: int = 0
    endpoint: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        path = head.split(b" ", 2)[1]
        found = re.search(rb"content-length: (\d+)", head)
        await reader.readexactly(int(found[1]) if found else 0)
        page = {
            b"/metrics": b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n",
            b"/v1/models": b'{"object":"list","data":[{"id":"base","parent":null}]}',
            b"/v1/completions": b'{"choices":[{"text":"x"}]}',
        }.get(path, b"")
        self.answered += path == b"/v1/completions"
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(page), page)
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def pod() -> AsyncIterator[Pod]:
    made = Pod()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]},engine=vllm"
    yield made
    server.close()


@dataclass
class Route:
    """`mural route` as a process, and what it says."""

    process: asyncio.subprocess.Process
    said: list[str] = field(default_factory=list)

    async def says(self, pattern: str) -> str:
        """The first group of the first line, from now on, in which it is found."""
        assert self.process.stderr is not None
        async with asyncio.timeout(BOUND_S):
            while line := (await self.process.stderr.readline()).decode():
                self.said.append(line)
                if found := re.search(pattern, line):
                    return found[1]
        raise AssertionError("the router ended: " + "".join(self.said))


@asynccontextmanager
async def route(config: Path) -> AsyncIterator[Route]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mural_router.commands", "--config", str(config)),
        *("--port", "0", "--admin-port", "0", "--no-access-log"),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ,
    )
    yield Route(process)
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            await process.communicate()


def stale(metrics: httpx.Response) -> bool:
    return 'mural_router_file_stale{file="settings"} 1.0' in metrics.text.splitlines()


async def test_a_process_goes_by_its_changed_file_and_not_by_a_broken_one(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"

    def write(replicas: str, more: str = "") -> None:
        config.write_text(f"replicas: ['{replicas}']\n{more}")

    async with pod() as one, pod() as two, httpx.AsyncClient() as client:
        write(one.endpoint)
        async with route(config) as here:
            admin = await here.says(r"admin pages on (\S+)")
            at = await here.says(r"routing on (http://\S+)")

            async def ask() -> None:
                body = {"model": "base", "prompt": "hello"}
                answer = await client.post(f"{at}/v1/completions", json=body, timeout=BOUND_S)
                assert answer.status_code == 200, answer.text

            await ask()
            assert (one.answered, two.answered) == (1, 0)
            write(f"{two.endpoint},weight=2")
            await here.says("(settings reloaded)")
            async with asyncio.timeout(BOUND_S):
                while not two.answered:
                    await ask()
            before = one.answered
            assert not stale(await client.get(f"{admin}/metrics"))
            told = (await client.get(f"{admin}/debug/fleet")).json()["replicas"]
            assert [replica["weight"] for replica in told] == [2.0]
            write(one.endpoint, "queue: {wait_s: never}\n")
            assert "queue.wait_s" in await here.says("(settings are refused.*)")
            for _ in range(3):
                await ask()
            assert (one.answered, two.answered) == (before, 4)
            assert stale(await client.get(f"{admin}/metrics"))
