"""Who may use the control API: whoever holds its token, which may be renewed."""

from __future__ import annotations

from starlette.datastructures import Headers

from mural_resolvers.errors import Forbidden, Unauthorized
from mural_server.api.renewed_token import RenewedToken

__all__ = ["ControlGate"]


class ControlGate:
    """Lets in whoever holds the token; without one the port is on loopback only."""

    def __init__(self, token: RenewedToken | None) -> None:
        self._token = token

    def check(self, headers: Headers) -> None:
        """Raise `Forbidden` for a browser, `Unauthorized` for whoever has no valid token."""
        if "origin" in headers:
            # No browser has business here, and a page could reach a loopback port.
            raise Forbidden("The control API is not for browsers.")
        if self._token is None:
            return
        sent = headers.getlist("authorization")
        if not self._token.is_shown_in(sent[0] if len(sent) == 1 else ""):
            raise Unauthorized("A valid control token is required.")
