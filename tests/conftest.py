"""Small random models of every family, and a Kubernetes control plane, for all the tests."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

TinyModel = Callable[[str], Path]

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_IDS = [2, 0]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = len(SPECIAL_TOKENS) + 256

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_IDS[0],
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA3 = _SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
}

TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama_untied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama_biased": lambda: LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=False
    ),
    "llama3": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama_yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=_YARN_ROPE),
    "llama_linear": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama_dynamic": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=12),
    # More rows in the table than tokens in the tokenizer, as Qwen ships it.
    "qwen2": lambda: Qwen2Config(**(_SIZES | {"vocab_size": 320}), tie_word_embeddings=True),
    "qwen2_sliding": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA3),
    "gemma3_softcap": lambda: Gemma3TextConfig(**_GEMMA3, final_logit_softcapping=3.0),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three special ones, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_transformers_model(config: PreTrainedConfig, seed: int = 0) -> AutoModelForCausalLM:
    """Random float32 weights, large enough that logits differ by whole units."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
            elif "norm" in name:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * 0.2)
    return model


def save_tiny_model(folder: Path, config: PreTrainedConfig, max_shard_size: str = "1GB") -> Path:
    """A model directory as the hub has them, generation defaults and tokenizer included."""
    tiny_transformers_model(config).save_pretrained(folder, max_shard_size=max_shard_size)
    GenerationConfig(
        bos_token_id=0, eos_token_id=EOS_IDS, pad_token_id=0, temperature=0.7, do_sample=True
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """``tiny_model(name)``: the directory of a model of `TINY_CONFIGS`, made once a session.

    Names: the families ("llama", "mistral", "qwen2", "qwen3", "gemma3") and their variants.
    """
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = save_tiny_model(folder, TINY_CONFIGS[name]())
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_save() -> Callable[..., Path]:
    """``tiny_save(name, folder, **changes)``: save a variant of a tiny model's configuration."""

    def save(name: str, folder: Path, **changes: object) -> Path:
        config = TINY_CONFIGS[name]()
        stated = {key: value for key, value in config.to_diff_dict().items() if key != "model_type"}
        return save_tiny_model(folder, type(config)(**(stated | changes)))

    return save


# -- Kubernetes -----------------------------------------------------------------------------------

_SPEC = importlib.util.spec_from_file_location(
    "kubernetes_api", Path(__file__).parent / "kubernetes_api.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _MODULE
_SPEC.loader.exec_module(_MODULE)
kube_api = _MODULE.kube_api

CLUSTER_WAIT_S = 90.0


@dataclass(frozen=True)
class Cluster:
    """A control plane whose pods turn Ready without running; ``up`` and ``down`` do the work."""

    folder: Path
    state: Path
    environment: dict[str, str]
    """For programs that are to speak with it: KUBECONFIG, and a PATH with kubectl and helm."""
    namespace: str = "default"

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return Path(self.environment["KUBECONFIG"])

    def start(self) -> None:
        """Start what does not run, on the data that is there."""
        subprocess.run(
            [self.folder / "up", "control-plane", "1"],
            env=self.environment,
            check=True,
            timeout=300,
        )

    def kill_api_server(self) -> None:
        """SIGKILL, and wait for its end. `start` brings it back."""
        # Not there in every environment that loads this file, such as one made for vLLM.
        import psutil

        pid = int((self.state / "run" / "kube-apiserver").read_text().split()[0])
        process = psutil.Process(pid)
        process.kill()
        process.wait(30)

    def stop(self) -> None:
        """End all of it, and remove its data."""
        subprocess.run([self.folder / "down"], env=self.environment, check=True, timeout=120)

    async def run(self, *command: str, told: bytes = b"") -> tuple[int, str, str]:
        """The command's status, output and errors; ``told`` is its input."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(CLUSTER_WAIT_S):
            output, errors = await process.communicate(told)
        assert process.returncode is not None
        return process.returncode, output.decode(), errors.decode()

    async def kubectl(self, *args: str, told: object = None) -> str:
        """Its output; ``told`` is sent as JSON. Where it fails, so does the test, with why."""
        sent = b"" if told is None else json.dumps(told).encode()
        status, output, errors = await self.run("kubectl", "-n", self.namespace, *args, told=sent)
        assert status == 0, f"kubectl {' '.join(args)}: {errors}"
        return output

    async def refusal(self, *args: str, told: object = None) -> str:
        """What ``kubectl`` says when it fails, as it must."""
        sent = b"" if told is None else json.dumps(told).encode()
        status, output, errors = await self.run("kubectl", "-n", self.namespace, *args, told=sent)
        assert status != 0, f"kubectl {' '.join(args)} went through: {output}"
        return errors

    async def apply(self, *objects: object) -> None:
        """Objects as Python's data, or paths of files and folders of them."""
        for each in objects:
            if isinstance(each, Path):
                await self.kubectl("apply", "-f", str(each))
            else:
                await self.kubectl("apply", "-f", "-", told=each)

    async def get(self, *args: str) -> dict[str, object]:
        """``kubectl get``, parsed."""
        found: dict[str, object] = json.loads(await self.kubectl("get", *args, "-o", "json"))
        return found


def five_free_ports() -> int:
    """The first of five in a row, below those that the kernel gives to connections."""
    while True:
        first = random.randrange(20000, 32000)
        with ExitStack() as taken:
            try:
                for port in range(first, first + 5):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of this session alone. Without a folder to build it from the test is NOT RUN."""
    folder = Path(os.environ.get("MURAL_CLUSTER_DIR", ""))
    if not (folder / "up").is_file():
        missing = "NOT RUN: MURAL_CLUSTER_DIR does not say where the test cluster is built from"
        if os.environ.get("MURAL_CI_FULL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    state = tmp_path_factory.mktemp("cluster")
    environment = os.environ | {
        "MURAL_CLUSTER_STATE": str(state),
        "MURAL_CLUSTER_PORT": str(five_free_ports()),
    }
    cluster = Cluster(folder, state, environment)
    try:
        cluster.start()
        exported = subprocess.run(
            ["bash", "-c", 'eval "$("$0"/env)" && echo "$KUBECONFIG" && echo "$PATH"', folder],
            env=environment,
            check=True,
            timeout=30,
            capture_output=True,
            text=True,
        )
        environment["KUBECONFIG"], environment["PATH"] = exported.stdout.splitlines()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def cluster(
    control_plane: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """The control plane, with a namespace of the test's own, and KUBECONFIG set."""
    monkeypatch.setenv("KUBECONFIG", control_plane.environment["KUBECONFIG"])
    name = f"test-{abs(hash(request.node.nodeid)) % 10**9}"
    await control_plane.kubectl("create", "namespace", name)
    return replace(control_plane, namespace=name)
