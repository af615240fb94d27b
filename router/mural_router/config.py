"""The settings file and the flags over it, and the file's changes while the router runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_router.settings import (
    RELOADED,
    RouterSettings,
    Secrets,
    convert_settings,
    merged,
    read_config,
)

__all__ = ["Config", "ReloadNumbers"]

POLL_S: Final = 0.5

logger = logging.getLogger("mural.router")


@dataclass(slots=True)
class ReloadNumbers:
    """Files taken and refused; ``stale``: the one on disk is not the one in force."""

    reloads: int = 0
    refused: int = 0
    stale: bool = False


class Config:
    """Settings from a file (or none) with flags over it. A bad file leaves the last one in force.

    As with the tenants file the content is compared, and counts once it was seen twice: a file
    that is just being written may by chance be a good one.
    """

    def __init__(self, path: Path | None, flags: Mapping[str, object], secrets: Secrets) -> None:
        """Raises ``InvalidInput`` when the settings cannot work."""
        self._path = path
        self._flags = flags
        self.secrets = secrets
        self.numbers = ReloadNumbers()
        raw = {} if path is None else read_config(path)
        self.settings = self._parse(raw)
        self._taken = self._seen = _fingerprint(raw)
        self._refused = ""

    @property
    def watched(self) -> bool:
        """Whether there is a file that may change."""
        return self._path is not None

    async def watch(self, changed: Callable[[RouterSettings], None]) -> None:
        """Poll the file, which there is, for ever; ``changed`` is told what is to be used."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                settings = await self.poll()
                if settings is not None:
                    changed(settings)
            except Exception:
                # A router must not stop because of one bad moment of its settings.
                logger.exception("the settings could not be looked at")

    async def poll(self) -> RouterSettings | None:
        """Look once; gives settings when a new file is taken, at the second look."""
        assert self._path is not None
        try:
            raw = await asyncio.to_thread(read_config, self._path)
        except InvalidInput as error:
            self._refuse(str(error), error)
            return None
        found = _fingerprint(raw)
        settled, self._seen = found == self._seen, found
        if found == self._taken:
            self._refused, self.numbers.stale = "", False
        elif settled and found != self._refused:
            return self._take(raw, found)
        return None

    def _take(self, raw: Mapping[str, object], found: str) -> RouterSettings | None:
        try:
            settings = self._parse(raw)
        except InvalidInput as error:
            self._refuse(found, error)
            return None
        later = _differing(self.settings, settings) - RELOADED
        self.settings = settings
        self._taken, self._refused = found, ""
        self.numbers.reloads += 1
        self.numbers.stale = bool(later)
        logger.info("settings reloaded")
        if later:
            logger.warning("these take effect at the next start: %s", ", ".join(sorted(later)))
        return settings

    def _parse(self, raw: Mapping[str, object]) -> RouterSettings:
        return convert_settings(merged(raw, self._flags), self.secrets)

    def _refuse(self, found: str, error: InvalidInput) -> None:
        if found == self._refused:
            return
        self._refused = found
        self.numbers.refused += 1
        self.numbers.stale = True
        logger.error("the settings are refused, the last good ones hold: %s", error.message)


def _differing(old: RouterSettings, new: RouterSettings) -> set[str]:
    names = RouterSettings.__struct_fields__
    return {name for name in names if getattr(old, name) != getattr(new, name)}


def _fingerprint(raw: Mapping[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(raw)).hexdigest()
