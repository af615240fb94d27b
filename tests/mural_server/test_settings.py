"""Settings are refused together, with a sentence that says what to change."""

from __future__ import annotations

import pytest

from mural_server.settings import EngineSettings, SettingsError


def test_the_defaults_are_valid():
    EngineSettings(model="x").validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "name a Hugging Face directory"),
        ({"max_cpu_loras": 7}, "max_cpu_loras.*raise the first"),
        ({"max_num_seqs": 512}, "max_num_batched_tokens.*lower the second"),
        ({"enable_chunked_prefill": False, "max_model_len": 512}, "leave chunked prefill on"),
        ({"block_size": 24}, "power of two"),
        ({"block_size": 2}, "power of two"),
        ({"max_model_len": 1}, "2 or more"),
        ({"max_num_seqs": 0}, "1 or more"),
        ({"kv_cache_memory_bytes": 0}, "above 0"),
        ({"cpu_threads": 0}, "from 1"),
        ({"max_loras": 0}, "--no-enable-lora"),
        ({"max_lora_rank": 0}, "from 1"),
        ({"max_lora_rank": 1024}, "to 512"),
        ({"lora_target_modules": ()}, "at least one"),
        ({"loader_nice": 20}, "to 19"),
        ({"adapter_quantum_tokens": 0}, "1 or more"),
        ({"seed": -1}, "from 0"),
        ({"max_cpu_lora_bytes": -1}, "above 0"),
    ],
)
def test_a_wrong_combination_says_what_to_change(changes, words):
    with pytest.raises(SettingsError, match=words):
        EngineSettings(**({"model": "x"} | changes)).validate()


def test_adapter_settings_do_not_matter_without_adapters():
    EngineSettings(model="x", enable_lora=False, max_loras=0, max_cpu_loras=0).validate()


def test_auto_is_bfloat16_where_the_cpu_multiplies_it():
    settings = EngineSettings(model="x")
    assert settings.resolved_dtype(frozenset({"avx512_bf16"})) == "bfloat16"
    assert settings.resolved_dtype(frozenset({"avx2"})) == "float32"
    assert EngineSettings(model="x", dtype="bfloat16").resolved_dtype(frozenset()) == "bfloat16"


def test_memory_left_open_is_a_bounded_share_of_what_is_free():
    settings = EngineSettings(model="x")
    assert settings.resolved_kv_bytes(4 << 30) == 1 << 30
    assert settings.resolved_kv_bytes(1 << 20) == 64 << 20
    assert settings.resolved_kv_bytes(1 << 40) == 4 << 30
    assert EngineSettings(model="x", kv_cache_memory_bytes=5).resolved_kv_bytes(1) == 5
