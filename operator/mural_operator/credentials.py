"""How the pods of a pool are spoken to: tokens, keys and certificates out of its Secrets."""

from __future__ import annotations

import ssl as tls
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from mural_operator.secret_cache import SecretCache
from mural_resolvers.kubernetes.objects import PoolSpec, SecretKey

__all__ = ["Credentials", "CredentialsMissing", "PoolCredentials", "secret_names"]


class CredentialsMissing(Exception):
    """A Secret that the pool names is not there, or has no such entry."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """For one connection."""

    token: str | None = None
    """Of the control API."""
    api_key: str | None = None
    """Of vLLM's API."""
    ssl: tls.SSLContext | None = None
    server_name: str | None = None
    """The name in the pod's certificate: it is reached by address."""


class PoolCredentials:
    """Reads them anew for every connection, so that a rotated Secret takes effect by itself."""

    def __init__(self, spec: Callable[[], PoolSpec], secrets: SecretCache) -> None:
        self._spec = spec
        self._secrets = secrets

    def now(self) -> Credentials:
        """Raises `CredentialsMissing`, naming the Secret and never what is in it."""
        spec = self._spec()
        certificates = spec.control_tls
        context = None if certificates is None else self._context(certificates.ca_secret)
        return Credentials(
            token=self._entry(spec.control_token_secret),
            api_key=self._entry(spec.api_key_secret),
            ssl=context,
            server_name=None if certificates is None else certificates.server_name,
        )

    def suspect(self) -> None:
        """A pod does not accept them: read the Secrets again."""
        for name in secret_names(self._spec()):
            self._secrets.suspect(name)

    def _context(self, reference: SecretKey) -> tls.SSLContext:
        certificates = self._entry(reference)
        assert certificates is not None
        try:
            return _context(certificates)
        except tls.SSLError:
            raise CredentialsMissing(
                f"the entry {reference.key} of the Secret {reference.name} holds no certificate"
            ) from None

    def _entry(self, reference: SecretKey | None) -> str | None:
        if reference is None:
            return None
        secret = self._secrets.get(reference.name)
        if secret is None:
            raise CredentialsMissing(f"the Secret {reference.name} cannot be read")
        try:
            text = secret.get(reference.key, b"").decode("ascii").strip()
        except UnicodeDecodeError:
            text = ""
        if not text:
            raise CredentialsMissing(
                f"the Secret {reference.name} has no text under {reference.key}"
            )
        return text


def secret_names(spec: PoolSpec) -> frozenset[str]:
    """The Secrets that a pool names."""
    references = (
        spec.control_token_secret,
        spec.api_key_secret,
        None if spec.control_tls is None else spec.control_tls.ca_secret,
    )
    return frozenset(reference.name for reference in references if reference is not None)


@lru_cache(maxsize=64)
def _context(certificates: str) -> tls.SSLContext:
    return tls.create_default_context(cadata=certificates)
