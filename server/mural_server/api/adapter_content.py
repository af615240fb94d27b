"""``/v1/adapters/…``: the content of uploads, for whoever may change them, and their aliases."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractAsyncContextManager

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mural_resolvers.errors import MuralError
from mural_resolvers.names import LATEST, AdapterName, parse_name
from mural_resolvers.store import Aliases
from mural_resolvers.uploads import OpenedFile
from mural_resolvers.versions import AliasTarget
from mural_server.api.body import read_request
from mural_server.api.requests import AliasRequest
from mural_server.api.sse import ClientGone, unless_disconnected
from mural_server.api.state import AppState
from mural_server.api.uploads import counted, json_answer, told, uploads_of

__all__ = [
    "delete_alias",
    "list_aliases",
    "put_alias",
    "retrieve_file",
    "retrieve_manifest",
]

logger = logging.getLogger("mural.uploads")

MAX_BODY_BYTES = 1 << 16
WRITE_S = 60.0


class AliasCards(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's aliases."""

    id: str
    object: str = "adapter.aliases"
    aliases: dict[str, tuple[AliasTarget, ...]]

    @classmethod
    def of(cls, adapter: AdapterName, aliases: Aliases) -> AliasCards:
        return cls(id=f"{adapter.tenant}/{adapter.adapter}", aliases=dict(sorted(aliases.items())))


async def retrieve_manifest(state: AppState, request: Request, text: str) -> Response:
    """The ``manifest.json`` of an exact name."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    with counted(state, principal):
        manifest = await uploads.manifest(principal, parse_name(text))
    return Response(manifest.to_json(), media_type="application/json")


async def retrieve_file(state: AppState, request: Request, text: str, path: str) -> Response:
    """One of the files that the manifest lists, as it is read."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    with counted(state, principal):
        opened = uploads.open_file(principal, parse_name(text), path)
    return _FileResponse(opened, uploads.settings.deadline_s)


async def list_aliases(state: AppState, request: Request, tenant: str, adapter: str) -> Response:
    """The aliases of one adapter."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    name = AdapterName(tenant, adapter, LATEST)
    with counted(state, principal):
        aliases = await uploads.aliases(principal, name)
    return json_answer(AliasCards.of(name, aliases))


async def put_alias(
    state: AppState, request: Request, tenant: str, adapter: str, alias_name: str
) -> Response:
    """Point an alias at versions, by weight; answers with all aliases of the adapter."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    alias = AdapterName(tenant, adapter, alias_name)
    uploads.check_own(principal, alias)
    body = await read_request(request, AliasRequest, MAX_BODY_BYTES)
    targets = [AliasTarget(share.version, share.weight) for share in body.versions]
    with told(state, principal, "alias", alias.exact):
        aliases = await uploads.set_alias(principal, alias, targets)
    return json_answer(AliasCards.of(alias, aliases))


async def delete_alias(
    state: AppState, request: Request, tenant: str, adapter: str, alias_name: str
) -> Response:
    """Remove an alias, if there is one; answers with those that are left."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    alias = AdapterName(tenant, adapter, alias_name)
    with told(state, principal, "unalias", alias.exact):
        aliases = await uploads.set_alias(principal, alias, ())
    return json_answer(AliasCards.of(alias, aliases))


class _FileResponse(Response):
    """Sends a file piece by piece; ends when the client leaves or takes too little.

    What is refused before the first byte is answered as everything else. Afterwards the connection
    is closed before its announced end, which no client takes for a whole file.
    """

    media_type = "application/octet-stream"

    def __init__(self, opened: AbstractAsyncContextManager[OpenedFile], deadline_s: float) -> None:
        super().__init__(None)
        self._opened = opened
        self._deadline_s = deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        except ClientGone:
            return

    async def _write(self, send: Send) -> None:
        async with self._opened as (file, pieces):
            self.headers["content-length"] = str(file.size)
            start = {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
            await send(start)
            try:
                async with asyncio.timeout(self._deadline_s):
                    async for piece in pieces:
                        async with asyncio.timeout(WRITE_S):
                            await send(_part(piece, more=True))
                    await send(_part(b"", more=False))
            except TimeoutError:
                raise ClientGone from None
            except MuralError as error:
                logger.warning("a download of %s breaks off: %s", file.path, error)
                raise ClientGone from None


def _part(piece: bytes, *, more: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": piece, "more_body": more}
