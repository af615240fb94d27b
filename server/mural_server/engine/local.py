"""A core in this process, driven by the event loop that asks it: for offline use and tests."""

from __future__ import annotations

import asyncio
import logging

from mural_server.engine.connection import ConnectedClient
from mural_server.engine.core import EngineCore
from mural_server.engine.wire import Command

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.02
"""How long to wait for news when there are requests but none can run."""


class LocalEngine(ConnectedClient):
    """Must be made inside a running event loop, which each step occupies."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core.info)
        self._core = core
        self._wake = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(self._wake.set)

        core.on_news = wake
        self._driver = asyncio.create_task(self._drive(), name="engine-core")

    def _send(self, command: Command) -> None:
        self._core.handle(command)
        self._wake.set()

    async def _drive(self) -> None:
        try:
            while True:
                progressed = self._core.step()
                outputs = self._core.take_outputs()
                if outputs is not None:
                    self._dispatch(outputs)
                if progressed:
                    await asyncio.sleep(0)
                else:
                    await self._rest()
        except Exception as error:
            logger.exception("the engine core failed")
            self._die(f"the engine core failed: {error}")

    async def _rest(self) -> None:
        timeout = IDLE_WAIT_S if self._core.has_work else None
        try:
            await asyncio.wait_for(self._wake.wait(), timeout)
        except TimeoutError:
            return
        self._wake.clear()

    async def close(self) -> None:
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)
        self._die("the engine was closed")
        self._core.close()
