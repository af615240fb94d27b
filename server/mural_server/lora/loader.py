"""Adapters are read, checked and converted in a process of their own, beside the steps.

A load neither holds the interpreter lock nor spins an OpenMP team; a hostile file can at worst
make the child hang, crash or run out of memory, which costs one load and a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import (
    InvalidInput,
    ManifestMismatch,
    MuralError,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.request import LoRARequest
from mural_server.lora.checkpoint import (
    BaseDigest,
    CheckpointHeader,
    LoadOptions,
    LoadPhase,
    no_base_digest,
)
from mural_server.lora.loader_protocol import (
    AskBaseDigest,
    BaseDigestAnswer,
    Channel,
    ChannelClosed,
    Load,
    Loaded,
    PhaseBegins,
    Refused,
    Start,
)
from mural_server.lora.model import LoRAModel
from mural_server.lora.shared_payload import check_sealed

__all__ = ["AdapterLoader", "LoaderLimits"]

logger = logging.getLogger(__name__)

T = TypeVar("T", LoRAModel, CheckpointHeader)

_ERRORS: dict[str, type[MuralError]] = {
    error.code: error
    for error in (InvalidInput, ManifestMismatch, TooLarge, Unavailable, UnusableAdapter)
}

# What the child needs of the environment; the rest may hold keys, which it must not.
_KEPT_VARIABLES = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR")
_ONE_THREAD = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class LoaderLimits:
    """Bounds on waiting."""

    load_timeout_s: float = 60.0
    """Of a whole load, once it is its turn."""
    judge_cpu_s: float = 2.0
    """Processor time of matching the adapter's own regular expressions."""
    max_queued: int = 256
    """Loads that wait for their turn."""
    start_timeout_s: float = 60.0
    """Of sending a new process its first words."""
    close_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class _Job:
    """``run`` reads the adapter and sets the future's result, or raises."""

    lora: LoRARequest
    future: Future[LoRAModel] | Future[CheckpointHeader]
    run: Callable[[], None]


