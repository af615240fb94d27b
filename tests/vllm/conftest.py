"""Real vLLM on a CPU, over an S3 that is moto's, beside Mural's own engine.

vLLM lives in an environment of its own (``make_environment.sh``); without it the suite is skipped
with "NOT RUN", or fails where ``MURAL_CI_FULL=1``. One server serves all tests of the suite.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import boto3
import httpx
import psutil
import pytest
import torch
import yaml
from moto.server import ThreadedMotoServer
from transformers import AutoModelForCausalLM

from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.s3 import S3Settings, S3Store
from mural_resolvers.versions import AliasTarget
from mural_server import LLM, SamplingParams
from mural_server.models.location import default_model_path
from mural_server.models.source import load_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
PUBLISHED = ("acme:v1", "acme:v2", "globex:v1", "globex:v2")
SERVED = ("acme:v1", "globex:v1")
BASE = "smollm2"
BUCKET = "murals"
# Room for acme:v1 and globex:v1 together (1.65 MB), and for nothing more.
QUOTA_BYTES = 2_000_000
MAX_TOKENS = 40
START_S, ANSWER_S, END_S = 420.0, 120.0, 30.0


class S3:
    """Moto's server, which can be down for a while; what it holds stays."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: ThreadedMotoServer | None = None

    def start(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    @contextmanager
    def down(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    async def publish(self) -> None:
        """All of the examples' adapters, and an alias."""
        store = S3Store(S3Settings(bucket=BUCKET, endpoint_url=self.url, region="us-east-1"))
        try:
            for text in PUBLISHED:
                name = parse_name(text)
                folder = EXAMPLES / "adapters" / name.tenant / name.adapter / name.version
                await store.publish(name, folder, build_manifest(folder))
            await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        finally:
            await store.close()


@dataclass
class VLLM:
    """A running vLLM."""

    client: httpx.Client
    log: Path
    port: int
    process: subprocess.Popen[bytes]

    def ask(self, model: str, prompt: list[int]) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        return self.client.post("/v1/completions", json=body)

    def text(self, model: str, prompt: list[int]) -> str:
        response = self.ask(model, prompt)
        assert response.status_code == 200, response.text
        text: str = response.json()["choices"][0]["text"]
        return text

    def forget(self, model: str) -> None:
        """Have it ask its resolvers again."""
        body = {"lora_name": model}
        assert self.client.post("/v1/unload_lora_adapter", json=body).status_code == 200

    def kill(self) -> None:
        """As a lost machine: its workers would outlive it."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for process in family:
            process.kill()

    def warned(self, *parts: str) -> bool:
        """Whether one line of the log, a warning, has all the parts."""
        lines = self.log.read_text(errors="replace").splitlines()
        return any(all(part in line for part in (" WARNING ", *parts)) for line in lines)


@dataclass
class Reference:
    """Mural's own answers over the same base, greedy and in float32."""

    prompts: list[list[int]]
    chats: list[str]
    """The same prompts as texts."""
    texts: dict[str, list[str]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def vllm_command() -> Path:
    folder = os.environ.get("MURAL_VLLM_VENV", "")
    command = Path(folder) / "bin" / "vllm"
    if not folder or not command.is_file():
        missing = "NOT RUN: there is no environment with vLLM; make test-vllm makes it"
        if os.environ.get("MURAL_CI_FULL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return command


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with its weights dequantised, as a directory: vLLM for CPUs reads no GGUF."""
    source, folder = Path(default_model_path()), tmp_path_factory.mktemp("base")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    # transformers refuses to save what it still takes for quantised.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    load_tokenizer(str(source)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(base_model: Path) -> Reference:
    """Computed, and its engine ended, before vLLM starts."""
    told = json.loads((EXAMPLES / "prompts.json").read_text())
    questions = list(
        dict.fromkeys(entry["prompt"] for entries in told.values() for entry in entries)
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    adapters = EXAMPLES / "adapters"
    with LLM(str(base_model), adapter_dir=adapters, dtype="float32", max_model_len=512) as llm:
        chats = [
            llm.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]
        prompts = [llm.tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
        asked = [(model, prompt) for model in (BASE, *SERVED) for prompt in prompts]
        loras = [None if model == BASE else model for model, _ in asked]
        outputs = llm.generate([prompt for _, prompt in asked], params, loras, use_tqdm=False)
    texts: dict[str, list[str]] = {}
    for (model, _), output in zip(asked, outputs, strict=True):
        texts.setdefault(model, []).append(output.outputs[0].text)
    return Reference(prompts, chats, texts)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "mural")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "muralsecret")
        store = S3()
        store.start()
        try:
            client = boto3.client("s3", endpoint_url=store.url, region_name="us-east-1")
            client.create_bucket(Bucket=BUCKET)
            asyncio.run(store.publish())
            yield store
        finally:
            store.stop()


Serve = Callable[..., AbstractContextManager["VLLM"]]


@pytest.fixture(scope="session")
def serve_vllm(
    vllm_command: Path,
    base_model: Path,
    reference: Reference,  # computed before vLLM takes the cores
    s3: S3,
    tmp_path_factory: pytest.TempPathFactory,
) -> Serve:
    """Start one that acts as acme, with a grant for globex:v1, and a disk cache of its own."""

    @contextmanager
    def serve(*, adapters: int, sequences: int) -> Iterator[VLLM]:
        folder = tmp_path_factory.mktemp("vllm")
        sources = folder / "sources.yaml"
        source = {
            "type": "s3",
            "url": f"s3://{BUCKET}",
            "endpoint_url": s3.url,
            "region": "us-east-1",
        }
        cache = {"path": str(folder / "cache"), "quota": QUOTA_BYTES}
        sources.write_text(yaml.safe_dump({"resolvers": [source], "cache": cache}))
        port, log = free_port(), folder / "log"
        command = [
            *(str(vllm_command), "serve", str(base_model), "--served-model-name", BASE),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", str(sequences)),
            *("--enable-lora", "--max-loras", str(adapters), "--max-cpu-loras", str(adapters)),
            *("--max-lora-rank", "16"),
        ]
        environment = os.environ | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "MURAL_SOURCES": str(sources),
            "MURAL_VLLM_TENANT": "acme",
            "MURAL_VLLM_GRANTS": "globex:v1",
        }
        # The test runner's bound on its own threads is not vLLM's.
        environment.pop("OMP_NUM_THREADS", None)
        with running(command, environment, log) as process:
            client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S)
            with client:
                await_ready(process, client)
                yield VLLM(client, log, port, process)

    return serve


@pytest.fixture(scope="session")
def vllm(serve_vllm: Serve) -> Iterator[VLLM]:
    """One adapter at a time is in its memory."""
    with serve_vllm(adapters=1, sequences=2) as server:
        yield server


@contextmanager
def running(
    command: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its children, ended on the way out; the end of its log where it failed."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        print(log.read_text(errors="replace")[-8000:])
        raise
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Its workers too, which may outlive it."""
    workers: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        workers = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    process.kill()
    process.wait()


def await_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"vLLM ended with status {process.returncode}")
        with suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.5)
    pytest.fail(f"vLLM was not ready within {START_S:.0f} s")
