"""Our reading of PEFT's files against PEFT itself, on a tiny Llama made from a configuration."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mural_resolvers.base_spec import BaseSpec, ModuleKind, ModuleSpec  # noqa: E402
from mural_resolvers.errors import UnusableAdapter  # noqa: E402
from mural_resolvers.peft import (  # noqa: E402
    AdapterPlan,
    PeftConfig,
    check_adapter,
    read_safetensors_header,
)

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_llama(tied: bool = False):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def spec_of(model) -> BaseSpec:
    modules = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            kind: ModuleKind = "lm_head" if name == "lm_head" else "linear"
            modules[name] = ModuleSpec(kind, module.in_features, module.out_features)
        elif isinstance(module, torch.nn.Embedding):
            modules[name] = ModuleSpec("embedding", module.num_embeddings, module.embedding_dim)
    return BaseSpec(
        model_names=("tiny",),
        modules=modules,
        vocab_size=64,
        hidden_size=32,
        num_layers=3,
        max_lora_rank=64,
    )


def save_adapter(folder: Path, tied: bool = False, load: bool = True, **settings: object):
    """Save an adapter with PEFT; give the model that PEFT loads back and the base's spec.

    The loaded one is the oracle: PEFT sorts the keys of patterns when it saves, so overlapping
    patterns may mean something else afterwards than they did in training.
    """
    base = tiny_llama(tied)
    spec = spec_of(base)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(base, config).save_pretrained(folder)
        if load:
            return peft.PeftModel.from_pretrained(tiny_llama(tied), folder), spec
    return None, spec


def plan_of(folder: Path, spec: BaseSpec) -> AdapterPlan:
    config = PeftConfig.from_json((folder / "adapter_config.json").read_bytes())
    header = read_safetensors_header(folder / "adapter_model.safetensors")
    return check_adapter(config, header, spec)


def peft_modules(model) -> dict[str, tuple[int, float]]:
    from peft.tuners.lora import LoraLayer

    return {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }


CASES: dict[str, dict[str, object]] = {
    "defaults": {"target_modules": ["q_proj", "v_proj"]},
    "rank and alpha": {"target_modules": LINEARS, "r": 4, "lora_alpha": 10},
    "rslora": {"target_modules": LINEARS, "r": 6, "lora_alpha": 12, "use_rslora": True},
    "patterns": {
        "target_modules": LINEARS,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.*": 5, "self_attn.*": 2},
        "alpha_pattern": {"^model.layers.2.*": 7, "up_proj": 9, "self_attn.v_proj": 1},
    },
    "patterns under rslora": {
        "target_modules": LINEARS,
        "use_rslora": True,
        "rank_pattern": {"down_proj": 12, "proj": 2, "o_pro": 3},
        "alpha_pattern": {r"layers\.[01]\..*": 40.5},
    },
    "a key that only ends a word": {
        "target_modules": ["q_proj"],
        "rank_pattern": {"proj": 2, "_proj": 3, "attn.q_proj": 4},
    },
    "alternation that escapes its group": {
        "target_modules": LINEARS,
        "rank_pattern": {"zzz)|(.*v_proj": 5},
    },
    "regex targets": {"target_modules": r".*\.layers\.\d\.mlp\.(up|down)_proj"},
    "all linear": {"target_modules": "all-linear"},
    "all linear, without some": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "excluded by regex": {"target_modules": LINEARS, "exclude_modules": r".*layers\.1.*"},
    "some layers": {"target_modules": LINEARS, "layers_to_transform": [0, 2]},
    "one layer by its pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": 1,
        "layers_pattern": "layers",
    },
    "a full name beside layers_to_transform": {
        "target_modules": ["model.layers.2.self_attn.q_proj", "k_proj"],
        "layers_to_transform": [0],
    },
    "output head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "r": 3, "lora_alpha": 7},
    "embedding under rslora": {
        "target_modules": ["embed_tokens", "lm_head"],
        "use_rslora": True,
        "rank_pattern": {"lm_head": 5},
    },
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_the_plan_has_peft_modules_ranks_and_scales(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    model, spec = save_adapter(tmp_path, **settings)

    plan = plan_of(tmp_path, spec)

    ours = {module.module: (module.rank, module.scale) for module in plan.modules}
    assert ours == peft_modules(model)


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_targets_agree_with_peft_on_every_module(tmp_path: Path, settings: dict[str, Any]) -> None:
    model, spec = save_adapter(tmp_path, **settings)
    config = PeftConfig.from_json((tmp_path / "adapter_config.json").read_bytes())

    targeted = {
        name
        for name, module in spec.modules.items()
        if config.targets(name, is_linear=module.kind == "linear")
    }

    assert targeted == set(peft_modules(model))


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_the_base_beside_an_embedding_adapter_are_reported(
    tmp_path: Path, tied: bool
) -> None:
    _, spec = save_adapter(tmp_path, tied, target_modules=["embed_tokens", "lm_head"])

    copies = {copy.module: copy.shape for copy in plan_of(tmp_path, spec).base_copies}

    assert copies == {"model.embed_tokens": (64, 32), "lm_head": (64, 32)}


def test_modules_to_save_of_the_head_are_copies_to_compare(tmp_path: Path) -> None:
    _, spec = save_adapter(tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])

    plan = plan_of(tmp_path, spec)

    assert [copy.module for copy in plan.base_copies] == ["lm_head"]


def test_the_live_form_of_names_is_read_as_the_saved_one(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, spec = save_adapter(tmp_path, target_modules=["q_proj", "embed_tokens"])
    live = {k: v.contiguous() for k, v in model.state_dict().items() if "lora_" in k}
    saved = plan_of(tmp_path, spec)
    save_file(live, tmp_path / "adapter_model.safetensors")

    plan = plan_of(tmp_path, spec)

    assert any(".lora_A.default.weight" in module.key_a for module in plan.modules)
    assert [(m.module, m.rank, m.scale) for m in plan.modules] == [
        (m.module, m.rank, m.scale) for m in saved.modules
    ]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias="),
        ({"layer_replication": [(0, 2), (1, 3)]}, "layer_replication"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "changes the base's weights"),
        ({"init_lora_weights": "olora"}, "changes the base's weights"),
        ({"alora_invocation_tokens": [3, 4]}, "activated LoRA"),
    ],
)
def test_what_peft_saves_and_we_do_not_serve_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    _, spec = save_adapter(tmp_path, load=False, target_modules=["q_proj"], r=4, **settings)

    with pytest.raises(UnusableAdapter, match=reason):
        plan_of(tmp_path, spec)


def test_every_key_that_peft_writes_by_default_is_known(tmp_path: Path) -> None:
    save_adapter(tmp_path, target_modules=["q_proj"])

    config = PeftConfig.from_json((tmp_path / "adapter_config.json").read_bytes())

    assert config.refusals == ()


def test_no_key_of_peft_changes_the_answers_unnoticed(tmp_path: Path) -> None:
    """Each of PEFT's own keys is read, inert or refused by its name: none is unknown."""
    save_adapter(tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_config.json"
    saved = json.loads(path.read_text())

    for key in saved:
        config = json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"], key: saved[key]})
        assert PeftConfig.from_json(config.encode()).refusals == ()
        for value in (True, {"x": 1}, ["x"], "x", 3):
            if key == "peft_type":
                continue
            config = json.dumps({"peft_type": "LORA", key: value})
            try:
                refusals = PeftConfig.from_json(config.encode()).refusals
            except UnusableAdapter:
                continue
            assert not any("is not known" in refusal for refusal in refusals)


def test_patterns_whose_order_peft_lost_are_refused_as_peft_refuses_them(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "target_modules": LINEARS,
        "rank_pattern": {"q_proj": 2, ".*self_attn.*": 3},
    }
    _, spec = save_adapter(tmp_path, load=False, **settings)

    with pytest.raises(UnusableAdapter, match="has the shape"):
        plan_of(tmp_path, spec)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(tiny_llama(), tmp_path)


def test_the_order_of_overlapping_alphas_is_the_one_that_peft_reads(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "target_modules": LINEARS,
        "alpha_pattern": {"q_proj": 2, ".*self_attn.*": 3},
    }
    model, spec = save_adapter(tmp_path, **settings)

    scales = {module.module: module.scale for module in plan_of(tmp_path, spec).modules}

    assert scales["model.layers.0.self_attn.q_proj"] == 3 / 8
    assert scales == {name: scale for name, (_, scale) in peft_modules(model).items()}
