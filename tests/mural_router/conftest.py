"""What holds for all tests of the router."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import trustme

_SPEC = importlib.util.spec_from_file_location(
    "ready_server", Path(__file__).with_name("ready_server.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
_module = importlib.util.module_from_spec(_SPEC)
sys.modules["ready_server"] = _module
_SPEC.loader.exec_module(_module)


@pytest.fixture(scope="session")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authorities") / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(path))
    return path


@pytest.fixture(autouse=True)
def _trust_nobody_unasked(_authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Authorities are those that a test names: the system's take 50 ms to read, each time."""
    monkeypatch.setenv("SSL_CERT_FILE", str(_authority))
