"""GGUF files give what the model they were made from gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from mural_server.models.errors import CheckpointError, ModelError, UnsupportedModel
from mural_server.models.gguf_file import GGUFFile
from mural_server.models.loader import load_model
from mural_server.models.location import default_model_path
from mural_server.models.source import (
    eos_token_ids,
    load_config,
    load_tokenizer,
    tokenizer_state,
)
from mural_server.ops.reference import ReferenceOps

TOKENS = [(37 * step) % 250 + 3 for step in range(40)]
F32, Q8_0, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q4_1"))
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def write_gguf(
    target: Path,
    source: Path,
    kind: gguf.GGMLQuantizationType = F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Convert a saved model as llama.cpp's script does: names, head order, norms, metadata."""
    config = AutoConfig.from_pretrained(source)
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(target, arch)
    write_metadata(writer, config)
    extra(writer)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in load_file(source / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        values = converted(name, tensor, config).numpy().astype(np.float32)
        packed = gguf.quantize(values, kind) if values.ndim == 2 else values
        stored = kind if values.ndim == 2 else F32
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(1)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "llama":
        writer.add_rope_dimension_count(head_dim)
    else:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)


def converted(name: str, tensor: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return tensor + 1.0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if config.model_type == "llama" and part in name:
            halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def assert_same_logits(path: Path, oracle: Path, paged, new_sequence, oracle_logits) -> None:
    model = load_model(str(path), dtype=torch.float32, ops=ReferenceOps())
    logits = paged(model).step([(new_sequence(TOKENS), len(TOKENS))])[0]
    expected = oracle_logits(oracle, TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.fixture(scope="session")
def gemma3_as_llama_cpp_knows_it(tmp_path_factory: pytest.TempPathFactory, tiny_save) -> Path:
    """llama.cpp has no key for the pattern of windows and none for the attention scale."""
    config = {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "layer_types": None}
    return tiny_save("gemma3", tmp_path_factory.mktemp("gemma3"), **config)


@pytest.mark.parametrize("family", ["llama", "llama_untied", "llama_biased", "qwen2", "qwen3"])
def test_a_gguf_file_equals_the_model_it_was_made_from(
    family: str, tiny_model, tmp_path: Path, paged, new_sequence, oracle_logits
) -> None:
    source = tiny_model(family)
    path = write_gguf(tmp_path / "model.gguf", source)
    assert_same_logits(path, source, paged, new_sequence, oracle_logits)


def test_a_gemma3_gguf_file_equals_the_model_it_was_made_from(
    gemma3_as_llama_cpp_knows_it: Path, tmp_path: Path, paged, new_sequence, oracle_logits
) -> None:
    path = write_gguf(tmp_path / "model.gguf", gemma3_as_llama_cpp_knows_it)
    assert_same_logits(path, gemma3_as_llama_cpp_knows_it, paged, new_sequence, oracle_logits)


@pytest.mark.parametrize("kind", [F32, Q8_0, Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_gguf_file_is_read_as_transformers_reads_it(
    family: str, kind, tiny_model, tmp_path: Path, paged, new_sequence, oracle_logits
) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model(family), kind)
    assert_same_logits(path, path, paged, new_sequence, oracle_logits)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    ours = load_config(str(path)).to_dict()
    named = {"_name_or_path", "_model_name_or_path", "head_dim"}
    assert {k: v for k, v in theirs.items() if k not in named} == {
        k: v for k, v in ours.items() if k not in named
    }


def test_llama3_scaling_written_as_frequency_factors_is_applied(
    tiny_model, tmp_path: Path, paged, new_sequence, oracle_logits
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    source = tiny_model("llama3")
    config = AutoConfig.from_pretrained(source)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / scaled).numpy()
    path = write_gguf(
        tmp_path / "model.gguf",
        source,
        extra=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    assert_same_logits(path, source, paged, new_sequence, oracle_logits)


@pytest.mark.parametrize("family", ["llama_linear", "llama_yarn"])
def test_rope_scaling_of_the_metadata_is_applied(
    family: str, tiny_model, tmp_path: Path, paged, new_sequence, oracle_logits
) -> None:
    def scale(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(family.removeprefix("llama_")))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    source = tiny_model(family)
    path = write_gguf(tmp_path / "model.gguf", source, extra=scale)
    assert_same_logits(path, source, paged, new_sequence, oracle_logits)


def test_gemma3_rope_scaling_is_applied_to_the_global_layers_alone(
    tiny_save, tmp_path: Path, paged, new_sequence, oracle_logits
) -> None:
    def scale(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    source = tiny_save(
        "gemma3",
        tmp_path / "source",
        num_hidden_layers=7,
        query_pre_attn_scalar=16,
        layer_types=None,
        rope_parameters=rope,
    )
    path = write_gguf(tmp_path / "model.gguf", source, extra=scale)
    assert_same_logits(path, source, paged, new_sequence, oracle_logits)


REFUSED = {
    "split.count": lambda writer: writer.add_uint16("split.count", 2),
    "expert_count": lambda writer: writer.add_expert_count(8),
    "rope.scaling.type": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    "partial rotation": lambda writer: writer.add_key_length(32),
}


@pytest.mark.parametrize("told", REFUSED)
def test_keys_that_are_not_implemented_are_refused(told: str, tiny_model, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"), extra=REFUSED[told])
    with pytest.raises(UnsupportedModel, match=told):
        load_config(str(path))


def test_an_unknown_architecture_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported; supported: llama"):
        load_config(str(tmp_path / "model.gguf"))


def test_tokens_that_end_a_turn_come_from_the_metadata(tiny_model, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    assert eos_token_ids(str(path)) == (2, 1)


def test_left_over_tensors_are_named(tiny_model, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_model("llama"),
        extra=lambda writer: writer.add_tensor("blk.0.extra.weight", np.ones(4, np.float32)),
    )
    with pytest.raises(CheckpointError, match=r"unexpected blk\.0\.extra\.weight"):
        load_model(str(path), dtype=torch.float32, ops=ReferenceOps())


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(share: float, tiny_model, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load_config(str(path))


@pytest.fixture(scope="session")
def header(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    content = write_gguf(folder / "whole.gguf", tiny_model("llama")).read_bytes()
    return content, folder / "mutated.gguf"


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 3000), new=st.binary(min_size=1, max_size=8))
def test_a_lying_header_is_refused_or_harmless(
    at: int, new: bytes, header: tuple[bytes, Path]
) -> None:
    content, path = header
    path.write_bytes(content[:at] + new + content[at + len(new) :])
    try:
        file = GGUFFile(path)
        for name in file.tensors:
            file.read(name)
    except ModelError:
        pass


@pytest.mark.slow
def test_smollm2_equals_transformers(paged, new_sequence, oracle_logits) -> None:
    path = Path(default_model_path())
    tokenizer = load_tokenizer(str(path))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Write a haiku about walls."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    tokens = tokenizer(text)["input_ids"]
    model = load_model(str(path), dtype=torch.float32, ops=ReferenceOps())
    runner, sequence = paged(model), new_sequence(tokens)
    parts = [runner.step([(sequence, count)])[0] for count in (17, len(tokens) - 18, 1)]
    logits, expected = torch.cat(parts), oracle_logits(path, tokens)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-3, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_smollm2_is_tokenized_as_transformers_does_by_itself() -> None:
    path = Path(default_model_path())
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(str(path))
    for text in ("two  spaces\n\nand don't", "grüß 🖌 12345", "<|im_start|>user\nhi<|im_end|>"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.slow
def test_smollm2_has_its_template_and_ends_at_its_turn() -> None:
    path = default_model_path()
    assert "<|im_start|>" in str(tokenizer_state(load_tokenizer(path)).chat_template)
    assert eos_token_ids(path) == (load_tokenizer(path).convert_tokens_to_ids("<|im_end|>"),)
