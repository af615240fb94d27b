"""A tar archive, gzipped or not, read as it arrives: plain files at the top or in one folder.

Formats: POSIX ustar and pax (https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html)
and GNU's long names. Nothing is extracted by name: a file's bytes go to a sink that knows the few
names it takes. Links, devices, sparse files and paths that lead anywhere are refused; what
describes an entry is bounded in size and number, so that no archive costs more than its files may.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

from mural_resolvers.errors import InvalidInput, TooLarge, UnusableAdapter, quoted
from mural_resolvers.uploads.intake import FileSink

__all__ = ["ArchiveReader"]

_BLOCK_BYTES = 512
_MAX_ENTRIES = 64
_MAX_EXTENDED_BYTES = 64 << 10
_MAX_TRAILING_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31
_ZERO_BLOCK = bytes(_BLOCK_BYTES)
_END_BLOCKS = 2
_MAX_SIZE = 1 << 62

_PAX_LENGTH = re.compile(rb"(\d{1,6}) ")
_REFUSED_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a pipe",
    b"S": "a sparse file",
}

Bytes = bytes | memoryview


class ArchiveReader:
    """Push an archive's bytes in; its files come out at the sink.

    Raises ``UnusableAdapter`` or ``TooLarge`` for what it holds, ``InvalidInput`` for bytes that
    are no archive or end before it does.
    """

    def __init__(self, sink: FileSink) -> None:
        self._tar = _TarReader(sink)
        self._start = b""
        self._feed: Callable[[Bytes], None] | None = None
        self._gunzip: _Gunzip | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes, any number of them."""
        if self._feed is None:
            self._start += data
            if len(self._start) < len(_GZIP_MAGIC):
                return
            data, self._start = self._start, b""
            if data.startswith(_GZIP_MAGIC):
                self._gunzip = _Gunzip(self._tar.feed)
            self._feed = self._tar.feed if self._gunzip is None else self._gunzip.feed
        self._feed(data)

    def finish(self) -> None:
        """The body ended; raise ``InvalidInput`` where the archive did not."""
        if self._gunzip is not None:
            self._gunzip.finish()
        self._tar.finish()


class _Gunzip:
    """One gzip member, inflated in bounded pieces."""

    def __init__(self, take: Callable[[Bytes], None]) -> None:
        self._take = take
        self._inflate = zlib.decompressobj(_GZIP_WINDOW)

    def feed(self, data: Bytes) -> None:
        more = True
        while more:
            if self._inflate.eof:
                if len(data):
                    raise InvalidInput("The body goes on after its gzip stream.")
                return
            try:
                piece = self._inflate.decompress(data, _PIECE_BYTES)
            except zlib.error:
                raise InvalidInput("The body is not a gzip stream.") from None
            self._take(piece)
            data = self._inflate.unused_data or self._inflate.unconsumed_tail
            # A full piece may have left output behind, though all input was taken.
            more = bool(data) or len(piece) == _PIECE_BYTES

    def finish(self) -> None:
        if not self._inflate.eof:
            raise InvalidInput("The gzip stream is cut short.")


class _Entry:
    """What a header says of the bytes behind it."""

    def __init__(self, block: bytes) -> None:
        if _number(block[148:156]) != sum(block[:148]) + 8 * 32 + sum(block[156:]):
            raise InvalidInput("The body is not a tar archive.")
        self.kind = block[156:157]
        self.size = _number(block[124:136])
        self.raw_path = block[:100].partition(b"\0")[0]
        prefix = block[345:500].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and prefix:
            self.raw_path = prefix + b"/" + self.raw_path

    @property
    def is_folder(self) -> bool:
        # Before there was a kind for it, a slash at the end told a folder.
        return self.kind == b"5" or (self.kind == b"\0" and self.raw_path.endswith(b"/"))

    @property
    def is_file(self) -> bool:
        return self.kind in (b"0", b"\0") and not self.is_folder


