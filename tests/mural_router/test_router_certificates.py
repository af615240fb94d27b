"""A running router whose files of TLS are renewed."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.running import Router
from mural_router.settings import Secrets


async def test_renewed_authorities_are_taken_for_following_replicas_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    flags = {"http": {"tls": {"replica_ca_file": str(path)}}}
    router = Router(Config(None, flags, Secrets()), LocalLimiter())
    taken: list[ssl.SSLContext] = []
    monkeypatch.setattr(router.fleet, "use_tls", taken.append)
    renewed = trustme.CA().cert_pem.bytes()
    path.write_bytes(renewed)
    router.reload_certificates()
    (authority,) = taken[0].get_ca_certs(binary_form=True)
    assert ssl.DER_cert_to_PEM_cert(authority).encode() == renewed
    path.write_text("no certificate")
    with pytest.raises(ValueError, match="authorities"):
        router.reload_certificates()
    assert len(taken) == 1
    await router.close()
