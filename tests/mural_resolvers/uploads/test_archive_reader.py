"""Archives as they arrive: those that tools write, and those that mean harm."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput, MuralError, TooLarge, UnusableAdapter
from mural_resolvers.uploads import ArchiveReader

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b"{}", WEIGHTS: bytes(range(256)) * 7, "empty": b"", "block": b"b" * 512}


class Kept:
    """A sink that keeps everything; none of the names matters to it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sizes: dict[str, int | None] = {}
        self._open: str | None = None

    def begin(self, name: str, size: int | None = None) -> None:
        assert self._open is None
        self._open = name
        self.files[name] = b""
        self.sizes[name] = size

    def write(self, data: bytes | memoryview) -> None:
        assert self._open is not None
        self.files[self._open] += bytes(data)

    def end(self) -> None:
        assert self._open is not None
        self._open = None


def read(data: bytes, piece: int = 1 << 20) -> dict[str, bytes]:
    sink = Kept()
    reader = ArchiveReader(sink)
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    reader.finish()
    assert sink.sizes == {name: len(data) for name, data in sink.files.items()}
    return sink.files


def archive(
    files: dict[str, bytes] = FILES, *, format: int = tarfile.PAX_FORMAT, mtime: float = 0
) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=format) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def header(
    name: bytes = CONFIG.encode(),
    *,
    kind: bytes = b"0",
    size: bytes = b"00000000002\0",
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[157 : 157 + len(link)] = link
    block[257 : 257 + len(magic)] = magic
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def octal(number: int) -> bytes:
    return b"%011o\0" % number


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


END = bytes(1024)
FILE = header() + padded(b"{}")


# -- what tools write -----------------------------------------------------------------------------


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "./", "out/", "./out/", "größer/"])
@pytest.mark.parametrize("compressed", [False, True])
def test_archives_of_python_are_read(format: int, prefix: str, compressed: bool) -> None:
    data = archive({prefix + name: data for name, data in FILES.items()}, format=format)

    assert read(gzip.compress(data) if compressed else data) == FILES


def test_times_with_fractions_and_long_names_are_read() -> None:
    folder = "f" * 150 + "/"
    files = {folder + name: data for name, data in FILES.items()}
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert read(archive(files, format=format, mtime=1.5)) == FILES
    short = {"f" * 90 + "/" + "n" * 20: b"x"}
    assert read(archive(short, format=tarfile.USTAR_FORMAT)) == {"n" * 20: b"x"}


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar here")
@pytest.mark.parametrize("format", ["ustar", "gnu", "pax", "v7", "posix"])
@pytest.mark.parametrize("how", [["-C", "out", "."], ["out"], ["-z", "out"], ["-C", "out", CONFIG]])
def test_archives_of_tar_are_read(tmp_path: Path, format: str, how: list[str]) -> None:
    (tmp_path / "out").mkdir()
    for name, data in FILES.items():
        (tmp_path / "out" / name).write_bytes(data)
    made = subprocess.run(
        ["tar", "-c", "-f", "-", f"--format={format}", *how],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )

    assert read(made.stdout) == ({CONFIG: FILES[CONFIG]} if CONFIG in how else FILES)


@given(piece=st.integers(1, 700), compressed=st.booleans())
def test_it_does_not_matter_how_the_bytes_are_cut(piece: int, compressed: bool) -> None:
    data = archive({"out/" + name: data for name, data in FILES.items()}, mtime=0.5)

    assert read(gzip.compress(data) if compressed else data, piece) == FILES


def test_a_comment_on_the_whole_archive_is_read_past() -> None:
    comment = b"52 comment=" + b"c" * 40 + b"\n"
    global_header = header(b"pax_global_header", kind=b"g", size=octal(len(comment)))

    assert read(global_header + padded(comment) + FILE + END) == {CONFIG: b"{}"}


def test_a_size_in_base_256_is_read() -> None:
    size = b"\x80" + (2).to_bytes(11, "big")

    assert read(header(size=size) + padded(b"{}") + END) == {CONFIG: b"{}"}


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (b"1", "hard link"),
        (b"2", "symbolic link"),
        (b"3", "device"),
        (b"4", "device"),
        (b"6", "pipe"),
        (b"S", "sparse"),
        (b"7", "no plain file"),
        (b"M", "no plain file"),
        (b"K", "no plain file"),
        (b"\xff", "no plain file"),
    ],
)
def test_only_plain_files_are_taken(kind: bytes, what: str) -> None:
    with pytest.raises(UnusableAdapter, match=what):
        read(header(kind=kind, link=b"/etc/passwd", size=octal(0)) + END)


