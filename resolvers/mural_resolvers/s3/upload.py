"""Upload of one local file to one key: held to its sha256, whole or in parts, under a condition."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mural_resolvers.digest import FileEntry
from mural_resolvers.errors import ManifestMismatch, MuralError, Unavailable, quoted
from mural_resolvers.files import open_regular
from mural_resolvers.s3.client import Condition, S3Client, UploadedPart
from mural_resolvers.s3.settings import S3Settings
from mural_resolvers.store import Progress

__all__ = ["FileUpload"]

logger = logging.getLogger("mural.s3")

_MAX_PARTS = 10_000
_ABORT_PAUSES_S = (0.1, 0.5)
"""A part may still be on its way when the others are dropped: S3 says to abort again then."""


class FileUpload:
    """A file on its way to a key. Nothing is there until all of it has been seen to be right.

    The file is read and hashed in threads. In parts, at most ``max_upload_parts`` of them are in
    memory; what was uploaded of them is dropped when it fails.
    """

    def __init__(
        self,
        client: S3Client,
        settings: S3Settings,
        path: Path,
        entry: FileEntry,
        progress: Progress,
    ) -> None:
        self._client = client
        self._settings = settings
        self._path = path
        self._entry = entry
        self._progress = progress
        # S3 takes 10,000 parts.
        self._part_bytes = max(settings.upload_part_bytes, -(-entry.size // _MAX_PARTS))

    async def run(self, key: str, condition: Condition) -> None:
        """Upload; raise ``ManifestMismatch`` for another file than was stated."""
        if self._entry.size < self._settings.multipart_bytes:
            await self._put_whole(key, condition)
        else:
            await self._put_in_parts(key, condition)

    async def _put_whole(self, key: str, condition: Condition) -> None:
        with self._opened() as file:
            data = await asyncio.to_thread(self._read_whole, file)
        await self._client.put(key, data, condition)
        self._progress(len(data))

    def _read_whole(self, file: BinaryIO) -> bytes:
        data = file.read(self._entry.size + 1)
        self._check(len(data), hashlib.sha256(data).hexdigest())
        return data

    async def _put_in_parts(self, key: str, condition: Condition) -> None:
        upload_id = await self._client.begin_multipart(key)
        try:
            parts = await self._put_parts(key, upload_id)
            await self._client.complete_multipart(key, upload_id, parts, condition)
        except BaseException:
            await asyncio.shield(self._abort(key, upload_id))
            raise

    async def _put_parts(self, key: str, upload_id: str) -> list[UploadedPart]:
        turns = asyncio.Semaphore(self._settings.max_upload_parts)
        parts: list[UploadedPart] = []

        async def put(number: int, data: bytes) -> None:
            try:
                parts.append(await self._client.put_part(key, upload_id, number, data))
            finally:
                turns.release()
            self._progress(len(data))

        failure: BaseException | None = None
        sha256, size, number = hashlib.sha256(), 0, 0
        try:
            with self._opened() as file:
                async with asyncio.TaskGroup() as group:
                    while True:
                        await turns.acquire()
                        data = await asyncio.to_thread(self._read_part, file, sha256)
                        size += len(data)
                        # A file that grows is not followed for ever.
                        if not data or size > self._entry.size:
                            break
                        number += 1
                        group.create_task(put(number, data))
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
        if failure is not None:
            raise failure
        self._check(size, sha256.hexdigest())
        return parts

    def _read_part(self, file: BinaryIO, sha256: hashlib._Hash) -> bytes:
        data = file.read(self._part_bytes)
        sha256.update(data)
        return data

    async def _abort(self, key: str, upload_id: str) -> None:
        for pause_s in (0.0, *_ABORT_PAUSES_S):
            await asyncio.sleep(pause_s)
            try:
                await self._client.abort_multipart(key, upload_id)
            except MuralError as error:
                failure = error
            else:
                return
        # The store's own life-cycle rule is what is left to remove the parts.
        logger.warning("parts of an upload could not be removed: %s", failure.message)

    def _check(self, size: int, sha256: str) -> None:
        if (size, sha256) != (self._entry.size, self._entry.sha256):
            raise ManifestMismatch(f"{quoted(self._entry.path)} is not what the manifest states.")

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        # What is held to its sha256 may be linked from anywhere (a hub's cache is).
        with open_regular(Path(os.path.realpath(self._path))) as file:
            try:
                yield file
            except OSError as error:
                raise Unavailable(
                    f"{quoted(self._entry.path)} cannot be read: {error.strerror}."
                ) from error
