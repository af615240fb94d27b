"""A fleet on this machine: real `mural serve` replicas, real `mural route` in front of them.

The replicas are the same for all the files here, since each takes its seconds to start.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from mural_resolvers.tenants import mint_key

START_S = 240.0
END_S = 60.0
TOKEN = "the-token-of-this-test's-router"
SERVING = re.compile(r"OpenAI API on https?://\S+, control API on ")
ROUTING = re.compile(r"routing on (https?://\S+)")
ADMIN = re.compile(r"admin pages on (http://\S+)")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


class Process:
    """A command of ours with its log, read by a thread."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.output: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | (environment or {}),
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._threads = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stderr, self.lines), (self.process.stdout, self.output))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: Iterator[str], lines: list[str]) -> None:
        for line in stream:
            with self._news:
                lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for(self, pattern: re.Pattern[str] | str, *, output: bool = False) -> re.Match[str]:
        """The first line that holds a pattern, once it is there."""
        wanted = re.compile(pattern) if isinstance(pattern, str) else pattern
        lines = self.output if output else self.lines
        deadline = time.monotonic() + START_S
        with self._news:
            while True:
                for line in lines:
                    if found := wanted.search(line):
                        return found
                assert not self._ended, f"ended: {self.lines}"
                left = deadline - time.monotonic()
                assert left > 0, f"no {wanted.pattern!r} in {lines[-20:]}"
                self._news.wait(left)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Ask it to end; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            for thread in self._threads:
                thread.join(END_S)

    def kill(self) -> None:
        """kill -9: nothing is said, and nothing tidied up."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        # Its children may hold the log open, so there is no end of it to wait for.
        self.process.wait(END_S)


@dataclass
class Replica:
    """A `mural serve` on ports that it keeps over restarts."""

    command: tuple[str, ...]
    port: int = field(default_factory=free_port)
    control_port: int = field(default_factory=free_port)
    process: Process | None = None

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def flag(self) -> str:
        return f"http://{self.name},control={self.control_port}"

    def start(self) -> Replica:
        ports = ["--port", str(self.port), "--control-port", str(self.control_port)]
        environment = {"MURAL_ROUTER_TOKEN": TOKEN}
        self.process = Process(*self.command, *ports, environment=environment)
        return self

    def wait(self) -> None:
        assert self.process is not None
        self.process.wait_for(SERVING)


class Router:
    """A `mural route`."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.process = Process(
            "mural_router.commands",
            *("--port", "0", "--admin-port", "0", *flags),
            environment={"MURAL_ROUTER_TOKEN": TOKEN} | (environment or {}),
        )
        self.url = self.process.wait_for(ROUTING)[1]
        self.admin = self.process.wait_for(ADMIN)[1]

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.admin}{path}", timeout=10)

    def count(self, metric: str, **labels: str) -> float:
        """A sample of the metrics; 0 where there is none."""
        wanted = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
        line = re.escape(f"{metric}{{{wanted}}}" if wanted else metric) + r" (\S+)"
        found = re.search(rf"^{line}$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@dataclass
class Tenants:
    """A tenants file and the keys of its tenants."""

    path: Path
    keys: dict[str, str] = field(default_factory=dict)


class Oracle:
    """PEFT's own adapters on the tiny model, and what PEFT answers under them."""

    def __init__(self, model: Path, root: Path) -> None:
        self._model = model
        self._root = root

    def folder(self, seed: int) -> Path:
        """An adapter of random weights, as PEFT saves it."""
        folder = self._root / str(seed)
        if not folder.exists():
            config = LoraConfig(
                task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"]
            )
            model = get_peft_model(self._base(), config)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if "lora_" in name:
                        noise = torch.randn(weight.shape, generator=generator)
                        weight.copy_(noise * weight.shape[-1] ** -0.5)
            model.save_pretrained(str(folder))
        return folder

    @torch.inference_mode()
    def logprobs(self, seed: int, prompt: list[int], count: int) -> list[float]:
        """Of the tokens that greedy decoding gives."""
        model = PeftModel.from_pretrained(self._base(), str(self.folder(seed))).eval()
        ids, found = list(prompt), []
        for _ in range(count):
            scores = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(scores.argmax()))
            found.append(float(scores[ids[-1]]))
        return found

    def _base(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(str(self._model), dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def oracle(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Adapters by seed, of the model that the replicas serve."""
    return Oracle(tiny_model("llama"), tmp_path_factory.mktemp("peft"))


@pytest.fixture(scope="session")
def fleet_store(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Path:
    """v1 to v3 of two tenants (seeds 1 to 3), as a store that replicas and router share."""
    root = tmp_path_factory.mktemp("store")
    for tenant in ("acme", "globex"):
        for seed in (1, 2, 3):
            shutil.copytree(oracle.folder(seed), root / tenant / "default" / f"v{seed}")
    return root


@pytest.fixture(scope="session")
def start_replica(
    tiny_model: Callable[[str], Path], fleet_store: Path
) -> Iterator[Callable[..., Replica]]:
    """Start a replica of the tiny model; all are ended after the session."""
    with ExitStack() as held:

        def start(*flags: str) -> Replica:
            command = (
                *("mural_server.commands", str(tiny_model("llama")), "--dtype", "float32"),
                *("--cpu-threads", "1", "--kv-cache-memory-bytes", "4Mi"),
                *("--served-model-name", "tiny", "--adapter-dir", str(fleet_store)),
                *("--max-loras", "4", "--auth", "router", *flags),
            )
            replica = Replica(command).start()
            held.callback(lambda: replica.process is not None and replica.process.end())
            return replica

        yield start


@pytest.fixture(scope="session")
def replicas(
    start_replica: Callable[..., Replica], tmp_path_factory: pytest.TempPathFactory
) -> list[Replica]:
    """Two of them, started side by side; the first takes uploads."""
    uploads = tmp_path_factory.mktemp("uploads")
    both = [start_replica("--upload-store", str(uploads)), start_replica()]
    for replica in both:
        replica.wait()
    return both


@pytest.fixture
def running(replicas: list[Replica]) -> list[Replica]:
    """The two, both alive: one that a test before ended is started again."""
    for replica in replicas:
        assert replica.process is not None
        if replica.process.process.poll() is not None:
            replica.start()
    for replica in replicas:
        replica.wait()
    return replicas


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    """acme and globex, without limits."""
    made = Tenants(tmp_path / "tenants.yaml")
    lines = ["tenants:"]
    for tenant in ("acme", "globex"):
        key = mint_key()
        made.keys[tenant] = key.key
        lines += [f"- id: {tenant}", "  keys:"]
        lines += [f"  - {{id: {key.key_id}, sha256: {key.sha256}}}"]
    made.path.write_text("\n".join(lines) + "\n")
    return made


@pytest.fixture
def start_router() -> Iterator[Callable[..., Router]]:
    """Start routers; all are ended after the test."""
    with ExitStack() as held:

        def start(*flags: str, environment: dict[str, str] | None = None) -> Router:
            router = Router(*flags, environment=environment)
            held.callback(router.process.end)
            return router

        yield start
