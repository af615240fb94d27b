"""The settings file and the flags over it, and the file's changes while the router runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.conversion import in_file
from mural_resolvers.errors import InvalidInput, MuralError
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
    """Files taken and refused; ``stale``: the one on disk is not the one in force as a whole."""

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
        """Those in force: of a changed file only what `RELOADED` names."""
        self._taken = self._seen = _fingerprint(raw)
        self._refused: tuple[str, str] | None = None
        """The last one that was, and why."""
        self._waits_for_restart = False

    @property
    def watched(self) -> bool:
        """Whether there is a file that may change."""
        return self._path is not None

    async def watch(self, use: Callable[[RouterSettings], None]) -> None:
        """`poll` the file, which there is, for ever."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.poll(use)
            except Exception:
                # A router must not stop because of one bad moment of its settings.
                logger.exception("the settings could not be looked at")

    async def poll(self, use: Callable[[RouterSettings], None]) -> None:
        """Look once; the second look at one new content takes it, or refuses it.

        ``use`` is told what is to hold from now on; it raises a ``MuralError``, and changes
        nothing, where that cannot be.
        """
        assert self._path is not None
        try:
            raw = await asyncio.to_thread(read_config, self._path)
            if not raw and self._taken != _fingerprint(raw):
                # As a full disk leaves one. Whoever means it starts the router anew.
                raise InvalidInput(f"{self._path}: this says nothing any more.")
        except InvalidInput as error:
            self._refuse("", error)
            return
        found = _fingerprint(raw)
        settled, self._seen = found == self._seen, found
        if found == self._taken:
            self._refused, self.numbers.stale = None, self._waits_for_restart
        elif settled:
            # One that was refused, too: what it names may have been put right since.
            await self._take(raw, found, use)

    async def _take(
        self, raw: Mapping[str, object], found: str, use: Callable[[RouterSettings], None]
    ) -> None:
        try:
            wanted = await asyncio.to_thread(self._parse, raw)
            settings = self._changed_to(wanted)
            use(settings)
        except MuralError as error:
            self._refuse(found, error)
            return
        later = _differing(settings, wanted)
        self.settings = settings
        self._taken, self._refused = found, None
        self.numbers.reloads += 1
        self.numbers.stale = self._waits_for_restart = bool(later)
        logger.info("settings reloaded")
        if later:
            logger.warning("these take effect at the next start: %s", ", ".join(sorted(later)))

    def _changed_to(self, wanted: RouterSettings) -> RouterSettings:
        """Those in force with what may change of others."""
        names = RELOADED
        if wanted.objects != self.settings.objects:
            # Where aliases come from changes as a whole, or they would come from nowhere.
            names -= {"aliases_file"}
        changed = {name: getattr(wanted, name) for name in names}
        return msgspec.structs.replace(self.settings, **changed)

    def _parse(self, raw: Mapping[str, object]) -> RouterSettings:
        try:
            return convert_settings(merged(raw, self._flags), self.secrets)
        except InvalidInput as error:
            with in_file(self._blamed(error.message)):
                raise

    def _blamed(self, message: str) -> str | None:
        """Where what a message speaks of was said."""
        if self._path is None:
            return None
        field = re.split(r"[^a-z_]", message, maxsplit=1)[0]
        of_file = field in RouterSettings.__struct_fields__ and field not in self._flags
        return str(self._path) if of_file or not self._flags else f"{self._path} and the flags"

    def _refuse(self, found: str, error: MuralError) -> None:
        """Tell it once, as long as it is the same."""
        if (found, error.message) == self._refused:
            return
        self._refused = found, error.message
        self.numbers.refused += 1
        self.numbers.stale = True
        logger.error("the settings are refused, the last good ones hold: %s", error.message)


def _differing(old: RouterSettings, new: RouterSettings) -> set[str]:
    names = RouterSettings.__struct_fields__
    return {name for name in names if getattr(old, name) != getattr(new, name)}


def _fingerprint(raw: Mapping[str, object]) -> str:
    return hashlib.sha256(msgspec.json.encode(raw)).hexdigest()
