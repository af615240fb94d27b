"""What the engine and the LoRA manager rely on in a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from mural_server.layers.linear import MergedColumnParallelLinear
from mural_server.ops.base import Activation
from mural_server.ops.batch import AttentionSpec

FAMILIES = ["llama", "llama_untied", "mistral", "qwen2", "qwen3", "gemma3"]


def oracle(path: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_base_spec_names_every_linear_and_embedding_of_transformers(
    family: str, tiny_model, load
) -> None:
    path = tiny_model(family)
    expected = {}
    for name, module in oracle(path).named_modules():
        if isinstance(module, nn.Embedding):
            expected[name] = ("embedding", module.num_embeddings, module.embedding_dim)
        elif isinstance(module, nn.Linear):
            kind = "lm_head" if name == "lm_head" else "linear"
            expected[name] = (kind, module.in_features, module.out_features)
    spec = load(path).base_spec(["tiny", "other"], max_lora_rank=16)
    found = {
        name: (module.kind, module.in_features, module.out_features)
        for name, module in spec.modules.items()
    }
    assert found == expected
    assert spec.model_names == ("tiny", "other")
    assert spec.max_lora_rank == 16
    assert spec.tie_word_embeddings == (family in ("llama", "qwen2", "gemma3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama_untied"])
def test_base_weights_come_back_bit_for_bit(family: str, dtype, tiny_model, load) -> None:
    path = tiny_model(family)
    model, theirs = load(path, dtype), oracle(path).state_dict()
    with torch.inference_mode():
        for module in ("model.embed_tokens", "lm_head"):
            weight = model.base_weight(module)
            assert weight is not None
            assert torch.equal(weight, theirs[f"{module}.weight"].to(dtype))
    assert model.base_weight("model.layers.0.self_attn.q_proj") is None


class Doubling(nn.Module):
    """Stands where a LoRA wrapper would: same calls, another answer."""

    def __init__(self, base_layer: MergedColumnParallelLinear) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *arguments: torch.Tensor | None) -> torch.Tensor:
        return self.base_layer(*arguments) * 2

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """What the feed-forward block asks of gate and up."""
        return self.base_layer.gated(x, activation) * 2


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.1.mlp.down_proj",
        "logits_processor",
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_module_can_be_replaced_by_a_wrapper(
    family: str, name: str, tiny_model, load, paged, new_sequence
) -> None:
    model = load(tiny_model(family))
    tokens = [9, 80, 33, 14]
    before = paged(model).step([(new_sequence(tokens), 4)])[0]
    spec = model.base_spec(["tiny"], 8)
    model.set_submodule(name, Doubling(model.get_submodule(name)))
    after = paged(model).step([(new_sequence(tokens), 4)])[0]
    assert not torch.allclose(before, after)
    assert model.base_spec(["tiny"], 8) == spec
    assert model.base_weight("model.embed_tokens") is not None


def test_attention_specs_say_which_layers_slide(tiny_model, load) -> None:
    specs = load(tiny_model("gemma3")).attention_specs
    assert [spec.sliding_window for spec in specs] == [8, 8, None, 8]
    assert specs[0] == AttentionSpec(4, 2, 16, 24**-0.5, 8)
    late = load(tiny_model("qwen2_sliding")).attention_specs
    assert [spec.sliding_window for spec in late] == [None, 10, 10]
    assert [spec.sliding_window for spec in load(tiny_model("mistral")).attention_specs] == [12] * 3


def test_the_token_table_is_not_a_module_twice(tiny_model, load) -> None:
    names = [name for name, _ in load(tiny_model("llama")).named_modules(remove_duplicate=False)]
    assert [name for name in names if "embed" in name] == ["model.embed_tokens"]
