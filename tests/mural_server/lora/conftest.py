"""A tiny base model on disk, adapters that PEFT itself wrote, and one-step batches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from mural_resolvers.base_spec import BaseSpec
from mural_server.lora.checkpoint import LoadOptions
from mural_server.lora.config import LoRAConfig
from mural_server.lora.manager import LoRAModelManager, LRUCacheLoRAModelManager
from mural_server.lora.mapping import ChunkMapping, LoRAMapping
from mural_server.lora.model import LoRAModel
from mural_server.lora.weights import LoRALayerWeights
from mural_server.models.base import CausalLM
from mural_server.models.loader import load_model
from mural_server.ops import AttentionBatch, KVLayer, PrefillChunk, select_ops

VOCAB, HIDDEN, LAYERS, MAX_RANK = 128, 48, 2, 8
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


class WrittenAdapter(NamedTuple):
    """An adapter's folder and the PEFT model that it came from."""

    path: Path
    peft: PeftModel


@dataclass
class Lab:
    """One base model, and what is needed to try adapters on it."""

    path: Path
    folder: Path
    count: int = 0
    spec: BaseSpec = field(init=False)
    options: LoadOptions = field(default_factory=lambda: LoadOptions(dtype="float32"))

    def __post_init__(self) -> None:
        self.spec = self.model().base_spec(["tiny"], MAX_RANK)

    def model(self, dtype: torch.dtype = torch.float32) -> CausalLM:
        return load_model(str(self.path), dtype=dtype, ops=select_ops(dtype).ops)

    def write(self, seed: int = 0, **config: object) -> WrittenAdapter:
        """Have PEFT make and save a random adapter."""
        self.count += 1
        path = self.folder / f"adapter-{self.count}"
        settings = {"r": 4, "lora_alpha": 12, "target_modules": list(LINEARS)} | config
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1000 + seed)
            peft = get_peft_model(
                AutoModelForCausalLM.from_pretrained(self.path),
                LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings),
            )
            for name, parameter in peft.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.2)
            peft.save_pretrained(path)
        return WrittenAdapter(path, peft.eval())

    def load(self, path: Path, lora_id: int, **options: Any) -> LoRAModel:
        return LoRAModel.from_local_checkpoint(
            path, self.spec, self.options, lora_model_id=lora_id, **options
        )

    def manager(
        self,
        *,
        lru: bool = True,
        max_loras: int = 3,
        max_cpu_loras: int = 6,
        target_modules: tuple[str, ...] | None = None,
        max_cpu_lora_bytes: int | None = None,
    ) -> LoRAModelManager:
        """A manager over a fresh model, which is its attribute ``model``."""
        model = self.model()
        manager = (LRUCacheLoRAModelManager if lru else LoRAModelManager)(
            model,
            self.spec,
            LoRAConfig(
                max_loras=max_loras,
                max_cpu_loras=max_cpu_loras,
                max_lora_rank=MAX_RANK,
                dtype=torch.float32,
                target_modules=target_modules,
                max_cpu_lora_bytes=max_cpu_lora_bytes,
            ),
            model.ops,
            packed_modules_mapping=model.packed_modules_mapping,
            max_rows=64,
        )
        manager.model = model  # type: ignore[attr-defined] # of the tests alone
        return manager


def random_model(
    spec: BaseSpec, lora_id: int, rank: int, modules: Sequence[str], *, nbytes: int | None = None
) -> LoRAModel:
    """A model of random weights for the named modules, every second one of a lower rank."""
    generator = torch.Generator().manual_seed(lora_id)
    loras = {}
    for index, name in enumerate(modules):
        own = max(1, rank - index % 2)
        fan_in, fan_out = spec.modules[name].in_features, spec.modules[name].out_features
        loras[name] = LoRALayerWeights(
            name,
            own,
            1.0,
            torch.randn(own, fan_in, generator=generator),
            torch.randn(own, fan_out, generator=generator),
        )
    size = sum(w.lora_a.nbytes + w.lora_b.nbytes for w in loras.values())
    return LoRAModel(lora_id, rank, loras, size if nbytes is None else nbytes)


def prefill(model: CausalLM, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """All prompts as chunks of one step over a fresh KV pool → logits of all rows."""
    block = 64
    kv = [
        KVLayer(
            torch.zeros(len(prompts) + 1, spec.num_kv_heads, block, spec.head_dim),
            torch.zeros(len(prompts) + 1, spec.num_kv_heads, block, spec.head_dim),
        )
        for spec in model.attention_specs
    ]
    chunks, slots, start = [], [], 0
    for index, prompt in enumerate(prompts, start=1):
        chunks.append(PrefillChunk(start, start + len(prompt), 0, torch.tensor([index])))
        slots += [index * block + at for at in range(len(prompt))]
        start += len(prompt)
    batch = AttentionBatch(
        kv_slots=torch.tensor(slots),
        num_decodes=0,
        decode_tables=torch.zeros(0, 1, dtype=torch.int64),
        decode_lengths=torch.zeros(0, dtype=torch.int64),
        prefills=tuple(chunks),
    )
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.tensor([at for prompt in prompts for at in range(len(prompt))])
    with torch.inference_mode():
        return model.compute_logits(model(ids, positions, batch, kv))


def prompts_mapping(prompts: Sequence[Sequence[int]], lora_ids: Sequence[int]) -> LoRAMapping:
    """The mapping of `prefill`'s step: one adapter a prompt, logits of every row."""
    return LoRAMapping(
        chunks=tuple(
            ChunkMapping(len(prompt), lora_id)
            for prompt, lora_id in zip(prompts, lora_ids, strict=True)
        ),
        sampled_ids=tuple(
            lora_id for prompt, lora_id in zip(prompts, lora_ids, strict=True) for _ in prompt
        ),
    )


class Labs(dict[str, Lab]):
    """Labs by the name of their base, made when first asked for."""

    def __init__(self, configs: dict[str, PreTrainedConfig], root: Path) -> None:
        super().__init__()
        self._configs, self._root = configs, root

    def __missing__(self, name: str) -> Lab:
        folder = self._root / name
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(self._configs[name]).save_pretrained(folder / "base")
        self[name] = Lab(folder / "base", folder)
        return self[name]


@pytest.fixture(scope="session")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Labs:
    """Labs by the name of their base: tied and untied Llama, Gemma with its scaled table."""
    configs = {
        "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
        "gemma3": Gemma3TextConfig(**SHAPE, query_pre_attn_scalar=12),
    }
    return Labs(configs, tmp_path_factory.mktemp("labs"))


@pytest.fixture(scope="session")
def lab(labs: Labs) -> Lab:
    return labs["tied"]


@pytest.fixture(scope="session")
def run_prefill():
    return prefill


@pytest.fixture(scope="session")
def map_prompts():
    return prompts_mapping


@pytest.fixture(scope="session")
def make_model():
    return random_model
