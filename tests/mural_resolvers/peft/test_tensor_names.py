"""Names of tensors in an adapter's file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.peft import TensorKind, parse_tensor_name

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "module", "kind", "adapter"),
    [
        (f"base_model.model.{Q}.lora_A.weight", Q, TensorKind.LORA_A, None),
        (f"base_model.model.{Q}.lora_B.weight", Q, TensorKind.LORA_B, None),
        (f"{Q}.lora_A.weight", Q, TensorKind.LORA_A, None),
        (f"base_model.model.{Q}.lora_A.default.weight", Q, TensorKind.LORA_A, "default"),
        (f"base_model.model.{Q}.lora_A.weight.weight", Q, TensorKind.LORA_A, "weight"),
        (f"base_model.model.{Q}.lora_B.bias", Q, TensorKind.BIAS, None),
        (f"base_model.model.{Q}.lora_B.x.bias", Q, TensorKind.BIAS, "x"),
        (f"base_model.model.{Q}.lora_magnitude_vector", Q, TensorKind.MAGNITUDE, None),
        (f"base_model.model.{Q}.lora_magnitude_vector.x.weight", Q, TensorKind.MAGNITUDE, "x"),
        (
            "base_model.model.model.embed_tokens.lora_embedding_A",
            "model.embed_tokens",
            TensorKind.EMBEDDING_A,
            None,
        ),
        (
            "model.embed_tokens.lora_embedding_B.x",
            "model.embed_tokens",
            TensorKind.EMBEDDING_B,
            "x",
        ),
        ("base_model.model.lm_head.weight", "lm_head", TensorKind.FULL, None),
        ("base_model.model.lm_head.base_layer.weight", "lm_head", TensorKind.FULL, None),
        ("score.weight", "score", TensorKind.FULL, None),
    ],
)
def test_each_form_that_peft_writes_is_read(
    key: str, module: str, kind: TensorKind, adapter: str | None
) -> None:
    parsed = parse_tensor_name(key)

    assert (parsed.module, parsed.kind, parsed.adapter) == (module, kind, adapter)
    assert parsed.trained_module == module


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_language_model_of_a_multimodal_one_has_its_own_names(prefix: str) -> None:
    parsed = parse_tensor_name(f"base_model.model.{prefix}layers.0.mlp.up_proj.lora_A.weight")

    assert parsed.module == "model.layers.0.mlp.up_proj"
    assert parsed.trained_module == f"{prefix}layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "weight",
        "base_model.model.",
        "lora_A.weight",
        f"{Q}.lora_A",
        f"{Q}.lora_A.weight\n",
        f"{Q}\n.lora_A.weight",
        f"{Q}.lora_A.a.b.weight",
        f"{Q}.lora_E",
        f"{Q}.bias",
        f"{Q}.lora_A.default.lora_A.default.weight",
    ],
    ids=ascii,
)
def test_what_has_no_known_form_means_no_half_of_a_module(key: str) -> None:
    parsed = parse_tensor_name(key)

    assert parsed.kind in {TensorKind.UNKNOWN, TensorKind.FULL}
    assert parsed.module != Q


@given(st.text(max_size=100))
def test_any_text_is_parsed(key: str) -> None:
    assert isinstance(parse_tensor_name(key).kind, TensorKind)
