"""Whether an adapter fits a base."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.base_spec import BaseSpec, ModuleSpec
from mural_resolvers.errors import UnusableAdapter
from mural_resolvers.peft import AdapterPlan, PeftConfig, TensorInfo, check_adapter

Tensors = dict[str, tuple[str, list[int]]]

P = "base_model.model."
Q0, Q1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"
V0 = "model.layers.0.self_attn.v_proj"


def pair(module: str, rank: int, in_features: int = 8, out_features: int = 8) -> Tensors:
    return {
        f"{P}{module}.lora_A.weight": ("F32", [rank, in_features]),
        f"{P}{module}.lora_B.weight": ("F32", [out_features, rank]),
    }


def embedding(rank: int = 4) -> Tensors:
    return {
        f"{P}model.embed_tokens.lora_embedding_A": ("F32", [rank, 20]),
        f"{P}model.embed_tokens.lora_embedding_B": ("F32", [8, rank]),
    }


def check(base: BaseSpec, tensors: Tensors, **settings: object) -> AdapterPlan:
    raw = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], **settings}
    header = {
        name: TensorInfo(dtype, tuple(shape), (0, 0)) for name, (dtype, shape) in tensors.items()
    }
    return check_adapter(PeftConfig.from_json(json.dumps(raw).encode()), header, base)


def test_the_plan_says_how_each_module_is_loaded(base_spec: BaseSpec) -> None:
    plan = check(base_spec, {**pair(Q1, 4), **pair(Q0, 4)}, lora_alpha=6)

    assert [module.module for module in plan.modules] == [Q0, Q1]
    first = plan.modules[0]
    assert (first.key_a, first.key_b) == (f"{P}{Q0}.lora_A.weight", f"{P}{Q0}.lora_B.weight")
    assert (first.kind, first.rank, first.alpha, first.scale) == ("linear", 4, 6.0, 1.5)
    assert (first.in_features, first.out_features) == (8, 8)
    assert plan.max_rank == 4


def test_a_targeted_module_without_tensors_is_fine(base_spec: BaseSpec) -> None:
    assert len(check(base_spec, pair(Q0, 4), target_modules=["q_proj", "v_proj"]).modules) == 1


def test_embeddings_and_the_head_are_adapted(base_spec: BaseSpec) -> None:
    plan = check(
        base_spec,
        {**embedding(), **pair("lm_head", 4, 8, 20)},
        target_modules=["embed_tokens", "lm_head"],
    )

    assert [(m.kind, m.in_features, m.out_features) for m in plan.modules] == [
        ("embedding", 20, 8),
        ("linear", 8, 20),
    ]


@pytest.mark.parametrize(
    "key",
    [
        "model.embed_tokens.weight",
        "model.embed_tokens.base_layer.weight",
        "lm_head.weight",
        "lm_head.base_layer.weight",
    ],
)
def test_copies_of_the_base_are_left_to_the_loader_to_compare(
    base_spec: BaseSpec, key: str
) -> None:
    plan = check(base_spec, {**pair(Q0, 4), f"{P}{key}": ("F16", [20, 8])})

    assert [(copy.key, copy.shape) for copy in plan.base_copies] == [(f"{P}{key}", (20, 8))]


def test_patterns_refer_to_the_names_of_the_trained_model(base_spec: BaseSpec) -> None:
    trained = "model.language_model.layers.0.self_attn.q_proj"

    plan = check(
        base_spec,
        pair(trained, 2),
        target_modules=r".*language_model.*q_proj",
        rank_pattern={"language_model.layers.0.self_attn.q_proj": 2},
    )

    assert [(m.module, m.rank) for m in plan.modules] == [(Q0, 2)]


X = f"{P}model.layers.9.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "settings", "reason"),
    [
        ({}, {}, "matches no module"),
        ({f"{P}lm_head.weight": ("F32", [20, 8])}, {}, "matches no module"),
        ({**pair(Q0, 4), f"{X}.lora_A.weight": ("F32", [4, 8])}, {}, "layers.9.self_attn.q_proj"),
        ({**pair(Q0, 4), f"{P}score.weight": ("F32", [2, 8])}, {}, "score.weight"),
        ({**pair(Q0, 4), f"{P}{Q0}.weight": ("F32", [8, 8])}, {}, "q_proj.weight"),
        ({**pair(Q0, 4), f"{P}{Q0}.base_layer.weight": ("F32", [8, 8])}, {}, "base_layer"),
        ({**pair(Q0, 4), "anything": ("F32", [1])}, {}, "anything"),
        ({**pair(Q0, 4), "": ("F32", [1])}, {}, "no place"),
        ({**pair(Q0, 4), f"{P}{Q0}.lora_magnitude_vector": ("F32", [8])}, {}, "DoRA"),
        ({**pair(Q0, 4), f"{P}{Q0}.lora_B.bias": ("F32", [8])}, {}, "lora_bias"),
        ({f"{P}{Q0}.lora_A.weight": ("F32", [4, 8])}, {}, "other half"),
        ({f"{P}{Q0}.lora_B.weight": ("F32", [8, 4])}, {}, "other half"),
        ({**pair(Q0, 4), **pair(V0, 4, 8, 4)}, {}, "target_modules leaves out.*v_proj"),
        ({**pair(Q0, 4)}, {"exclude_modules": ["q_proj"]}, "target_modules leaves out"),
        ({**pair("lm_head", 4, 8, 20)}, {"target_modules": "all-linear"}, "leaves out"),
        (
            {**pair("lm_head", 4, 8, 20)},
            {"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]},
            "leaves out",
        ),
        (pair(Q0, 4), {"modules_to_save": ["lm_head"]}, "lm_head.*no tensor"),
        (pair(Q0, 8), {}, "shape"),
        (pair(Q0, 4, 9, 8), {}, "shape"),
        (pair(Q0, 4, 8, 9), {}, "shape"),
        (pair(Q0, 17), {"r": 17}, "rank 17.*16"),
        ({**pair(Q0, 4), f"{P}lm_head.weight": ("F32", [21, 8])}, {}, "shape"),
        ({**pair(Q0, 4), f"{P}{Q0}.lora_A.weight": ("I8", [4, 8])}, {}, "dtype I8"),
        ({**pair(Q0, 4), f"{P}{Q0}.lora_A.weight": ("F32", [4, 8, 1])}, {}, "shape"),
        ({**pair(Q0, 4), f"{P}{Q0}.lora_A.x.weight": ("F32", [4, 8])}, {}, "say the same"),
        ({**pair(Q0, 4), f"{Q0}.lora_A.weight": ("F32", [4, 8])}, {}, "say the same"),
        (
            {**pair(Q0, 4), **pair("model.language_model.layers.0.self_attn.q_proj", 4)},
            {},
            "say the same",
        ),
        (
            {
                f"{P}{Q0}.lora_A.one.weight": ("F32", [4, 8]),
                f"{P}{Q0}.lora_B.two.weight": ("F32", [8, 4]),
            },
            {},
            "more than one adapter name",
        ),
        (
            pair("model.embed_tokens", 4, 20, 8),
            {"target_modules": ["embed_tokens"]},
            "embed_tokens.lora_A",
        ),
        ({**pair(Q0, 4)}, {"use_dora": True}, "DoRA"),
    ],
    ids=range(30),
)
def test_an_adapter_that_does_not_fit_is_refused_with_the_reason(
    base_spec: BaseSpec, tensors: Tensors, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(UnusableAdapter, match=reason):
        check(base_spec, tensors, **settings)


def test_a_kind_that_the_engine_does_not_take_is_refused(base_spec: BaseSpec) -> None:
    base = BaseSpec.from_json(
        base_spec.to_json().replace(b'"linear","embedding","lm_head"', b'"linear"')
    )

    with pytest.raises(UnusableAdapter, match="embed_tokens"):
        check(base, embedding(), target_modules=["embed_tokens"])


MODULES = [Q0, Q1, V0, "lm_head", "model.embed_tokens", "model.norm", "x"]
FORMS = [
    "lora_A.weight",
    "lora_B.weight",
    "lora_A.d.weight",
    "lora_embedding_A",
    "lora_embedding_B",
    "weight",
    "base_layer.weight",
    "lora_B.bias",
    "lora_E",
]
BASE = BaseSpec(
    model_names=("tiny",),
    modules={
        "model.embed_tokens": ModuleSpec("embedding", 20, 8),
        Q0: ModuleSpec("linear", 8, 8),
        Q1: ModuleSpec("linear", 8, 8),
        V0: ModuleSpec("linear", 8, 4),
        "lm_head": ModuleSpec("lm_head", 8, 20),
    },
    vocab_size=20,
    hidden_size=8,
    num_layers=2,
    max_lora_rank=16,
)


@given(
    st.dictionaries(
        st.builds("{}{}.{}".format, st.just(P), st.sampled_from(MODULES), st.sampled_from(FORMS)),
        st.tuples(st.just("F32"), st.sampled_from([[4, 8], [8, 4], [4, 20], [20, 4], [20, 8]])),
        max_size=8,
    )
)
def test_no_plan_leaves_a_tensor_out(tensors: Tensors) -> None:
    try:
        plan = check(BASE, tensors, target_modules=".*")
    except UnusableAdapter:
        return
    used = [key for module in plan.modules for key in (module.key_a, module.key_b)]
    used += [copy.key for copy in plan.base_copies]
    assert sorted(used) == sorted(tensors)
    assert plan.modules
