"""A token that callers must show, and that may be renewed while the server runs."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Final

__all__ = ["OVERLAP_S", "RenewedToken"]

OVERLAP_S: Final = 300.0
"""For how long a token holds after another has come: callers have copies of the Secret of their
own, which change minutes apart."""


class RenewedToken:
    """Kept and compared as sha256 only."""

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._hash = _hash(token)
        self._old: tuple[bytes, float] | None = None
        self._clock = clock

    def renew(self, token: str) -> None:
        """Take another token; the last one holds for ``OVERLAP_S`` more, those before it do not."""
        new = _hash(token)
        if new != self._hash:
            self._old = (self._hash, self._clock() + OVERLAP_S)
            self._hash = new

    def is_shown_in(self, authorization: str) -> bool:
        """Whether the header's value is a bearer's with a token that holds."""
        scheme, _, token = authorization.partition(" ")
        found = _hash(token.strip(" "))
        good = hmac.compare_digest(found, self._hash)
        if self._old is not None and self._clock() < self._old[1]:
            good |= hmac.compare_digest(found, self._old[0])
        return good and scheme.lower() == "bearer"


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
