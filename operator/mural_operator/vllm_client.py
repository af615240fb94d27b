"""What can be asked of a vLLM pod that has Mural's plug-in, over its OpenAI API."""

from __future__ import annotations

import asyncio
import ssl as tls
from typing import Final, NamedTuple

import msgspec

from mural_resolvers.errors import MalformedName
from mural_resolvers.names import parse_name
from mural_resolvers.redaction import holds_key
from mural_router.placement import base_names
from mural_server.protocol import ControlError
from mural_server.protocol.caution import MAX_ADAPTERS
from mural_server.protocol.exchange import ExchangeError, exchange

__all__ = ["VLLMClient", "VLLMModels", "served_names"]

MAX_MODELS_BYTES: Final = 4 << 20
MAX_ANSWER_BYTES: Final = 64 << 10


class VLLMModels(NamedTuple):
    """What it lists: a name stays there for as long as the process does."""

    base_names: tuple[str, ...]
    adapters: frozenset[str]
    """Exact names, of those that may be a tenant's."""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Warm(msgspec.Struct):
    model: str
    prompt: list[int]
    max_tokens: int = 1


class _Forget(msgspec.Struct):
    lora_name: str


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    """vLLM's errors, of both of its shapes."""

    error: _ErrorDetail | None = None
    message: str = ""


class VLLMClient:
    """Speaks with one pod, one connection a call. Every call raises `ControlError`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        api_key: str | None = None,
        ssl: tls.SSLContext | None = None,
        server_name: str | None = None,
        timeout_s: float = 3.0,
        warm_timeout_s: float = 120.0,
    ) -> None:
        self._host = host
        self._port = port
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._ssl = ssl
        self._server_name = server_name
        self._timeout_s = timeout_s
        self._warm_timeout_s = warm_timeout_s

    async def models(self) -> VLLMModels:
        """The models that it lists."""
        body = await self._ask("GET", "/v1/models", None, MAX_MODELS_BYTES, self._timeout_s)
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ControlError(f"a list of models that is none: {error}") from None
        if len(cards) > MAX_ADAPTERS:
            raise ControlError(f"it tells of more than {MAX_ADAPTERS} adapters")
        bases = tuple(card.id for card in cards if card.parent is None)
        names = (_exact(card.id) for card in cards if card.parent is not None)
        return VLLMModels(
            served_names(bases), frozenset(name for name in names if name is not None)
        )

    async def warm(self, name: str) -> None:
        """Have the plug-in resolve and load it, by a request of one token."""
        body = _Warm(model=parse_name(name).short, prompt=[0])
        await self._ask("POST", "/v1/completions", body, MAX_ANSWER_BYTES, self._warm_timeout_s)

    async def forget(self, name: str) -> None:
        """Unload it; idempotent."""
        body = _Forget(lora_name=parse_name(name).short)
        try:
            await self._ask(
                "POST", "/v1/unload_lora_adapter", body, MAX_ANSWER_BYTES, self._timeout_s
            )
        except ControlError as error:
            if error.status != 404:
                raise

    async def _ask(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        max_bytes: int,
        timeout_s: float,
    ) -> bytes:
        try:
            async with (
                asyncio.timeout(timeout_s),
                exchange(
                    self._host,
                    self._port,
                    method,
                    path,
                    body=b"" if body is None else msgspec.json.encode(body),
                    headers=self._headers,
                    ssl=self._ssl,
                    server_name=self._server_name,
                    connect_timeout_s=self._timeout_s,
                    answer_timeout_s=timeout_s,
                ) as answer,
            ):
                received = await answer.body(max_bytes)
        except TimeoutError:
            raise ControlError(f"no answer within {timeout_s:g} s") from None
        except ExchangeError as error:
            raise ControlError(error.message, refused=error.refused) from None
        if answer.head.status != 200:
            raise _refusal(answer.head.status, received, answer.head.headers.get("retry-after", ""))
        return received


def served_names(told: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a base model, which come into statuses: none that holds a key."""
    return tuple(name for name in base_names(told) if not holds_key(name))


def _exact(text: str) -> str | None:
    try:
        return parse_name(text).exact if ":" in text else None
    except MalformedName:
        return None


def _refusal(status: int, body: bytes, retry_after: str) -> ControlError:
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
        message = found.message if found.error is None else found.error.message
    except (msgspec.MsgspecError, RecursionError):
        message = ""
    retry_after_s = float(retry_after) if retry_after.isdecimal() else None
    return ControlError(message or f"status {status}", status, retry_after_s)
