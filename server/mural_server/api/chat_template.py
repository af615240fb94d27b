"""Conversations to prompts: the base's template in this process, an adapter's own in a sandbox.

What a tenant uploads is hostile: an adapter's template runs in a process of its own that is
bounded in memory, is killed at a deadline, and knows nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeAlias

import msgspec

from mural_resolvers.digest import FileEntry
from mural_resolvers.errors import Unavailable, UnusableAdapter
from mural_resolvers.files import open_regular
from mural_resolvers.limits import DEFAULT_LIMITS
from mural_resolvers.request import LoRARequest
from mural_server.api import template_worker
from mural_server.api.errors import BadParameter
from mural_server.api.template_worker import TemplateRefused, TemplateUnusable

__all__ = ["AdapterTemplates", "Rendering", "SandboxedRenderer", "render_trusted"]

DEADLINE_S = 2.0
QUEUE_S = 10.0
REMEMBER_UNUSABLE_S = 60.0
MAX_REMEMBERED = 1024

ContextValue: TypeAlias = (
    "str | int | float | bool | list[ContextValue] | dict[str, ContextValue] | None"
)

FilesOf: TypeAlias = "Callable[[LoRARequest], AbstractAsyncContextManager[Path]]"


class Rendering(msgspec.Struct, kw_only=True):
    """What a template is rendered with."""

    template: str
    context: dict[str, ContextValue]
    continue_final_message: bool = False


class _Answer(msgspec.Struct):
    text: str | None = None
    unusable: str | None = None
    refused: str | None = None


def render_trusted(rendering: Rendering) -> str:
    """Render the base's template, which the operator chose; raise `BadParameter`."""
    try:
        return template_worker.render(
            rendering.template,
            rendering.context,
            continue_final_message=rendering.continue_final_message,
        )
    except TemplateRefused as error:
        raise BadParameter(f"The chat template refuses: {error}.", at="messages") from None
    except TemplateUnusable as error:
        raise BadParameter(f"The chat template cannot be used: {error}.", at="messages") from None


class SandboxedRenderer:
    """One worker process, started when first needed and again after every kill."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.deadline_s = deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def render(self, rendering: Rendering) -> str:
        """Raise `TemplateRefused`, `TemplateUnusable`, or `Unavailable` when all is busy."""
        try:
            await asyncio.wait_for(self._turn.acquire(), QUEUE_S)
        except TimeoutError:
            raise Unavailable("Too many chat templates wait to be rendered.") from None
        try:
            answer = await self._exchange(msgspec.json.encode(rendering))
        finally:
            self._turn.release()
        if answer.unusable is not None:
            raise TemplateUnusable(answer.unusable)
        if answer.text is None:
            raise TemplateRefused(answer.refused or "no reason given")
        return answer.text

    async def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _exchange(self, frame: bytes) -> _Answer:
        process = await self._running()
        done = False
        try:
            async with asyncio.timeout(self.deadline_s):
                answer = await _ask(process, frame)
            done = True
            return answer
        except TimeoutError:
            raise TemplateUnusable(f"it takes longer than {self.deadline_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            raise TemplateUnusable("it ended the process that renders it") from None
        finally:
            # A worker in an unknown state, also after a cancelled request, answers nobody else.
            if not done:
                await asyncio.shield(self.close())

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            # -I: no environment, no user site, nothing of the working folder is importable.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(Path(template_worker.__file__)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={"LC_ALL": "C.UTF-8"},
                cwd="/",
                start_new_session=True,
            )
            # Start-up is not the template's time.
            await _ask(self._process, msgspec.json.encode(Rendering(template="", context={})))
        return self._process


async def _ask(process: asyncio.subprocess.Process, frame: bytes) -> _Answer:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(frame).to_bytes(4, "big") + frame)
    await process.stdin.drain()
    size = int.from_bytes(await process.stdout.readexactly(4), "big")
    return msgspec.json.decode(await process.stdout.readexactly(size), type=_Answer)


class AdapterTemplates:
    """The templates that adapters ship, by digest: a version's files never change.

    ``files`` holds an adapter's folder in place while its template is read.
    """

    def __init__(
        self, renderer: SandboxedRenderer, files: FilesOf | None = None, *, keep: int = 256
    ) -> None:
        self._renderer = renderer
        self._files = files or _in_place
        self._keep = keep
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._unusable: OrderedDict[str, tuple[float, str]] = OrderedDict()

    async def template(self, lora: LoRARequest, entry: FileEntry) -> str:
        """The adapter's own template, which is the file that its digest knows.

        Raises `UnusableAdapter` when that file is not there any more, and what ``files`` raises.
        """
        if entry.sha256 not in self._texts:
            async with self._files(lora) as folder:
                text = await asyncio.to_thread(_read_template, folder, entry)
            self._texts[entry.sha256] = text
            while len(self._texts) > self._keep:
                self._texts.popitem(last=False)
        self._texts.move_to_end(entry.sha256)
        return self._texts[entry.sha256]

    async def render(self, rendering: Rendering) -> str:
        """Raise `BadParameter` for these messages, `UnusableAdapter` for the template."""
        key = hashlib.sha256(rendering.template.encode()).hexdigest()
        since, reason = self._unusable.get(key, (0.0, ""))
        if reason and time.monotonic() - since < REMEMBER_UNUSABLE_S:
            raise _unusable(reason)
        try:
            return await self._renderer.render(rendering)
        except TemplateRefused as error:
            raise BadParameter(
                f"The adapter's chat template refuses: {str(error)[:300]!a}.", at="messages"
            ) from None
        except TemplateUnusable as error:
            # Remembered, so that a template that burns its deadline cannot do so all the time.
            self._unusable[key] = (time.monotonic(), str(error))
            while len(self._unusable) > MAX_REMEMBERED:
                self._unusable.popitem(last=False)
            raise _unusable(str(error)) from None

    async def close(self) -> None:
        """End the worker."""
        await self._renderer.close()


@contextlib.asynccontextmanager
async def _in_place(lora: LoRARequest) -> AsyncIterator[Path]:
    yield Path(lora.lora_path)


def _unusable(reason: str) -> UnusableAdapter:
    return UnusableAdapter(f"The adapter's chat template cannot be used: {reason}.")


def _read_template(folder: Path, entry: FileEntry) -> str:
    # Whatever lies there now, a link out of the folder too, must be what was checked and hashed.
    limit = DEFAULT_LIMITS.max_template_bytes
    with open_regular(Path(os.path.realpath(folder / entry.path))) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise _unusable(f"it is larger than {limit} bytes")
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise _unusable("its file has changed since the adapter was checked")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise _unusable("it is not UTF-8") from None
