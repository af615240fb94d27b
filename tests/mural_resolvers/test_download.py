"""The downloader, over a source in memory that breaks, stalls and lies."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import FileEntry
from mural_resolvers.download import Downloader, DownloadSettings
from mural_resolvers.errors import (
    Conflict,
    ManifestMismatch,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.tenants import Principal

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = AdapterName("acme", "default", "v1")


@dataclass
class Read:
    """One call of ``open``."""

    path: str
    start: int
    stop: int


@dataclass
class MemorySource(LoRAResolver):
    """Serves bytes in pieces; ``script`` may do anything before each piece of each read."""

    contents: dict[str, bytes]
    piece_bytes: int = 1000
    script: Callable[[Read, int], object] = lambda read, sent: None
    extra: bytes = b""
    reads: list[Read] = field(default_factory=list)
    open_now: int = 0
    most_open: int = 0

    @property
    def name(self) -> str:
        return "memory"

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        return self.describe()

    def describe(self, *, hashed: bool = True) -> AdapterDescription:
        files = tuple(
            SourceFile(path, len(data), hashlib.sha256(data).hexdigest() if hashed else None)
            for path, data in self.contents.items()
        )
        return AdapterDescription(NAME, "r1", files)

    @asynccontextmanager
    async def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        self.reads.append(read := Read(file.path, start, stop))
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            yield self._pieces(read)
        finally:
            self.open_now -= 1

    async def _pieces(self, read: Read) -> AsyncIterator[bytes]:
        data = self.contents[read.path][read.start : read.stop] + self.extra
        for at in range(0, len(data), self.piece_bytes):
            step = self.script(read, at)
            if asyncio.iscoroutine(step):
                step = await step
            if step == "short":
                return
            await asyncio.sleep(0)
            yield data[at : at + self.piece_bytes]


def source(num_bytes: int = 50_000, **settings: object) -> MemorySource:
    weights = random.Random(num_bytes).randbytes(num_bytes)
    return MemorySource({CONFIG: b"{}", WEIGHTS: weights}, **settings)  # type: ignore[arg-type]


class Waits:
    """A sleep that only notes; jitter at its most."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)

    def downloader(self, limits: AdapterLimits | None = None, **settings: object) -> Downloader:
        small: dict[str, object] = {"part_bytes": 7_000, "write_bytes": 3_000, "stall_s": 5.0}
        return Downloader(
            DownloadSettings(**(small | settings)),  # type: ignore[arg-type]
            limits or AdapterLimits(),
            sleep=self.sleep,
            random=lambda: 1.0,
        )


@pytest.fixture
def waits() -> Waits:
    return Waits()


async def fetch(
    downloader: Downloader, served: MemorySource, folder: Path, described: object = None
) -> tuple[tuple[FileEntry, ...], int]:
    advanced: list[int] = []
    description = described if isinstance(described, AdapterDescription) else served.describe()
    try:
        entries = await downloader.download(served, description, folder, advanced.append)
    finally:
        await downloader.close()
    return entries, sum(advanced)


def assert_whole(served: MemorySource, folder: Path, entries: tuple[FileEntry, ...]) -> None:
    assert sorted(os.listdir(folder)) == sorted(served.contents)
    for entry, (path, data) in zip(entries, served.contents.items(), strict=True):
        assert (folder / path).read_bytes() == data
        assert entry == FileEntry(path, len(data), hashlib.sha256(data).hexdigest())


def open_below(folder: Path) -> set[str]:
    """The files in a folder that this process holds open."""
    ends = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return {end for end in ends if end.startswith(str(folder))}


async def test_every_byte_arrives_once_and_is_hashed(tmp_path: Path, waits: Waits) -> None:
    served = source()
    entries, advanced = await fetch(waits.downloader(), served, tmp_path)
    assert_whole(served, tmp_path, entries)
    assert advanced == sum(map(len, served.contents.values()))
    assert served.most_open == 4
    assert waits.seconds == []


async def test_a_file_without_bytes_is_a_file(tmp_path: Path, waits: Waits) -> None:
    served = source()
    served.contents["chat_template.jinja"] = b""
    entries, _ = await fetch(waits.downloader(), served, tmp_path)
    assert_whole(served, tmp_path, entries)


async def test_content_of_unknown_hash_is_hashed(tmp_path: Path, waits: Waits) -> None:
    served = source()
    entries, _ = await fetch(waits.downloader(), served, tmp_path, served.describe(hashed=False))
    assert_whole(served, tmp_path, entries)


