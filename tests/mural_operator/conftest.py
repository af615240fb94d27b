"""Makes ``simulated_server`` importable to the tests of this folder, and starts such servers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).with_name("simulated_server.py")
_SPEC = importlib.util.spec_from_file_location("simulated_server", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
simulated_server = importlib.util.module_from_spec(_SPEC)
sys.modules["simulated_server"] = simulated_server
_SPEC.loader.exec_module(simulated_server)


@pytest.fixture
async def start_simulated() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """``await start_simulated(**more)``: a `SimulatedServer` that ends with the test."""
    async with AsyncExitStack() as held:

        async def start(**more: Any) -> Any:
            server = simulated_server.SimulatedServer(**more)
            return await held.enter_async_context(server)

        yield start
