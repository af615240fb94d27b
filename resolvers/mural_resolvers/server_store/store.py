"""``ServerStore``: publish through a Mural server, which judges what it is given.

It is the store behind the server, as far as the key reaches: the key's own namespace, or all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeVar
from urllib.parse import quote

import msgspec

from mural_resolvers.digest import FileEntry, max_file_bytes
from mural_resolvers.errors import (
    AdapterNotFound,
    InvalidInput,
    ManifestMismatch,
    MuralError,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.limits import DEFAULT_LIMITS
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import LATEST, AdapterName, parse_name
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


class _Target(msgspec.Struct):
    version: str
    weight: float


class _AliasRecord(msgspec.Struct):
    aliases: dict[str, list[_Target]]

    def targets(self) -> Aliases:
        return {
            alias: tuple(AliasTarget(target.version, target.weight) for target in held)
            for alias, held in self.aliases.items()
        }


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
        """What the server says of an exact version."""
        if name.version == LATEST:
            # Never a version's own name, and a server takes no other.
            return None
        try:
            answer = await self._send("GET", f"{_path(name)}/manifest")
        except AdapterNotFound:
            return None
        try:
            return Manifest.from_json(answer.body)
        except UnusableAdapter:
            raise _unreadable() from None

    async def read_record(self, name: AdapterName, record: str) -> bytes | None:
        """Not to be had from a server: its records are its own."""
        raise InvalidInput("A server keeps no records for others.")

    async def fetch(
        self, name: AdapterName, folder: Path, progress: Progress | None = None
    ) -> Manifest:
        """Download the files one after the other, and hold each to the manifest."""
        if not await asyncio.to_thread(_is_empty_folder, folder):
            raise InvalidInput("An adapter is fetched into an empty folder.")
        manifest = await self.manifest(name)
        if manifest is None:
            raise AdapterNotFound(f"The adapter {name} does not exist.")
        try:
            for file in manifest.files:
                await self._fetch_file(name, file, folder / file.path, progress)
        except BaseException:
            for file in manifest.files:
                (folder / file.path).unlink(missing_ok=True)
            raise
        return manifest

    @asynccontextmanager
    async def open(self, name: AdapterName, file: FileEntry) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read a file as the server sends it."""
        request = Request(self._settings)
        try:
            path = f"{_path(name)}/files/{quote(file.path, safe='')}"
            await _in_thread(request, partial(request.open, path))
            yield _received(request, file)
        finally:
            request.close()

    async def _fetch_file(
        self, name: AdapterName, file: FileEntry, target: Path, progress: Progress | None
    ) -> None:
        if file.size > max_file_bytes(file.path, DEFAULT_LIMITS):
            raise TooLarge(f"{file.path} has {file.size} bytes, which is above the limit.")
        sha256 = hashlib.sha256()
        with target.open("xb") as writer:
            async with self.open(name, file) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(_keep, writer, sha256.update, piece)
                    if progress is not None:
                        progress(len(piece))
        if sha256.hexdigest() != file.sha256:
            raise ManifestMismatch(f"{file.path} is not what the manifest states.")

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
        """What holds in the store behind the server."""
        answer = await self._send("GET", _aliases_path(tenant, adapter))
        return _decoded(answer.body, _AliasRecord).targets()

    async def set_alias(
        self, tenant: str, adapter: str, alias: str, targets: Sequence[AliasTarget]
    ) -> Aliases:
        """Have the server point an alias, or remove it."""
        path = f"{_aliases_path(tenant, adapter)}/{quote(alias, safe='')}"
        if targets:
            data = msgspec.json.encode({"versions": targets})
            body = Body("application/json", len(data), iter([data]))
            answer = await self._send("PUT", path, body)
        else:
            answer = await self._send("DELETE", path)
        return _decoded(answer.body, _AliasRecord).targets()

    async def _listing(self, query: str) -> tuple[StoredVersion, ...]:
        answer = await self._send("GET", _PATH + query)
        return tuple(upload.version() for upload in _decoded(answer.body, _Listing).data)

    async def _send(
        self,
        method: Literal["GET", "POST", "PUT", "DELETE"],
        path: str,
        body: Body | None = None,
    ) -> Answer:
        request = Request(self._settings)
        return await _in_thread(request, partial(request.send, method, path, body))


async def _in_thread(request: Request, work: Callable[[], T]) -> T:
    """Wait for the server in a thread; a caller that is cancelled breaks it off."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        request.give_up()
        await asyncio.gather(working, return_exceptions=True)
        raise


async def _received(request: Request, file: FileEntry) -> AsyncIterator[bytes]:
    """As many bytes as the file has; ``Unavailable`` where there are fewer."""
    left = file.size
    while left:
        piece = await _in_thread(request, partial(request.read, min(_PIECE_BYTES, left)))
        if not piece:
            raise Unavailable(f"The server broke off in the midst of {file.path}.")
        left -= len(piece)
        yield piece


def _keep(writer: BinaryIO, update: Callable[[bytes], None], piece: bytes) -> None:
    update(piece)
    writer.write(piece)


def _is_empty_folder(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _aliases_path(tenant: str, adapter: str) -> str:
    return f"{_PATH}/{quote(tenant, safe='')}/{quote(adapter, safe='')}/aliases"


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
        raise _unreadable() from None


def _unreadable() -> Unavailable:
    return Unavailable("The server's answer cannot be read: is it a Mural server?")
