"""Serves the admin pages beside the proxy, in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final

import uvicorn

from mural_resolvers.ports import listen
from mural_router.admin.app import create_admin_app
from mural_router.running import Router
from mural_router.start_checks import ADMIN_PORT

__all__ = ["AdminServer"]

GRACE_S: Final = 2


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the signals to the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AdminServer:
    """Listens from its making on, until `close`. Raises ``InvalidInput`` when it cannot."""

    def __init__(self, router: Router, host: str, port: int) -> None:
        self._socket = listen(host, port, ADMIN_PORT)
        bound_host, bound_port = self._socket.getsockname()[:2]
        self.address = f"[{bound_host}]:{bound_port}" if ":" in host else f"{host}:{bound_port}"
        self._server = _Server(
            uvicorn.Config(
                create_admin_app(router),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="admin pages")

    async def close(self) -> None:
        """End within seconds."""
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
