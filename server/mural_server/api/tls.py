"""What both ports speak where a certificate is given: TLS 1.2 and newer."""

from __future__ import annotations

import ssl

from mural_server.settings import ServerSettings

__all__ = ["PortTls"]


class PortTls:
    """The context of both ports, into which a renewed certificate is read.

    Raises ``ValueError`` for files that do not fit. Authorities of clients are only ever added
    while a process runs.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.context = self._read()

    def reload(self) -> None:
        """Read the files anew, for new connections; raises and keeps the old ones."""
        # Into a context of its own first: a pair that half fits would spoil the one in use.
        self._read()
        self._load(self.context)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        settings = self._settings
        assert settings.ssl_certfile is not None
        try:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
            if settings.ssl_ca_certs is not None:
                context.load_verify_locations(settings.ssl_ca_certs)
                # Probes and gateways come without a certificate; who needs one gets 401.
                context.verify_mode = ssl.CERT_OPTIONAL
        except ssl.SSLError:
            # What OpenSSL says of it names lines of its own source.
            raise ValueError("the files hold no certificate with its key") from None
        except OSError as error:
            raise ValueError(f"the certificate cannot be read: {error.strerror}") from None
