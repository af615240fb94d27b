"""A checkpoint is loaded whole or refused with the tensor's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mural_server.models.errors import CheckpointError, ModelError, UnsupportedModel
from mural_server.models.loader import load_model
from mural_server.ops.reference import ReferenceOps

TOKENS = [5, 90, 31, 200, 17, 8]


def load(path: Path, dtype: torch.dtype = torch.float32):
    return load_model(str(path), dtype=dtype, ops=ReferenceOps())


@pytest.fixture
def copied(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(tiny_model(name), tmp_path / name)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def sharded(source: Path, target: Path) -> Path:
    """The same weights in several files with an index."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(target, max_shard_size="100KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def logits_of(model, paged, new_sequence) -> torch.Tensor:
    return paged(model).step([(new_sequence(TOKENS), len(TOKENS))])[0]


@pytest.mark.parametrize("family", ["llama_untied", "gemma3"])
def test_shards_load_like_one_file(
    family: str, tiny_model, tmp_path: Path, paged, new_sequence
) -> None:
    folder = sharded(tiny_model(family), tmp_path / "sharded")
    results = [logits_of(load(path), paged, new_sequence) for path in (tiny_model(family), folder)]
    assert torch.equal(*results)


def test_a_missing_shard_is_named(tiny_model, tmp_path: Path) -> None:
    folder = sharded(tiny_model("llama"), tmp_path / "sharded")
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"{lost.name} is missing"):
        load(folder)


def test_an_index_that_promises_more_than_its_shards_hold_is_refused(
    tiny_model, tmp_path: Path
) -> None:
    folder = sharded(tiny_model("llama"), tmp_path / "sharded")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = next(iter(index["weight_map"].values()))
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = file
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_an_index_that_points_out_of_its_folder_is_refused(
    name: str, tiny_model, tmp_path: Path
) -> None:
    folder = sharded(tiny_model("llama"), tmp_path / "sharded")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file beside it"):
        load(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index_is_refused(content: str, tiny_model, tmp_path: Path) -> None:
    folder = sharded(tiny_model("llama"), tmp_path / "sharded")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_file_is_refused(keep: float, copied) -> None:
    file = copied("llama") / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if keep < 1 else keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(file.parent)


def test_missing_weights_are_named(copied) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(CheckpointError, match=r"is missing model\.layers\.1\.self_attn\.k_proj"):
        load(folder)


def test_no_weights_at_all_are_told(copied) -> None:
    folder = copied("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        load(folder)


def test_left_over_tensors_are_named(copied) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"has unexpected model\.layers\.0\.extra"):
        load(folder)


def test_a_bias_that_the_configuration_does_not_have_is_left_over(copied) -> None:
    folder = copied("llama_biased")
    set_config(folder, attention_bias=False)
    with pytest.raises(CheckpointError, match=r"unexpected .*bias.* and \d+ more"):
        load(folder)


def test_old_rotary_buffers_are_no_fault(copied) -> None:
    folder = copied("llama")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(folder, lambda tensors: tensors.update(buffer))
    load(folder)


def test_a_wrong_shape_is_named_with_both_shapes(copied) -> None:
    folder = copied("llama")
    name = "model.layers.2.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(64, 95)}))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight is \[64, 95\], not \[64, 96\]"):
        load(folder)


def test_quantised_safetensors_are_refused(copied) -> None:
    folder = copied("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(UnsupportedModel, match="quantised"):
        load(folder)


def test_a_tied_checkpoint_may_ship_the_same_table_twice(copied) -> None:
    folder = copied("llama")
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[table].clone()}))
    assert load(folder).tie_word_embeddings


def test_a_tied_checkpoint_whose_tables_differ_is_not_tied(
    copied, paged, new_sequence, oracle_logits
) -> None:
    folder = copied("llama")
    table = "model.embed_tokens.weight"
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[table] * -2.0}))
    model = load(folder)
    assert not model.tie_word_embeddings
    torch.testing.assert_close(
        logits_of(model, paged, new_sequence), oracle_logits(folder, TOKENS), atol=1e-4, rtol=0
    )


def test_an_untied_checkpoint_without_an_output_projection_is_refused(copied) -> None:
    folder = copied("llama_untied")
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"is missing lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_converted_to_the_asked_dtype(stored: torch.dtype, copied) -> None:
    folder = copied("llama")
    rewrite(folder, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()}))
    model = load(folder, torch.bfloat16)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.bfloat16}
    assert model.model.layers[0].mlp.down_proj.packed.weight.dtype == torch.bfloat16


def test_the_model_outlives_its_files(copied, paged, new_sequence) -> None:
    folder = copied("llama")
    model = load(folder)
    before = logits_of(model, paged, new_sequence)
    file = folder / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)  # in place: a mapping would see it
    assert torch.equal(before, logits_of(model, paged, new_sequence))


REFUSED = {
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, "quantization_config"),
    "num_experts": (8, "num_experts"),
    "attn_logit_softcapping": (50.0, "attn_logit_softcapping"),
    "num_key_value_heads": (3, "4 query heads cannot share 3"),
    "hidden_act": ("relu", "activation 'relu'"),
    "layer_types": (["chunked_attention"] * 3, "layer_types"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor"),
    "rope_parameters": (
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        },
        "rope type 'longrope'",
    ),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_is_not_implemented_is_refused_by_name(setting: str, copied) -> None:
    folder = copied("llama")
    value, told = REFUSED[setting]
    set_config(folder, **{setting: value})
    with pytest.raises(ModelError, match=told):
        load(folder)


def test_gemma_with_an_attention_softcap_or_both_directions_is_refused(copied) -> None:
    folder = copied("gemma3")
    set_config(folder, attn_logit_softcapping=50.0)
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping"):
        load(folder)
    set_config(folder, attn_logit_softcapping=None, use_bidirectional_attention=True)
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        load(folder)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "LlamaForSequenceClassification"])
def test_an_unknown_architecture_is_answered_with_the_known_ones(name: str, copied) -> None:
    folder = copied("llama")
    set_config(folder, architectures=[name])
    with pytest.raises(UnsupportedModel, match=f"{name} is not supported.*LlamaForCausalLM"):
        load(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "no-such-model"}'])
def test_a_damaged_configuration_is_refused(content: str, copied) -> None:
    folder = copied("llama")
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError):
        load(folder)


def test_a_path_that_is_nothing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path / "absent.gguf", Path("org/model-on-the-hub")):
        with pytest.raises(CheckpointError):
            load(path)
