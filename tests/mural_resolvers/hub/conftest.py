"""A small Hugging Face hub of this project's own, for tests; no part of any real one.

It answers what huggingface_hub's client asks for downloads, in the forms of the real hub:
descriptions, trees in pages, ``resolve`` with LFS files on another host, gated and private
repositories. ``test_small_hub.py`` holds it to huggingface_hub's own client.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import trustme

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.hub import HubResolver, HubSettings
from mural_resolvers.names import parse_name
from mural_resolvers.resolver import AdapterDescription
from mural_resolvers.tenants import Principal

TOKEN = "hf_readerreaderreader"
OTHER_TOKEN = "hf_strangerstranger"


@dataclass
class Asked:
    """A request as it came in; ``server`` is ``hub`` or ``store``."""

    server: str
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]

    @property
    def token(self) -> str | None:
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None


@dataclass
class Answer:
    """What is sent back; ``cut_at`` ends the body early, ``hangs`` sends nothing at all."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_at: int | None = None
    hangs: bool = False
    hangs_in_body: bool = False


Alter = Callable[[Asked, Answer], Answer | None]


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=lambda: {TOKEN})
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pointer(data: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
        sha256(data).encode(),
        len(data),
    )


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


class SmallHub:
    """The hub and, on a port of its own, the store of its LFS files.

    ``alter`` sees each answer before it is sent, and may give another. ``asked`` lists requests.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.tokens = {TOKEN, OTHER_TOKEN}
        self.page_size = 1000
        self.asked: list[Asked] = []
        self.alter: Alter = lambda asked, answer: None
        self.released = threading.Event()
        self._lfs: dict[str, bytes] = {}
        self._servers = [self._serve("hub", self._hub, tls), self._serve("store", self._store, tls)]
        scheme = "http" if tls is None else "https"
        self.url, self.store_url = (
            f"{scheme}://localhost:{server.server_address[1]}" for server in self._servers
        )

    def add(self, repo: str, files: dict[str, bytes], *refs: str, **repo_fields: Any) -> str:
        """Commit files and point refs (``main`` without any) at the commit."""
        known = self.repos.setdefault(repo, Repo())
        for key, value in repo_fields.items():
            setattr(known, key, value)
        parts = [f"{path} {sha256(data)}" for path, data in sorted(files.items())]
        commit = hashlib.sha1(f"{repo} {len(known.commits)} {parts}".encode()).hexdigest()
        known.commits[commit] = files
        known.refs.update(dict.fromkeys(refs or ("main",), commit))
        self._lfs.update({sha256(data): data for path, data in files.items() if is_lfs(path)})
        return commit

    def close(self) -> None:
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def paths(self, server: str = "hub") -> list[str]:
        return [f"{a.method} {a.path}" for a in self.asked if a.server == server]

    # -- answers ----------------------------------------------------------------------------------

    def _hub(self, asked: Asked) -> Answer:
        if asked.token is not None and asked.token not in self.tokens:
            return Answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", asked.path):
            return self._described(asked, match[1], unquote(match[2] or "main"))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)(?:/(.*))?", asked.path):
            return self._tree(asked, match[1], unquote(match[2]))
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", asked.path):
            return self._resolve(asked, match[1], unquote(match[2]), unquote(match[3]))
        if match := re.fullmatch(
            r"/api/resolve-cache/models/([^/]+/[^/]+)/([^/]+)/(.+)", asked.path
        ):
            return self._cached(asked, match[1], match[2], unquote(match[3]))
        return Answer(404)

    def _found(
        self, asked: Asked, repo: str, revision: str
    ) -> tuple[Repo, str, dict[str, bytes]] | Answer:
        for known in (*self.moved, *self.repos):
            target = self.moved.get(known, known)
            if known.casefold() == repo.casefold() and target != repo:
                location = asked.path.replace(repo, target, 1)
                return Answer(307, {"Location": location})
        found = self.repos.get(repo)
        hidden = found is None or (found.private and asked.token not in found.readers)
        if hidden and asked.token is None:
            return Answer(401, {"X-Error-Message": "Invalid username or password."})
        if found is None or hidden:
            return refused(404, "RepoNotFound", "Repository not found")
        commit = found.refs.get(revision, revision)
        if commit not in found.commits:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found, commit, found.commits[commit]

    def _described(self, asked: Asked, repo: str, revision: str) -> Answer:
        found = self._found(asked, repo, revision)
        if isinstance(found, Answer):
            return found
        known, commit, files = found
        with_blobs = asked.query.get("blobs") in (["true"], ["True"])
        siblings: list[dict[str, object]] = []
        for path, data in files.items():
            sibling: dict[str, object] = {"rfilename": path}
            if with_blobs:
                sibling |= {"size": len(data), "blobId": git_sha1(blob_of(path, data))}
            if with_blobs and is_lfs(path):
                sibling["lfs"] = lfs_of(data) | {"sha256": sha256(data)}
            siblings.append(sibling)
        return as_json(
            {
                "_id": "0",
                "id": repo,
                "modelId": repo,
                "sha": commit,
                "private": known.private,
                "gated": "manual" if known.gated else False,
                "disabled": False,
                "tags": [],
                "siblings": siblings,
            }
        )

    def _tree(self, asked: Asked, repo: str, revision: str) -> Answer:
        found = self._found(asked, repo, revision)
        if isinstance(found, Answer):
            return found
        files = found[2]
        recursive = asked.query.get("recursive", ["false"])[0].lower() == "true"
        entries: dict[str, dict[str, object]] = {}
        for path, data in sorted(files.items()):
            top, slash, _ = path.partition("/")
            if slash:
                entries[top] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": top}
            if slash and not recursive:
                continue
            oid = git_sha1(blob_of(path, data))
            entry: dict[str, object] = {"type": "file", "oid": oid, "size": len(data), "path": path}
            entries[path] = entry | ({"lfs": lfs_of(data)} if is_lfs(path) else {})
        start = int(asked.query.get("cursor", ["0"])[0])
        page = list(entries.values())[start : start + self.page_size]
        answer = as_json(page)
        if start + self.page_size < len(entries):
            query = f"recursive={str(recursive).lower()}&expand=false"
            following = f"{self.url}{asked.path}?{query}&cursor={start + self.page_size}"
            answer.headers["Link"] = f'<{following}>; rel="next"'
        return answer

    def _resolve(self, asked: Asked, repo: str, revision: str, path: str) -> Answer:
        found = self._found(asked, repo, revision)
        if isinstance(found, Answer):
            return found
        known, commit, files = found
        if known.gated and asked.token not in known.readers:
            status = 401 if asked.token is None else 403
            return refused(status, "GatedRepo", f"Access to model {repo} is restricted.")
        if path not in files:
            return refused(404, "EntryNotFound", "Entry not found")
        data, headers = files[path], {"X-Repo-Commit": commit}
        if not is_lfs(path):
            where = f"/api/resolve-cache/models/{repo}/{commit}/{path}?etag=1"
            return Answer(307, headers | {"Location": where})
        return Answer(
            302,
            headers
            | {
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{sha256(data)}"',
                "Location": f"{self.store_url}/lfs/{sha256(data)}?signature=canary-signature",
            },
        )

    def _cached(self, asked: Asked, repo: str, commit: str, path: str) -> Answer:
        found = self._found(asked, repo, commit)
        if isinstance(found, Answer):
            return found
        data = found[2][path]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{git_sha1(data)}"'}
        return ranged(asked, data, headers)

    def _store(self, asked: Asked) -> Answer:
        data = self._lfs.get(asked.path.removeprefix("/lfs/"))
        if data is None or asked.query.get("signature") != ["canary-signature"]:
            return Answer(403)
        if "authorization" in asked.headers:
            # An object store takes a signed URL or credentials, not both.
            return Answer(400)
        return ranged(asked, data, {"ETag": '"of-the-store"'})

    # -- a server ---------------------------------------------------------------------------------

    def _serve(
        self, name: str, answers: Callable[[Asked], Answer], tls: ssl.SSLContext | None
    ) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # A body cut short leaves a kept connection in no order.
            timeout = 60

            def _any(self) -> None:
                parts = urlsplit(self.path)
                headers = {key.lower(): value for key, value in self.headers.items()}
                asked = Asked(name, self.command, parts.path, parse_qs(parts.query), headers)
                hub.asked.append(asked)
                answer = answers(asked)
                self._send(hub.alter(asked, answer) or answer)

            do_GET = do_HEAD = _any

            def _send(self, answer: Answer) -> None:
                if answer.hangs:
                    hub.released.wait()
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                headers = {"Content-Length": str(len(answer.body))} | answer.headers
                if "Transfer-Encoding" in headers:
                    del headers["Content-Length"]
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body[: answer.cut_at])
                    self.wfile.flush()
                if answer.hangs_in_body:
                    hub.released.wait()
                if answer.cut_at is not None:
                    self.close_connection = True

            def log_message(self, format: str, *args: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                # Clients that hang up are what some tests are about.
                return

        server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


def blob_of(path: str, data: bytes) -> bytes:
    return pointer(data) if is_lfs(path) else data


def lfs_of(data: bytes) -> dict[str, object]:
    return {"oid": sha256(data), "size": len(data), "pointerSize": len(pointer(data))}


def refused(status: int, code: str, message: str) -> Answer:
    return Answer(status, {"X-Error-Code": code, "X-Error-Message": message})


def as_json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())


def ranged(asked: Asked, data: bytes, headers: dict[str, str]) -> Answer:
    headers = headers | {"Accept-Ranges": "bytes"}
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", asked.headers.get("range", ""))
    if match is None:
        return Answer(200, headers, data)
    start, stop = int(match[1]), min(int(match[2] or len(data)) + 1, len(data))
    if start >= len(data):
        return Answer(416, headers | {"Content-Range": f"bytes */{len(data)}"})
    content_range = f"bytes {start}-{stop - 1}/{len(data)}"
    return Answer(206, headers | {"Content-Range": content_range}, data[start:stop])


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    made = SmallHub()
    yield made
    made.close()


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_hub(authority: trustme.CA) -> Iterator[SmallHub]:
    """The same over TLS; ``ca_file`` has its authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    made = SmallHub(context)
    yield made
    made.close()


