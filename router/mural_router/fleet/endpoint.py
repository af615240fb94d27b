"""Where a replica listens and what it speaks."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

__all__ = ["Address", "Endpoint", "Engine", "plain_authority"]

Engine = Literal["mural", "vllm"]
Address = tuple[str, int, bool]
"""Host, port, TLS: what two connections have to share to be alike."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica's addresses. ``name`` is stable over its addresses (a pod's name, say)."""

    name: str
    host: str
    """An address or a name, without brackets."""
    port: int
    """Of the OpenAI API."""
    engine: Engine = "mural"
    control_port: int | None = None
    """Of the control API; None for an engine that has none."""
    tls: bool = False
    weight: float = 1.0
    ready: bool = True
    """By what discovery knows (a pod's conditions); the replica's own word comes on top."""

    @property
    def address(self) -> Address:
        """Of the OpenAI API."""
        return self.host, self.port, self.tls

    @property
    def authority(self) -> str:
        """``host:port`` as in a URL or a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def plain_authority(text: str) -> str:
    """Give ``host:port`` in one spelling, for comparing: an address of IPv6 can be written in many
    ways, and one of IPv4 as one of them."""
    if not text.startswith("["):
        return text
    host, _, port = text[1:].rpartition("]:")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return text
    mapped = address.ipv4_mapped
    return f"[{address}]:{port}" if mapped is None else f"{mapped}:{port}"
