"""A file whose content is in force while a process runs: read at the start, then watched."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Generic, TypeVar

from mural_resolvers.conversion import in_file
from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.files import read_settings
from mural_resolvers.redaction import redacted

__all__ = ["POLL_S", "WatchNumbers", "WatchedFile"]

POLL_S: Final = 0.5
"""Between two looks."""

logger = logging.getLogger("mural.files")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WatchNumbers:
    """What a watch has done: files taken, files refused, and whether the last was one of those."""

    loaded_at: datetime
    reloads: int = 0
    refused: int = 0
    stale: bool = False


class WatchedFile(Generic[T]):
    """Keeps what a file says in force. A bad file, or none at all, leaves the last good one.

    The content is compared rather than the time of the change, which a mounted ConfigMap, a copy
    or a coarse clock may keep. A new content counts once it has been seen twice: a file that is
    just being written in place may by chance be a good one that has lost its end.
    """

    def __init__(
        self,
        path: Path,
        parse: Callable[[bytes], T],
        *,
        what: str,
        max_bytes: int,
        shown: Callable[[T], str] = lambda _: "",
    ) -> None:
        """Read the file; raise a ``MuralError`` when it is absent or wrong.

        ``what`` names it in log and errors, as in "tenants file"; ``shown`` says what is in it.
        ``parse`` is given one byte more than ``max_bytes`` of a larger file, and refuses it.
        """
        self._path = path
        self._parse = parse
        self._what = what
        self._max_bytes = max_bytes
        self._shown = shown
        data = self._read()
        self.value = self._parsed(data)
        self.numbers = WatchNumbers(loaded_at=datetime.now(UTC))
        self._taken = _digest(data)
        self._seen = self._taken
        self._refused = ""
        self._changed = asyncio.Event()

    async def watch(self, poll_s: float = POLL_S) -> None:
        """Poll for ever. Whoever starts it cancels it."""
        while True:
            await asyncio.sleep(poll_s)
            await self.look()

    async def look(self) -> None:
        """`poll`, whatever comes: what is in force must not stop being watched because of one
        bad moment."""
        try:
            await self.poll()
        except Exception:
            logger.exception("the %s could not be looked at", self._what)

    async def wait_change(self) -> None:
        """Return when the next content has been taken or refused."""
        await self._changed.wait()

    async def poll(self) -> None:
        """Look once; the second look at one new content takes it, or refuses it."""
        try:
            data = await asyncio.to_thread(self._read)
        except InvalidInput as error:
            self._refuse(error.message, error)
            return
        digest = _digest(data)
        settled, self._seen = digest == self._seen, digest
        if digest == self._taken:
            self._back_to_what_is_in_force()
        elif settled and digest != self._refused:
            await self._take(data, digest)

    def _read(self) -> bytes:
        with in_file(self._path):
            try:
                return read_settings(self._path, self._max_bytes + 1)
            except OSError as error:
                raise InvalidInput(f"The {self._what} cannot be read: {error.strerror}.") from None

    def _parsed(self, data: bytes) -> T:
        with in_file(self._path):
            return self._parse(data)

    async def _take(self, data: bytes, digest: str) -> None:
        try:
            value = await asyncio.to_thread(self._parsed, data)
        except MuralError as error:
            self._refuse(digest, error)
            return
        self.value = value
        self._taken, self._refused = digest, ""
        self.numbers = replace(
            self.numbers,
            loaded_at=datetime.now(UTC),
            reloads=self.numbers.reloads + 1,
            stale=False,
        )
        logger.info("%s reloaded: %s", self._what, self._shown(value))
        self._tell()

    def _refuse(self, digest: str, error: MuralError) -> None:
        if digest == self._refused:
            return
        self._refused = digest
        self.numbers = replace(self.numbers, refused=self.numbers.refused + 1, stale=True)
        logger.error(
            "the %s is refused, the last good one stays in force: %s",
            self._what,
            redacted(error.message),
        )
        self._tell()

    def _back_to_what_is_in_force(self) -> None:
        if not self._refused:
            return
        self._refused = ""
        self.numbers = replace(self.numbers, stale=False)
        logger.info("the %s is the one in force again", self._what)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
