"""The core in a process of its own, and the client that starts and watches it.

Commands and outputs go over two ZeroMQ pipes in a private folder, msgspec-encoded. The child's
standard input is a pipe that nobody writes to: it ends when the parent is gone, and so does the
child.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from mural_server.engine.client import EngineInfo
from mural_server.engine.connection import ConnectedClient
from mural_server.engine.wire import Command, Failed, Outputs, Shutdown, Started
from mural_server.sampling_params import GenerationDefaults
from mural_server.settings import EngineSettings, SettingsError
from mural_server.tokenizer import TokenizerState

if TYPE_CHECKING:
    from mural_server.engine.core import EngineCore

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 30.0
STALL_TIMEOUT_S = 120.0
"""A core that says nothing for so long stands still. A step is far shorter, a beat comes between
steps and when there are none."""
IDLE_POLL_MS = 1000
STALLED_POLL_MS = 20
"""How long to wait for news when there are requests but none can run."""


async def start_engine(
    settings: EngineSettings, *, stall_timeout_s: float = STALL_TIMEOUT_S
) -> StartedEngine:
    """Start a core and wait until it is ready; one that later stands still is ended.

    Raises `SettingsError` with the core's own sentence when it cannot start.
    """
    settings.validate()
    link = await _open_link()
    try:
        await link.commands.send(msgspec.msgpack.encode(settings))
        started = await asyncio.wait_for(_await_start(link), START_TIMEOUT_S)
    except TimeoutError:
        await link.close()
        raise SettingsError(
            f"The engine core was not ready within {START_TIMEOUT_S:.0f} s."
        ) from None
    except BaseException:
        await link.close()
        raise
    engine = ProcessEngine(started.info, link, stall_timeout_s)
    return StartedEngine(engine, started.tokenizer, started.defaults)


async def _open_link() -> Link:
    """Make the pipes and start the child; nothing is left behind where that fails."""
    with contextlib.ExitStack() as undo:
        try:
            folder = Path(tempfile.mkdtemp(prefix="mural-engine-"))
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            context = zmq.asyncio.Context()
            undo.callback(context.destroy, linger=0)
            commands = context.socket(zmq.PUSH)
            outputs = context.socket(zmq.PULL)
            commands.setsockopt(zmq.LINGER, 0)
            commands.set_hwm(0)
            commands.bind(f"ipc://{folder}/commands")
            outputs.bind(f"ipc://{folder}/outputs")
        except (OSError, zmq.ZMQError) as error:
            # A socket's path has room for about a hundred characters, whatever the disk allows.
            raise SettingsError(
                f"The engine's pipes cannot be made ({error.strerror or error}): set TMPDIR to a "
                "folder that can be written to and has a short path."
            ) from None
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "mural_server.engine.process",
                str(folder),
                str(logger.getEffectiveLevel()),
                stdin=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise SettingsError(
                f"The engine core cannot be started ({error.strerror or error})."
            ) from None
        undo.pop_all()
        return Link(folder, context, commands, outputs, child)


async def _await_start(link: Link) -> Started:
    message = asyncio.ensure_future(link.outputs.recv())
    death = asyncio.ensure_future(link.child.wait())
    try:
        await asyncio.wait((message, death), return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            raise SettingsError(f"The engine core ended while starting ({link.exit_reason()}).")
        started = msgspec.msgpack.decode(message.result(), type=Started | Failed)
    finally:
        message.cancel()
        death.cancel()
    if isinstance(started, Failed):
        raise SettingsError(started.message)
    return started


class Link:
    """The child process with its two pipes."""

    def __init__(
        self,
        folder: Path,
        context: zmq.asyncio.Context,
        commands: zmq.asyncio.Socket,
        outputs: zmq.asyncio.Socket,
        child: asyncio.subprocess.Process,
    ) -> None:
        self.folder = folder
        self.context = context
        self.commands = commands
        self.outputs = outputs
        self.child = child

    def exit_reason(self) -> str:
        code = self.child.returncode
        if code is None:
            return "still running"
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    async def close(self) -> None:
        if self.child.returncode is None and self.child.stdin is not None:
            self.child.stdin.close()
            try:
                await asyncio.wait_for(self.child.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                logger.warning("the engine core did not end within %.0f s: killed", STOP_TIMEOUT_S)
                with contextlib.suppress(ProcessLookupError):
                    self.child.kill()
                await self.child.wait()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


class StartedEngine(NamedTuple):
    """A core that is ready, and what it takes to speak with its model in texts."""

    client: ProcessEngine
    tokenizer: TokenizerState
    defaults: GenerationDefaults


class ProcessEngine(ConnectedClient):
    """The client of a core in a child process, which it owns."""

    def __init__(self, info: EngineInfo, link: Link, stall_timeout_s: float) -> None:
        super().__init__(info)
        self._link = link
        self._stall_timeout_s = stall_timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = False
        self._reader = asyncio.create_task(self._read(), name="engine-outputs")
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    @property
    def pid(self) -> int:
        return self._link.child.pid

    @property
    def folder(self) -> Path:
        """The private folder of the pipes, gone after `close`."""
        return self._link.folder

    def _send(self, command: Command) -> None:
        if self.alive:
            # A PUSH socket without a high-water mark takes the message at once.
            self._link.commands.send(self._encoder.encode(command))

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(Outputs)
        try:
            while True:
                async with asyncio.timeout(self._stall_timeout_s):
                    message = await self._link.outputs.recv()
                self._dispatch(decoder.decode(message))
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            reason = f"the engine core has stood still for {self._stall_timeout_s:.0f} s"
            logger.error("%s: it is ended", reason)
            self._die(reason)
            with contextlib.suppress(ProcessLookupError):
                self._link.child.kill()
        except Exception as error:
            logger.exception("the engine core's outputs cannot be read")
            self._die(f"the engine core's outputs cannot be read: {error}")

    async def _watch(self) -> None:
        await self._link.child.wait()
        if not self._closing:
            logger.error("the engine core died (%s)", self._link.exit_reason())
        self._die(f"the engine core died ({self._link.exit_reason()})")

    async def close(self) -> None:
        self._send(Shutdown())
        self._closing = True
        self._reader.cancel()
        await self._link.close()
        await asyncio.gather(self._reader, self._watcher, return_exceptions=True)


# -- the child's side -----------------------------------------------------------------------------


def _end_with_parent() -> None:
    stdin = sys.stdin.fileno()

    def wait() -> None:
        # Not by way of sys.stdin: the interpreter cannot shut down while a thread holds its lock.
        os.read(stdin, 1)
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main(folder: str, log_level: int) -> int:
    """Run a core until it is told to stop or its parent is gone."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent drains, then closes the pipe
    context = zmq.Context()
    commands = context.socket(zmq.PULL)
    outputs = context.socket(zmq.PUSH)
    outputs.setsockopt(zmq.SNDTIMEO, int(SEND_TIMEOUT_S * 1000))
    outputs.setsockopt(zmq.LINGER, int(STOP_TIMEOUT_S * 1000))
    commands.connect(f"ipc://{folder}/commands")
    outputs.connect(f"ipc://{folder}/outputs")
    settings = msgspec.msgpack.decode(commands.recv(), type=EngineSettings)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("mural_server").setLevel(log_level)
    # Run as a program, this module is called __main__.
    logger.setLevel(log_level)
    try:
        core, started = started_core(settings)
    except (SettingsError, MemoryError, OSError, ValueError) as error:
        logger.debug("the core cannot start", exc_info=True)
        outputs.send(msgspec.msgpack.encode(Failed(str(error) or type(error).__name__)))
        context.destroy(linger=int(STOP_TIMEOUT_S * 1000))
        return 1
    outputs.send(msgspec.msgpack.encode(started))
    try:
        _serve(core, commands, outputs)
    finally:
        core.close()
        context.destroy(linger=0)
    return 0


