"""What the API process loads, and what it leaves to the engine's."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from mural_server.models.source import tokenizer_state

LOADS = """
import sys
import msgspec
import uvloop
import mural_server.commands
from mural_server.api.server import run_server
from mural_server.commands import engine_settings
from mural_server.tokenizer import ModelTokenizer, TokenizerState

engine_settings({})
tokenizer = ModelTokenizer(msgspec.json.decode(sys.stdin.buffer.read(), type=TokenizerState))
assert tokenizer.decode(tokenizer.encode("Hi", True)) == "Hi"
heavy = {"torch", "transformers", "numpy", "safetensors", "gguf"} & set(sys.modules)
assert not heavy, heavy
"""


def test_the_api_process_loads_neither_torch_nor_transformers(byte_tokenizer):
    state = msgspec.json.encode(tokenizer_state(byte_tokenizer))
    subprocess.run([sys.executable, "-c", LOADS], check=True, timeout=120, input=state)