@pytest.fixture(scope="session")
def ca_file(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("authority") / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def small_hub_tools() -> dict[str, Any]:
    """What tests say of a hub: its tokens, the form of an altered answer."""
    return {"token": TOKEN, "other_token": OTHER_TOKEN, "answer": Answer, "replace": replace}


@pytest.fixture
def settings(hub: SmallHub, ca_file: Path) -> HubSettings:
    """Asks the hub without a token. One authority is read faster than a machine's many."""
    return HubSettings(
        organisations=("acme",),
        endpoint=hub.url,
        ca_bundle=ca_file,
        answer_timeout_s=20,
        read_timeout_s=20,
    )


@pytest.fixture
async def make_resolver() -> AsyncIterator[Callable[[HubSettings], HubResolver]]:
    made: list[HubResolver] = []

    def make(settings: HubSettings) -> HubResolver:
        made.append(HubResolver(settings))
        return made[-1]

    yield make
    for resolver in made:
        await resolver.close()


@pytest.fixture
def adapter_files(write_adapter: Callable[..., Path], tmp_path: Path) -> dict[str, bytes]:
    """The files of an adapter, and others that a repository has beside them."""
    folder = write_adapter(tmp_path / "adapter")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {
        "README.md": b"# An adapter\n",
        "chat_template.jinja": b"{{ messages }}",
        "checkpoint-10/adapter_model.safetensors": b"not this one",
        "optimizer.bin": b"\0" * 64,
    }


@pytest.fixture
def with_token(
    settings: HubSettings, monkeypatch: pytest.MonkeyPatch, small_hub_tools: dict[str, Any]
) -> HubSettings:
    monkeypatch.setenv("MURAL_HUB_TOKEN", small_hub_tools["token"])
    return replace(settings, token_env="MURAL_HUB_TOKEN")


@pytest.fixture
def resolve(
    settings: HubSettings,
    make_resolver: Callable[[HubSettings], HubResolver],
    base_spec: BaseSpec,
) -> Callable[..., Any]:
    """``await resolve(name)``: what acme is told of it."""

    async def ask(
        text: str, settings: HubSettings = settings, resolver: HubResolver | None = None
    ) -> AdapterDescription | None:
        resolver = resolver or make_resolver(settings)
        return await resolver.resolve(Principal("acme"), parse_name(text), base_spec)

    return ask
