"""Certificates that are renewed while the router runs: their files are watched."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mural_router.http.settings import TlsSettings

__all__ = ["CertificateWatch"]

POLL_S: Final = 5.0

logger = logging.getLogger("mural.router")

_Stamp = tuple[int, int, int]


class CertificateWatch:
    """Calls ``reload`` when a file has changed and all of them have settled."""

    def __init__(self, tls: TlsSettings, reload: Callable[[], None]) -> None:
        """``reload`` raises ``ValueError`` for files that do not fit, and keeps the old ones."""
        names = (
            *(tls.certfile, tls.keyfile, tls.replica_ca_file),
            *(tls.replica_certfile, tls.replica_keyfile),
        )
        self._paths = [Path(name) for name in names if name is not None]
        self._reload = reload
        self._taken = self._seen = self._stamps()

    @property
    def needed(self) -> bool:
        """Whether there is a file at all."""
        return bool(self._paths)

    async def run(self, poll_s: float = POLL_S) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(poll_s)
            self.poll(await asyncio.to_thread(self._stamps))

    def poll(self, found: list[_Stamp | None] | None = None) -> None:
        """Look once. A change counts when it was seen twice: key and certificate come apart."""
        found = self._stamps() if found is None else found
        settled, self._seen = found == self._seen, found
        if not settled or found == self._taken:
            return
        self._taken = found
        try:
            self._reload()
        except ValueError as error:
            logger.error("the certificates are refused, the old ones hold: %s", error)
        else:
            logger.info("certificates reloaded")

    def _stamps(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp | None:
    try:
        # Through the links by which a mounted secret is swapped.
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
