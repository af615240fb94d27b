"""Download of a described version into a folder: parallel ranges, resumed, hashed as they come.

The bytes go to disk in threads, never on the event loop, and what is held in memory is bounded:
per range in flight one buffer that fills and one that is written. A range that arrives before
those in front of it is hashed from the disk once its turn has come.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mural_resolvers.digest import (
    BIN_WEIGHTS_FILE,
    CONFIG_FILE,
    ENGINE_FILES,
    WEIGHTS_FILE,
    FileEntry,
    max_file_bytes,
)
from mural_resolvers.errors import (
    ManifestMismatch,
    TooLarge,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.files import start_writeback
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile

__all__ = ["DownloadSettings", "Downloader"]

T = TypeVar("T")

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DownloadSettings:
    """Bounds on how a version is read from its source.

    Files are read in ranges of ``part_bytes``: ``max_parts`` of a version at once, and
    ``max_parts_in_total`` of all. A range from which no byte came for ``stall_s`` counts as broken
    off. One that broke off ``max_attempts`` times in a row without a byte fails the download.
    Between attempts there is a wait, drawn from 0 to ``backoff_s``, doubled each time up to
    ``max_backoff_s``, and never shorter than the source asked for (up to ``max_backoff_s``).
    ``write_bytes`` are gathered before they are written.
    """

    part_bytes: int = 8 << 20
    max_parts: int = 4
    max_parts_in_total: int = 16
    stall_s: float = 15.0
    max_attempts: int = 6
    backoff_s: float = 0.2
    max_backoff_s: float = 10.0
    retry_after_s: float = 2.0
    write_bytes: int = 1 << 20
    threads: int = 4


class Downloader:
    """Brings described files into a folder. For one event loop.

    ``sleep`` waits between attempts, and ``random`` gives a number from [0, 1) for each wait.
    """

    def __init__(
        self,
        settings: DownloadSettings | None = None,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings = settings or DownloadSettings()
        self._limits = limits
        self._sleep = sleep
        self._random = random
        self._turns = asyncio.Semaphore(settings.max_parts_in_total)
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="adapter-write")

    async def download(
        self,
        resolver: LoRAResolver,
        description: AdapterDescription,
        folder: Path,
        advance: Callable[[int], None],
    ) -> tuple[FileEntry, ...]:
        """Write a description's files into an empty folder; give them with their sha256.

        ``advance`` is told of bytes as they arrive, each once. Nothing is synced to disk: that is
        the cache's, when it commits. What was written stays in the folder after an error or a
        cancellation, and no thread writes to it any more. The whole has no deadline of its own.

        Raises ``TooLarge`` and ``UnusableAdapter`` before a byte is read where the description
        breaks a limit, ``ManifestMismatch`` for content that is not as described, ``Unavailable``
        for a source that goes on breaking off or a disk that is full, and what the source raises.
        """
        _check_described(description.files, self._limits)
        with _opened(folder, description.files, self._settings.part_bytes) as targets:
            parts = iter([part for target in targets for part in target.parts])
            await self._read_parts(resolver, description, parts, advance)
            return await self._in_thread(lambda: tuple([target.finish() for target in targets]))

    async def close(self) -> None:
        """Stop the threads; downloads under way have been cancelled before."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read_parts(
        self,
        resolver: LoRAResolver,
        description: AdapterDescription,
        parts: Iterator[_Part],
        advance: Callable[[int], None],
    ) -> None:
        """Let a few workers share the parts, in order; the first failure ends them all."""

        async def work() -> None:
            for part in parts:
                await self._read_part(_Reader(resolver, description, part, advance))

        failure: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._settings.max_parts):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
        if failure is not None:
            raise failure

    async def _read_part(self, reader: _Reader) -> None:
        part, failures = reader.part, 0
        while part.at < part.stop:
            before = part.at
            try:
                broken = await self._attempt(reader)
            finally:
                await self._written(part)
            await self._flush(part)
            await self._written(part)
            if broken is None:
                continue
            failures = failures + 1 if part.at == before else 1
            if failures >= self._settings.max_attempts:
                raise Unavailable(broken.message, retry_after_s=self._give_up_for(broken))
            await self._sleep(self._wait_s(failures, broken.retry_after_s))

    async def _attempt(self, reader: _Reader) -> Unavailable | None:
        """Read on from where the part stands; how it broke off, or None."""
        async with self._turns:
            try:
                await self._stream(reader)
            except _DiskFailed:
                raise
            except Unavailable as error:
                return error
            except TimeoutError:
                return Unavailable("The source of the adapter stalled.", retry_after_s=None)
        if reader.part.at < reader.part.stop:
            return Unavailable("The source of the adapter broke off.", retry_after_s=None)
        return None

    async def _stream(self, reader: _Reader) -> None:
        part, stall_s = reader.part, self._settings.stall_s
        now = asyncio.get_running_loop().time
        async with (
            asyncio.timeout(stall_s) as bound,
            reader.resolver.open(
                reader.description, part.target.file, part.at, part.stop
            ) as pieces,
        ):
            async for piece in pieces:
                if not piece:
                    continue
                if len(piece) > part.stop - part.at:
                    raise ManifestMismatch(
                        f"{part.target.file.path} has more bytes than its source described."
                    )
                part.held += piece
                reader.advance(len(piece))
                if len(part.held) >= self._settings.write_bytes:
                    # A slow disk is not a source that stalls.
                    bound.reschedule(None)
                    await self._flush(part)
                bound.reschedule(now() + stall_s)

    async def _flush(self, part: _Part) -> None:
        """Have what is held written beside what is read next, once what was before it is."""
        await self._written(part)
        if part.held:
            data = part.release()
            part.writing = self._begin(lambda: part.target.write(part, data))

    async def _written(self, part: _Part) -> None:
        """Leave only once no thread writes what the part gave up; raise what that failed with."""
        writing, part.writing = part.writing, None
        if writing is not None:
            await _ended(writing)

    def _wait_s(self, failures: int, asked_s: float | None) -> float:
        settings = self._settings
        longest = min(settings.max_backoff_s, settings.backoff_s * 2.0 ** (failures - 1))
        return max(self._random() * longest, min(asked_s or 0.0, settings.max_backoff_s))

    def _give_up_for(self, broken: Unavailable) -> float:
        return max(self._settings.retry_after_s, broken.retry_after_s or 0.0)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await _ended(self._begin(call))

    def _begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, call)


