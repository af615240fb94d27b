"""Files that are renewed while a process runs: certificates, tokens, mounted Secrets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from mural_resolvers.errors import MuralError
from mural_resolvers.redaction import redacted
from mural_resolvers.watched_file import WatchNumbers

__all__ = ["FileWatch"]

POLL_S: Final = 5.0

logger = logging.getLogger("mural.files")

_Stamp = tuple[int, int, int]


class FileWatch:
    """Calls ``reload`` when a file has changed and all of them have settled.

    Files that do not fit leave the old ones, and are tried again at each look until they do.
    """

    def __init__(
        self, paths: Iterable[str | Path | None], reload: Callable[[], None], *, what: str
    ) -> None:
        """``paths`` may hold None for a file that is not used; ``what`` they are, for the log.

        ``reload`` raises ``ValueError`` or a `MuralError` for files that do not fit, and keeps what
        it had.
        """
        self._paths = [Path(path) for path in paths if path is not None]
        self._reload = reload
        self._what = what
        self._taken = self._seen = self._stamps()
        self._trouble = ""
        self.numbers = WatchNumbers(loaded_at=datetime.now(UTC))

    @property
    def needed(self) -> bool:
        """Whether there is a file at all."""
        return bool(self._paths)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            self.poll(await asyncio.to_thread(self._stamps))

    def poll(self, found: list[_Stamp | None] | None = None) -> None:
        """Look once. A change counts when it was seen twice: key and certificate come apart."""
        found = self._stamps() if found is None else found
        settled, self._seen = found == self._seen, found
        if not settled or (found == self._taken and not self._trouble):
            return
        self._taken = found
        try:
            self._reload()
        except (ValueError, MuralError) as error:
            self._refuse(redacted(str(error)))
        else:
            self._trouble = ""
            self.numbers = replace(
                self.numbers,
                loaded_at=datetime.now(UTC),
                reloads=self.numbers.reloads + 1,
                stale=False,
            )
            logger.info("%s reloaded", self._what)

    def _refuse(self, trouble: str) -> None:
        if trouble == self._trouble:
            return
        self._trouble = trouble
        self.numbers = replace(self.numbers, refused=self.numbers.refused + 1, stale=True)
        logger.error("the %s cannot be used, the old ones hold: %s", self._what, trouble)

    def _stamps(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp | None:
    try:
        # Through the links by which a mounted secret is swapped.
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
