"""``mural serve`` as a contender, asked by streaming clients in this process."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping
from contextlib import closing
from typing import NamedTuple, TypeVar

import msgspec
import uvloop

from mural_server.bench.http_client import StreamingClient
from mural_server.bench.setup import BenchError, Job, Setup
from mural_server.bench.timing import RequestTimes, Sample

__all__ = ["OverHTTP"]

HOST = "127.0.0.1"
MODEL = "bench-base"
START_TIMEOUT_S = 300.0
START_POLL_S = 0.2
ROUND_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 60.0
SETTLED_TIMEOUT_S = 30.0
LOG_TAIL_BYTES = 3000

RESIDENT = re.compile(r'vllm:lora_adapter_loaded\{.*adapter_name="([^"]*)"')

T = TypeVar("T")


class Scrape(NamedTuple):
    """What /metrics told."""

    sums: Mapping[str, float]
    """Of each family, over its labels."""
    adapters: set[str]
    """Names of those in host memory."""


class OverHTTP:
    """A server in a child process and ``concurrency`` kept-alive connections; see `Contender`."""

    def __init__(self, setup: Setup) -> None:
        self._sizes = setup.sizes
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._clients: list[StreamingClient] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._port = _free_port()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "mural_server.commands", *_flags(setup, self._port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            self._run(self._wait_ready(), START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def start(self, jobs: list[Job]) -> list[str]:
        self.settle(jobs)
        self.run(jobs)
        return []

    def settle(self, jobs: list[Job]) -> None:
        self._run(self._reconnect(), ROUND_TIMEOUT_S)
        self._run(self._send(jobs, tokens=2), ROUND_TIMEOUT_S)

    def run(self, jobs: list[Job]) -> Sample:
        return self._run(self._round(jobs), ROUND_TIMEOUT_S)

    def check(self) -> None:
        self._run(self._wait_settled(), SETTLED_TIMEOUT_S)

    def close(self) -> None:
        if self._log.closed:
            return
        self._server.terminate()
        try:
            self._server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()
        self._runner.close()

    def _run(self, work: Coroutine[object, object, T], timeout_s: float) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(timeout_s):
                return await work

        try:
            return self._runner.run(bounded())
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise BenchError(
                f"The server did not answer ({type(error).__name__}: {error}). "
                f"Its last lines:\n{self._tail()}"
            ) from None

    def _tail(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace")

    async def _wait_ready(self) -> None:
        while self._server.poll() is None:
            try:
                client = await StreamingClient.connect(HOST, self._port)
                await client.get("/health")
            except (OSError, BenchError):
                await asyncio.sleep(START_POLL_S)
                continue
            await client.close()
            return
        raise BenchError(f"The server did not start:\n{self._tail()}")

    async def _reconnect(self) -> None:
        """New connections, since a server closes one that was idle while others were measured."""
        for client in self._clients:
            await client.close()
        self._clients = [
            await StreamingClient.connect(HOST, self._port) for _ in range(self._sizes.concurrency)
        ]
        await asyncio.gather(*(client.get("/health") for client in self._clients))

    async def _round(self, jobs: list[Job]) -> Sample:
        before = await self._metrics()
        started = time.perf_counter()
        times = await self._send(jobs, self._sizes.output_tokens)
        after = await self._metrics()
        if any(request.output_tokens != self._sizes.output_tokens for request in times):
            raise BenchError("An answer does not have the tokens that were asked for.")
        hits = "vllm:prefix_cache_hits_total"
        wanted = {job.adapter for job in jobs if job.adapter}
        return Sample(
            seconds=max(request.arrivals[-1] for request in times) - started,
            requests=times,
            prefix_hits=int(after.sums[hits] - before.sums[hits]),
            cold_adapters=len(wanted - before.adapters),
        )

    async def _send(self, jobs: list[Job], tokens: int) -> list[RequestTimes]:
        bodies = [_body(job, tokens) for job in jobs]
        return list(
            await asyncio.gather(
                *(c.complete(body) for c, body in zip(self._clients, bodies, strict=True))
            )
        )

    async def _metrics(self) -> Scrape:
        return _parsed((await self._clients[0].get("/metrics")).decode())

    async def _wait_settled(self) -> None:
        """The server tells of its state a quarter of a second late."""
        gauges = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "mural:open_sequences",
            "vllm:kv_cache_usage_perc",
        )
        while True:
            sums = (await self._metrics()).sums
            if not any(sums[gauge] for gauge in gauges):
                return
            await asyncio.sleep(START_POLL_S)


def _flags(setup: Setup, port: int) -> list[str]:
    sizes = setup.sizes
    return [
        *(setup.model, "--served-model-name", MODEL),
        *("--host", HOST, "--port", str(port), "--no-control", "--log-level", "warning"),
        *("--auth", "open", "--adapter-dir", setup.adapter_dir),
        *("--dtype", setup.dtype, "--cpu-threads", str(setup.threads)),
        *("--max-num-seqs", str(sizes.concurrency), "--max-loras", str(sizes.slots)),
        *("--max-cpu-loras", str(sizes.host_adapters)),
        *("--max-lora-rank", str(max(64, sizes.rank))),
    ]


def _body(job: Job, tokens: int) -> bytes:
    return msgspec.json.encode(
        {
            "model": job.adapter or MODEL,
            "prompt": job.prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _parsed(text: str) -> Scrape:
    sums: dict[str, float] = defaultdict(float)
    adapters = set()
    for line in text.splitlines():
        if line.startswith("#") or not line:
            continue
        series, _, value = line.rpartition(" ")
        sums[series.partition("{")[0]] += float(value)
        if match := RESIDENT.match(series):
            adapters.add(match[1])
    return Scrape(sums, adapters)


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