@pytest.mark.parametrize(
    "name",
    [
        b"/adapter_config.json",
        b"../adapter_config.json",
        b"out/../../adapter_config.json",
        b"./../adapter_config.json",
        b"..",
        b"..\\adapter_config.json",
        b"C:\\adapter_config.json",
        b"out\n/adapter_config.json",
        b"\x1b[2J",
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("form", ["header", "long name", "pax"])
def test_a_path_that_leads_elsewhere_is_refused(name: bytes, form: str) -> None:
    if form == "header":
        data = header(name)
    elif form == "long name":
        data = header(b"././@LongLink", kind=b"L", size=octal(len(name) + 1))
        data += padded(name + b"\0") + header()
    else:
        data = pax(record(b"path", name)) + header()

    with pytest.raises(UnusableAdapter):
        read(data + padded(b"{}") + END)


@pytest.mark.parametrize(
    "names",
    [["a/b/c"], ["a/c", "b/c"], ["c", "a/c"], ["a/c", "c"], ["a/", "b/c"], ["a/b/"]],
)
def test_files_lie_beside_each_other(names: list[str]) -> None:
    blocks = [
        header(name.encode(), kind=b"5" if name.endswith("/") else b"0", size=octal(0))
        for name in names
    ]

    with pytest.raises(UnusableAdapter, match="folder"):
        read(b"".join(blocks) + END)


def record(key: bytes, value: bytes) -> bytes:
    """A line of a pax header, whose length counts its own digits."""
    line = b" " + key + b"=" + value + b"\n"
    length = len(line) + 1
    length += len(str(length + 1)) - 1
    return b"%d" % length + line


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return header(b"pax", kind=kind, size=octal(len(records))) + padded(records)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pax(record(b"GNU.sparse.major", b"1")) + FILE, UnusableAdapter),
        (pax(record(b"GNU.sparse.size", b"99999")) + FILE, UnusableAdapter),
        (pax(record(b"path", b"/etc/passwd"), b"g") + FILE, InvalidInput),
        (pax(record(b"size", b"9999"), b"g") + FILE, InvalidInput),
        (pax(record(b"size", b"-1")) + FILE, InvalidInput),
        (pax(record(b"size", b"9" * 20)) + FILE, InvalidInput),
        (pax(b"99 path=x\n") + FILE, InvalidInput),
        (pax(b"0 path=x\n") + FILE, InvalidInput),
        (pax(b"8 path=x\n") + FILE, InvalidInput),
        (pax(b"7 path\n") + FILE, InvalidInput),
        (pax(b"nonsense\n") + FILE, InvalidInput),
        (pax(record(b"path", b"x")), InvalidInput),
        (header(kind=b"x", size=octal(1 << 20)), TooLarge),
        (header(kind=b"L", size=octal(1 << 20)), TooLarge),
        (header(size=b"\x80" + b"\xff" * 11) + padded(b"{}"), TooLarge),
        (header(size=b"\xff" * 12) + padded(b"{}"), InvalidInput),
        (header(size=b"-0000000002\0") + padded(b"{}"), InvalidInput),
        (header(size=b"00000000009\0") + padded(b"{}"), InvalidInput),
        (header(b"", size=octal(0)), InvalidInput),
        (header(b"out/", kind=b"5", size=octal(512)) + bytes(512), InvalidInput),
        (header()[:100] + b"X" + header()[101:] + padded(b"{}"), InvalidInput),
        (b"not a tar archive" * 100, InvalidInput),
        (b"PK\x03\x04" + bytes(600), InvalidInput),
    ],
)
def test_what_no_tool_writes_is_refused(data: bytes, error: type[MuralError]) -> None:
    with pytest.raises(error):
        read(data + END)


def test_an_archive_of_endless_entries_is_refused() -> None:
    for entry in (header(b"out/", kind=b"5", size=octal(0)), pax(b"9 a=bcde\n"), FILE):
        with pytest.raises(TooLarge, match="entries"):
            read(entry * 65 + END)


def test_bytes_behind_the_archive_are_refused() -> None:
    for rest in (b"x", FILE, bytes(4096) + b"x", bytes(2 << 20)):
        with pytest.raises(InvalidInput, match="goes on"):
            read(FILE + END + rest)
    with pytest.raises(InvalidInput, match="goes on"):
        read(gzip.compress(FILE + END) + b"x")
    with pytest.raises(InvalidInput, match="goes on"):
        read(gzip.compress(FILE + END) * 2)


@given(length=st.integers(0, len(FILE + END) - 1), compressed=st.booleans())
def test_an_archive_that_is_cut_is_refused(length: int, compressed: bool) -> None:
    with pytest.raises(InvalidInput):
        read(gzip.compress((FILE + END)[:length]) if compressed else (FILE + END)[:length])
    packed = gzip.compress(FILE + END)
    with pytest.raises(InvalidInput):
        read(packed[: min(length, len(packed) - 1)])


@given(st.binary(max_size=2048))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for start in (b"", FILE, b"\x1f\x8b", b"\x1f\x8b\x08\0\0\0\0\0\0\xff"):
        try:
            read(start + data)
        except (InvalidInput, TooLarge, UnusableAdapter):
            continue


@given(place=st.integers(0, len(FILE) - 1), value=st.integers(0, 255))
def test_a_spoilt_byte_is_read_or_refused(place: int, value: int) -> None:
    data = bytearray(FILE + END)
    data[place] = value
    try:
        read(bytes(data))
    except (InvalidInput, TooLarge, UnusableAdapter):
        return


@pytest.mark.parametrize("start", [b"", FILE, header(size=octal(1 << 30))])
def test_a_gzip_bomb_is_refused_in_bounded_memory(start: bytes) -> None:
    """A GiB of zeros in a MiB: neither the end of an archive nor a file of it may be that."""

    class Stingy(Kept):
        def write(self, data: bytes | memoryview) -> None:
            if len(self.files[CONFIG]) + len(data) > 1 << 20:
                raise TooLarge("It is large.")
            super().write(data)

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = packer.compress(start) + b"".join(packer.compress(bytes(1 << 20)) for _ in range(64))
    reader = ArchiveReader(Stingy())
    tracemalloc.start()
    try:
        with pytest.raises((InvalidInput, TooLarge)):
            reader.feed(bomb + packer.flush())
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
