"""``multipart/form-data`` read as it arrives: its files go to a sink, and nothing else is taken."""

from __future__ import annotations

import logging

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from mural_resolvers.errors import TooLarge, quoted
from mural_resolvers.uploads import FileSink
from mural_server.api.errors import BadParameter

__all__ = ["MultipartReader"]

MAX_BOUNDARY_CHARS = 70
MAX_PARTS = 16
MAX_HEADER_CHARS = 4096

# It warns of what a client sends, one line for each byte at the worst.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class MultipartReader:
    """Push a body in; each part with a file name is a file of that name.

    Raises what the sink raises, and `BadParameter` for a body that is no such form.
    """

    def __init__(self, sink: FileSink, content_type: str) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS:
            raise BadParameter("The content type multipart/form-data names no boundary.")
        self._sink = sink
        self._parts = 0
        self._ended = False
        self._field = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_field,
                "on_header_value": self._add_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_file,
                "on_part_data": self._write,
                "on_part_end": sink.end,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """The next piece of the body."""
        if not data:
            return
        try:
            self._parser.write(data)
        except MultipartParseError:
            raise BadParameter("The body is not multipart/form-data.") from None

    def finish(self) -> None:
        """The body ended; raise `BadParameter` where the form did not."""
        if not self._ended:
            raise BadParameter("The body ends before its last boundary.")

    # -- what the parser calls --------------------------------------------------------------------

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise TooLarge(f"The form has more than {MAX_PARTS} parts.")
        self._disposition = b""

    def _add_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._check_header()

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._field) + len(self._value) > MAX_HEADER_CHARS:
            raise TooLarge(
                f"A part of the form has a header of more than {MAX_HEADER_CHARS} bytes."
            )

    def _end_header(self) -> None:
        if bytes(self._field).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _begin_file(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"filename")
        if name is None:
            field = options.get(b"name", b"").decode("utf-8", "replace")
            raise BadParameter(f"The part {quoted(field)} of the form is not a file.")
        self._sink.begin(name.decode("utf-8", "replace"))

    def _write(self, data: bytes, start: int, end: int) -> None:
        self._sink.write(memoryview(data)[start:end])

    def _end(self) -> None:
        self._ended = True
