"""Speaking with a server: what is sent, whom it is sent to, and every way in which it fails.

The server here is a stand-in that answers what a test tells it; ``test_adapters_on_a_server`` has
the real one.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from mural_resolvers.digest import CONFIG_FILE, FileEntry, compute_digest
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    ManifestMismatch,
    MuralError,
    RateLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.manifest import Manifest, build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.server_store import ServerSettings, ServerStore
from mural_resolvers.versions import AliasTarget

WriteAdapter = Callable[..., Path]
NAME = parse_name("acme/sql:v1")


@dataclass
class StandIn:
    """A server that answers ``status``, ``headers`` and ``body``, and notes what it was asked."""

    status: int = 201
    body: bytes = b"{}"
    bodies: dict[str, bytes] = field(default_factory=dict)
    """Other bodies, by path."""
    headers: dict[str, str] = field(default_factory=dict)
    port: int = 0
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)

    def settings(self, **more: Any) -> ServerSettings:
        here: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "tls": False}
        return ServerSettings(**(here | more))

    def store(self, **more: object) -> ServerStore:
        return ServerStore(self.settings(**more))


@contextmanager
def listening(server: StandIn, context: ssl.SSLContext | None = None) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            server.asked.append(
                (self.command, self.path, dict(self.headers), self.rfile.read(length))
            )
            self.send_response(server.status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            body = server.bodies.get(self.path, server.body)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = _answer

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if context is not None:
        http.socket = context.wrap_socket(http.socket, server_side=True)
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with listening(StandIn()) as server:
        yield server


@pytest.fixture
def manifest(adapter: Path) -> Manifest:
    return build_manifest(adapter)


def published(manifest: Manifest) -> bytes:
    answer = {"id": "acme/sql:v1", "digest": manifest.digest, "bytes": manifest.num_bytes}
    return json.dumps(answer).encode()


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "code": "c"}}).encode()


async def test_the_files_are_sent_as_one_form_under_the_exact_name(
    server: StandIn, adapter: Path, manifest: Manifest
) -> None:
    server.body = published(manifest)
    sent: list[int] = []

    created = await server.store(api_key="k").publish(NAME, adapter, manifest, sent.append)

    assert created is True
    method, path, headers, body = server.asked[0]
    assert (method, path) == ("POST", "/v1/adapters/acme/sql:v1")
    assert headers["Authorization"] == "Bearer k"
    form = BytesParser().parsebytes(
        f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body
    )
    parts = {str(part.get_filename()): part.get_payload(decode=True) for part in form.walk()}
    del parts["None"]  # The form itself.
    assert list(parts) == [file.path for file in manifest.files]
    assert all(parts[name] == (adapter / name).read_bytes() for name in parts)
    await asyncio.sleep(0)
    assert sum(sent) == manifest.num_bytes


@pytest.mark.parametrize(("status", "created"), [(201, True), (200, False)])
async def test_the_status_says_whether_it_was_there(
    server: StandIn, adapter: Path, manifest: Manifest, status: int, created: bool
) -> None:
    server.status, server.body = status, published(manifest)

    assert await server.store().publish(NAME, adapter, manifest) is created


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidInput),
        (401, Unauthorized),
        (403, Forbidden),
        (409, Conflict),
        (413, TooLarge),
        (422, UnusableAdapter),
        (429, RateLimited),
        (503, Unavailable),
        (502, Unavailable),
        (504, Unavailable),
        (500, MuralError),
    ],
)
async def test_a_refusal_is_the_server_s_own(
    server: StandIn, adapter: Path, manifest: Manifest, status: int, error: type[MuralError]
) -> None:
    server.status, server.body = status, refusal("Because of this.")
    server.headers = {"Retry-After": "7"}

    with pytest.raises(error, match=r"^Because of this\.$") as caught:
        await server.store().publish(NAME, adapter, manifest)
    if status in (429, 503):
        assert caught.value.retry_after_s == 7


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"error": 1}', b"\xff", b"[" * 100_000])
async def test_a_refusal_without_a_reason_tells_the_status(server: StandIn, body: bytes) -> None:
    server.status, server.body = 403, body

    with pytest.raises(Forbidden, match="403"):
        await server.store().delete(NAME)


async def test_a_server_s_words_cannot_steer_a_terminal(server: StandIn) -> None:
    server.status, server.body = 403, refusal("\x1b[2J" + "x" * 5000)

    with pytest.raises(Forbidden) as caught:
        await server.store().delete(NAME)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1100


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed_with_the_key(server: StandIn, status: int) -> None:
    with listening(StandIn()) as elsewhere:
        server.status = status
        server.headers = {"Location": f"http://127.0.0.1:{elsewhere.port}/"}
        with pytest.raises(InvalidInput, match="redirect"):
            await server.store(api_key="k").delete(NAME)

    assert elsewhere.asked == []


async def test_other_content_than_was_sent_is_told(
    server: StandIn, adapter: Path, manifest: Manifest
) -> None:
    server.body = published(manifest).replace(manifest.digest.encode(), b"0" * 64)

    with pytest.raises(ManifestMismatch):
        await server.store().publish(NAME, adapter, manifest)


async def test_a_file_that_shrinks_while_it_is_sent_is_told(
    server: StandIn, adapter: Path, manifest: Manifest
) -> None:
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])

    with pytest.raises(ManifestMismatch, match="shorter"):
        await server.store().publish(NAME, adapter, manifest)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"id": "acme:v1"}', b"\xff"])
async def test_an_answer_that_is_none_of_ours_is_told(
    server: StandIn, adapter: Path, manifest: Manifest, body: bytes
) -> None:
    server.body = body

    with pytest.raises(Unavailable, match="Mural server"):
        await server.store().publish(NAME, adapter, manifest)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    with pytest.raises(Unavailable, match="does not answer"):
        await StandIn(port=port).store().delete(NAME)


async def test_silence_has_a_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = StandIn(port=silent.getsockname()[1]).store(answer_timeout_s=0.05)
        with pytest.raises(Unavailable, match="does not answer"):
            await store.delete(NAME)


async def test_a_cancelled_call_ends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        call = asyncio.create_task(StandIn(port=silent.getsockname()[1]).store().delete(NAME))
        loop = asyncio.get_running_loop()
        client, _ = await loop.run_in_executor(None, silent.accept)
        await loop.run_in_executor(None, client.recv, 65536)

        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, 30)
        client.close()


async def test_a_refusal_in_the_midst_of_a_body_is_read(
    tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    tensors = {
        f"base_model.model.x.lora_{half}.weight": ("F32", [4096, 4096]) for half in ("A", "B")
    }
    folder = write_adapter(tmp_path / "big", config={"r": 4096}, tensors=tensors)
    answer = b"HTTP/1.1 413 x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    body = refusal("Too much of it.")

    def refuse(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1024)
            client.sendall(answer % (len(body), body))
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 20):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, args=(listener,))
        thread.start()
        with pytest.raises(TooLarge, match="Too much of it"):
            await (
                StandIn(port=listener.getsockname()[1])
                .store()
                .publish(NAME, folder, build_manifest(folder))
            )
        thread.join()


async def test_tls_is_checked_against_the_given_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with listening(StandIn(status=200), context) as server:
        url = f"https://127.0.0.1:{server.port}"

        with pytest.raises(Unavailable, match="No TLS"):
            await open_store(url, api_key="k").delete(NAME)
        assert server.asked == []
        assert await open_store(f"{url}?ca_bundle={tmp_path / 'ca.pem'}").delete(NAME) is True


@pytest.mark.parametrize("bundle", ["absent.pem", "empty.pem"])
async def test_a_bundle_without_certificates_is_told(tmp_path: Path, bundle: str) -> None:
    (tmp_path / "empty.pem").touch()

    with pytest.raises(InvalidInput, match="ca_bundle"):
        await open_store(f"https://127.0.0.1:1?ca_bundle={tmp_path / bundle}").delete(NAME)


async def test_records_are_the_server_s_own() -> None:
    store = StandIn(port=1).store()

    with pytest.raises(InvalidInput, match="records"):
        await store.read_record(NAME, "_upload.json")


def serve(server: StandIn, adapter: Path, manifest: Manifest) -> None:
    place = "/v1/adapters/acme/sql:v1"
    server.status = 200
    server.bodies = {f"{place}/manifest": manifest.to_json()} | {
        f"{place}/files/{file.path}": (adapter / file.path).read_bytes() for file in manifest.files
    }


async def test_a_version_is_fetched_file_by_file(
    server: StandIn, adapter: Path, manifest: Manifest, tmp_path: Path
) -> None:
    serve(server, adapter, manifest)
    got: list[int] = []
    (tmp_path / "out").mkdir()

    found = await server.store(api_key="k").fetch(NAME, tmp_path / "out", got.append)

    assert found == manifest
    assert build_manifest(tmp_path / "out") == manifest
    assert sum(got) == manifest.num_bytes
    assert {asked[2]["Authorization"] for asked in server.asked} == {"Bearer k"}


@pytest.mark.parametrize(("cut", "error"), [(1, Unavailable), (0, ManifestMismatch)])
async def test_a_file_that_is_another_leaves_nothing(
    server: StandIn,
    adapter: Path,
    manifest: Manifest,
    tmp_path: Path,
    cut: int,
    error: type[MuralError],
) -> None:
    serve(server, adapter, manifest)
    last = f"/v1/adapters/acme/sql:v1/files/{manifest.files[-1].path}"
    data = server.bodies[last]
    server.bodies[last] = data[:-1] if cut else data[:-1] + bytes([data[-1] ^ 1])
    (tmp_path / "out").mkdir()

    with pytest.raises(error):
        await server.store().fetch(NAME, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_file_above_its_limit_is_refused_before_it_is_asked_for(
    server: StandIn, manifest: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    large = (FileEntry(CONFIG_FILE, 1 << 40, "0" * 64),)
    stated = Manifest(files=large, facts=manifest.facts, digest=compute_digest(large))
    server.status, server.body = 200, stated.to_json()

    with pytest.raises(TooLarge):
        await server.store().fetch(NAME, tmp_path / "out")
    assert len(server.asked) == 1


async def test_a_cancelled_fetch_ends_at_once_and_leaves_nothing(
    adapter: Path, manifest: Manifest, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    (tmp_path / "out").mkdir()
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    body = manifest.to_json()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = StandIn(port=listener.getsockname()[1]).store()
        call = asyncio.create_task(store.fetch(NAME, tmp_path / "out"))
        for data in (head % len(body) + body, head % manifest.files[0].size + b"{"):
            client, _ = await loop.run_in_executor(None, listener.accept)
            await loop.run_in_executor(None, client.recv, 65536)
            client.sendall(data)
            if data.endswith(body):
                client.close()
        # The file has begun, and does not go on.
        while not list((tmp_path / "out").iterdir()):
            await asyncio.to_thread(lambda: None)

        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(call, 30)
        client.close()
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_version_that_is_not_there_is_told(server: StandIn, tmp_path: Path) -> None:
    server.status, server.body = 404, refusal("No such adapter.")

    assert await server.store().manifest(NAME) is None
    with pytest.raises(AdapterNotFound):
        await server.store().fetch(NAME, tmp_path)


async def test_a_manifest_that_is_none_is_told(server: StandIn) -> None:
    server.status, server.body = 200, b"<html>"

    with pytest.raises(Unavailable, match="Mural server"):
        await server.store().manifest(NAME)


async def test_latest_is_asked_of_the_aliases_alone(server: StandIn) -> None:
    assert await server.store().manifest(NAME.at("latest")) is None
    assert server.asked == []


async def test_aliases_are_read_set_and_removed(server: StandIn) -> None:
    held = {"stable": (AliasTarget("v1", 9.0), AliasTarget("v2", 1.0))}
    shares = [{"version": "v1", "weight": 9.0}, {"version": "v2", "weight": 1.0}]
    server.status = 200
    server.body = json.dumps({"id": "acme/sql", "aliases": {"stable": shares}}).encode()
    store = server.store()

    assert await store.aliases("acme", "sql") == held
    assert await store.set_alias("acme", "sql", "stable", held["stable"]) == held
    await store.set_alias("acme", "sql", "old", ())

    path = "/v1/adapters/acme/sql/aliases"
    assert [asked[:2] for asked in server.asked] == [
        ("GET", path),
        ("PUT", f"{path}/stable"),
        ("DELETE", f"{path}/old"),
    ]
    assert json.loads(server.asked[1][3]) == {"versions": shares}


@pytest.mark.parametrize(
    "url",
    [
        "https://",
        "https://host:0",
        "https://host:99999",
        "https://host/v1",
        "https://host#x",
        "https://host?x=1",
        "https://host?x",
        "http://[::1",
    ],
)
def test_a_url_that_is_no_server_s_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        open_store(url)


def test_a_key_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store("https://user:canary@host")
    assert "canary" not in caught.value.message


@pytest.mark.parametrize("key", ["", "a b", "a\nb", "é", "a\r\nX: y"])
def test_a_key_that_cannot_be_one_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_store("https://host", api_key=key)
    assert not key or key not in caught.value.message


@pytest.mark.parametrize("url", ["http://host", "http://10.0.0.1:8000", "http://localhost.evil"])
def test_a_key_does_not_cross_a_network_in_the_clear(url: str) -> None:
    with pytest.raises(InvalidInput, match="unencrypted"):
        open_store(url, api_key="k")
    assert open_store(url).location.startswith("http://")
    assert open_store(f"{url}?plain_http=1", api_key="k").location.startswith("http://")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]"])
def test_a_key_goes_to_this_machine_without_tls(host: str) -> None:
    store = open_store(f"http://{host}:8000", api_key="canary")

    assert store.location == f"http://{host}:8000"


def test_no_representation_shows_the_key() -> None:
    assert "canary" not in repr(ServerSettings.from_url("https://host", "canary"))