@given(
    num_bytes=st.integers(0, 40_000),
    part_bytes=st.integers(1_000, 50_000),
    write_bytes=st.integers(1, 20_000),
    piece_bytes=st.integers(1, 5_000),
    max_parts=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    breaking=st.floats(0, 0.3),
)
def test_any_sizes_and_random_breaks_give_the_same_bytes(
    num_bytes: int,
    part_bytes: int,
    write_bytes: int,
    piece_bytes: int,
    max_parts: int,
    seed: int,
    breaking: float,
) -> None:
    dice = random.Random(seed)

    def breaks(read: Read, sent: int) -> object:
        if sent and dice.random() < breaking:
            if dice.random() < 0.5:
                return "short"
            raise Unavailable("reset")
        return None

    served = source(num_bytes, piece_bytes=max(piece_bytes, num_bytes // 50), script=breaks)
    downloader = Waits().downloader(
        part_bytes=part_bytes, write_bytes=write_bytes, max_parts=max_parts
    )
    with TemporaryDirectory() as folder:
        entries, advanced = asyncio.run(fetch(downloader, served, Path(folder)))
        assert_whole(served, Path(folder), entries)
    assert advanced == num_bytes + 2


async def test_a_break_is_resumed_from_where_it_was(tmp_path: Path, waits: Waits) -> None:
    broken: list[Read] = []

    def once(read: Read, sent: int) -> None:
        if read.path == WEIGHTS and sent == 2_000 and not broken:
            broken.append(read)
            raise Unavailable("reset", retry_after_s=None)

    served = source(7_000, script=once)
    entries, _ = await fetch(waits.downloader(), served, tmp_path)
    assert_whole(served, tmp_path, entries)
    assert [r for r in served.reads if r.path == WEIGHTS] == [
        Read(WEIGHTS, 0, 7_000),
        Read(WEIGHTS, 2_000, 7_000),
    ]
    assert waits.seconds == [0.2]


async def test_waits_double_up_to_a_bound_and_the_last_reason_is_told(
    tmp_path: Path, waits: Waits
) -> None:
    def never(read: Read, sent: int) -> None:
        if read.path == WEIGHTS:
            raise Unavailable("The store is down.", retry_after_s=None)

    downloader = waits.downloader(max_parts=1, max_attempts=6, backoff_s=1.0, max_backoff_s=5.0)
    with pytest.raises(Unavailable, match=r"The store is down\.") as caught:
        await fetch(downloader, source(script=never), tmp_path)
    assert waits.seconds == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert caught.value.retry_after_s == 2.0


async def test_jitter_takes_the_whole_of_a_wait(tmp_path: Path) -> None:
    waits = Waits()
    failures = iter([True, True])

    def twice(read: Read, sent: int) -> None:
        if next(failures, False):
            raise Unavailable("down", retry_after_s=None)

    draws = iter([0.25, 0.5])
    downloader = Downloader(
        DownloadSettings(max_parts=1, backoff_s=1.0),
        sleep=waits.sleep,
        random=lambda: next(draws),
    )
    await fetch(downloader, source(script=twice), tmp_path)
    assert waits.seconds == [0.25, 1.0]


@pytest.mark.parametrize(("asked", "waited"), [(3.0, 3.0), (1e9, 10.0), (0.0, 0.2)])
async def test_a_source_may_ask_for_a_longer_wait_within_bounds(
    tmp_path: Path, waits: Waits, asked: float, waited: float
) -> None:
    failures = iter([True])

    def once(read: Read, sent: int) -> None:
        if next(failures, False):
            raise Unavailable("Slow down.", retry_after_s=asked)

    await fetch(waits.downloader(), source(script=once), tmp_path)
    assert waits.seconds == [waited]


async def test_progress_starts_the_count_of_failures_anew(tmp_path: Path, waits: Waits) -> None:
    def each(read: Read, sent: int) -> object:
        return "short" if sent else None

    served = source(20_000, script=each)
    downloader = waits.downloader(max_attempts=2, part_bytes=20_000)
    entries, _ = await fetch(downloader, served, tmp_path)
    assert_whole(served, tmp_path, entries)
    assert set(waits.seconds) == {0.2}


@pytest.mark.parametrize("sent_before", [0, 3_000])
async def test_a_source_that_stalls_is_asked_again(
    tmp_path: Path, waits: Waits, sent_before: int
) -> None:
    stalls = iter([True])

    async def stall(read: Read, sent: int) -> None:
        if read.path == WEIGHTS and sent == sent_before and next(stalls, False):
            await asyncio.Event().wait()

    served = source(7_000, script=stall)
    entries, _ = await fetch(waits.downloader(stall_s=0.02), served, tmp_path)
    assert_whole(served, tmp_path, entries)
    assert Read(WEIGHTS, sent_before, 7_000) in served.reads[2:]
    assert served.open_now == 0


async def test_a_source_that_only_stalls_is_unavailable(tmp_path: Path, waits: Waits) -> None:
    async def stall(read: Read, sent: int) -> None:
        await asyncio.Event().wait()

    downloader = waits.downloader(stall_s=0.01, max_attempts=2)
    with pytest.raises(Unavailable, match="stalled"):
        await fetch(downloader, source(script=stall), tmp_path)


async def test_more_bytes_than_described_are_refused_and_not_written(
    tmp_path: Path, waits: Waits
) -> None:
    with pytest.raises(ManifestMismatch, match="more bytes"):
        await fetch(waits.downloader(), source(extra=b"x" * 5_000), tmp_path)
    assert all(os.stat(tmp_path / name).st_size <= 50_000 for name in os.listdir(tmp_path))


async def test_another_hash_than_described_is_refused(tmp_path: Path, waits: Waits) -> None:
    served = source()
    described = served.describe()
    served.contents[WEIGHTS] = bytes(len(served.contents[WEIGHTS]))
    with pytest.raises(ManifestMismatch, match=WEIGHTS):
        await fetch(waits.downloader(), served, tmp_path, described)


async def test_a_refusal_by_the_source_is_not_tried_again(tmp_path: Path, waits: Waits) -> None:
    def changed(read: Read, sent: int) -> None:
        if read.path == WEIGHTS:
            raise Conflict("It changed.")

    served = source(script=changed)
    with pytest.raises(Conflict, match="It changed"):
        await fetch(waits.downloader(max_parts=1), served, tmp_path)
    assert len(served.reads) == 2
    assert served.open_now == 0


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ([SourceFile("../evil", 1)], UnusableAdapter),
        ([SourceFile("optimizer.pt", 1)], UnusableAdapter),
        ([SourceFile(CONFIG, 1), SourceFile(CONFIG, 1)], UnusableAdapter),
        ([SourceFile(CONFIG, -1), SourceFile(WEIGHTS, 1)], UnusableAdapter),
        ([SourceFile(CONFIG, 1)], UnusableAdapter),
        ([SourceFile(WEIGHTS, 1)], UnusableAdapter),
        ([SourceFile(CONFIG, 1), SourceFile("adapter_model.bin", 1)], UnusableAdapter),
        ([SourceFile(CONFIG, 1 << 21), SourceFile(WEIGHTS, 1)], TooLarge),
        ([SourceFile(CONFIG, 1), SourceFile(WEIGHTS, 9 << 30)], TooLarge),
    ],
)
async def test_what_breaks_a_limit_is_refused_before_a_byte_is_read(
    tmp_path: Path, waits: Waits, files: list[SourceFile], error: type[Exception]
) -> None:
    served = source()
    with pytest.raises(error):
        await fetch(
            waits.downloader(), served, tmp_path, AdapterDescription(NAME, "r1", tuple(files))
        )
    assert served.reads == []
    assert os.listdir(tmp_path) == []


