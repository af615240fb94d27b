"""S3 servers to test against: moto's in this process, real ones where they can be built.

The real ones (marker ``stores``) are built by ``$MURAL_STORES_DIR/build``; a test that needs one
which cannot be built is skipped with "NOT RUN", or fails where ``MURAL_CI_FULL=1``.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
import trustme
from botocore.config import Config

from mural_resolvers.s3 import S3Settings
from tests.moto_s3 import moto_s3

ROOT = Path(__file__).resolve().parents[3]
KEY_ID, SECRET = "mural", "muralsecret"
START_S = 60.0

_buckets = count()


@dataclass(frozen=True)
class Server:
    """A running S3 server, and where it keeps what it knows of users."""

    kind: str
    url: str
    port: int = 0
    ca: Path | None = None
    admin: tuple[str, ...] = ()


@dataclass
class Bucket:
    """A bucket of its own for a test, with boto3 as the other client."""

    server: Server
    name: str
    boto: Any

    def settings(self, **changes: Any) -> S3Settings:
        stated: dict[str, Any] = {
            "bucket": self.name,
            "prefix": "adapters",
            "endpoint_url": self.server.url,
            "region": "us-east-1",
            "ca_bundle": self.server.ca,
            "alias_cache_s": 0.0,
        }
        return S3Settings(**(stated | changes))

    def put(self, key: str, data: bytes) -> None:
        self.boto.put_object(Bucket=self.name, Key=f"adapters/{key}", Body=data)

    def get(self, key: str) -> bytes:
        body: bytes = self.boto.get_object(Bucket=self.name, Key=f"adapters/{key}")["Body"].read()
        return body

    def listing(self) -> list[str]:
        found = self.boto.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [entry["Key"].removeprefix("adapters/") for entry in found]

    def uploads(self) -> list[str]:
        """The multipart uploads that are neither complete nor aborted."""
        found = self.boto.list_multipart_uploads(Bucket=self.name).get("Uploads", [])
        return [entry["Key"] for entry in found]


def boto_client(server: Server, key_id: str = KEY_ID, secret: str = SECRET) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        region_name="us-east-1",
        aws_access_key_id=key_id,
        aws_secret_access_key=secret,
        verify=str(server.ca) if server.ca else None,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 2}),
    )


# -- starting servers -----------------------------------------------------------------------------


def built(name: str, program: str) -> Path:
    """The path of a real server's program; skips the test where it cannot be built."""
    build = Path(os.environ.get("MURAL_STORES_DIR", ROOT.parent / "shared" / "stores")) / "build"
    missing = None
    if not build.exists():
        missing = f"there is no {build.name} for the real servers"
    elif shutil.which("go") is None:
        missing = "Go is not installed"
    if missing is None:
        folder = subprocess.run(
            [build, name], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        return Path(folder) / program
    if os.environ.get("MURAL_CI_FULL") == "1":
        pytest.fail(f"{name} is needed, and {missing}")
    pytest.skip(f"NOT RUN: {name}: {missing}")


def free_port(below: int = 65_536) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < below:
            return port


@contextmanager
def running(command: list[str], port: int, log: Path, **environment: str) -> Iterator[None]:
    """Run a server until it answers on its port, and end it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | environment
        )
        try:
            deadline = time.monotonic() + START_S
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    gone = process.poll() is not None or time.monotonic() > deadline
                    assert not gone, log.read_text(errors="replace")[-2000:]
                    threading.Event().wait(0.05)
            yield
        finally:
            process.kill()
            process.wait()


@contextmanager
def versitygw_running(folder: Path, authority: trustme.CA | None = None) -> Iterator[Server]:
    program, port = str(built("versitygw", "versitygw")), free_port()
    for name in ("iam", "ver", "data"):
        (folder / name).mkdir()
    tls: list[str] = []
    if authority is not None:
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        certificate.private_key_pem.write_to_path(folder / "tls.key")
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(folder / "tls.crt", append=True)
        authority.cert_pem.write_to_path(folder / "ca.crt")
        tls = ["--cert", f"{folder}/tls.crt", "--key", f"{folder}/tls.key"]
    command = [program, "--quiet", "--access", KEY_ID, "--secret", SECRET]
    command += ["--port", f"127.0.0.1:{port}", "--virtual-domain", f"localhost:{port}"]
    command += ["--iam-dir", f"{folder}/iam", *tls]
    command += ["posix", "--versioning-dir", f"{folder}/ver", f"{folder}/data"]
    scheme = "https" if tls else "http"
    url = f"{scheme}://127.0.0.1:{port}"
    admin = (program, "admin", "-a", KEY_ID, "-s", SECRET, "-er", url)
    with running(command, port, folder / "log"):
        yield Server("versitygw", url, port, folder / "ca.crt" if tls else None, admin)


@contextmanager
def minio_running(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [str(built("minio", "minio")), "server", "--address", f"127.0.0.1:{port}"]
    environment = {
        "MINIO_ROOT_USER": KEY_ID,
        "MINIO_ROOT_PASSWORD": SECRET,
        "MINIO_BROWSER": "off",
    }
    with running([*command, f"{folder}/data"], port, folder / "log", **environment):
        yield Server("minio", f"http://127.0.0.1:{port}", port)


@contextmanager
def seaweedfs_running(folder: Path) -> Iterator[Server]:
    identity = {
        "name": KEY_ID,
        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    master, volume, filer, port = (free_port(55_000) for _ in range(4))
    command = [str(built("seaweedfs", "weed")), "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={folder}/data", f"-master.port={master}", "-master.volumeSizeLimitMB=64"]
    command += ["-master.telemetry=false", f"-volume.port={volume}", "-filer"]
    command += [f"-filer.port={filer}", "-s3", f"-s3.port={port}", f"-s3.config={folder}/s3.json"]
    # Each bucket takes seven volumes, and each test a bucket.
    command += ["-s3.autoCreateBucket=false", "-volume.max=2000"]
    with running(command, port, folder / "log"):
        yield Server("seaweedfs", f"http://127.0.0.1:{port}", port)


@contextmanager
def moto_running() -> Iterator[Server]:
    with moto_s3() as port:
        yield Server("moto", f"http://127.0.0.1:{port}", port)


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Server]:
    with moto_running() as server:
        yield server


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with versitygw_running(tmp_path_factory.mktemp("versitygw")) as server:
        yield server


@pytest.fixture(scope="session")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with minio_running(tmp_path_factory.mktemp("minio")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with seaweedfs_running(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


# The second opinions take minutes to build: they are asked for by name.
_REAL = ["versitygw", *os.environ.get("MURAL_MORE_STORES", "").split()]


@pytest.fixture(
    params=["moto_server", *(pytest.param(name, marks=pytest.mark.stores) for name in _REAL)]
)
def server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """What botocore's chain finds, and nothing of this machine's own."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


def make_bucket(server: Server) -> Bucket:
    boto = boto_client(server)
    name = f"bucket-{os.getpid()}-{next(_buckets)}"
    boto.create_bucket(Bucket=name)
    return Bucket(server, name, boto)


@pytest.fixture(name="new_bucket")
def bucket_maker() -> Callable[[Server], Bucket]:
    """Makes a new bucket on a server."""
    return make_bucket


@pytest.fixture(name="start_versitygw", scope="session")
def versitygw_starter() -> Callable[[Path, trustme.CA], AbstractContextManager[Server]]:
    """Runs a versitygw of its own, with certificates of an authority."""
    return versitygw_running


@pytest.fixture
def bucket(server: Server) -> Iterator[Bucket]:
    """A new bucket on each server."""
    made = make_bucket(server)
    yield made
    made.boto.close()


@pytest.fixture
def moto_bucket(moto_server: Server) -> Iterator[Bucket]:
    """A new bucket on moto's server alone."""
    made = make_bucket(moto_server)
    yield made
    made.boto.close()


# -- faults ---------------------------------------------------------------------------------------


@dataclass
class Fault:
    """What the fault proxy does to one request instead of passing it on.

    ``status`` and ``code``: an error of S3's. ``cut``: the true head, and so many bytes of the
    body. ``pause``: the true head and ``cut`` bytes, then nothing until ``release``. ``ignore``:
    passed on without the header of that name. ``lose``: passed on, and the answer lost. ``hang``:
    no answer until ``release``.
    """

    status: int = 0
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    pause: bool = False
    ignore: str | None = None
    lose: bool = False
    hang: bool = False


Script = Callable[[str, str, dict[str, str]], Fault | None]


class FaultProxy:
    """Ours, small, and for tests alone: passes requests on to a store, or answers with a fault.

    ``script`` gets the method, the path with its query, and the headers.
    """

    def __init__(self, upstream: Server) -> None:
        self.script: Script = lambda method, path, headers: None
        self.requests: list[tuple[str, str]] = []
        self.release = threading.Event()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # with which it answers Expect: 100-continue

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65_537)
                if self.raw_requestline and self.parse_request():
                    proxy.answer(self)
                self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                return

        self._upstream = upstream
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        self.requests.append((handler.command, handler.path))
        fault = self.script(handler.command, handler.path, headers) or Fault()
        if fault.status:
            content = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
            self._send(handler, fault.status, fault.headers, content, len(content))
            return
        if fault.hang:
            self.release.wait(60)
            return
        if fault.ignore is not None:
            headers.pop(fault.ignore, None)
        headers["connection"] = "close"
        port = urlsplit(self._upstream.url).port
        passed_on = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        passed_on.request(handler.command, handler.path, body or None, headers)
        answer = passed_on.getresponse()
        content = answer.read()
        passed_on.close()
        if fault.lose:
            return
        size = int(answer.headers.get("Content-Length", len(content)))
        sent = content if fault.cut is None else content[: fault.cut]
        self._send(handler, answer.status, dict(answer.headers), sent, size)
        if fault.pause:
            self.release.wait(60)

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        content: bytes,
        size: int,
    ) -> None:
        handler.send_response(status)
        dropped = {"content-length", "connection", "transfer-encoding", "date", "server"}
        for name, value in headers.items():
            if name.lower() not in dropped:
                handler.send_header(name, value)
        handler.send_header("Content-Length", str(size))
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(content)
        handler.wfile.flush()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def faults() -> type[Fault]:
    """What the proxy can be told to do."""
    return Fault


