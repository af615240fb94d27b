"""Small random models of every family. Imported by the tests that need one: torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_IDS = [2, 0]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = len(SPECIAL_TOKENS) + 256

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": EOS_IDS[0],
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_GEMMA3 = _SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ],
}

TINY_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama_untied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "llama_biased": lambda: LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=False
    ),
    "llama3": lambda: LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama_yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=_YARN_ROPE),
    "llama_linear": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama_dynamic": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=12),
    # More rows in the table than tokens in the tokenizer, as Qwen ships it.
    "qwen2": lambda: Qwen2Config(**(_SIZES | {"vocab_size": 320}), tie_word_embeddings=True),
    "qwen2_sliding": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=10, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(**_GEMMA3),
    "gemma3_softcap": lambda: Gemma3TextConfig(**_GEMMA3, final_logit_softcapping=3.0),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three special ones, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[0],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_transformers_model(config: PreTrainedConfig, seed: int = 0) -> AutoModelForCausalLM:
    """Random float32 weights, large enough that logits differ by whole units."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)
            elif "norm" in name:
                parameter.add_(noise * 0.2)
            else:
                parameter.copy_(noise * 0.2)
    return model


def save_tiny_model(folder: Path, config: PreTrainedConfig, max_shard_size: str = "1GB") -> Path:
    """A model directory as the hub has them, generation defaults and tokenizer included."""
    tiny_transformers_model(config).save_pretrained(folder, max_shard_size=max_shard_size)
    GenerationConfig(
        bos_token_id=0, eos_token_id=EOS_IDS, pad_token_id=0, temperature=0.7, do_sample=True
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
