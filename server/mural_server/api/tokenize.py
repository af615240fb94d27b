"""``POST /tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mural_resolvers.tenants import Principal
from mural_server.api.body import read_request
from mural_server.api.requests import DetokenizeRequest, TokenizeRequest
from mural_server.api.state import AppState

__all__ = ["detokenize", "tokenize"]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


async def tokenize(state: AppState, request: Request) -> Response:
    """The token ids of a prompt, or of a conversation as its template renders it."""
    caller = state.auth.caller(request)
    body = await read_request(request, TokenizeRequest, state.settings.max_body_bytes)
    with _admitted(state, caller.principal):
        served = await state.catalog.find(caller.principal, body.model)
        caller.check(served)
        if body.messages is not None:
            text = await state.texts.render_chat(served, body.messages, body)
            special = body.add_special_tokens or False
        else:
            text = body.prompt or ""
            special = True if body.add_special_tokens is None else body.add_special_tokens
        ids = await state.texts.encode(text, add_special_tokens=special)
    names = state.texts.token_names(ids) if body.return_token_strs else None
    return _json(Tokenized(len(ids), state.max_model_len, ids, names))


async def detokenize(state: AppState, request: Request) -> Response:
    """The text of token ids."""
    caller = state.auth.caller(request)
    body = await read_request(request, DetokenizeRequest, state.settings.max_body_bytes)
    with _admitted(state, caller.principal):
        caller.check(await state.catalog.find(caller.principal, body.model))
        state.texts.check_ids(body.tokens)
        return _json(Detokenized(await state.texts.decode(body.tokens)))


@contextmanager
def _admitted(state: AppState, principal: Principal) -> Iterator[None]:
    """A place among what is open, and one of the tenant's requests."""
    with (
        closing(state.accounts.enter(principal, 1, time.monotonic())),
        state.admission.enter(principal.tenant or "", 1),
    ):
        yield


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