async def test_a_pickle_is_read_where_it_is_admitted(tmp_path: Path, waits: Waits) -> None:
    served = MemorySource({CONFIG: b"{}", "adapter_model.bin": b"x"})
    entries, _ = await fetch(waits.downloader(AdapterLimits(admit_bin=True)), served, tmp_path)
    assert_whole(served, tmp_path, entries)


@pytest.mark.parametrize(
    ("number", "told"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "written")]
)
async def test_a_disk_that_fails_is_told_at_once_and_without_its_path(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch, number: int, told: str
) -> None:
    def fail(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(Unavailable, match=told) as caught:
        await fetch(waits.downloader(), source(), tmp_path)
    assert waits.seconds == []
    assert str(tmp_path) not in caught.value.message
    assert caught.value.retry_after_s


async def test_short_writes_are_completed(
    tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:700], offset))
    served = source()
    entries, _ = await fetch(waits.downloader(), served, tmp_path)
    assert_whole(served, tmp_path, entries)


async def test_a_file_that_lies_there_already_is_not_overwritten(
    tmp_path: Path, waits: Waits
) -> None:
    (tmp_path / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unavailable):
        await fetch(waits.downloader(), source(), tmp_path)
    assert not (tmp_path / "elsewhere").exists()


async def test_a_cancelled_download_lets_go_of_the_source_and_of_its_files(
    tmp_path: Path, waits: Waits
) -> None:
    reached = asyncio.Event()

    async def hang(read: Read, sent: int) -> None:
        if read.path == WEIGHTS and sent:
            reached.set()
            await asyncio.Event().wait()

    served = source(script=hang)
    assert open_below(tmp_path) == set()
    download = asyncio.create_task(fetch(waits.downloader(stall_s=60), served, tmp_path))
    await reached.wait()
    assert open_below(tmp_path)
    download.cancel()
    with pytest.raises(asyncio.CancelledError):
        await download
    assert served.open_now == 0
    assert open_below(tmp_path) == set()


async def test_ranges_of_all_downloads_together_are_bounded(tmp_path: Path, waits: Waits) -> None:
    served = source()
    downloader = waits.downloader(max_parts=4, max_parts_in_total=3)
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    await asyncio.gather(
        *(downloader.download(served, served.describe(), f, lambda _: None) for f in folders)
    )
    await downloader.close()
    assert served.most_open == 3


async def test_what_arrives_out_of_order_is_held_on_disk_alone(
    tmp_path: Path, waits: Waits
) -> None:
    """The first range comes last: all others must be complete by then, and the hash right."""
    rest = asyncio.Event()

    async def first_last(read: Read, sent: int) -> None:
        if read.path == WEIGHTS and read.start == 0:
            await rest.wait()

    served = source(70_000, script=first_last)
    arrived = 0

    def advance(num_bytes: int) -> None:
        nonlocal arrived
        arrived += num_bytes
        if arrived == 63_002:
            rest.set()

    downloader = waits.downloader(stall_s=60)
    entries = await downloader.download(served, served.describe(), tmp_path, advance)
    await downloader.close()
    assert_whole(served, tmp_path, entries)
