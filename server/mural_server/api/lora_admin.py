"""vLLM's load and unload endpoints, and pinning: for admins, and off unless turned on."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mural_resolvers.errors import AdapterNotFound
from mural_resolvers.tenants import Principal
from mural_server.api.auditing import audited
from mural_server.api.body import read_request
from mural_server.api.errors import InvalidUserInput, LoRANotFound, RuntimeUpdatesOff
from mural_server.api.requests import LoadLoRARequest, NamedLoRARequest
from mural_server.api.state import AppState
from mural_server.engine.messages import FreedBytes

__all__ = ["load_lora_adapter", "pin_lora_adapter", "unload_lora_adapter"]

MAX_BODY_BYTES = 1 << 16


async def load_lora_adapter(state: AppState, request: Request) -> Response:
    """Register and load; 400 for a name that is taken, 403 outside the allowed folders."""
    admin = _admin(state, request)
    body = await read_request(request, LoadLoRARequest, MAX_BODY_BYTES)
    if not body.lora_name or not body.lora_path:
        raise InvalidUserInput("Both 'lora_name' and 'lora_path' must be provided.")
    with audited(state.audit, admin, "load", body.lora_name) as about:
        info = await state.catalog.admin.load(
            body.lora_name,
            body.lora_path,
            inplace=body.load_inplace,
            shared=body.shared,
            pinned=body.pinned,
        )
        about.digest = info.digest
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def unload_lora_adapter(state: AppState, request: Request) -> Response:
    """Drain and unload; the text says what was freed. 404 for a name that is not known."""
    admin = _admin(state, request)
    name = await _name(request)
    with audited(state.audit, admin, "unload", name) as about:
        about.digest = state.catalog.digest_of(name)
        try:
            freed = await state.catalog.admin.unload(name)
        except AdapterNotFound:
            raise LoRANotFound(f"The lora adapter {name[:256]!a} cannot be found.") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully. {_told(freed)}")


async def pin_lora_adapter(state: AppState, request: Request, *, pinned: bool) -> Response:
    """Keep an adapter resident, or let it be evicted again."""
    admin = _admin(state, request)
    name = await _name(request)
    with audited(state.audit, admin, "pin" if pinned else "unpin", name) as about:
        about.digest = state.catalog.digest_of(name)
        try:
            await state.catalog.admin.pin(name, pinned=pinned)
        except AdapterNotFound as error:
            raise LoRANotFound(error.message) from None
    return PlainTextResponse(
        f"Success: LoRA adapter '{name}' {'pinned' if pinned else 'unpinned'} successfully."
    )


async def _name(request: Request) -> str:
    body = await read_request(request, NamedLoRARequest, MAX_BODY_BYTES)
    if not body.lora_name:
        raise InvalidUserInput("'lora_name' must be provided.")
    return body.lora_name


def _admin(state: AppState, request: Request) -> Principal:
    if not state.settings.allow_runtime_lora_updating:
        raise RuntimeUpdatesOff
    return state.auth.admin(request)


def _told(freed: FreedBytes) -> str:
    if not (freed.slot or freed.host or freed.kv_blocks or freed.disk):
        return "Nothing was freed: it was not resident, or another name shares its weights."
    told = (
        f"Freed {freed.slot} bytes of its slot, {freed.host} bytes of host memory and "
        f"{freed.kv_blocks} KV blocks."
    )
    if freed.disk:
        told += f" Its {freed.disk} bytes may leave the disk cache."
    return told
