"""``mural serve``: flags to settings, help that answers at once, one sentence on failure."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from mural_server.commands import engine_settings, serve, server_settings
from mural_server.settings import EngineSettings, LoRAModule, ServerSettings, SettingsError


def parsed(*flags: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, exit_on_error=False
    )
    serve.add_arguments(parser)
    return vars(parser.parse_args(flags))


def test_without_flags_the_settings_defaults_hold():
    assert engine_settings(parsed("m")) == EngineSettings(model="m")
    assert server_settings(parsed("m"), {}) == ServerSettings()


def test_vllms_flags_are_understood():
    given = parsed(
        *("m", "--served-model-name", "a", "b", "--max-loras", "2", "--max-cpu-loras", "4"),
        *("--max-lora-rank", "16", "--lora-target-modules", "q_proj", "v_proj", "--port", "9"),
        *("--kv-cache-memory-bytes", "512Mi", "--no-enable-prefix-caching", "--no-enable-lora"),
        *("--api-key", "key-number-one", "--api-key", "key-number-two", "--adapter-dir", "/a"),
        *("--lora-modules", "one=/x", '{"name": "two", "path": "/y=z", "shared": true}'),
        *("--dtype", "float32", "--max-model-len", "64", "--seed", "3"),
    )
    engine = engine_settings(given)
    assert (engine.max_loras, engine.max_cpu_loras, engine.max_lora_rank) == (2, 4, 16)
    assert engine.lora_target_modules == ("q_proj", "v_proj")
    assert engine.kv_cache_memory_bytes == 512 << 20
    assert not engine.enable_prefix_caching
    assert not engine.enable_lora
    assert (engine.dtype, engine.max_model_len, engine.seed) == ("float32", 64, 3)
    server = server_settings(given, {})
    assert server.served_model_name == ("a", "b")
    assert server.api_key == ("key-number-one", "key-number-two")
    assert server.lora_modules == (LoRAModule("one", "/x"), LoRAModule("two", "/y=z", True))


def test_secrets_and_vllms_switch_come_from_the_environment(tmp_path: Path):
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "MURAL_CONTROL_TOKEN": "a-token",
        "MURAL_API_KEY": "an-admin-key",
    }
    server = server_settings(parsed("m", "--api-key", "another-key"), environment)
    assert server.allow_runtime_lora_updating
    assert server.control_token == "a-token"
    assert server.api_key == ("another-key", "an-admin-key")
    assert not server_settings(
        parsed("m"), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}
    ).allow_runtime_lora_updating
    token = tmp_path / "token"
    token.write_text("of-the-file\n")
    given = parsed("m", "--control-token-file", str(token))
    assert server_settings(given, environment).control_token == "of-the-file"
    token.write_text("\n")
    with pytest.raises(SettingsError, match="empty"):
        server_settings(given, environment)
    assert server_settings(parsed("m", "--no-control"), {}).control_port is None


@pytest.mark.parametrize(
    "flags",
    [
        ("m", "--lora-modules", "nonsense"),
        ("m", "--lora-modules", '{"name": 5}'),
        ("m", "--kv-cache-memory-bytes", "lots"),
        ("m", "--dtype", "int4"),
    ],
)
def test_flags_that_mean_nothing_are_refused(flags):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parsed(*flags)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mural_server.commands", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_wrong_combination_is_one_sentence_and_status_1():
    found = run("some-model", "--max-loras", "9", "--max-cpu-loras", "3")
    assert found.returncode == 1
    assert found.stderr.startswith("mural serve: max_cpu_loras (3) is below max_loras (9)")
    assert "Traceback" not in found.stderr
    assert found.stderr.count("\n") == 1


def test_help_imports_nothing_heavy_and_tells_the_defaults():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'fastapi', 'uvicorn', 'pydantic'):\n"
        "    sys.modules[name] = None\n"
        "from mural_server.commands import main\n"
        "main(['--help'])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "(default 16)" in found.stdout
    assert "(default: None)" not in found.stdout
    assert "==SUPPRESS==" not in found.stdout
