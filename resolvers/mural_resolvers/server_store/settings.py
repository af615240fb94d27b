"""Where a server is, and how it is spoken to."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from mural_resolvers.errors import InvalidInput, quoted

__all__ = ["ServerSettings"]

_TRUE = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """A server's address; raises ``InvalidInput`` for what cannot be meant.

    ``api_key`` goes over TLS, or to this machine, unless ``plain_http`` allows otherwise.
    ``ca_bundle`` is a PEM file that replaces the machine's roots. Seconds: ``connect_timeout_s``;
    ``send_timeout_s`` for each piece of a body, either way; ``answer_timeout_s`` for the answer,
    before which the server judges what was sent.
    """

    host: str
    port: int
    tls: bool
    api_key: str | None = field(default=None, repr=False)
    plain_http: bool = False
    ca_bundle: Path | None = None
    connect_timeout_s: float = 10.0
    send_timeout_s: float = 60.0
    answer_timeout_s: float = 360.0

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
            raise InvalidInput("The API key is not one: it is a line of ASCII without spaces.")
        if key is not None and not (self.tls or self.plain_http or _is_local(self.host)):
            raise InvalidInput(
                "The key would cross the network unencrypted: give https://, or allow it with "
                "?plain_http=1 in the URL."
            )

    @property
    def location(self) -> str:
        """The server's URL, without what is nobody's business."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @classmethod
    def from_url(cls, url: str, api_key: str | None = None) -> ServerSettings:
        """Read ``http(s)://host[:port][?ca_bundle=FILE&plain_http=1]``."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            query = dict(
                parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            )
        except ValueError:
            raise InvalidInput("This is not a server's URL.") from None
        if "@" in parts.netloc:
            # Not repeated: what stands there may be a secret.
            raise InvalidInput("A server's URL has no key in it: see --api-key-file.")
        if parts.scheme not in ("http", "https") or not host or parts.fragment or port == 0:
            raise InvalidInput("A server's URL is http(s)://host[:port].")
        if parts.path not in ("", "/"):
            raise InvalidInput("A server's URL ends with its port: the rest is known.")
        if unknown := query.keys() - {"ca_bundle", "plain_http"}:
            raise InvalidInput(f"{quoted(min(unknown))} is no setting of a server's URL.")
        tls = parts.scheme == "https"
        ca_bundle = query.get("ca_bundle")
        return cls(
            host=host,
            port=port or (443 if tls else 80),
            tls=tls,
            api_key=api_key,
            plain_http=query.get("plain_http", "").lower() in _TRUE,
            ca_bundle=Path(ca_bundle) if ca_bundle else None,
        )


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
