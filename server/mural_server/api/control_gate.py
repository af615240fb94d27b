"""Who may use the control API: whoever holds its token, which may be renewed."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers

from mural_resolvers.errors import Forbidden, Unauthorized

__all__ = ["ControlGate"]

OVERLAP_S: Final = 300.0
"""For how long a token holds after another has come: callers have copies of the Secret of their
own, which change minutes apart."""


class ControlGate:
    """Lets in whoever holds the token; without one the port is on loopback only."""

    def __init__(self, token: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._hash = None if token is None else _hash(token)
        self._old: tuple[bytes, float] | None = None
        self._clock = clock

    def renew(self, token: str) -> None:
        """Take another token; the last one holds for ``OVERLAP_S`` more, those before it do not."""
        new = _hash(token)
        if self._hash is None or new == self._hash:
            return
        self._old = (self._hash, self._clock() + OVERLAP_S)
        self._hash = new

    def check(self, headers: Headers) -> None:
        """Raise `Forbidden` for a browser, `Unauthorized` for whoever has no valid token."""
        if "origin" in headers:
            # No browser has business here, and a page could reach a loopback port.
            raise Forbidden("The control API is not for browsers.")
        if self._hash is None:
            return
        sent = headers.getlist("authorization")
        scheme, _, token = (sent[0] if len(sent) == 1 else "").partition(" ")
        found = _hash(token.strip(" "))
        good = hmac.compare_digest(found, self._hash)
        if self._old is not None and self._clock() < self._old[1]:
            good |= hmac.compare_digest(found, self._old[0])
        if scheme.lower() != "bearer" or not good:
            raise Unauthorized("A valid control token is required.")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
