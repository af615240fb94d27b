"""The tenants' HTTP application: routes, and nothing of what they do."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, JsonValue

from mural_server.api.adapter_content import (
    delete_alias,
    list_aliases,
    put_alias,
    retrieve_file,
    retrieve_manifest,
)
from mural_server.api.chat import create_chat_completion
from mural_server.api.completions import create_completion
from mural_server.api.errors import install_error_handlers
from mural_server.api.listing import list_models, retrieve_model
from mural_server.api.lora_admin import load_lora_adapter, pin_lora_adapter, unload_lora_adapter
from mural_server.api.requests import (
    AliasRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoRARequest,
    NamedLoRARequest,
    TokenizeRequest,
)
from mural_server.api.state import AppState
from mural_server.api.status import get_health, get_metrics, get_ready, get_version
from mural_server.api.tokenize import detokenize, tokenize
from mural_server.api.tracing import TracingMiddleware
from mural_server.api.uploads import (
    UPLOAD_BODY,
    delete_adapter,
    list_adapters,
    retrieve_adapter,
    upload_adapter,
)

__all__ = ["create_app"]


def create_app(state: AppState) -> FastAPI:
    """The application of one server. It holds no state of its own."""
    app = FastAPI(title="Mural", docs_url=None, redoc_url=None, redirect_slashes=False)
    install_error_handlers(app, state.metrics.error)
    if state.tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=state.tracing)
    _add_generating_routes(app, state)
    _add_lora_routes(app, state)
    # In this order: what lies below a name is looked for before the name itself.
    _add_alias_routes(app, state)
    _add_content_routes(app, state)
    _add_upload_routes(app, state)
    _add_status_routes(app, state)
    return app


@cache
def _body_of(model: type[BaseModel]) -> dict[str, JsonValue]:
    """The body in the OpenAPI document; it is parsed by us, so that every refusal is OpenAI's."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def _add_generating_routes(app: FastAPI, state: AppState) -> None:
    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await create_completion(state, request)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(state, request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return await list_models(state, request)

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        return await retrieve_model(state, request, name)

    @app.post("/tokenize", openapi_extra=_body_of(TokenizeRequest))
    async def tokenize_(request: Request) -> Response:
        return await tokenize(state, request)

    @app.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest))
    async def detokenize_(request: Request) -> Response:
        return await detokenize(state, request)


def _add_lora_routes(app: FastAPI, state: AppState) -> None:
    @app.post("/v1/load_lora_adapter", openapi_extra=_body_of(LoadLoRARequest))
    async def load(request: Request) -> Response:
        return await load_lora_adapter(state, request)

    @app.post("/v1/unload_lora_adapter", openapi_extra=_body_of(NamedLoRARequest))
    async def unload(request: Request) -> Response:
        return await unload_lora_adapter(state, request)

    @app.post("/v1/pin_lora_adapter", openapi_extra=_body_of(NamedLoRARequest))
    async def pin(request: Request) -> Response:
        return await pin_lora_adapter(state, request, pinned=True)

    @app.post("/v1/unpin_lora_adapter", openapi_extra=_body_of(NamedLoRARequest))
    async def unpin(request: Request) -> Response:
        return await pin_lora_adapter(state, request, pinned=False)


def _add_alias_routes(app: FastAPI, state: AppState) -> None:
    # Both parts of the name are spelt out: no name of a version has three.
    path = "/v1/adapters/{tenant}/{adapter}/aliases"

    @app.get(path)
    async def aliases(request: Request, tenant: str, adapter: str) -> Response:
        return await list_aliases(state, request, tenant, adapter)

    @app.put(f"{path}/{{alias}}", openapi_extra=_body_of(AliasRequest))
    async def set_alias(request: Request, tenant: str, adapter: str, alias: str) -> Response:
        return await put_alias(state, request, tenant, adapter, alias)

    @app.delete(f"{path}/{{alias}}")
    async def remove_alias(request: Request, tenant: str, adapter: str, alias: str) -> Response:
        return await delete_alias(state, request, tenant, adapter, alias)


def _add_content_routes(app: FastAPI, state: AppState) -> None:
    @app.get("/v1/adapters/{name:path}/manifest")
    async def manifest(request: Request, name: str) -> Response:
        return await retrieve_manifest(state, request, name)

    @app.get("/v1/adapters/{name:path}/files/{file}")
    async def adapter_file(request: Request, name: str, file: str) -> Response:
        return await retrieve_file(state, request, name, file)


def _add_upload_routes(app: FastAPI, state: AppState) -> None:
    @app.get("/v1/adapters")
    async def adapters(request: Request) -> Response:
        return await list_adapters(state, request)

    @app.post("/v1/adapters/{name:path}", openapi_extra=UPLOAD_BODY)
    async def upload(request: Request, name: str) -> Response:
        return await upload_adapter(state, request, name)

    @app.get("/v1/adapters/{name:path}")
    async def adapter(request: Request, name: str) -> Response:
        return await retrieve_adapter(state, request, name)

    @app.delete("/v1/adapters/{name:path}")
    async def delete(request: Request, name: str) -> Response:
        return await delete_adapter(state, request, name)


def _add_status_routes(app: FastAPI, state: AppState) -> None:
    @app.get("/health")
    async def health() -> Response:
        return get_health(state)

    @app.get("/ready")
    async def ready() -> Response:
        return get_ready(state)

    @app.get("/version")
    async def version() -> Response:
        return get_version()

    @app.get("/metrics")
    async def metrics() -> Response:
        return await get_metrics(state)
