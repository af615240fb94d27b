"""``GET /v1/models``: what the caller may use."""

from __future__ import annotations

import time
from contextlib import closing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mural_resolvers.tenants import Principal
from mural_server.api.state import AppState
from mural_server.catalog import AdapterView

__all__ = ["list_models", "retrieve_model"]

from mural_resolvers.errors import AdapterNotFound, quoted


class ModelCard(msgspec.Struct, kw_only=True):
    """One model, in OpenAI's form with vLLM's fields; the last six are an adapter's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "mural"
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    digest: str | None = None
    rank: int | None = None
    state: str | None = None
    loading: bool | None = None
    pinned: bool | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


async def list_models(state: AppState, request: Request) -> Response:
    """What the caller may use: the base under each of its names, then adapters."""
    cards = _cards(state, state.auth.principal(request))
    return Response(msgspec.json.encode(ModelList(cards)), media_type="application/json")


async def retrieve_model(state: AppState, request: Request, name: str) -> Response:
    """One model; raises as a request for it would."""
    principal = state.auth.principal(request)
    # It may ask the sources, so it counts as the other requests do.
    with closing(state.accounts.enter(principal, 1, time.monotonic())):
        served = await state.catalog.find(principal, name)
    cards = _base_cards(state, principal)
    # Whoever may ask under an alias may not always list the version that it means.
    cards += [_adapter(state, principal, view) for view in state.catalog.view()]
    for card in cards:
        if card.id in (name, served.name):
            return Response(msgspec.json.encode(card), media_type="application/json")
    raise AdapterNotFound(f"The model {quoted(name)} does not exist.")


def _cards(state: AppState, principal: Principal) -> list[ModelCard]:
    adapters = [_adapter(state, principal, view) for view in state.catalog.visible(principal)]
    return [*_base_cards(state, principal), *adapters]


def _base_cards(state: AppState, principal: Principal) -> list[ModelCard]:
    return [
        ModelCard(
            id=name,
            created=state.started_at,
            root=state.client.info.model if principal.is_admin else name,
            max_model_len=state.max_model_len,
        )
        for name in state.catalog.served
        if principal.base or principal.is_admin
    ]


def _adapter(state: AppState, principal: Principal, view: AdapterView) -> ModelCard:
    return ModelCard(
        id=view.name,
        created=state.started_at,
        # Where things lie on this machine is for admins.
        root=view.path if principal.is_admin else view.name,
        parent=state.catalog.served[0],
        digest=view.digest,
        rank=view.rank,
        state=view.state,
        loading=view.loading,
        pinned=view.pinned,
    )
