"""The Secrets that Tenants and pools name, each by a ``get`` of its own: no list, no watch.

Read again each minute (many: less often, so that they cost a few requests a second in all), and at
once when a pod does not accept what one held, or the object that names it has changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.paths import SECRETS

__all__ = ["Secret", "SecretCache"]

log = logging.getLogger(__name__)

FRESH_S: Final = 60.0
READS_PER_S: Final = 4.0
"""Where that would take more, all are read less often: 1,000 Secrets each 250 s."""
SUSPECT_AFTER_S: Final = 5.0
"""A suspicion waits until the last read is as old as that."""
RETRY_S: Final = 5.0
"""After a read that failed; less often where so many fail that it would exceed `READS_PER_S`."""
AT_A_TIME: Final = 8
NAMES: Final = 5
"""In one line of the log."""
MAX_SECRETS: Final = 10_000
NOT_READ: Final = "it has not been read yet"

Secret = Mapping[str, bytes]
"""An entry's content by its key."""


class _Secret(msgspec.Struct):
    data: dict[str, str] | None = None


@dataclass(slots=True)
class _Kept:
    content: Secret | None = None
    """None: there is none, or it could not be read yet."""
    trouble: str = NOT_READ
    """Empty: the content is what the API server has."""
    known: bool = False
    """Whether the API server has answered, if only that there is none."""
    due_s: float = 0.0
    read_s: float = float("-inf")

    @property
    def troubled(self) -> bool:
        """Whether it was read in vain."""
        return self.trouble not in ("", NOT_READ)


class SecretCache:
    """Keeps what is wanted and nothing else. For one event loop."""

    def __init__(self, client: KubeClient, namespace: str, changed: Callable[[], None]) -> None:
        self._client = client
        self._namespace = namespace
        self._changed = changed
        self._wanted: dict[str, frozenset[str]] = {}
        self._kept: dict[str, _Kept] = {}
        self._wake = asyncio.Event()
        self._retry_s = RETRY_S
        self._failed: dict[str, str] = {}
        """Since the last line about them, with why."""
        self._mended: list[str] = []

    def want(self, owner: str, names: Iterable[str]) -> None:
        """What an owner needs, in place of what it needed before; nothing: none any more."""
        wanted = frozenset(names)
        if self._wanted.get(owner, frozenset()) == wanted:
            return
        if wanted:
            self._wanted[owner] = wanted
        else:
            del self._wanted[owner]
        every = sorted(frozenset().union(*self._wanted.values()))
        if len(every) > MAX_SECRETS:
            log.warning("%d Secrets are named, of which %d are read", len(every), MAX_SECRETS)
        self._kept = {name: self._kept.get(name) or _Kept() for name in every[:MAX_SECRETS]}
        self._wake.set()

    def get(self, name: str) -> Secret | None:
        """What it held when it was last read; None: there is none, or it cannot be read."""
        kept = self._kept.get(name)
        return None if kept is None else kept.content

    def trouble(self, name: str) -> str:
        """Why it could not be read the last time; empty: it could."""
        kept = self._kept.get(name)
        return "it is not wanted" if kept is None else kept.trouble

    @property
    def contents(self) -> dict[str, Secret]:
        """Of those that are there."""
        return {name: one.content for name, one in self._kept.items() if one.content is not None}

    def knows(self, names: Iterable[str]) -> bool:
        """Whether the API server has answered for each of these."""
        return all((kept := self._kept.get(name)) is not None and kept.known for name in names)

    def suspect(self, name: str) -> None:
        """Read it again: at once, or soon where that was done just now."""
        kept = self._kept.get(name)
        if kept is not None:
            kept.due_s = min(kept.due_s, max(self._now(), kept.read_s + SUSPECT_AFTER_S))
            self._wake.set()

    async def run(self) -> None:
        """Keep what is wanted fresh, for ever."""
        while True:
            self._wake.clear()
            now = self._now()
            due = [name for name, kept in self._kept.items() if kept.due_s <= now]
            for start in range(0, len(due), AT_A_TIME):
                troubled = sum(kept.troubled for kept in self._kept.values())
                self._retry_s = max(RETRY_S, troubled / READS_PER_S)
                await asyncio.gather(*map(self._read, due[start : start + AT_A_TIME]))
            self._say()
            await self._rest()

    async def _rest(self) -> None:
        next_s = min((kept.due_s for kept in self._kept.values()), default=float("inf"))
        rest_s = min(max(next_s - self._now(), 0.0), FRESH_S)
        try:
            async with asyncio.timeout(rest_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _read(self, name: str) -> None:
        kept = self._kept.get(name)
        if kept is None:
            return
        before, was_troubled = (kept.content, kept.trouble), kept.troubled
        try:
            path = SECRETS.named(self._namespace, name)
        except ValueError as error:
            # There is none of such a name, and there never will be.
            kept.trouble, kept.known, kept.due_s = str(error), True, float("inf")
            self._failed[name] = str(error)
            self._changed()
            return
        try:
            kept.content = _content(await self._client.get(path))
            kept.trouble, kept.known = "", True
        except KubeError as error:
            kept.trouble = error.message
            # What may not be read must not keep the rest waiting.
            kept.known = kept.known or error.status in (403, 404)
            if error.status == 404:
                kept.content = None
        except ValueError as error:
            # No JSON, or no Base64: never with what was read in it.
            kept.trouble = f"{type(error).__name__}: {error}"
        kept.read_s = self._now()
        rest_s = self._retry_s if kept.trouble else max(FRESH_S, len(self._kept) / READS_PER_S)
        # Those that were wanted at the same moment need not always be read at the same moment.
        kept.due_s = kept.read_s + rest_s * (1.0 - 0.2 * random.random())
        if (kept.content, kept.trouble) != before:
            if kept.trouble:
                self._failed[name] = kept.trouble
            elif was_troubled:
                self._mended.append(name)
            self._changed()

    def _say(self) -> None:
        """A line for all of them: a role or an API server that is away concerns every one."""
        if self._failed:
            why = next(iter(self._failed.values()))
            log.warning("%s cannot be read: %s", _named(list(self._failed)), why)
        if self._mended:
            log.info("%s can be read again", _named(self._mended))
        self._failed, self._mended = {}, []

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _named(names: list[str]) -> str:
    if len(names) == 1:
        return f"the Secret {names[0]}"
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return f"the Secrets {', '.join(names[:NAMES])}{more}"


def _content(body: bytes) -> Secret:
    data = msgspec.json.decode(body, type=_Secret).data or {}
    return {key: b64decode(value, validate=True) for key, value in data.items()}
