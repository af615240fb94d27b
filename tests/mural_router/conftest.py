"""What holds for all tests of the router."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _trust_nobody_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Authorities are those that a test names: the system's take 50 ms to read, each time."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.setenv("SSL_CERT_DIR", os.devnull)
