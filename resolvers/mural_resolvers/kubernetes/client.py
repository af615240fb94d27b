"""A small client of the API server: bytes in and out, every call bounded, every refusal typed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from types import TracebackType
from typing import Literal

import httpx2
import msgspec
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

__all__ = ["JsonObject", "KubeClient", "KubeError", "PatchKind", "Verb"]

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""For a whole call, its answer's body included."""
RETRY_AFTER_MOST_S = 5.0
"""A server that asks for more patience than this is reported instead of waited for."""
MAX_BODY_BYTES = 64 * 2**20
"""An object has at most 1.5 MB, and lists come in pages."""
MAX_LINE_BYTES = 8 * 2**20
MAX_MESSAGE = 500
MAX_CONNECTIONS = 1000
"""Each watch holds one for as long as it runs."""

Verb = Literal["get", "list", "watch", "create", "update", "patch", "delete"]
PatchKind = Literal["merge", "json", "apply"]
JsonObject = Mapping[str, object]

_METHODS: Mapping[Verb, str] = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}
_PATCH_TYPES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
MAX_WARNINGS = 64
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
"""RFC 7234, as the API server writes it."""
_NO_PARAMS: Mapping[str, str] = {}


class KubeError(Exception):
    """The API server refused (``status``), or gave no answer that counts (``status`` 0).

    ``reason`` is the API's one word (``NotFound``, ``Conflict``, ``Forbidden``, …), ``NoAnswer``
    where there was none. ``retry_after_s`` is what the server asked for, if it did.
    """

    def __init__(
        self, status: int, reason: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        message = message[:MAX_MESSAGE]
        super().__init__(f"status {status} ({reason}): {message}" if status else message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class _Status(msgspec.Struct):
    """The API's object for what went wrong, as far as it is of use."""

    message: str = ""
    reason: str = ""


class KubeClient:
    """Connections to one API server as one user. ``calls`` counts what was sent, by verb.

    A service account's token, which the kubelet replaces hourly, is read again from its file when
    the server refuses the one in use. A call that the server asks to repeat soon (429 or 503 with
    ``Retry-After``) is repeated once. Everything else is the caller's to judge: `KubeError`.
    """

    def __init__(self, config: SingleConfig, *, timeout_s: float = TIMEOUT_S) -> None:
        """``timeout_s`` bounds each call as a whole. Raises ValueError for unusable settings."""
        self.calls: Counter[str] = Counter()
        self.namespace: str = config.namespace
        self._server = config.cluster.server
        self._warned: set[str] = set()
        self._timeout_s = timeout_s
        params = ConnectionParams(timeout=httpx2.Timeout(timeout_s))
        try:
            # Who has no user is anonymous, and the API server says what that may do.
            settings = params.httpx_params(config._replace(user=config.user or User()))
        except (ConfigError, OSError, ValueError) as error:
            raise ValueError(f"no Kubernetes to ask: {error}") from None
        limits = httpx2.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=20)
        self._http = httpx2.AsyncClient(**settings, limits=limits)

    async def __aenter__(self) -> KubeClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """One object; with ``params``, one page of a list. Raises `KubeError`, as all do."""
        return await self._call("get" if params is None else "list", path, params=params)

    async def create(self, path: str, body: JsonObject) -> bytes:
        """The object as it was made. 409 (``AlreadyExists``) where the name is taken."""
        return await self._call("create", path, body)

    async def replace(self, path: str, body: JsonObject) -> bytes:
        """The object as it became. 409 (``Conflict``) when ``resourceVersion`` is not the last."""
        return await self._call("update", path, body)

    async def patch(
        self,
        path: str,
        body: JsonObject | list[JsonObject],
        *,
        kind: PatchKind = "merge",
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """The object as it became. ``json`` takes a list of operations; ``apply`` needs
        ``fieldManager`` in ``params``."""
        return await self._call("patch", path, body, params=params, media=_PATCH_TYPES[kind])

    async def delete(self, path: str) -> None:
        """Ask for the object's end. That it is gone already is a success."""
        try:
            await self._call("delete", path)
        except KubeError as error:
            if error.status != 404:
                raise

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """The lines of a watch, without their ends, as bytes.

        Raises `KubeError` when it is refused or cannot be opened, and from the lines when the
        connection breaks, is silent for ``silence_s``, or sends a line without end.
        """
        # The other parts of a read are bounded by the opening's own time.
        timeout = httpx2.Timeout(self._timeout_s, read=silence_s)
        request = self._http.build_request("GET", path, params=params, timeout=timeout)
        response = await self._send("watch", request)
        try:
            if response.status_code != 200:
                raise await self._refusal(response)
            async with aclosing(_lines(response.aiter_bytes())) as lines:
                yield lines
        finally:
            await response.aclose()

    async def _call(
        self,
        verb: Verb,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        media: str = "application/json",
    ) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        headers = {"accept": "application/json"}
        if content is not None:
            headers["content-type"] = media

        async def once() -> bytes:
            request = self._http.build_request(
                _METHODS[verb], path, params=params or _NO_PARAMS, content=content, headers=headers
            )
            return await self._answer(verb, request)

        try:
            return await once()
        except KubeError as error:
            wait_s = error.retry_after_s
            if error.status not in (429, 503) or wait_s is None or wait_s > RETRY_AFTER_MOST_S:
                raise
            await asyncio.sleep(wait_s)
            return await once()

    async def _answer(self, verb: Verb, request: httpx2.Request) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._send(verb, request)
                try:
                    if not response.is_success:
                        raise await self._refusal(response)
                    self._pass_on_warnings(response)
                    return await _body(response)
                finally:
                    await response.aclose()
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> KubeError:
        return _no_answer(f"no answer from {self._server} within {self._timeout_s:g} s")

    async def _send(self, verb: Verb, request: httpx2.Request) -> httpx2.Response:
        """The answer's head."""
        self.calls[verb] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._http.send(request, stream=True)
        except TimeoutError:
            raise self._late() from None
        except (httpx2.HTTPError, ConfigError, OSError, KeyError, TypeError, ValueError) as error:
            # Beside HTTP's: what a token's absent file and the program that makes tokens cause.
            why = f"{type(error).__name__}: {error}"
            raise _no_answer(f"no answer from {self._server} ({why})") from None

    def _pass_on_warnings(self, response: httpx2.Response) -> None:
        """What the API server has done only in part, such as dropped a field: each once."""
        for header in response.headers.get_list("warning"):
            for text in _WARNING.findall(header):
                if text not in self._warned and len(self._warned) < MAX_WARNINGS:
                    self._warned.add(text)
                    older = (
                        ": its definitions of Mural's kinds are older than this program; those "
                        "that belong to it are in charts/mural/crds"
                    )
                    log.warning(
                        "the API server warns: %s%s",
                        text.replace('\\"', '"')[:MAX_MESSAGE],
                        older if text.startswith("unknown field") else "",
                    )

    async def _refusal(self, response: httpx2.Response) -> KubeError:
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await _body(response)
        except TimeoutError:
            content = b""
        try:
            status = msgspec.json.decode(content, type=_Status)
        except (ValueError, RecursionError):
            # A proxy between, say: its page is of no use.
            status = _Status(message=response.reason_phrase)
        return KubeError(
            response.status_code,
            status.reason or response.reason_phrase,
            status.message,
            retry_after_s=_seconds(response.headers.get("retry-after", "")),
        )


def _no_answer(message: str) -> KubeError:
    return KubeError(0, "NoAnswer", message)


def _seconds(text: str) -> float | None:
    """``Retry-After`` as the API server writes it; a date is nothing that it sends."""
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 7 else None


async def _body(response: httpx2.Response) -> bytes:
    content = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MAX_BODY_BYTES:
                raise _no_answer(f"the answer is larger than {MAX_BODY_BYTES} bytes")
    except httpx2.HTTPError as error:
        raise _no_answer(f"{type(error).__name__}: {error}") from None
    return bytes(content)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Split at line feeds alone: JSON may hold what other line splitters take for a line's end."""
    kept = bytearray()
    try:
        async for chunk in chunks:
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                kept += end
                yield bytes(kept)
                kept.clear()
            kept += rest
            if len(kept) > MAX_LINE_BYTES:
                raise _no_answer(f"a line is longer than {MAX_LINE_BYTES} bytes")
    except httpx2.HTTPError as error:
        raise _no_answer(f"{type(error).__name__}: {error}") from None
