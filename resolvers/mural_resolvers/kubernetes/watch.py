"""A kind of objects as the API server last told it: listed once, then watched, for ever.

The protocol is "Efficient detection of changes" of the Kubernetes API concepts: a watch begins at
the version where the list, or the watch before it, ended, so that nothing in between is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

import msgspec

from mural_resolvers.backoff import Backoff
from mural_resolvers.errors import MuralError
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.complaint import Complaint

__all__ = ["Changed", "Watch", "from_json"]

log = logging.getLogger(__name__)

PAGE = 500
MAX_PAGES = 2000
WATCH_S = 300
"""After it the API server ends a watch, which goes on from where it was."""
SILENCE_S = 120.0
"""Bookmarks come every minute: after two without one the connection is given up."""
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 10.0
VERSION_STANDS = (0, 401, 403, 429, 503)
"""Refusals that say nothing of the version asked for. Others may: 410 that it is too old, 504
that it is yet to come, as when etcd was restored from a copy."""

T = TypeVar("T")

Changed = Callable[[str | None], None]
"""Told the key of the object that changed, or None: look at all of them."""


class _Metadata(msgspec.Struct):
    name: str = ""
    namespace: str = ""
    resourceVersion: str = ""


class _Head(msgspec.Struct):
    metadata: _Metadata

    @property
    def key(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class _ListMetadata(msgspec.Struct):
    resourceVersion: str = ""
    next_page: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: tuple[msgspec.Raw, ...] | None = None


class _Event(msgspec.Struct):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0


class _Forgotten(Exception):
    """What comes after the version in hand cannot be had: all must be listed again."""


def from_json(read: Callable[[object], T]) -> Callable[[bytes], T]:
    """A watch's decoder from a reader of parsed JSON, such as `objects.read_adapter`."""

    def decode(data: bytes) -> T:
        return read(msgspec.json.decode(data))

    return decode


