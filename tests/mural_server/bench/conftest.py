"""A tiny model with the benchmark's adapters for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from mural_server.bench.adapters import make_adapters
from mural_server.bench.setup import QUICK, Setup


@pytest.fixture(scope="module")
def bench_setup(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Setup:
    path = tiny_model("llama")
    setup = Setup(
        model=str(path),
        dtype="float32",
        threads=1,
        sizes=QUICK,
        vocab_size=AutoConfig.from_pretrained(path).vocab_size,
        adapter_dir=str(tmp_path_factory.mktemp("bench-adapters")),
    )
    make_adapters(setup)
    return setup