async def _ended(future: asyncio.Future[T]) -> T:
    """Leave only once a thread has ended: it uses a file that we close."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # What else went wrong is looked at, so that it is not reported as forgotten.
        raise cancelled from future.exception()
    return future.result()


class _DiskFailed(Unavailable):
    """Our own disk, not the source: reading it once more would not help."""


@dataclass(frozen=True, slots=True)
class _Reader:
    """A part and all that is needed to read it."""

    resolver: LoRAResolver
    description: AdapterDescription
    part: _Part
    advance: Callable[[int], None]


@dataclass(slots=True)
class _Part:
    """The bytes ``[start, stop)`` of a file: ``written`` of them are on disk, some more are held.

    It is filled from its start, so what there is of it is one run of bytes. What was given up is
    on its way to the disk (``writing``).
    """

    target: _Target
    start: int
    stop: int
    written: int = 0
    given_up: int = 0
    held: bytearray = field(default_factory=bytearray)
    writing: asyncio.Future[None] | None = None

    @property
    def at(self) -> int:
        """Where to read on."""
        return self.start + self.given_up + len(self.held)

    def release(self) -> bytearray:
        data, self.held = self.held, bytearray()
        self.given_up += len(data)
        return data


class _Target:
    """A file that is filled in parts by several threads and hashed in order."""

    def __init__(self, folder: Path, file: SourceFile, part_bytes: int) -> None:
        self.file = file
        self.parts = [
            _Part(self, start, min(start + part_bytes, file.size))
            for start in range(0, file.size, part_bytes)
        ]
        self._part_bytes = part_bytes
        self._sha256 = hashlib.sha256()
        self._hashed = 0
        self._hashing = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _writing():
            self._descriptor = os.open(folder / file.path, flags, 0o644)

    def write(self, part: _Part, data: bytearray) -> None:
        """Write what a part gave up, and hash it if all in front of it has been."""
        with _writing():
            offset = part.start + part.written
            rest = memoryview(data)
            while rest:
                rest = rest[os.pwrite(self._descriptor, rest, offset + len(data) - len(rest)) :]
            start_writeback(self._descriptor, offset, len(data))
            part.written += len(data)
            # Whoever holds the lock, or else finish(), hashes what is left out here.
            if self._hashing.acquire(blocking=False):
                try:
                    if offset == self._hashed:
                        self._update(data)
                    self._catch_up(self._part_bytes)
                finally:
                    self._hashing.release()

    def finish(self) -> FileEntry:
        """Hash the rest and compare; raise ``ManifestMismatch``."""
        with _writing(), self._hashing:
            self._catch_up(self.file.size)
        sha256 = self._sha256.hexdigest()
        if self.file.sha256 not in (None, sha256):
            raise ManifestMismatch(f"{self.file.path} is not the file that its source described.")
        return FileEntry(self.file.path, self.file.size, sha256)

    def close(self) -> None:
        os.close(self._descriptor)

    def _catch_up(self, num_bytes: int) -> None:
        """Hash from the disk what lies there in one run, at most about ``num_bytes``."""
        last = self._hashed + num_bytes
        while self._hashed < min(self._run_end(), last):
            length = min(_READ_BYTES, self._run_end() - self._hashed)
            data = os.pread(self._descriptor, length, self._hashed)
            if not data:
                raise OSError(errno.EIO, "The file was cut behind our back")
            self._update(data)

    def _run_end(self) -> int:
        """How far the part on which the hash stands has been written."""
        if self._hashed >= self.file.size:
            return self.file.size
        part = self.parts[self._hashed // self._part_bytes]
        return part.start + part.written

    def _update(self, data: bytes | bytearray) -> None:
        self._sha256.update(data)
        self._hashed += len(data)


@contextmanager
def _opened(folder: Path, files: Sequence[SourceFile], part_bytes: int) -> Iterator[list[_Target]]:
    targets: list[_Target] = []
    try:
        for file in files:
            targets.append(_Target(folder, file, part_bytes))
        yield targets
    finally:
        for target in targets:
            target.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _DiskFailed("The disk for adapters is full.", retry_after_s=10.0) from error
        # strerror alone: the path is not the user's to know.
        raise _DiskFailed(
            f"The disk for adapters cannot be written: {error.strerror}.", retry_after_s=10.0
        ) from error


def _check_described(files: Sequence[SourceFile], limits: AdapterLimits) -> None:
    """Refuse, before anything is read, what could not be served anyway."""
    paths = {file.path for file in files}
    for file in files:
        if file.path not in ENGINE_FILES:
            raise UnusableAdapter(f"{quoted(file.path)} is none of an adapter's files.")
        if file.size < 0 or len(paths) != len(files):
            raise UnusableAdapter("The adapter's source describes its files wrongly.")
        max_bytes = max_file_bytes(file.path, limits)
        if file.size > max_bytes:
            raise TooLarge(f"{file.path} has {file.size} bytes; the limit is {max_bytes}.")
    if CONFIG_FILE not in paths:
        raise UnusableAdapter(f"The adapter has no {CONFIG_FILE}.")
    if WEIGHTS_FILE not in paths and not (limits.admit_bin and BIN_WEIGHTS_FILE in paths):
        raise UnusableAdapter(f"The adapter has no {WEIGHTS_FILE}.")
