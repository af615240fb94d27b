"""The core in its own process: its start, its answers over the border, and its death."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.errors import AdapterNotFound, InvalidInput, Unavailable, UnusableAdapter
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_server.catalog import OPERATOR, AdapterCatalog
from mural_server.engine.build import build_core
from mural_server.engine.client import EngineDead
from mural_server.engine.core import HEARTBEAT_S
from mural_server.engine.messages import EngineRequest, RequestDelta
from mural_server.engine.process import ProcessEngine, start_engine, started_core
from mural_server.models import source
from mural_server.models.errors import UnsupportedModel
from mural_server.models.source import load_tokenizer, tokenizer_state
from mural_server.sampling_params import GenerationDefaults, SamplingParams
from mural_server.settings import EngineSettings, SettingsError

if TYPE_CHECKING:
    from tests.mural_server.conftest import OracleOf

BOUND_S = 60.0


def settings_of(model: Path, **changes: object) -> EngineSettings:
    options: dict[str, object] = {
        "dtype": "float32",
        "cpu_threads": 1,
        "kv_cache_memory_bytes": 4 << 20,
        "max_loras": 2,
        "max_cpu_loras": 4,
    }
    return EngineSettings(model=str(model), **(options | changes))  # type: ignore[arg-type]


def request_of(name: str, count: int = 8, lora: LoRARequest | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[5, 6, 7, 8],
        sampling=SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
        lora=lora,
    )


async def collect(engine: ProcessEngine, request: EngineRequest) -> list[RequestDelta]:
    return [delta async for delta in engine.generate(request)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(tiny_model: Callable[[str], Path]) -> AsyncIterator[ProcessEngine]:
    """One core for the tests that leave it as it was."""
    engine, *_ = await start_engine(settings_of(tiny_model("llama")))
    yield engine
    await engine.close()


@pytest.fixture
async def engine(tiny_model: Callable[[str], Path]) -> AsyncIterator[ProcessEngine]:
    engine, *_ = await start_engine(settings_of(tiny_model("llama")))
    yield engine
    await engine.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_adapters_are_loaded_used_and_freed_over_the_border(
    shared_engine: ProcessEngine, peft_oracle: OracleOf
) -> None:
    oracle = peft_oracle("llama")
    folder = oracle.folder("all")
    lora = LoRARequest("acme:v1", 1, str(folder))
    base, adapted = await asyncio.gather(
        collect(shared_engine, request_of("base")),
        collect(shared_engine, request_of("adapted", lora=lora)),
    )
    for deltas, where in ((base, None), (adapted, folder)):
        ids = [token for delta in deltas for token in delta.token_ids]
        assert ids == oracle.answer(where, [5, 6, 7, 8], 8).token_ids
        assert deltas[-1].finish_reason == "length"
    info = await shared_engine.add_lora(lora, level="slot", pinned=True)
    assert (info.level, info.pinned, info.rank) == ("slot", True, 8)
    freed = await shared_engine.remove_lora(1)
    assert freed.slot > 0
    assert freed.host == info.bytes
    with pytest.raises(AdapterNotFound):
        await shared_engine.pin_lora(1, pinned=True)
    await shared_engine.check_integrity()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_on_disk_is_told_by_what_it_will_take_in_host_memory(
    shared_engine: ProcessEngine, peft_oracle: OracleOf, tmp_path: Path
) -> None:
    folder = tmp_path / "acme/default/v1"
    shutil.copytree(peft_oracle("llama").folder("all"), folder)
    weights = folder / "adapter_model.safetensors"
    halved = {key: tensor.half() for key, tensor in load_file(weights).items()}
    save_file(halved, weights)
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry(
        [DirectoryResolver(tmp_path)], shared_engine.info.base_spec, ids
    )
    catalog = AdapterCatalog(shared_engine, registry, ids, served=("tiny",), adapter_wait_s=BOUND_S)
    found = await catalog.find(OPERATOR, "acme:v1")
    [on_disk] = catalog.view()
    assert found.lora is not None
    taken = await shared_engine.add_lora(found.lora)
    await shared_engine.remove_lora(found.lora.lora_int_id)
    assert (on_disk.state, on_disk.bytes) == ("disk", taken.bytes)
    await catalog.close()
    await registry.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_is_checked_and_nothing_of_it_kept(
    shared_engine: ProcessEngine, peft_oracle: OracleOf, tmp_path: Path
) -> None:
    good = peft_oracle("llama").folder("all")
    spoilt = tmp_path / "spoilt"
    shutil.copytree(good, spoilt)
    weights = load_file(spoilt / "adapter_model.safetensors")
    name = sorted(weights)[0]
    weights[name][0, 0] = float("nan")
    save_file(weights, spoilt / "adapter_model.safetensors")

    await shared_engine.check_lora(LoRARequest("acme:v1", 7, str(good)))
    with pytest.raises(UnusableAdapter, match="NaN"):
        await shared_engine.check_lora(LoRARequest("acme:v2", 8, str(spoilt)))

    await shared_engine.check_integrity()
    assert {7, 8}.isdisjoint(info.lora_int_id for info in shared_engine.stats().adapters)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_that_is_closed_early_frees_its_blocks(shared_engine: ProcessEngine) -> None:
    stream = shared_engine.generate(request_of("long", 200))
    await anext(stream)
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()
    # A later answer comes only after the abort was handled.
    await collect(shared_engine, request_of("short", 1))
    await shared_engine.check_integrity()
    # The core tells of its state when it falls idle, before the reply to a later call.
    await shared_engine.check_integrity()
    assert shared_engine.stats().kv_usage == 0.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_cannot_be_is_refused_alone(shared_engine: ProcessEngine) -> None:
    request = request_of("bad")
    request.prompt_token_ids = [1_000_000]
    good, [refusal] = await asyncio.gather(
        collect(shared_engine, request_of("good")), collect(shared_engine, request)
    )
    assert len(good) == 8
    assert (refusal.finish_reason, refusal.error_status) == ("error", 400)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_id_in_use_is_refused(shared_engine: ProcessEngine) -> None:
    stream = shared_engine.generate(request_of("twice", 50))
    await anext(stream)
    with pytest.raises(InvalidInput, match="in use"):
        await anext(shared_engine.generate(request_of("twice")))
    assert isinstance(stream, AsyncGenerator)
    await stream.aclose()


async def test_a_killed_core_ends_every_stream_and_call_in_bounded_time(
    engine: ProcessEngine,
) -> None:
    streams = [
        asyncio.create_task(collect(engine, request_of(f"r{i}", 10_000 // 50))) for i in range(3)
    ]
    first = engine.generate(request_of("first", 200))
    await anext(first)
    call = asyncio.create_task(engine.remove_lora(77, drain_timeout_s=BOUND_S))
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(BOUND_S):
        reason = await engine.wait_dead()
        results = await asyncio.gather(*streams, call, return_exceptions=True)
    assert "SIGKILL" in reason
    assert not engine.alive
    # A stream or call may have ended just before; none is left without an end.
    assert all(isinstance(r, EngineDead) or not isinstance(r, BaseException) for r in results)
    with pytest.raises(EngineDead, match="SIGKILL"):
        async for _ in first:
            pass
    with pytest.raises(EngineDead):
        await engine.add_lora(LoRARequest("x", 1, "/nowhere"))


async def test_a_core_that_stands_still_is_ended_and_its_streams_with_it(
    tiny_model: Callable[[str], Path],
) -> None:
    engine, *_ = await start_engine(
        settings_of(tiny_model("llama"), enable_lora=False), stall_timeout_s=HEARTBEAT_S + 3.0
    )
    # While tokens come, the core is never silent for as long as a heartbeat.
    engine._stall_timeout_s = 1.5
    try:
        stream = engine.generate(request_of("first", 200))
        await anext(stream)
        await anext(stream)
        os.kill(engine.pid, signal.SIGSTOP)
        async with asyncio.timeout(BOUND_S):
            assert "stood still" in await engine.wait_dead()
            with pytest.raises(EngineDead, match="stood still"):
                async for _ in stream:
                    pass
    finally:
        await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)


async def test_a_start_tells_of_the_models_texts_and_closing_leaves_nothing(
    tiny_model: Callable[[str], Path],
) -> None:
    model = tiny_model("llama")
    engine, tokenizer, defaults = await start_engine(settings_of(model, enable_lora=False))
    assert tokenizer == tokenizer_state(load_tokenizer(str(model)))
    assert defaults == GenerationDefaults(temperature=0.7)
    pid, folder = engine.pid, engine.folder
    await engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_cache_memory_bytes": 20_000, "max_model_len": 256}, "set kv_cache_memory_bytes to"),
        ({"max_model_len": 100_000}, "set max_model_len to that or less"),
        ({"max_cpu_loras": 1}, "raise the first or lower"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "raise the first or lower",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(
    changes: dict[str, object], sentence: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        build_core(settings_of(tiny_model("llama"), **changes))


def test_a_tokenizer_that_cannot_be_used_leaves_no_core_behind(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tokenizer: object) -> None:
        raise UnsupportedModel("not a fast one")

    before = psutil.Process().children()
    monkeypatch.setattr(source, "tokenizer_state", refuse)
    with pytest.raises(UnsupportedModel, match="not a fast one"):
        started_core(settings_of(tiny_model("llama")))
    # The loader's process is gone too.
    assert psutil.Process().children() == before


async def test_the_cores_sentence_at_the_start_comes_over_the_border(
    tiny_model: Callable[[str], Path],
) -> None:
    settings = settings_of(tiny_model("llama"), max_model_len=100_000)
    with pytest.raises(SettingsError, match="set max_model_len to that or less"):
        await start_engine(settings)


async def test_a_model_that_is_not_there_is_refused_at_the_start() -> None:
    with pytest.raises(SettingsError, match="/nowhere/at/all"):
        await start_engine(settings_of(Path("/nowhere/at/all")))


def watching_core(then: str) -> subprocess.Popen[bytes]:
    """A child that watches for its parent's end as a core does, and then does ``then``."""
    program = (
        "import time; from mural_server.engine.process import _end_with_parent; "
        f"_end_with_parent(); {then}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_core_that_ends_by_itself_is_not_disturbed_by_its_watch_of_the_parent() -> None:
    # Long enough for the watch to have begun to read.
    with watching_core("time.sleep(0.3); raise SystemExit(7)") as child:
        assert child.wait(BOUND_S) == 7
        assert child.stderr is not None
        assert child.stderr.read() == b""


def test_a_core_ends_when_its_parent_is_gone() -> None:
    with watching_core(f"time.sleep({2 * BOUND_S})") as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(BOUND_S) == 0


async def test_pipes_that_cannot_be_made_are_refused_with_what_to_change(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    for place in (folder, tmp_path / "absent"):
        monkeypatch.setattr("tempfile.tempdir", str(place))
        with pytest.raises(SettingsError, match="set TMPDIR"):
            await start_engine(settings_of(tiny_model("llama")))
    assert list(folder.iterdir()) == []


async def test_a_core_that_stands_still_is_told_as_unavailable_and_can_be_closed(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mural_server.engine.connection.CALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr("mural_server.engine.process.STOP_TIMEOUT_S", 0.2)
    engine, *_ = await start_engine(settings_of(tiny_model("llama")))
    os.kill(engine.pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="does not answer"):
        await engine.add_lora(LoRARequest("x", 1, "/nowhere"))
    await asyncio.wait_for(engine.close(), BOUND_S)
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)
