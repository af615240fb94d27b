"""Which paths there are, and who answers them. Everything else of a replica is out of reach."""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

from mural_router.http.errors import MethodNotAllowed, NotFound, VersionNotSupported

__all__ = ["Answerer", "Asked", "Place", "place_of"]

INFERENCE: Final = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
)
_ADAPTERS = re.compile(r"/v1/adapters(?:/[A-Za-z0-9_][A-Za-z0-9._:\-]{0,255}){0,8}")
_MODEL: Final = "/v1/models/"


class Asked(Protocol):
    """What is looked at of a request's head, whoever read it."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str:
        """As it was sent, without the query."""
        ...

    @property
    def minor(self) -> int:
        """0 for HTTP/1.0."""
        ...


class Answerer(Enum):
    """Who answers."""

    HEALTH = auto()
    VERSION = auto()
    MODELS = auto()
    MODEL = auto()
    INFERENCE = auto()
    """A replica that routing chooses by the body."""
    ADAPTERS = auto()
    """Any Mural server; the body is passed on."""


class Place(NamedTuple):
    """Where a request goes. ``name`` is the model's in the path, or the path to ask a replica."""

    answerer: Answerer
    name: str = ""


_READ: Final = ("GET", "HEAD")
_FIXED: Final = {
    "/health": Place(Answerer.HEALTH),
    "/version": Place(Answerer.VERSION),
    "/v1/models": Place(Answerer.MODELS),
}
_INFERENCE: Final = Place(Answerer.INFERENCE)


def place_of(head: Asked) -> Place:
    """Find it. Raises `NotFound`, `MethodNotAllowed` or `VersionNotSupported`."""
    path = head.path
    if path in INFERENCE:
        _allow(head, ("POST",))
        _keep_framing(head)
        return _INFERENCE
    fixed = _FIXED.get(path)
    if fixed is not None:
        _allow(head, _READ)
        return fixed
    if path.startswith(_MODEL):
        _allow(head, _READ)
        return Place(Answerer.MODEL, _decoded(path[len(_MODEL) :]))
    if path.startswith("/v1/adapters"):
        plain = _decoded(path)
        if _ADAPTERS.fullmatch(plain):
            _allow(head, ("GET", "POST", "PUT", "DELETE"))
            _keep_framing(head)
            return Place(Answerer.ADAPTERS, plain)
    raise NotFound("There is no such path.")


def _allow(head: Asked, methods: tuple[str, ...]) -> None:
    if head.method not in methods:
        raise MethodNotAllowed(methods)


def _keep_framing(head: Asked) -> None:
    """A replica's answer may be chunked, and 1.0 would tell its end from a break in no way."""
    if head.minor == 0:
        raise VersionNotSupported("This path needs HTTP/1.1.")


def _decoded(path: str) -> str:
    try:
        return unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise NotFound("There is no such path.") from None
