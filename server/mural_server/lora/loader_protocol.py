"""What the loader process and its parent say to each other: framed msgpack, and one descriptor.

Never pickle: the child reads what strangers upload, and its parent must not trust it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

import msgspec

from mural_resolvers.base_spec import BaseSpec
from mural_server.lora.checkpoint import CheckpointHeader, LoadOptions, LoadPhase

__all__ = [
    "AskBaseDigest",
    "BaseDigestAnswer",
    "Channel",
    "ChannelClosed",
    "Load",
    "Loaded",
    "PhaseBegins",
    "Refused",
    "Start",
]

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 64 << 20
_DESCRIPTOR_FOLLOWS = b"D"


class Start(msgspec.Struct, frozen=True, tag=True):
    """The parent's first word."""

    base: BaseSpec
    options: LoadOptions
    nice: int


class Load(msgspec.Struct, frozen=True, tag=True):
    """Read this folder, within limits that end the child by a signal, wherever it is."""

    path: str
    expected_digest: str
    give_up_s: float
    """Of the whole load, should the parent be gone that bounds it."""
    judge_cpu_s: float
    """Processor time of matching the adapter's own regular expressions."""
    check_only: bool = False
    """Do all of it, and keep the payload."""


class BaseDigestAnswer(msgspec.Struct, frozen=True, tag=True):
    """The base's own digest, or None where it keeps no such tensor."""

    digest: str | None


class AskBaseDigest(msgspec.Struct, frozen=True, tag=True):
    """The adapter has a copy of this tensor of the base."""

    module: str


class PhaseBegins(msgspec.Struct, frozen=True, tag=True):
    """What the load does from here on."""

    phase: LoadPhase


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The load failed: the code of a typed error and its message."""

    code: str
    message: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Unless it was only a check, the descriptor of the payload's memory follows."""

    header: CheckpointHeader


ParentMessage = Start | Load | BaseDigestAnswer
ChildMessage = AskBaseDigest | PhaseBegins | Refused | Loaded

_FROM_PARENT: msgspec.msgpack.Decoder[ParentMessage] = msgspec.msgpack.Decoder(ParentMessage)
_FROM_CHILD: msgspec.msgpack.Decoder[ChildMessage] = msgspec.msgpack.Decoder(ChildMessage)


class ChannelClosed(ConnectionError):
    """The other side is gone."""


class Channel:
    """One end of a stream socket. ``deadline`` (of ``time.monotonic``) bounds every wait.

    Raises `ChannelClosed` when the other side is gone, ``TimeoutError`` past the deadline.
    """

    def __init__(self, connection: socket.socket, clock: Callable[[], float] = time.monotonic):
        self._socket = connection
        self._clock = clock
        self.deadline: float | None = None

    def send(self, message: ParentMessage | ChildMessage) -> None:
        frame = msgspec.msgpack.encode(message)
        self._wait()
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from None

    def send_descriptor(self, descriptor: int) -> None:
        """Give the other side a descriptor of its own for what this one stands for."""
        self._wait()
        try:
            socket.send_fds(self._socket, [_DESCRIPTOR_FOLLOWS], [descriptor])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(str(error)) from None

    def receive_descriptor(self) -> int:
        """The caller closes it."""
        self._wait()
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except ConnectionResetError as error:
            raise ChannelClosed(str(error)) from None
        if data != _DESCRIPTOR_FOLLOWS or len(descriptors) != 1:
            for each in descriptors:
                os.close(each)
            raise ChannelClosed("a descriptor was to come")
        return descriptors[0]

    def from_parent(self) -> ParentMessage:
        """The child's next message."""
        return _FROM_PARENT.decode(self._frame())

    def from_child(self) -> ChildMessage:
        """The parent's next message; raise ``msgspec.MsgspecError`` for what is none."""
        return _FROM_CHILD.decode(self._frame())

    def _frame(self) -> bytearray:
        length = bytearray(_LENGTH.size)
        self._receive_into(memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > _MAX_FRAME_BYTES:
            raise ChannelClosed("a frame above its limit")
        frame = bytearray(size)
        self._receive_into(memoryview(frame))
        return frame

    def _receive_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            self._wait()
            try:
                count = self._socket.recv_into(view[done:])
            except ConnectionResetError as error:
                raise ChannelClosed(str(error)) from None
            if count == 0:
                raise ChannelClosed("the other side closed the connection")
            done += count

    def close(self) -> None:
        self._socket.close()

    def _wait(self) -> None:
        if self.deadline is None:
            self._socket.settimeout(None)
            return
        left = self.deadline - self._clock()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
