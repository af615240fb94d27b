"""TLS on both sides: version 1.2 and newer, certificates read from files."""

from __future__ import annotations

import ssl

from mural_router.http.settings import TlsSettings

__all__ = ["client_side", "replica_side"]


def client_side(settings: TlsSettings) -> ssl.SSLContext | None:
    """What the port speaks; None: plain HTTP. Raises `ValueError` for files that do not fit."""
    if settings.certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, settings.certfile, settings.keyfile)
    return context


def replica_side(settings: TlsSettings) -> ssl.SSLContext:
    """What replicas with ``tls`` are spoken to in: their certificate and name are checked."""
    try:
        context = ssl.create_default_context(cafile=settings.replica_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"the replicas' authorities cannot be read: {_reason(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.replica_certfile is not None:
        _load(context, settings.replica_certfile, settings.replica_keyfile)
    return context


def _load(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"the certificate cannot be used: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
