"""``mural adapters`` in this process and as the installed program, over each kind of store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.cli import main
from mural_resolvers.commands.adapters import adapters

# What the commands may take from whoever runs the tests.
_VARIABLES = ("MURAL_STORE", "MURAL_API_KEY")


class _Entry:
    name = "adapters"

    def load(self) -> object:
        return adapters


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Mural = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def mural(capsys: pytest.CaptureFixture[str]) -> Mural:
    """Run ``mural adapters …`` in this process."""

    def run(*argv: object) -> Ran:
        capsys.readouterr()
        try:
            status = main(["adapters", *map(str, argv)], [_Entry()])
        except SystemExit as stop:  # argparse's own way out
            status = int(str(stop.code))
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def program() -> Path:
    """The installed console script ``mural``."""
    path = Path(sys.executable).with_name("mural")
    assert path.exists(), "the package is not installed"
    return path


@pytest.fixture
def mural_program(program: Path) -> Mural:
    """Run the installed ``mural adapters …``."""

    def run(*argv: object) -> Ran:
        done = subprocess.run(
            [program, "adapters", *map(str, argv)],
            capture_output=True,
            text=True,
            timeout=100,
            stdin=subprocess.DEVNULL,
            check=False,
            env=dict(os.environ),
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def spec_file(tmp_path: Path, base_spec: BaseSpec) -> Path:
    path = tmp_path / "base.json"
    path.write_bytes(base_spec.to_json())
    return path


@pytest.fixture
def directory_store(tmp_path: Path) -> str:
    root = tmp_path / "store"
    root.mkdir()
    return str(root)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """moto's server, in a thread of this process."""
    pytest.importorskip("aiobotocore")
    from tests.moto_s3 import moto_s3

    with moto_s3() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def s3_store(moto_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in a bucket of its own."""
    import boto3

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mural")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "muralsecret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"adapters-{uuid.uuid4().hex}"
    boto3.client("s3", endpoint_url=moto_endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/prod?endpoint_url={moto_endpoint}"


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The location of an empty store, which ``MURAL_STORE`` names too."""
    location: str = request.getfixturevalue(f"{request.param}_store")
    monkeypatch.setenv("MURAL_STORE", location)
    return location


@pytest.fixture
def one_store(directory_store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty store of one kind, for what no kind decides."""
    monkeypatch.setenv("MURAL_STORE", directory_store)
    return directory_store
