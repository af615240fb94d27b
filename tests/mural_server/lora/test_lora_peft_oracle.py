"""PEFT is the oracle: for each module's delta, and for whole models with mixed batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from mural_server.lora.worker_manager import LRUCacheWorkerLoRAManager

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank and alpha patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
        "alpha_pattern": {"v_proj": 5, r"model\.layers\.0\.self_attn\.o_proj": 3},
    },
    "rank-stabilised": {"use_rslora": True, "r": 6},
    "rank-stabilised with a pattern": {"use_rslora": True, "rank_pattern": {"down_proj": 3}},
    "q and v only": {"target_modules": ["q_proj", "v_proj"]},
    "up only": {"target_modules": ["up_proj"]},
    "one layer": {"layers_to_transform": [1]},
    "a regular expression": {"target_modules": r".*\.0\..*\.(k|o)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "lm_head": {"target_modules": ["lm_head", "down_proj"]},
    "embedding and lm_head": {"target_modules": ["embed_tokens", "lm_head"]},
}


def peft_deltas(peft_model) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in peft_model.named_modules()
        if isinstance(module, LoraLayer)
    }


def base_digests(lab):
    from mural_server.lora.base_copies import BaseDigests

    return BaseDigests(lab.model().base_weight)


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_effective_delta_of_every_module_equals_pefts(labs, base, config):
    lab = labs[base]
    written = lab.write(**config)
    model = lab.load(written.path, 1, base_digest=base_digests(lab))
    wanted = peft_deltas(written.peft)
    assert model.loras.keys() == wanted.keys()
    for name, weights in model.loras.items():
        delta = weights.lora_a.t() @ weights.lora_b
        if "embed_tokens" not in name:
            delta = delta.t()
        torch.testing.assert_close(delta, wanted[name].detach(), rtol=1e-5, atol=1e-6)


PROMPTS = [[3, 9, 27, 81, 5], [1, 2], [3, 9, 27, 81, 5], [7, 8, 9, 10], [3, 9, 27]]


@pytest.mark.parametrize("base", ["tied", "untied", "gemma3"])
@pytest.mark.parametrize(
    "sampled",
    [
        ["plain", "rank and alpha patterns", "q and v only"],
        ["embedding", "lm_head", "embedding and lm_head"],
    ],
    ids=["linears", "embeddings"],
)
def test_a_mixed_batch_answers_each_row_as_peft_does(labs, base, sampled, run_prefill, map_prompts):
    lab = labs[base]
    manager = lab.manager()
    worker = LRUCacheWorkerLoRAManager(manager)
    written = [lab.write(seed, **CONFIGS[name]) for seed, name in enumerate(sampled)]
    for lora_id, adapter in enumerate(written, start=1):
        worker.add_adapter(lab.load(adapter.path, lora_id, base_digest=base_digests(lab)))
    lora_ids = [1, 0, 2, 3, 1]
    worker.set_active_adapters({1, 2, 3}, map_prompts(PROMPTS, lora_ids))
    logits = run_prefill(manager.model, PROMPTS)
    manager.check_integrity()
    start = 0
    for prompt, lora_id in zip(PROMPTS, lora_ids, strict=True):
        ours = logits[start : start + len(prompt)].log_softmax(-1)
        start += len(prompt)
        oracle = written[lora_id - 1].peft
        with torch.inference_mode():
            if lora_id:
                theirs = oracle(torch.tensor([prompt])).logits[0]
            else:
                with oracle.disable_adapter():
                    theirs = oracle(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(ours, theirs.log_softmax(-1), rtol=1e-3, atol=1e-3)
