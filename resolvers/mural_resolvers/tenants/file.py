"""``tenants.yaml`` on disk, and the keys that are in force: read at the start, then watched."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from mural_resolvers.errors import InvalidInput
from mural_resolvers.redaction import redacted
from mural_resolvers.tenants.config import MAX_FILE_BYTES, TenantsConfig, parse_tenants
from mural_resolvers.tenants.keys import KeyRing

__all__ = ["TenantsFile", "WatchNumbers", "read_tenants"]

POLL_S: Final = 0.5

logger = logging.getLogger("mural.tenants")


def read_tenants(path: Path) -> TenantsConfig:
    """Read a file; raise ``InvalidInput`` naming the place that is wrong."""
    return parse_tenants(_read(path))


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"The tenants file cannot be read: {error.strerror}.") from None


@dataclass(frozen=True, slots=True)
class WatchNumbers:
    """What a watch has done: files taken, files refused, and whether the last was one of those."""

    loaded_at: datetime
    reloads: int = 0
    refused: int = 0
    stale: bool = False


class TenantsFile:
    """Keeps the keys of a file in force. A bad file, or none at all, leaves the last good one.

    The content is compared rather than the time of the change, which a mounted ConfigMap, a copy
    or a coarse clock may keep. A new content counts once it has been seen twice: a file that is
    just being written in place may by chance be a good one that has lost its last tenants.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; raise ``InvalidInput`` when it is absent or wrong."""
        data = _read(path)
        self.config = parse_tenants(data)
        self.ring: KeyRing = self.config.ring()
        self.numbers = WatchNumbers(loaded_at=datetime.now(UTC))
        self._path = path
        self._taken = _digest(data)
        self._seen = self._taken
        self._refused = ""
        self._changed = asyncio.Event()

    async def watch(self, poll_s: float = POLL_S) -> None:
        """Poll for ever. Whoever starts it cancels it."""
        while True:
            await asyncio.sleep(poll_s)
            try:
                await self.poll()
            except Exception:
                # The keys of a server must not stop being watched because of one bad moment.
                logger.exception("the tenants file could not be looked at")

    async def wait_change(self) -> None:
        """Return when the next content has been taken or refused."""
        await self._changed.wait()

    async def poll(self) -> None:
        """Look once; the second look at one new content takes it, or refuses it."""
        try:
            data = await asyncio.to_thread(_read, self._path)
        except InvalidInput as error:
            self._refuse("absent", error)
            return
        digest = _digest(data)
        settled, self._seen = digest == self._seen, digest
        if digest == self._taken:
            self._back_to_what_is_in_force()
        elif settled and digest != self._refused:
            await self._take(data, digest)

    async def _take(self, data: bytes, digest: str) -> None:
        try:
            config, ring = await asyncio.to_thread(_parse, data)
        except InvalidInput as error:
            self._refuse(digest, error)
            return
        self.config, self.ring = config, ring
        self._taken, self._refused = digest, ""
        self.numbers = replace(
            self.numbers,
            loaded_at=datetime.now(UTC),
            reloads=self.numbers.reloads + 1,
            stale=False,
        )
        logger.info("tenants file reloaded: %d tenants, %d keys", len(config.tenants), len(ring))
        self._tell()

    def _refuse(self, digest: str, error: InvalidInput) -> None:
        if digest == self._refused:
            return
        self._refused = digest
        self.numbers = replace(self.numbers, refused=self.numbers.refused + 1, stale=True)
        logger.error(
            "the tenants file is refused, the last good one stays in force: %s",
            redacted(error.message),
        )
        self._tell()

    def _back_to_what_is_in_force(self) -> None:
        if not self._refused:
            return
        self._refused = ""
        self.numbers = replace(self.numbers, stale=False)
        logger.info("the tenants file is the one in force again")

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _parse(data: bytes) -> tuple[TenantsConfig, KeyRing]:
    config = parse_tenants(data)
    return config, config.ring()
