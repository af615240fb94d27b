"""``ServerStore``: publish through a Mural server, which judges what it is given.

The server keeps adapters for itself: it lists and deletes them and gives none out, and it knows of
aliases only what the store behind it says.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar
from urllib.parse import quote

import msgspec

from mural_resolvers.digest import FileEntry
from mural_resolvers.errors import (
    AdapterNotFound,
    InvalidInput,
    ManifestMismatch,
    MuralError,
    Unavailable,
)
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.server_store.connection import Answer, Body, Request
from mural_resolvers.server_store.settings import ServerSettings
from mural_resolvers.store import AdapterStore, Aliases, Progress, StoredVersion
from mural_resolvers.versions import AliasTarget

__all__ = ["ServerStore"]

_PATH = "/v1/adapters"
_PIECE_BYTES = 256 << 10

T = TypeVar("T")


class _Upload(msgspec.Struct):
    """What is read of the server's word for one adapter."""

    id: str
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    bytes: int

    def version(self) -> StoredVersion:
        return StoredVersion(parse_name(self.id), self.digest, self.bytes)


class _Listing(msgspec.Struct):
    data: list[_Upload]


class ServerStore(AdapterStore):
    """A server's upload API; what it refuses it refuses with the server's own reason.

    ``Unauthorized`` without a valid key, ``Forbidden`` outside the key's namespace, and beside
    them whatever the server finds wrong with an adapter: it judges more than this machine can.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings

    @property
    def location(self) -> str:
        """The server's URL."""
        return self._settings.location

    async def publish(
        self,
        name: AdapterName,
        folder: Path,
        manifest: Manifest,
        progress: Progress | None = None,
        *,
        records: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Upload the files; the server publishes them once it has judged them all."""
        if records:
            raise InvalidInput("A server keeps no records for others.")
        body = _multipart(folder, manifest.files, _on_loop(progress))
        answer = await self._send("POST", _path(name), body)
        if _decoded(answer.body, _Upload).digest != manifest.digest:
            raise ManifestMismatch(f"{name} is published with other content than was sent.")
        return answer.status == 201

    async def manifest(self, name: AdapterName) -> Manifest | None:
        """Not to be had from a server."""
        self._keeps_to_itself()

    async def read_record(self, name: AdapterName, record: str) -> bytes | None:
        """Not to be had from a server."""
        self._keeps_to_itself()

    async def fetch(
        self, name: AdapterName, folder: Path, progress: Progress | None = None
    ) -> Manifest:
        """Not to be had from a server."""
        self._keeps_to_itself()

    async def delete(self, name: AdapterName) -> bool:
        """Ask for a version's removal, for good."""
        try:
            await self._send("DELETE", _path(name))
        except AdapterNotFound:
            return False
        return True

    async def tenants(self) -> tuple[str, ...]:
        """The tenants whose adapters the key may see."""
        return tuple(sorted({version.name.tenant for version in await self._listing("")}))

    async def list(self, tenant: str) -> tuple[StoredVersion, ...]:
        """A tenant's uploads, in order."""
        return tuple(sorted(await self._listing(f"?tenant={quote(tenant, safe='')}")))

    async def aliases(self, tenant: str, adapter: str) -> Aliases:
        """None: they are the business of the store behind the server."""
        return {}

    async def set_alias(
        self, tenant: str, adapter: str, alias: str, targets: Sequence[AliasTarget]
    ) -> Aliases:
        """Not to be had from a server."""
        self._keeps_to_itself()

    def _keeps_to_itself(self) -> NoReturn:
        raise InvalidInput(
            f"{self.location} takes, lists and deletes adapters, and no more: for this name the "
            "store behind it (s3://… or a folder)."
        )

    async def _listing(self, query: str) -> tuple[StoredVersion, ...]:
        answer = await self._send("GET", _PATH + query)
        return tuple(upload.version() for upload in _decoded(answer.body, _Listing).data)

    async def _send(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        body: Body | None = None,
    ) -> Answer:
        """Send in a thread; a caller that is cancelled breaks it off."""
        request = Request(self._settings)
        sending = asyncio.create_task(asyncio.to_thread(request.send, method, path, body))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            request.give_up()
            await asyncio.gather(sending, return_exceptions=True)
            raise


def _path(name: AdapterName) -> str:
    return f"{_PATH}/{quote(name.exact, safe='/:')}"


def _on_loop(progress: Progress | None) -> Progress:
    """Have the caller told on its own loop, whatever thread sends."""
    loop = asyncio.get_running_loop()

    def advance(num_bytes: int) -> None:
        if progress is not None:
            loop.call_soon_threadsafe(progress, num_bytes)

    return advance


def _multipart(folder: Path, files: Sequence[FileEntry], progress: Progress) -> Body:
    """RFC 7578: a part a file, in the manifest's order, so that the configuration comes first."""
    boundary = secrets.token_hex(16)
    heads = [
        (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{file.path}"; '
            f'filename="{file.path}"\r\nContent-Type: application/octet-stream\r\n\r\n'
        ).encode()
        for file in files
    ]
    end = f"--{boundary}--\r\n".encode()
    num_bytes = sum(len(head) + file.size + 2 for head, file in zip(heads, files, strict=True))

    def pieces() -> Iterator[bytes]:
        for head, file in zip(heads, files, strict=True):
            yield head
            yield from _read(folder / file.path, file, progress)
            yield b"\r\n"
        yield end

    return Body(f"multipart/form-data; boundary={boundary}", num_bytes + len(end), pieces())


def _read(path: Path, file: FileEntry, progress: Progress) -> Iterator[bytes]:
    """A file's bytes, as many as were announced; the server holds them to the digest."""
    left = file.size
    try:
        reader = path.open("rb")
    except OSError as error:
        raise InvalidInput(f"{file.path} cannot be read: {error.strerror}.") from None
    with reader:
        while left:
            piece = reader.read(min(_PIECE_BYTES, left))
            if not piece:
                raise ManifestMismatch(f"{file.path} became shorter while it was sent.")
            left -= len(piece)
            yield piece
            progress(len(piece))


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, MuralError):
        raise Unavailable("The server's answer cannot be read: is it a Mural server?") from None
