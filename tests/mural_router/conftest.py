"""What holds for all tests of the router."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme


@pytest.fixture(scope="session")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authorities") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(autouse=True)
def _trust_nobody_unasked(_authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Authorities are those that a test names: the system's take 50 ms to read, each time."""
    monkeypatch.setenv("SSL_CERT_FILE", str(_authority))
