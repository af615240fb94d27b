"""Makes the simulated server and pool, and ``operated``, importable to the tests of this folder,
and starts such servers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _import(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


simulated_server = _import("simulated_server")
_import("virtual_time")
_import("simulated_pool")
_import("operated")
_import("memory_cluster")


@pytest.fixture
async def start_simulated() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """``await start_simulated(**more)``: a `SimulatedServer` that ends with the test."""
    async with AsyncExitStack() as held:

        async def start(**more: Any) -> Any:
            server = simulated_server.SimulatedServer(**more)
            return await held.enter_async_context(server)

        yield start