class Watch(Generic[T]):
    """The objects at ``path``, by ``namespace/name``; ``run`` keeps them, others read them.

    What ``decode`` refuses (`MuralError`, ValueError) is in ``invalid`` with the reason in place
    of ``objects``, and disturbs no other object. Through an outage everything stays as it was
    last told, and ``fresh`` is False; ``trouble`` says why. A connection that breaks is no
    outage: the next one goes on where it was.
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        decode: Callable[[bytes], T],
        *,
        label_selector: str | None = None,
        field_selector: str | None = None,
        what: str,
    ) -> None:
        """``what`` names the objects in the log, in the plural. Selectors as ``kubectl`` has."""
        self.synced = False
        self.fresh = False
        self._complaint = Complaint(
            log, f"{what} cannot be watched", mended=f"{what} are watched again"
        )
        self._client = client
        self._path = path
        self._decode = decode
        self._what = what
        selectors = {"labelSelector": label_selector, "fieldSelector": field_selector}
        self._selectors = {key: text for key, text in selectors.items() if text is not None}
        self._objects: dict[str, T] = {}
        self._invalid: dict[str, str] = {}
        self._version: str | None = None
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)

    @property
    def trouble(self) -> str:
        """Why they are not watched now; empty: they are, or never were tried."""
        return self._complaint.trouble

    @property
    def objects(self) -> Mapping[str, T]:
        """A live view; it changes only between two awaits of whoever reads it."""
        return MappingProxyType(self._objects)

    @property
    def invalid(self) -> Mapping[str, str]:
        """What is wrong with the objects that ``decode`` refused; a live view too."""
        return MappingProxyType(self._invalid)

    async def run(self, changed: Changed) -> None:
        """Keep the objects for ever; whoever starts it cancels it, and notices if it dies.

        ``changed(key)`` follows each change of an object, ``changed(None)`` each list, and each
        change of ``fresh``; also the first failure, so that nobody waits for what cannot come.
        """
        while True:
            asked_for_s = 0.0
            try:
                if self._version is None:
                    self._version = await self._list()
                    changed(None)
                await self._follow(self._version, changed)
            except _Forgotten as error:
                log.debug("%s are listed again: %s", self._what, error)
                self._version = None
            except KubeError as error:
                asked_for_s = error.retry_after_s or 0.0
                if error.status not in VERSION_STANDS:
                    self._version = None
                if error.status != 410:
                    self._complain(error, changed)
            await asyncio.sleep(max(self._backoff.next_s(), min(asked_for_s, RETRY_MOST_S)))

    # -- list -------------------------------------------------------------------------------------

    async def _list(self) -> str:
        """Take what is there now in place of all before; return its version."""
        objects: dict[str, T] = {}
        invalid: dict[str, str] = {}
        params = self._selectors | {"limit": str(PAGE)}
        for _ in range(MAX_PAGES):
            page = _decoded(await self._client.get(self._path, params), _List)
            for item in page.items or ():
                self._put(_decoded(item, _Head).key, item, objects, invalid)
            if not page.metadata.next_page:
                break
            params["continue"] = page.metadata.next_page
        else:
            raise KubeError(0, "Garbled", f"a list of more than {MAX_PAGES} pages")
        # In one step, and in the mappings that others hold.
        self._objects.clear()
        self._objects.update(objects)
        self._invalid.clear()
        self._invalid.update(invalid)
        self.synced = True
        return page.metadata.resourceVersion

    def _put(
        self, key: str, data: msgspec.Raw, objects: dict[str, T], invalid: dict[str, str]
    ) -> None:
        try:
            objects[key] = self._decode(bytes(data))
        except (MuralError, ValueError, RecursionError) as error:
            objects.pop(key, None)
            message = str(error)
            if invalid.get(key) != message:
                log.warning("%s: %s is left out: %s", self._what, key, message)
            invalid[key] = message
        else:
            invalid.pop(key, None)

    # -- watch ------------------------------------------------------------------------------------

    async def _follow(self, version: str, changed: Changed) -> None:
        """Take changes after ``version`` until the watch ends or its connection breaks."""
        params = self._selectors | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        now = asyncio.get_running_loop().time
        began = now()
        async with self._client.stream(self._path, params, silence_s=SILENCE_S) as lines:
            if not self.fresh:
                self._well()
                changed(None)
            heard = await self._take_all(lines, changed)
        # One that ends at once and says nothing must not be opened ten times a second.
        if heard or now() - began >= RETRY_MOST_S:
            self._backoff.reset()

    async def _take_all(self, lines: AsyncIterator[bytes], changed: Changed) -> bool:
        """Whether there was anything to take."""
        heard = False
        try:
            async for line in lines:
                if line:
                    self._take(line, changed)
                    heard = True
        except KubeError as error:
            log.debug("the watch of %s broke: %s", self._what, error)
        return heard

    def _take(self, line: bytes, changed: Changed) -> None:
        try:
            event = _decoded(line, _Event)
            if event.type == "ERROR":
                status = _decoded(event.object, _Status)
                raise _Forgotten(f"status {status.code} ({status.reason}): {status.message}")
            head = _decoded(event.object, _Head)
        except KubeError as error:
            # What this line said is lost, and asking for it again would bring it again.
            raise _Forgotten(error.message) from None
        if not head.metadata.resourceVersion:
            raise _Forgotten("an event without a version")
        self._version = head.metadata.resourceVersion
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            self._objects.pop(head.key, None)
            self._invalid.pop(head.key, None)
        else:
            self._put(head.key, event.object, self._objects, self._invalid)
        changed(head.key)

    # -- outages ----------------------------------------------------------------------------------

    def _well(self) -> None:
        self._complaint.over()
        self.fresh = True

    def _complain(self, error: KubeError, changed: Changed) -> None:
        self.fresh = False
        if self._complaint.note(error):
            changed(None)


S = TypeVar("S", _Event, _Head, _List, _Status)


def _decoded(data: bytes | msgspec.Raw, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise KubeError(0, "Garbled", f"the API server sent what cannot be read: {error}") from None
