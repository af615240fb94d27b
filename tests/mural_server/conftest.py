"""Random PEFT adapters on the tiny models, and what PEFT itself answers under them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, object]] = {
    "all": {"target_modules": ALL_LINEAR, "r": 8, "lora_alpha": 16},
    "query_value": {"target_modules": ["q_proj", "v_proj"], "r": 3, "lora_alpha": 12},
    "patterns": {
        "target_modules": ALL_LINEAR,
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"v_proj": 5},
    },
    "gate_one_layer": {
        "target_modules": ["gate_proj", "down_proj"],
        "layers_to_transform": [1],
        "r": 16,
        "lora_alpha": 64,
    },
    "embedding": {"target_modules": ["embed_tokens", "k_proj"], "r": 5, "lora_alpha": 10},
    "head": {"target_modules": ["lm_head", "o_proj"], "r": 6, "lora_alpha": 12},
}


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities, and those of the prompt's own tokens."""

    token_ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]


@dataclass
class PeftOracle:
    """One base with its adapters, saved as PEFT saves them; answers are kept."""

    path: Path
    adapter_root: Path
    _answers: dict[tuple[str | None, tuple[int, ...], int], Answer] = field(default_factory=dict)
    _models: dict[str | None, torch.nn.Module] = field(default_factory=dict)

    def folder(self, adapter: str, seed: int = 0) -> Path:
        """The adapter's PEFT folder, made when first asked for; another seed, other weights."""
        folder = self.adapter_root / f"{adapter}-{seed}"
        if not folder.exists():
            self._save(adapter, seed, folder)
        return folder

    def _save(self, adapter: str, seed: int, folder: Path) -> None:
        model = get_peft_model(self._base(), LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[adapter]))
        generator = torch.Generator().manual_seed(1000 * seed + len(adapter))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    scale = 0.6 if "lora_embedding" in name else weight.shape[-1] ** -0.5
                    weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        model.save_pretrained(str(folder), save_embedding_layers=False)

    def _base(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(str(self.path), dtype=torch.float32).eval()

    def _model(self, folder: Path | None) -> torch.nn.Module:
        key = str(folder) if folder else None
        if key not in self._models:
            base = self._base()
            self._models[key] = (
                PeftModel.from_pretrained(base, str(folder)).eval() if folder else base
            )
        return self._models[key]

    @torch.inference_mode()
    def answer(self, folder: Path | None, prompt: list[int], count: int) -> Answer:
        """What transformers and PEFT give in float32, one prompt at a time, without a cache."""
        key = (str(folder) if folder else None, tuple(prompt), count)
        if key not in self._answers:
            model = self._model(folder)
            ids, logprobs = list(prompt), []
            prompt_logprobs: list[float] = []
            for step in range(count):
                scores = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
                if step == 0:
                    following = torch.tensor(prompt[1:], dtype=torch.int64)
                    prompt_logprobs = scores[:-1].gather(1, following[:, None])[:, 0].tolist()
                ids.append(int(scores[-1].argmax()))
                logprobs.append(float(scores[-1, ids[-1]]))
            self._answers[key] = Answer(ids[len(prompt) :], logprobs, prompt_logprobs)
        return self._answers[key]


OracleOf = Callable[[str], PeftOracle]


@pytest.fixture(scope="session")
def peft_oracle(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> OracleOf:
    """``peft_oracle(family)``: the oracle of a tiny model, one a session."""
    made: dict[str, PeftOracle] = {}

    def make(family: str) -> PeftOracle:
        if family not in made:
            root = tmp_path_factory.mktemp(f"adapters-{family}")
            made[family] = PeftOracle(tiny_model(family), root)
        return made[family]

    return make