@pytest.fixture
def fault_proxy(moto_server: Server) -> Iterator[FaultProxy]:
    """A fault proxy in front of moto's server."""
    proxy = FaultProxy(moto_server)
    yield proxy
    proxy.close()


class Toxiproxy:
    """The real fault proxy's ten lines of HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._names = count()

    def call(self, method: str, path: str, body: object = None) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        assert answer.status < 300, text

    def front(self, server: Server) -> tuple[str, str]:
        """Stand in front of a server; the name of that, and the URL for clients."""
        name, port = f"front-{next(self._names)}", free_port()
        self.call(
            "POST",
            "/proxies",
            {
                "name": name,
                "listen": f"127.0.0.1:{port}",
                "upstream": f"127.0.0.1:{server.port}",
                "enabled": True,
            },
        )
        return name, f"{server.url.partition(':')[0]}://127.0.0.1:{port}"

    def poison(self, name: str, kind: str, stream: str = "downstream", **attributes: int) -> None:
        toxic = {"type": kind, "stream": stream, "toxicity": 1, "attributes": attributes}
        self.call("POST", f"/proxies/{name}/toxics", {"name": kind} | toxic)

    def heal(self, name: str, kind: str) -> None:
        self.call("DELETE", f"/proxies/{name}/toxics/{kind}")

    def refuse(self, name: str) -> None:
        self.call("POST", f"/proxies/{name}", {"enabled": False})


@pytest.fixture(scope="session")
def toxiproxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    port = free_port()
    command = [str(built("toxiproxy", "toxiproxy-server")), "-host", "127.0.0.1", "-port"]
    log = tmp_path_factory.mktemp("toxiproxy") / "log"
    with running([*command, str(port)], port, log):
        yield Toxiproxy(port)