class _TarReader:
    """A state machine over blocks of 512 bytes: a header, or bytes that belong to one."""

    def __init__(self, sink: FileSink) -> None:
        self._sink = sink
        self._state: Callable[[memoryview], int] = self._header
        self._block = bytearray()
        self._left = 0
        self._padding = 0
        self._entries = 0
        self._extended = bytearray()
        self._extended_kind = b""
        self._next_path: bytes | None = None
        self._next_size: int | None = None
        self._folder: str | None = None
        self._zero_blocks = 0
        self._trailing = 0

    def feed(self, data: Bytes) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._state(view) :]

    def finish(self) -> None:
        if self._zero_blocks < _END_BLOCKS:
            raise InvalidInput("The archive ends before its end.")

    # -- states: each takes some of the bytes, and gives how many ----------------------------------

    def _header(self, view: memoryview) -> int:
        taken = view[: _BLOCK_BYTES - len(self._block)]
        self._block += taken
        if len(self._block) == _BLOCK_BYTES:
            block = bytes(self._block)
            self._block.clear()
            self._begin_block(block)
        return len(taken)

    def _content(self, view: memoryview) -> int:
        taken = view[: self._left]
        self._sink.write(taken)
        self._left -= len(taken)
        if not self._left:
            self._sink.end()
            self._state = self._pad
            self._skip_no_padding()
        return len(taken)

    def _extension(self, view: memoryview) -> int:
        taken = view[: self._left]
        self._extended += taken
        self._left -= len(taken)
        if not self._left:
            self._end_extension()
            self._state = self._pad
            self._skip_no_padding()
        return len(taken)

    def _pad(self, view: memoryview) -> int:
        taken = min(len(view), self._padding)
        self._padding -= taken
        self._skip_no_padding()
        return taken

    def _end(self, view: memoryview) -> int:
        """Zeros up to the end of the record, of whatever size the writer makes them."""
        self._trailing += len(view)
        if any(view) or self._trailing > _MAX_TRAILING_BYTES:
            raise InvalidInput("The body goes on after its archive.")
        self._zero_blocks = 1 + self._trailing // _BLOCK_BYTES
        return len(view)

    def _skip_no_padding(self) -> None:
        if not self._padding:
            self._state = self._header

    # -- entries -----------------------------------------------------------------------------------

    def _begin_block(self, block: bytes) -> None:
        if block == _ZERO_BLOCK:
            if self._next_path is not None or self._next_size is not None:
                raise InvalidInput("The archive describes an entry that it does not have.")
            self._zero_blocks = 1
            self._state = self._end
            return
        self._entries += 1
        if self._entries > _MAX_ENTRIES:
            raise TooLarge(f"The archive has more than {_MAX_ENTRIES} entries.")
        entry = _Entry(block)
        if entry.kind in (b"x", b"g", b"L"):
            self._begin_extension(entry)
        else:
            self._begin_entry(entry)

    def _begin_extension(self, entry: _Entry) -> None:
        if entry.size > _MAX_EXTENDED_BYTES:
            raise TooLarge(
                f"The archive describes an entry with more than {_MAX_EXTENDED_BYTES} bytes."
            )
        self._extended.clear()
        self._extended_kind = entry.kind
        self._expect(entry.size)
        if entry.size:
            self._state = self._extension

    def _end_extension(self) -> None:
        if self._extended_kind == b"L":
            self._next_path = bytes(self._extended).partition(b"\0")[0]
            return
        for key, value in _pax_records(bytes(self._extended)):
            if key.startswith(b"GNU.sparse"):
                raise UnusableAdapter("The archive holds a sparse file, which is no plain file.")
            if key in (b"path", b"size") and self._extended_kind == b"g":
                raise InvalidInput("The archive describes all its entries at once.")
            if key == b"path":
                self._next_path = value
            elif key == b"size":
                self._next_size = _decimal(value)

    def _begin_entry(self, entry: _Entry) -> None:
        if self._next_path is not None:
            entry.raw_path = self._next_path
        if self._next_size is not None:
            entry.size = self._next_size
        self._next_path = self._next_size = None
        path = _path(entry.raw_path)
        if entry.is_folder:
            self._enter(path, entry)
        elif entry.is_file:
            self._begin_file(path, entry.size)
        else:
            kind = _REFUSED_KINDS.get(entry.kind, "no plain file")
            raise UnusableAdapter(f"{quoted('/'.join(path))} in the archive is {kind}.")

    def _enter(self, path: tuple[str, ...], entry: _Entry) -> None:
        if entry.size:
            raise InvalidInput("The archive has a folder with bytes of its own.")
        if path:
            self._check_folder(path)

    def _begin_file(self, path: tuple[str, ...], size: int) -> None:
        if not path:
            raise InvalidInput("The archive has a file without a name.")
        self._check_folder(path[:-1])
        self._sink.begin(path[-1], size)
        self._expect(size)
        if size:
            self._state = self._content
        else:
            self._sink.end()

    def _check_folder(self, folders: tuple[str, ...]) -> None:
        """All files lie at the top, or all in one folder."""
        folder = "/".join(folders)
        if len(folders) > 1 or self._folder not in (None, folder):
            raise UnusableAdapter(
                "The archive has more than one folder; an adapter's files lie beside each other."
            )
        self._folder = folder

    def _expect(self, size: int) -> None:
        self._left = size
        self._padding = -size % _BLOCK_BYTES


def _number(field: bytes) -> int:
    """Octal digits, or GNU's base-256 for what is larger."""
    if field[:1] == b"\x80":
        value = int.from_bytes(field[1:], "big")
    else:
        digits = field.strip(b"\0 ")
        if digits.strip(b"01234567"):
            raise InvalidInput("The body is not a tar archive.")
        value = int(digits or b"0", 8)
    if value > _MAX_SIZE:
        raise TooLarge("The archive has an entry that is too large.")
    return value


def _decimal(value: bytes) -> int:
    if not value.isdigit() or len(value) > 18:
        raise InvalidInput("The archive has an entry whose size is no number.")
    return int(value)


def _path(raw: bytes) -> tuple[str, ...]:
    """A path's parts, ``.`` left out; raise ``UnusableAdapter`` for one that leads elsewhere."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise UnusableAdapter("The archive has a path that is not UTF-8.") from None
    parts = text.split("/")
    if text.startswith("/") or ".." in parts or "\\" in text or not text.isprintable():
        raise UnusableAdapter(f"The archive has the path {quoted(text)}, which leads elsewhere.")
    return tuple(part for part in parts if part not in ("", "."))


def _pax_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """The ``length key=value`` lines of a pax header; raise ``InvalidInput``."""
    records = []
    start = 0
    while start < len(data):
        match = _PAX_LENGTH.match(data, start)
        end = start + int(match[1]) if match else 0
        key, equals, value = data[match.end() if match else 0 : max(end - 1, 0)].partition(b"=")
        if not match or end > len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise InvalidInput("The archive describes an entry in a way that is none.")
        records.append((key, value))
        start = end
    return records