def started_core(settings: EngineSettings) -> tuple[EngineCore, Started]:
    """Build the core, and say what the parent has to know; raises as `build_core` does."""
    # What reads models loads torch and transformers, which the parent does without.
    from mural_server.engine.build import build_core
    from mural_server.models.source import (
        load_generation_defaults,
        load_tokenizer,
        tokenizer_state,
    )

    core = build_core(settings)
    try:
        tokenizer = tokenizer_state(load_tokenizer(settings.model))
        return core, Started(core.info, tokenizer, load_generation_defaults(settings.model))
    except BaseException:
        core.close()
        raise


def _serve(core: EngineCore, commands: zmq.Socket[bytes], outputs: zmq.Socket[bytes]) -> None:
    news = os.eventfd(0, os.EFD_NONBLOCK)
    core.on_news = lambda: os.eventfd_write(news, 1)
    poller = zmq.Poller()
    poller.register(commands, zmq.POLLIN)
    poller.register(news, zmq.POLLIN)
    decoder = msgspec.msgpack.Decoder(Command)
    encoder = msgspec.msgpack.Encoder()
    progressed = False
    while True:
        timeout = 0 if progressed else STALLED_POLL_MS if core.has_work else IDLE_POLL_MS
        ready = dict(poller.poll(timeout))
        if news in ready:
            os.eventfd_read(news)
        while commands.poll(0):
            command = decoder.decode(commands.recv())
            if isinstance(command, Shutdown):
                return
            core.handle(command)
        progressed = core.step()
        news_of_step = core.take_outputs()
        if news_of_step is not None:
            outputs.send(encoder.encode(news_of_step))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
