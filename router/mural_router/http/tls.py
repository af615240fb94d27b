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
        context = _verifying(settings.replica_ca_file, settings.replica_server_name)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"the replicas' authorities cannot be read: {_reason(error)}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.replica_certfile is not None:
        _load(context, settings.replica_certfile, settings.replica_keyfile)
    return context


class _OneName(ssl.SSLContext):
    """Holds every peer to one name: pods are reached by addresses, which no certificate can hold
    beforehand."""

    server_name: str

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return super().wrap_bio(incoming, outgoing, server_side, self.server_name, session)


def _verifying(ca_file: str | None, server_name: str | None) -> ssl.SSLContext:
    if server_name is None:
        return ssl.create_default_context(cafile=ca_file)
    context = _OneName(ssl.PROTOCOL_TLS_CLIENT)
    context.server_name = server_name
    if ca_file is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(ca_file)
    return context


def _load(context: ssl.SSLContext, certfile: str, keyfile: str | None) -> None:
    try:
        context.load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"the certificate cannot be used: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
