"""adapter_config.json: what is read, what is refused, what can never crash us."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.peft import PeftConfig

MODULE = "model.layers.1.self_attn.q_proj"


def config(**settings: object) -> PeftConfig:
    return PeftConfig.from_json(
        json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], **settings}).encode()
    )


def test_the_defaults_are_peft_s() -> None:
    read = config()

    assert (read.r, read.lora_alpha, read.scale_for(MODULE)) == (8, 8.0, 1.0)


def test_null_means_the_default_but_is_no_number() -> None:
    assert config(rank_pattern=None, use_rslora=None) == config()
    for key in ("r", "lora_alpha"):  # PEFT fails on them, so nothing can be held to its answer
        with pytest.raises(UnusableAdapter, match=f"{key} takes"):
            config(**{key: None})


def test_scales_follow_rank_alpha_and_rslora() -> None:
    read = config(r=4, lora_alpha=2.5, rank_pattern={"q_proj": 16})

    assert read.scale_for(MODULE) == 2.5 / 16
    assert read.scale_for("model.layers.1.self_attn.v_proj") == 2.5 / 4
    assert config(r=16, use_rslora=True).scale_for(MODULE) == 8 / math.sqrt(16)


def test_the_first_matching_pattern_wins() -> None:
    read = config(alpha_pattern={"self_attn.q_proj": 1, "q_proj": 2, ".*": 3})

    assert read.alpha_for(MODULE) == 1
    assert read.alpha_for("q_proj") == 2
    assert read.alpha_for("model.layers.1.mlp.up_proj") == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"modules_to_save": ["classifier"]}, "modules_to_save='classifier'"),
        ({"modules_to_save": ["lm_head", ".*"]}, "modules_to_save"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"trainable_token_indices": {"embed_tokens": [1]}}, "trainable_token_indices"),
        ({"target_parameters": ["experts.weight"]}, "target_parameters"),
        ({"megatron_config": {"x": 1}}, "megatron_config"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"arrow_config": {"top_k": 3}}, "Arrow"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"velora_config": {"scale": 1}}, "VeLoRA"),
        ({"monteclora_config": {"buffer_size": 1}}, "MonteCLoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base"),
        ({"init_lora_weights": "olora"}, "changes the base"),
        ({"init_lora_weights": "corda"}, "changes the base"),
        ({"init_lora_weights": "lora_ga"}, "changes the base"),
        ({"init_lora_weights": "loftq"}, "changes the base"),
        ({"init_lora_weights": "invented"}, "changes the base"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"some_new_option": True}, "'some_new_option' is not known"),
        ({"some_new_option": 0.5}, "'some_new_option' is not known"),
        ({"some_new_option": {"x": None}}, "'some_new_option' is not known"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_served_is_refused_by_name(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(UnusableAdapter, match=reason) as caught:
        config(**settings).refuse_unsupported()

    assert caught.value.status == 422


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_unknown_key_with_an_empty_value_is_let_be(value: object) -> None:
    config(some_new_option=value).refuse_unsupported()


@pytest.mark.parametrize("init", [True, False, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_served(init: bool | str) -> None:
    config(init_lora_weights=init).refuse_unsupported()


@pytest.mark.parametrize("kind", ["XLORA", "lora", "PROMPT_TUNING", "IA3", None, 3, "LORA\n"])
def test_another_peft_type_is_refused(kind: object) -> None:
    with pytest.raises(UnusableAdapter, match="peft_type"):
        config(peft_type=kind)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 0},
        {"r": -1},
        {"r": 4.0},
        {"r": "8"},
        {"r": True},
        {"r": 10**9},
        {"lora_alpha": "16"},
        {"lora_alpha": True},
        {"lora_alpha": 1e300},
        {"use_rslora": "yes"},
        {"use_rslora": 1},
        {"rank_pattern": []},
        {"rank_pattern": {"a": "8"}},
        {"rank_pattern": {"a": 0}},
        {"alpha_pattern": {"a": None}},
        {"alpha_pattern": "x"},
        {"target_modules": 3},
        {"target_modules": {"a": 1}},
        {"target_modules": [1]},
        {"target_modules": [None]},
        {"target_modules": "x" * 3000},
        {"target_modules": ["x" * 3000]},
        {"target_modules": ["x"] * 10_000},
        {"rank_pattern": {f"k{n}": 1 for n in range(3000)}},
        {"exclude_modules": 3},
        {"layers_to_transform": "0"},
        {"layers_to_transform": [True]},
        {"layers_to_transform": [1.5]},
        {"layers_pattern": 3, "layers_to_transform": [1]},
        {"layers_pattern": "layers"},
        {"layers_to_transform": [1], "target_modules": ".*"},
        {"bias": 3},
        {"bias": False},
        {"modules_to_save": {"a": 1}},
        {"task_type": ["CAUSAL_LM"]},
        {"init_lora_weights": 3},
        {"base_model_name_or_path": 3},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_of_another_type_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(UnusableAdapter, match=r"adapter_config\.json cannot be read"):
        config(**settings)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"\x80",
        b'{"peft_type": "LORA", "lora_alpha": NaN}',
        b'{"peft_type": "LORA", "lora_alpha": 1e999}',
        b'{"peft_type": "LORA", "r": ' + b"9" * 5000 + b"}",
        b'{"peft_type": "LORA", "r": 8, "r": 16}',
        b'{"peft_type": "LORA", "x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"peft_type": "LORA", "target_modules": ["\\ud800"]}',
        b'{"peft_type": "LORA", "x": "' + b"y" * (1 << 20) + b'"}',
    ],
    ids=lambda data: ascii(data[:40]),
)
def test_hostile_json_is_an_unusable_adapter(data: bytes) -> None:
    with pytest.raises(UnusableAdapter):
        PeftConfig.from_json(data)


@pytest.mark.parametrize(
    "pattern",
    ["(", "*", "a{2,1}", "(?P<a>x)(?P<a>y)", "\\", "(?<=a*)b", "(" * 1000 + ")" * 1000, "[",
     "a{99999999999999999999}", "(?i", "(?P=x)"],
    ids=lambda text: text[:20],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rank_pattern", "target_modules", "exclude_modules"])
def test_what_is_no_regular_expression_is_an_unusable_adapter(key: str, pattern: str) -> None:
    read = config(**{key: {pattern: 4} if key == "rank_pattern" else pattern})
    ask = read.rank_for if key == "rank_pattern" else read.targets

    with pytest.raises(UnusableAdapter, match="not a regular expression"):
        ask(MODULE)


def test_a_pattern_longer_than_the_limit_is_never_compiled() -> None:
    data = json.dumps({"peft_type": "LORA", "target_modules": "a" * 33}).encode()

    with pytest.raises(UnusableAdapter, match="at most 32 characters"):
        PeftConfig.from_json(data, AdapterLimits(max_pattern_chars=32))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
keys = st.sampled_from(
    sorted({*PeftConfig.__dataclass_fields__, "peft_version", "eva_config", "x"})
)


@given(st.dictionaries(keys, json_values, max_size=5))
def test_any_json_is_a_configuration_or_a_typed_refusal(settings: dict[str, object]) -> None:
    data = json.dumps({"peft_type": "LORA", **settings}).encode()
    try:
        read = PeftConfig.from_json(data)
        read.refuse_unsupported()
        assert isinstance(read.targets(MODULE), bool)
        assert math.isfinite(read.scale_for(MODULE))
    except UnusableAdapter as error:
        error.message.encode()


@given(st.binary(max_size=300))
def test_any_bytes_are_a_configuration_or_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(UnusableAdapter):
        PeftConfig.from_json(data)