class AdapterLoader:
    """One load at a time, in a child process that is started again when it dies or is killed.

    It is started before the first load, unless it is not ``eager``. Thread-safe. ``close`` must be
    called; afterwards every load fails with ``Unavailable``.
    """

    def __init__(
        self,
        base_spec: BaseSpec,
        options: LoadOptions,
        *,
        base_digest: BaseDigest = no_base_digest,
        nice: int = 10,
        limits: LoaderLimits | None = None,
        eager: bool = True,
    ) -> None:
        self._start = Start(base_spec, options, nice)
        self._base_digest = base_digest
        self._limits = limits or LoaderLimits()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(self._limits.max_queued)
        self._eager = eager
        self._closing = threading.Event()
        self._child = _Child(self._start, self._limits.start_timeout_s)
        self._thread = threading.Thread(target=self._run, name="adapter-loader", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The child's process id while it runs."""
        return self._child.pid

    def submit(self, lora: LoRARequest) -> Future[LoRAModel]:
        """Queue a load; the future gives the model under ``lora.lora_int_id``.

        It fails with ``UnusableAdapter`` or ``ManifestMismatch`` (the reason), ``TooLarge``, or
        ``Unavailable``: the queue is full, the child died or ran out of time or memory, or the
        loader is closed. Cancelling it works while it is queued.
        """
        return self._queue(
            lora, lambda channel, header: _receive(channel, header, lora, self._start.options)
        )

    def check(self, lora: LoRARequest) -> Future[CheckpointHeader]:
        """Queue a load that ends before its result is handed over; fails as one would."""
        return self._queue(lora, lambda channel, header: header, check_only=True)

    def _queue(
        self,
        lora: LoRARequest,
        take: Callable[[Channel, CheckpointHeader], T],
        *,
        check_only: bool = False,
    ) -> Future[T]:
        future: Future[T] = Future()
        job = _Job(
            lora, future, lambda: future.set_result(self._load(lora, take, check_only=check_only))
        )
        try:
            if self._closing.is_set():
                raise _closed()
            self._jobs.put_nowait(job)
        except queue.Full:
            future.set_exception(
                Unavailable(f"{self._limits.max_queued} adapters wait to be loaded already.")
            )
        except Unavailable as error:
            future.set_exception(error)
        if self._closing.is_set():
            # Closed between the check and the put: nobody may be left waiting.
            self._fail_queued()
        return future

    def close(self) -> None:
        """End the child, fail what is queued or in flight, and return; bounded."""
        self._closing.set()
        # The thread that waits for the child sees it end, and is the one to close the connection.
        self._child.end_process(for_good=True)
        self._fail_queued()
        self._jobs.put(None)
        self._thread.join(self._limits.close_timeout_s)
        self._child.end_process()
        self._fail_queued()

    def _fail_queued(self) -> None:
        last_word = False
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is None:
                    last_word = True
                elif job.future.set_running_or_notify_cancel():
                    job.future.set_exception(_closed())
        if last_word:
            self._jobs.put(None)  # it is the thread's

    def _run(self) -> None:
        if self._eager:
            self._start_early()
        while self._do(self._jobs.get()):
            pass

    def _do(self, job: _Job | None) -> bool:
        """One job. A call of its own: what was loaded is not kept while the next is waited for."""
        if job is None:
            return False
        if not job.future.set_running_or_notify_cancel():
            return True
        try:
            job.run()
        except MuralError as error:
            job.future.set_exception(error)
        except Exception as error:
            logger.exception("loading adapter %r failed", job.lora.lora_name)
            self._child.kill()
            unavailable = Unavailable("The adapter could not be loaded.")
            unavailable.__cause__ = error
            job.future.set_exception(unavailable)
        return True

    def _start_early(self) -> None:
        """Start the child before the first load; one that cannot start is told again then."""
        try:
            self._child.ensure()
        except (OSError, TimeoutError) as error:
            logger.error("the adapter loader does not start: %s", error)

    def _load(
        self,
        lora: LoRARequest,
        take: Callable[[Channel, CheckpointHeader], T],
        *,
        check_only: bool,
    ) -> T:
        if self._closing.is_set():
            raise _closed()
        phase: LoadPhase = "read"
        end = time.monotonic() + self._limits.load_timeout_s
        try:
            channel = self._begin(lora, end, check_only=check_only)
            while True:
                message = channel.from_child()
                if isinstance(message, PhaseBegins):
                    phase = message.phase
                elif isinstance(message, AskBaseDigest):
                    channel.send(BaseDigestAnswer(self._base_digest(message.module)))
                elif isinstance(message, Refused):
                    raise _ERRORS.get(message.code, UnusableAdapter)(message.message)
                elif isinstance(message, Loaded):
                    return take(channel, message.header)
        except TimeoutError:
            self._child.kill()
            raise Unavailable(
                f"The adapter was not loaded within {self._limits.load_timeout_s:g} s.",
                retry_after_s=5.0,
            ) from None
        except (ChannelClosed, msgspec.MsgspecError) as error:
            ended_by = self._child.kill()
            if self._closing.is_set():
                raise _closed() from None
            if ended_by == -signal.SIGVTALRM:
                raise self._never_judged() from None
            logger.error("the adapter loader died in phase %r: %s", phase, error)
            raise Unavailable("The adapter's loader died; try again.") from None

    def _begin(self, lora: LoRARequest, end: float, *, check_only: bool) -> Channel:
        """Hand the load to a child, which says that it began.

        A child that died before it could say so died idle: it is replaced, and no load fails.
        """
        # A little longer than the parent waits, which it normally is there to do.
        give_up_s = self._limits.load_timeout_s + 5.0
        path = os.path.abspath(lora.lora_path)
        load = Load(path, lora.digest, give_up_s, self._limits.judge_cpu_s, check_only)
        try:
            return self._hand_over(load, end)
        except ChannelClosed:
            self._child.kill()
            return self._hand_over(load, end)

    def _hand_over(self, load: Load, end: float) -> Channel:
        channel = self._child.ensure()
        channel.deadline = end
        channel.send(load)
        if channel.from_child() != PhaseBegins("read"):
            raise ChannelClosed("a load that did not begin")
        return channel

    def _never_judged(self) -> UnusableAdapter:
        return UnusableAdapter(
            "The patterns of adapter_config.json took more than "
            f"{self._limits.judge_cpu_s:g} s to match."
        )


class _Child:
    """The process and the connection to it."""

    def __init__(self, start: Start, start_timeout_s: float) -> None:
        self._start = start
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._ended_for_good = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def ensure(self) -> Channel:
        """The connection to a running child, started if there is none; raise `ChannelClosed`."""
        with self._lock:
            if self._ended_for_good:
                raise ChannelClosed("the loader is closed")
            if self._process is not None and self._process.poll() is not None:
                logger.warning("the adapter loader ended with %s", self._process.returncode)
                self._forget()
            if self._channel is None:
                self._spawn()
            assert self._channel is not None
            return self._channel

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # A plain interpreter instead of multiprocessing's spawn, which would run the main
            # module of a script that uses the library once more.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "mural_server.lora.loader_process",
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                process_group=0,
            )
        self._channel = Channel(ours)
        self._channel.deadline = time.monotonic() + self._start_timeout_s
        self._channel.send(self._start)

    def kill(self) -> int | None:
        """End the child, whatever it does, and the connection; give its return code, if any."""
        self.end_process()
        with self._lock:
            returncode = self._process.returncode if self._process is not None else None
            self._forget()
            return returncode

    def end_process(self, *, for_good: bool = False) -> None:
        """End the child alone: who reads from it sees the connection's end."""
        with self._lock:
            self._ended_for_good |= for_good
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _forget(self) -> None:
        self._process = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return kept | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": path}


def _receive(
    channel: Channel, header: CheckpointHeader, lora: LoRARequest, options: LoadOptions
) -> LoRAModel:
    """Take over the payload's memory; all tensors of the model are views of it."""
    limit = options.max_payload_bytes
    descriptor = channel.receive_descriptor()
    try:
        if header.num_bytes <= 0 or (limit is not None and header.num_bytes > limit):
            raise ChannelClosed("a payload that was not agreed on")
        check_sealed(descriptor, header.num_bytes)
        # Private: what is written there is nobody else's. Unlike Python's mmap it keeps no
        # descriptor, of which a process has fewer than it may have adapters.
        payload = torch.from_file(
            f"/dev/fd/{descriptor}", shared=False, size=header.num_bytes, dtype=torch.uint8
        )
    except ValueError as error:
        raise ChannelClosed(str(error)) from None
    finally:
        os.close(descriptor)
    return LoRAModel.from_payload(header, payload, lora.lora_int_id)


def _closed() -> Unavailable:
    return Unavailable("The server is shutting down.")
