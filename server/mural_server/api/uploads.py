"""``/v1/adapters``: tenants upload adapters into their own namespace, look at and remove them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from typing import Final

import msgspec
from pydantic import JsonValue
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mural_resolvers.errors import MuralError, TooLarge, Unavailable, quoted
from mural_resolvers.names import is_tenant, parse_name
from mural_resolvers.tenants import Principal
from mural_resolvers.uploads import (
    ArchiveReader,
    BodyReader,
    FileSink,
    Upload,
    Uploads,
    UploadSettings,
)
from mural_server.api.auditing import Audited, audited
from mural_server.api.errors import BadParameter, RequestTimeout, UploadsOff
from mural_server.api.multipart import MultipartReader
from mural_server.api.state import AppState

__all__ = [
    "UPLOAD_BODY",
    "counted",
    "delete_adapter",
    "json_answer",
    "list_adapters",
    "retrieve_adapter",
    "told",
    "upload_adapter",
    "uploads_of",
]

ARCHIVE_TYPES: Final = (
    "application/x-tar",
    "application/tar",
    "application/gzip",
    "application/x-gzip",
    "application/x-gtar",
)
ENVELOPE_BYTES: Final = 4 << 20
"""What a form or an archive may add to its files."""

UPLOAD_BODY: Final[dict[str, JsonValue]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "additionalProperties": {"type": "string", "format": "binary"},
                }
            },
            "application/x-tar": {"schema": {"type": "string", "format": "binary"}},
            "application/gzip": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
"""The body in the OpenAPI document; it is taken apart by us as it arrives."""


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """An upload; times are seconds since the epoch, None where it was not uploaded or stays."""

    id: str
    object: str = "adapter"
    digest: str
    bytes: int
    rank: int
    uploaded_at: int | None
    expires_at: int | None

    @classmethod
    def of(cls, upload: Upload) -> AdapterCard:
        record = upload.record
        end = None if record is None else record.expires_at
        return cls(
            id=upload.name.short,
            digest=upload.digest,
            bytes=upload.num_bytes,
            rank=upload.rank,
            uploaded_at=None if record is None else int(record.uploaded_at),
            expires_at=None if end is None else int(end),
        )


class AdapterCards(msgspec.Struct, frozen=True):
    """A tenant's uploads, in order of name."""

    data: list[AdapterCard]
    object: str = "list"


class DeletedAdapter(msgspec.Struct, frozen=True):
    """OpenAI's answer to a deletion."""

    id: str
    object: str = "adapter"
    deleted: bool = True


async def upload_adapter(state: AppState, request: Request, text: str) -> Response:
    """Take an adapter in: 201, or 200 where the same content is there already."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    name = parse_name(text)
    if not state.admission.accepting:
        raise Unavailable(state.admission.refusal, retry_after_s=5.0)

    def reader_for(sink: FileSink) -> BodyReader:
        return _reader(request.headers.get("content-type", ""), sink)

    with told(state, principal, "upload", name.exact) as about:
        upload, created = await uploads.receive(
            principal, name, reader_for, _body(request, uploads.settings)
        )
        about.digest = upload.digest
    return json_answer(AdapterCard.of(upload), 201 if created else 200)


async def retrieve_adapter(state: AppState, request: Request, text: str) -> Response:
    """What is there under an exact name."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    with counted(state, principal):
        found = await uploads.find(principal, parse_name(text))
    return json_answer(AdapterCard.of(found))


async def list_adapters(state: AppState, request: Request) -> Response:
    """The caller's uploads; an admin sees everybody's, or those of ``?tenant=``."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    tenant = request.query_params.get("tenant")
    if tenant is not None and not is_tenant(tenant):
        raise BadParameter(f"{quoted(tenant)} is not a tenant name.", at="tenant")
    with counted(state, principal):
        found = await uploads.list(principal, tenant)
    return json_answer(AdapterCards([AdapterCard.of(upload) for upload in found]))


async def delete_adapter(state: AppState, request: Request, text: str) -> Response:
    """Remove a version for good."""
    uploads, principal = uploads_of(state), state.auth.principal(request)
    name = parse_name(text)
    with told(state, principal, "delete", name.exact) as about:
        about.digest = (await uploads.delete(principal, name)).digest
    return json_answer(DeletedAdapter(name.short))


def uploads_of(state: AppState) -> Uploads:
    """What takes uploads in; raise ``UploadsOff`` where nothing does."""
    if state.uploads is None:
        raise UploadsOff
    return state.uploads


@contextmanager
def counted(state: AppState, principal: Principal) -> Iterator[None]:
    """Around what reads the store, which counts as the other requests do."""
    with closing(state.accounts.enter(principal, 1, time.monotonic())):
        yield


@contextmanager
def told(state: AppState, principal: Principal, action: str, name: str) -> Iterator[Audited]:
    """What an admin does goes into the audit log; what tenants do with their own does not."""
    if not principal.is_admin:
        yield Audited()
        return
    with audited(state.audit, principal, action, name) as about:
        yield about


def _reader(content_type: str, sink: FileSink) -> BodyReader:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return MultipartReader(sink, content_type)
    if kind in ARCHIVE_TYPES:
        return ArchiveReader(sink)
    raise BadParameter(
        f"The content type must be multipart/form-data, {ARCHIVE_TYPES[0]} or "
        f"{ARCHIVE_TYPES[2]}, not {quoted(kind)}."
    )


async def _body(request: Request, settings: UploadSettings) -> AsyncIterator[bytes]:
    """The body's pieces, as long as the client sends fast enough."""
    max_bytes = settings.max_bytes + ENVELOPE_BYTES
    _check_headers(request, max_bytes)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.deadline_s
    stream = request.stream()
    received, waited_s = 0, 0.0
    while True:
        begun = loop.time()
        # Only the time that the client keeps us waiting is its own: our disk may be slow, too.
        patience_s = settings.grace_s + received / settings.min_bytes_per_s - waited_s
        try:
            async with asyncio.timeout_at(min(begun + patience_s, deadline)):
                piece = await anext(stream, None)
        except TimeoutError:
            raise RequestTimeout("The upload did not arrive fast enough.") from None
        except ClientDisconnect:
            raise BadParameter("The client went away before its upload had arrived.") from None
        if piece is None:
            return
        waited_s += loop.time() - begun
        received += len(piece)
        if received > max_bytes:
            raise _too_large(max_bytes)
        yield piece


def _check_headers(request: Request, max_bytes: int) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadParameter("The body must be sent without a content encoding.")


def _too_large(max_bytes: int) -> MuralError:
    return TooLarge(f"The body is larger than {max_bytes} bytes.")


def json_answer(answer: msgspec.Struct, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
