"""Bounds of the HTTP room: every wait, every buffer and every pool has one here."""

from __future__ import annotations

import msgspec

__all__ = ["HttpSettings", "TlsSettings"]


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files of PEM; None: not used."""

    certfile: str | None = None
    """What clients are shown; with a key it makes the port speak TLS."""
    keyfile: str | None = None
    replica_ca_file: str | None = None
    """Authorities that sign replicas' certificates; None: the system's."""
    replica_server_name: str | None = None
    """What replicas' certificates are for, where these are reached by address; None: their host."""
    replica_certfile: str | None = None
    """What replicas are shown (mTLS)."""
    replica_keyfile: str | None = None

    @property
    def files(self) -> tuple[str | None, ...]:
        """All of them, for whoever watches for renewals."""
        return (
            *(self.certfile, self.keyfile, self.replica_ca_file),
            *(self.replica_certfile, self.replica_keyfile),
        )


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to listen, and how much and how long anything may be."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: any free one."""
    tls: TlsSettings = TlsSettings()

    max_connections: int = 16_384
    """Of clients at one time; more are answered 503 and closed."""
    max_head_bytes: int = 32_768
    max_head_fields: int = 100
    max_body_bytes: int = 8 << 20
    """Of an inference request, which is read whole; above it 413 before it is read."""
    max_buffered_bytes: int = 512 << 20
    """Of all bodies that are being read or wait for an answer; above it 503."""

    head_timeout_s: float = 10.0
    """From a head's first byte to its last."""
    body_timeout_s: float = 60.0
    """For the whole of a body that is read whole; between two pieces of one that is passed on."""
    keep_alive_s: float = 75.0
    """A client's connection without a request."""
    stall_timeout_s: float = 60.0
    """A client that takes nothing more of its answer."""
    tls_handshake_timeout_s: float = 10.0

    connect_timeout_s: float = 2.0
    """To a replica, TLS handshake included."""
    first_byte_timeout_s: float = 120.0
    """From a request's last byte to its answer's first: above a replica's ``adapter_wait_s``."""
    idle_timeout_s: float = 60.0
    """Between two pieces of a replica's answer."""
    max_idle_connections: int = 256
    """Kept open to each replica without a request."""
    idle_connection_s: float = 4.0
    """How long; below the 5 s after which a common server closes its end."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "port" and isinstance(value, int | float) and value <= 0:
                raise ValueError(f"{name} must be above 0")
        if (self.tls.certfile is None) != (self.tls.keyfile is None):
            raise ValueError("tls.certfile and tls.keyfile go together")
        if (self.tls.replica_certfile is None) != (self.tls.replica_keyfile is None):
            raise ValueError("tls.replica_certfile and tls.replica_keyfile go together")
