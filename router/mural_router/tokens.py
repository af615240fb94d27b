"""The tokens that replicas are shown, which may be renewed while the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from mural_resolvers.file_watch import FileWatch
from mural_resolvers.secret_text import watch_secret
from mural_router.settings import Secrets

__all__ = ["ReplicaTokens"]

HANDOVER_S: Final = 120.0
"""For how long a renewed router token is held back. Each pod has a copy of the Secret of its own,
a minute or so apart, and a server takes the last token for five minutes more."""

logger = logging.getLogger("mural.router")


class ReplicaTokens:
    """What the files say, as far as it is to be used. For one event loop; whoever makes it closes
    it.

    Followers try both tokens at once, where a server knows one of them. Requests carry one alone:
    the new one is shown when servers have had the time to hear of it.
    """

    def __init__(self, secrets: Secrets, changed: Callable[[ReplicaTokens], None]) -> None:
        """``changed`` is told whenever another token is to be used."""
        self.router_token = secrets.router_token
        self.control_token = secrets.control_token
        self.vllm_api_key = secrets.vllm_api_key
        self._changed = changed
        self._next = secrets.router_token
        self._due: asyncio.TimerHandle | None = None
        files = (
            ("router_token", secrets.router_token_file, self._renew_router_token),
            ("control_token", secrets.control_token_file, self._renew_control_token),
            ("vllm_api_key", secrets.vllm_api_key_file, self._renew_vllm_api_key),
        )
        self.watches: dict[str, FileWatch] = {
            name: watch_secret(path, f"{name}_file", renew, what=name.replace("_", " "))
            for name, path, renew in files
            if path is not None
        }

    def close(self) -> None:
        """Show no other token any more."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _renew_router_token(self, token: str) -> None:
        if token == self._next:
            return
        if self._due is not None:
            # Renewed twice in a row: servers may not know the one before the last any more.
            self._show_router_token()
        self._next = token
        loop = asyncio.get_running_loop()
        self._due = loop.call_later(HANDOVER_S, self._show_router_token)
        logger.info("the new router token is shown in %g s, when servers know it", HANDOVER_S)

    def _show_router_token(self) -> None:
        self.close()
        self.router_token = self._next
        self._changed(self)

    def _renew_control_token(self, token: str) -> None:
        self.control_token = token
        self._changed(self)

    def _renew_vllm_api_key(self, key: str) -> None:
        self.vllm_api_key = key
        self._changed(self)
