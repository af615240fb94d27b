"""Starts simulated servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.mural_operator.simulated_server import SimulatedServer


@pytest.fixture
async def start_simulated() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """``await start_simulated(**more)``: a `SimulatedServer` that ends with the test."""
    async with AsyncExitStack() as held:

        async def start(**more: Any) -> Any:
            server = SimulatedServer(**more)
            return await held.enter_async_context(server)

        yield start
