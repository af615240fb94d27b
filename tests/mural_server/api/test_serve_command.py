"""``mural serve`` as a user starts it: the real engine, the real openai client, real signals."""

from __future__ import annotations

import asyncio
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import openai
import psutil
import pytest

from mural_server.protocol import ControlClient, ControlError

START_S = 240.0
END_S = 60.0
ADDRESSES = re.compile(r"OpenAI API on (http://\S+), control API on (http://\S+)")


@dataclass
class Serving:
    """A running ``mural serve``."""

    process: subprocess.Popen[bytes]
    log: list[str] = field(default_factory=list)
    url: str = ""
    control_url: str = ""

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        stderr = self.process.stderr
        assert stderr is not None
        pending = b""
        while not self.url:
            ready, _, _ = select.select([stderr], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"not up in time: {self.log}"
            data = os.read(stderr.fileno(), 65536)
            assert data, f"ended while starting: {self.log}"
            *lines, pending = (pending + data).split(b"\n")
            self.log += [line.decode() for line in lines]
            for line in self.log:
                if found := ADDRESSES.search(line):
                    self.url, self.control_url = found.groups()

    def rest(self) -> str:
        """The exit's log, once it has ended."""
        _, stderr = self.process.communicate(timeout=END_S)
        return stderr.decode()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


def start(model: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "mural_server.commands", str(model), "--port", "0"]
    sizes = ["--control-port", "0", "--dtype", "float32", "--cpu-threads", "1"]
    sizes += ["--kv-cache-memory-bytes", "4Mi", "--served-model-name", "tiny"]
    return subprocess.Popen(
        [*command, *sizes, *flags],
        stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def serving(tiny_model, peft_oracle, tmp_path: Path) -> Iterator[Serving]:
    root = tmp_path / "adapters"
    for version, adapter in (("v1", "all"), ("v2", "patterns")):
        shutil.copytree(peft_oracle("llama").folder(adapter), root / "acme" / "default" / version)
    process = start(tiny_model("llama"), "--adapter-dir", str(root), "--max-loras", "2")
    serving = Serving(process)
    try:
        serving.wait_until_up()
        yield serving
    finally:
        process.kill()
        process.communicate()


PROMPT = [40, 41, 42, 43, 44]
LONG = {"ignore_eos": True}


def expected(peft_oracle, adapter: str | None) -> list[int]:
    oracle = peft_oracle("llama")
    folder = None if adapter is None else oracle.folder(adapter)
    return oracle.answer(folder, PROMPT, 12).token_ids


async def test_base_and_adapters_answer_as_peft_does_and_a_stop_drains(serving, peft_oracle):
    client = openai.AsyncOpenAI(
        base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60
    )

    async def tokens(model: str) -> list[str]:
        answer = await client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.model == model
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        return logprobs.tokens

    found = await asyncio.gather(*(tokens(model) for model in ("tiny", "acme:v1", "acme:v2")))
    names = serving.client()
    for texts, adapter in zip(found, (None, "all", "patterns"), strict=True):
        wanted = expected(peft_oracle, adapter)
        assert texts == [token_text(serving, token) for token in wanted]
    assert len({tuple(texts) for texts in found}) == 3
    assert {model.id for model in names.models.list()} == {"tiny", "acme:v1", "acme:v2"}
    assert has_torch(core_of(serving))
    assert not has_torch(psutil.Process(serving.process.pid))

    stream = await client.completions.create(
        model="acme:v1", prompt=PROMPT, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = aiter(stream)
    await anext(chunks)
    serving.process.send_signal(signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason async for chunk in chunks]
    assert reasons[-1] == "length"
    log = serving.rest()
    assert serving.process.returncode == 0, log
    assert len(serving.log) <= 10
    assert "Traceback" not in log


def has_torch(process: psutil.Process) -> bool:
    """Whether it has the library loaded, which takes seconds and hundreds of megabytes."""
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def core_of(serving: Serving) -> psutil.Process:
    [core] = [
        child
        for child in psutil.Process(serving.process.pid).children()
        if "mural_server.engine.process" in " ".join(child.cmdline())
    ]
    return core


async def test_a_stop_is_told_at_once_and_what_runs_may_end(serving):
    base = f"{serving.url}/v1"
    client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60)
    port = urlsplit(serving.control_url).port
    assert port is not None
    control = ControlClient("127.0.0.1", port)
    core = core_of(serving)
    async with asyncio.timeout(END_S), aclosing(control.states()) as states:
        assert (await anext(states)).ready
        stream = await client.completions.create(
            model="acme:v1", prompt=PROMPT, max_tokens=60, stream=True, extra_body=LONG
        )
        chunks = aiter(stream)
        await anext(chunks)
        # The running stream stands still, so that the server is draining for as long as we look.
        core.suspend()
        try:
            serving.process.send_signal(signal.SIGTERM)
            state = await anext(states)
            while state.accepting:
                state = await anext(states)
            assert not state.ready
            assert not await control.ready()
            assert await control.healthy()
            assert (await control.drain()).open_sequences == 1
            for model in ("tiny", "acme:v2"):
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.completions.create(model=model, prompt=PROMPT)
                assert caught.value.status_code == 503
                assert caught.value.response.headers["retry-after"]
        finally:
            core.resume()
        reasons = [chunk.choices[0].finish_reason async for chunk in chunks]
    assert reasons[-1] == "length"
    assert "Traceback" not in serving.rest()
    assert serving.process.returncode == 0


async def test_an_idle_server_says_that_it_stops_before_it_is_gone(serving):
    port = urlsplit(serving.control_url).port
    assert port is not None
    told: list[bool] = []

    async def follow() -> None:
        async with aclosing(ControlClient("127.0.0.1", port).states()) as states:
            async for state in states:
                if not told:
                    serving.process.send_signal(signal.SIGTERM)
                told.append(state.accepting)

    with pytest.raises(ControlError, match="ended the stream"):
        await asyncio.wait_for(follow(), END_S)
    assert (told[0], told[-1]) == (True, False)
    serving.rest()
    assert serving.process.returncode == 0


def token_text(serving: Serving, token: int) -> str:
    answer = openai.OpenAI(base_url=serving.url, api_key="none").post(
        "/detokenize", body={"model": "tiny", "tokens": [token]}, cast_to=dict[str, str]
    )
    return answer["prompt"]


def test_the_cores_death_is_told_to_clients_and_to_the_supervisor(serving):
    core = core_of(serving)
    stream = serving.client().completions.create(
        model="acme:v1", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    core.kill()
    with pytest.raises(openai.APIError, match="died"):
        for _ in chunks:
            pass
    assert "Traceback" not in serving.rest()
    assert serving.process.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", "512", "--kv-cache-memory-bytes", "4096"), "kv_cache_memory_bytes"),
        (("--lora-modules", "sql=/nowhere"), "--lora-modules sql"),
    ],
)
def test_a_start_that_fails_is_one_sentence(tiny_model: Callable[[str], Path], flags, words):
    process = start(tiny_model("llama"), *flags)
    _, stderr = process.communicate(timeout=START_S)
    lines = [line for line in stderr.decode().splitlines() if " INFO " not in line]
    assert process.returncode == 1
    assert len(lines) == 1, lines
    assert lines[0].startswith("mural serve: ")
    assert words in lines[0]
