"""All secrets that a router knows or is shown, at work and in trouble: it writes none of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import trustme

from mural_resolvers.errors import MuralError
from mural_resolvers.redaction import RedactingFormatter
from mural_resolvers.tenants import TenantsFile, mint_key
from mural_router import commands
from mural_router.config import Config
from mural_router.http.scan import plain_request
from mural_router.settings import Secrets
from tests.mural_router.ready_server import control

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BOUND_S = 60.0
ACME, WRONG = mint_key(), mint_key()
# Right id, another secret: what is sent by mistake or to guess is nobody else's business either.
GUESS = f"mural_{ACME.key_id}_{WRONG.key[-43:]}"
KEYS = (ACME.key, GUESS)
ADMIN = "the-admins-key-from-the-environment"
ROUTER_TOKEN = "the-token-that-mural-servers-know"
CONTROL_TOKEN = "the-token-of-the-control-api"
VLLM_KEY = "the-key-of-the-vllm-pods"
REDIS_PASSWORD = "the-password-of-the-store"
COLLECTOR_PASSWORD = "the-password-of-the-collector"
SECRETS = (
    *(key[-43:] for key in KEYS),
    # What is left of a key that was cut off would still be most of it.
    *(key[-43:-23] for key in KEYS),
    *(ADMIN, ROUTER_TOKEN, CONTROL_TOKEN, VLLM_KEY, REDIS_PASSWORD, COLLECTOR_PASSWORD),
)
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CHANCES = ("fine", "unknown", "garbage", "closed", "fault", "cut")
"""What a replica does with a request whose prompt begins so."""
ADAPTERS = 8
"""So many that each of two replicas is the home of some."""


def found_in(written: dict[str, str]) -> set[tuple[str, str]]:
    return {
        (name, secret) for name, text in written.items() for secret in SECRETS if secret in text
    }


# -- who the router speaks to ----------------------------------------------------------------------


def answer(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body


PAGES = {
    b"GET /health": b"",
    b"GET /metrics": b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n",
    b"GET /v1/models ": b'{"object":"list","data":[{"id":"base","parent":null}]}',
}
USAGE = b'"usage":{"prompt_tokens":3,"completion_tokens":2}'


def quoting(head: bytes) -> str:
    """All that was sent, on one line of an answer's head."""
    return head.decode("latin-1").replace("\r\n", " ")


async def pod(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A replica that says back, where it fails, what it was sent."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        body = await reader.readexactly(int(length[1])) if length else b""
        page = next((page for path, page in PAGES.items() if head.startswith(path)), None)
        if page is not None:
            writer.write(answer(page))
        elif b'"unknown' in body:
            writer.write(answer(head, f"401 {quoting(head)}", f"x-why: {quoting(head)}\r\n"))
        elif b'"garbage' in body:
            writer.write(b"HTTP/9 " + head)
        elif b'"closed' in body:
            return
        elif b'"fault' in body:
            writer.write(answer(b'{"error":{"message":"out of order"}}', "500 Fault"))
        elif b'"cut' in body:
            writer.write(answer(b"x" * 100)[:-50])
            return
        else:
            writer.write(answer(b'{"id":"1","choices":[],' + USAGE + b"}"))


async def refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A replica, or its control API, that knows nobody, and quotes who asks."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = json.dumps({"error": {"message": quoting(head)}}).encode()
    writer.write(answer(body, f"401 {quoting(head)}", f"x-why: {quoting(head)}\r\n"))


async def babbling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A control API whose events are no events, and quote who asks."""
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: " + json.dumps(quoting(head)).encode() + b"\n\n")


async def no_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Where HTTP is spoken without TLS."""
    await reader.read(1)
    writer.write(answer(b"HTTP is wanted", "400 Bad Request"))


async def store(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A Redis that takes no password, and quotes it."""
    while data := await reader.read(65536):
        writer.write(b"-WRONGPASS " + data.replace(b"\r\n", b" ") + b"\r\n")


@dataclass
class Collector:
    """Keeps spans, and says that it does not take them."""

    spans: list[bytes] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = LENGTH.search(head)
        assert length
        self.spans.append(await reader.readexactly(int(length[1])))
        writer.write(answer(b"", "400 No", "connection: close\r\n"))


# -- the router ------------------------------------------------------------------------------------


@dataclass
class Router:
    process: asyncio.subprocess.Process
    folder: Path
    port: int
    admin: str
    context: ssl.SSLContext

    def written(self) -> dict[str, str]:
        return {
            "standard error": (self.folder / "stderr").read_text(),
            "standard output": (self.folder / "stdout").read_text(),
            "access log": (self.folder / "access.jsonl").read_text(),
        }

    async def says(self, pattern: str, seen: int = 0) -> str:
        async with asyncio.timeout(BOUND_S):
            while True:
                log = (self.folder / "stderr").read_text()
                if len(found := re.findall(pattern, log)) > seen:
                    return str(found[seen])
                assert self.process.returncode is None, log
                await asyncio.sleep(0.02)


@pytest.fixture
async def collector() -> Collector:
    return Collector()


@pytest.fixture(params=["plain", pytest.param("traced", marks=pytest.mark.slow)])
async def router(
    request: pytest.FixtureRequest, collector: Collector, tmp_path: Path
) -> AsyncIterator[Router]:
    """One over TLS, with replicas, a store and a collector that refuse it and quote it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "cert.pem"))
    tenant = {"id": "acme", "keys": [{"id": ACME.key_id, "sha256": ACME.sha256}]}
    (tmp_path / "tenants.yaml").write_text(json.dumps({"tenants": [tenant]}))
    tokens = {
        "router-token": ROUTER_TOKEN,
        "control-token": CONTROL_TOKEN,
        "vllm-api-key": VLLM_KEY,
    }
    flags = []
    for name, token in tokens.items():
        (tmp_path / name).write_text(token)
        flags += [f"--{name}-file", str(tmp_path / name)]
    async with AsyncExitStack() as held:

        async def serve(handler: Handler) -> int:
            async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                # The router may have gone on before it was answered.
                with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                    await handler(reader, writer)
                writer.close()

            server = await asyncio.start_server(handle, "127.0.0.1", 0)
            held.callback(server.close)
            return int(server.sockets[0].getsockname()[1])

        replica, refuses = await serve(pod), await serve(refusing)
        replicas = [
            f"http://127.0.0.1:{replica},engine=vllm",
            f"http://127.0.0.1:{await serve(pod)},control={await serve(control)}",
            f"http://127.0.0.1:{refuses},engine=vllm",
            f"http://127.0.0.1:{refuses},name=strange,control={await serve(refusing)}",
            f"http://127.0.0.1:{refuses},name=babbling,control={await serve(babbling)}",
            f"https://127.0.0.1:{await serve(no_tls)},name=no-tls,engine=vllm",
        ]
        settings = {"replicas": replicas, "breaker": {"failures": 1000}, "queue": {"wait_s": 0.2}}
        (tmp_path / "config.yaml").write_text(json.dumps(settings))
        environment = os.environ | {
            "MURAL_API_KEY": ADMIN,
            "MURAL_REDIS_URL": f"redis://router:{REDIS_PASSWORD}@127.0.0.1:{await serve(store)}/0",
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={COLLECTOR_PASSWORD}",
        }
        if request.param == "traced":
            user = f"collector:{COLLECTOR_PASSWORD}"
            flags.append("--otlp-traces-endpoint")
            flags.append(f"http://{user}@127.0.0.1:{await serve(collector.serve)}/v1/traces")
        out, err = (held.enter_context((tmp_path / n).open("wb")) for n in ("stdout", "stderr"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mural_router.commands", "--host", "127.0.0.1", *flags),
            *("--port", "0", "--admin-port", "0", "--log-level", "debug"),
            *("--config", str(tmp_path / "config.yaml")),
            *("--tenants-file", str(tmp_path / "tenants.yaml")),
            *("--access-log", str(tmp_path / "access.jsonl")),
            *("--ssl-certfile", str(tmp_path / "cert.pem")),
            *("--ssl-keyfile", str(tmp_path / "cert.pem")),
            stdout=out,
            stderr=err,
            env=environment,
        )
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        router = Router(process, tmp_path, 0, "", context)
        try:
            router.port = int(await router.says(r"routing on https://127\.0\.0\.1:(\d+)"))
            router.admin = await router.says(r"admin pages on (\S+)")
            yield router
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


# -- what it is asked ------------------------------------------------------------------------------


def bodies(key: str) -> Iterator[tuple[str, object]]:
    """A path, and a body that has the key somewhere in it."""
    prompt = {"model": "acme:v1", "prompt": "x"}
    for model in (key, f"acme:{key}", f"{key}:v1", f"acme/{key}:v1", f"x {key}", "/" * 60 + key):
        yield "/v1/completions", {"model": model, "prompt": "x"}
        yield "/v1/completions", {"model": model, "prompt": "unknown"}
        yield "/v1/embeddings", {"model": model, "input": "x"}
    for extra in (
        {key: 1},
        {"stream": key},
        {"user": key},
        {"cache_salt": key},
        {"max_tokens": key},
        {"stream_options": {key: key}},
        {"n": key},
    ):
        yield "/v1/completions", prompt | extra
    yield "/v1/completions", key
    yield "/v1/completions", {"model": "acme:v1", "prompt": f"unknown {key * 20}"}
    yield "/v1/chat/completions", {"model": "acme:v1", "messages": [{"role": key, "content": "x"}]}
    yield "/v1/chat/completions", {"model": "acme:v1", "messages": key}
    yield f"/{key}", {}
    yield f"/v1/completions?api_key={key}", prompt
    yield f"/v1/adapters/{key}/default/v1", prompt
    yield f"/v1/adapters/acme/{key}/v1?tenant={key}", prompt


def heads(key: str) -> Iterator[dict[str, str]]:
    """Headers that have the key in them, rightly or not."""
    yield {"authorization": f"Bearer {key}"}
    for scheme in ("Basic", "Token", "", "Bearer Bearer"):
        yield {"authorization": f"{scheme} {key}".strip()}
    yield {"x-api-key": key, "x-mural-tenant": key, "x-request-id": key, key: "1"}
    yield {"authorization": f"Bearer {key}", "x-request-id": key, "x-session-id": key}
    yield {"authorization": f"Bearer {key}", "content-type": key, "content-encoding": key}
    yield {"authorization": f"Bearer {key}", "traceparent": key, "tracestate": f"a={key}"}


async def send_all(router: Router, client: httpx.AsyncClient, key: str) -> list[str]:
    """Send the key everywhere; give the text of every answer that is an error or a list."""
    told: list[str] = []

    def note(response: httpx.Response) -> None:
        if response.status_code >= 400:
            told.extend((response.text, str(response.headers)))

    for path, body in bodies(key):
        for used in {key, ACME.key, ADMIN}:
            head = {"authorization": f"Bearer {used}"}
            note(await client.post(path, json=body, headers=head))
    for headers in heads(key):
        for path in ("/v1/models", f"/v1/models/{key}", f"/v1/models/acme:{key}?key={key}"):
            note(await client.get(path, headers=headers))
        malformed = b"{" + key.encode()
        note(await client.post("/v1/completions", content=malformed, headers=headers))
        asked = {"model": "acme:v1", "prompt": "x"}
        note(await client.post("/v1/completions", json=asked, headers=headers))
    for tls in (router.context, None):
        # Plain HTTP where TLS is spoken, too.
        told.append(await raw(router, f"GET / HTTP/1.1\r\n{key}\r\n\r\n", tls))
        told.append(await raw(router, f"{key} /{key} HTTP/9\r\n\r\n", tls))
        told.append(await raw(router, f"GET /v1/models HTTP/1.1\r\nauthorization: {key}", tls))
    return told


async def fail_all(client: httpx.AsyncClient) -> list[str]:
    """Good requests that meet replicas in every kind of trouble; the errors' text."""
    told: list[str] = []
    head = {"authorization": f"Bearer {ACME.key}"}
    for chance in CHANCES:
        for n in range(ADAPTERS):
            body = {"model": f"acme/a{n}:v1", "prompt": chance, "stream": n % 2 == 0}
            try:
                response = await client.post("/v1/completions", json=body, headers=head)
            except httpx.RemoteProtocolError:
                assert chance == "cut"
                continue
            assert (response.status_code == 200) == (chance == "fine"), (chance, response.text)
            told.extend((response.text, str(response.headers)))
    return told


async def raw(router: Router, text: str, tls: ssl.SSLContext | None) -> str:
    """What is answered to bytes that are not HTTP, or half of it."""
    async with asyncio.timeout(BOUND_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, ssl=tls)
        writer.write(text.encode())
        if tls is None or text.endswith("\r\n\r\n"):
            try:
                answered = await reader.read()
            except ConnectionError:
                answered = b""
        else:
            answered = b""
        writer.close()
    return answered.decode("latin-1")


async def pages(router: Router, key: str) -> dict[str, str]:
    paths = ["/metrics", "/ready", "/debug/fleet", "/debug/limits", "/debug/objects", f"/{key}"]
    names = (f"acme:{key}", key, f"x {key}")
    paths += [f"/debug/placement?model={name}&session={key}" for name in names]
    async with httpx.AsyncClient(base_url=router.admin, timeout=BOUND_S) as client:
        answers = [await client.get(path) for path in paths]
        return {
            path.replace(key, "KEY"): answer.text + str(answer.headers)
            for path, answer in zip(paths, answers, strict=True)
        }


async def test_no_secret_is_in_anything_that_a_router_writes(
    router: Router, collector: Collector, tmp_path: Path
) -> None:
    limits = httpx.Limits(max_connections=4)
    async with httpx.AsyncClient(
        base_url=f"https://127.0.0.1:{router.port}",
        verify=router.context,
        timeout=BOUND_S,
        limits=limits,
    ) as client:
        told = await fail_all(client)
        for key in KEYS:
            told += await send_all(router, client, key)
        # Tokens that are renewed wrongly, and settings that say too much.
        (tmp_path / "router-token").write_text(f"{ROUTER_TOKEN} and {ROUTER_TOKEN}")
        (tmp_path / "config.yaml").write_text(f"router_token: {ROUTER_TOKEN}\n")
        (tmp_path / "tenants.yaml").write_text(f"tenants: [{{id: acme, keys: [{ACME.key}]}}]\n")
        await router.says("router token.* refused|refused.*router.token|router_token_file")
        await router.says("the settings are refused")
        await router.says("tenants.*refused|refused.*tenants")
    written = {"error bodies": "\n".join(told), **await pages(router, ACME.key)}
    router.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(BOUND_S):
        assert await router.process.wait() == 0
    written |= router.written() | {"spans": b"\n".join(collector.spans).decode()}

    # All of it was there to be told of.
    for trouble in (
        "the store of limits is out of reach (AuthenticationError)",
        "answers 401: it does not accept what this router shows it",
        "its head is not proper HTTP/1.1",
        "replica strange (mural): not ready",
        "replica no-tls (vllm): not ready",
    ):
        assert trouble in written["standard error"]
    assert ACME.key_id in written["access log"]
    carried = re.search(
        r'^mural_router_express_total\{outcome="whole"\} ([1-9]\S*)$',
        written["/metrics"],
        re.MULTILINE,
    )
    traced = "mural-router" in written["spans"]
    assert (carried is not None) == (not traced and plain_request is not None)
    assert ("Failed to export spans batch code: 400" in written["standard error"]) == traced
    assert not found_in(written)


# -- files that change -----------------------------------------------------------------------------

SETTINGS = (
    f"router_token: {ROUTER_TOKEN}",
    f"redis: {{url: 'redis://:{REDIS_PASSWORD}@127.0.0.1'}}",
    f"redis: {{password: {REDIS_PASSWORD}}}",
    f"replicas: ['http://user:{VLLM_KEY}@127.0.0.1:1']",
    f"replicas: ['http://127.0.0.1:1,key={ACME.key}']",
    f"replicas: ['http://127.0.0.1:1/{ACME.key}']",
    f"replicas: ['{ACME.key}']",
    f"queue: {{wait_s: {ACME.key}}}",
    f"queue: {REDIS_PASSWORD}",
    f"queue: {{{ACME.key}: 1}}",
    f"{ACME.key}: 1",
    f"aliases_file: /nowhere/{ACME.key}",
    f"retry: [{ROUTER_TOKEN}",
    f'"{CONTROL_TOKEN}: 1',
    f"{CONTROL_TOKEN}\x00",
    f"- {CONTROL_TOKEN}",
    f"x: !!{ACME.key} {CONTROL_TOKEN}",
    f"x: *{ACME.key}",
    f"log_level: {CONTROL_TOKEN}",
    f"auth: {ADMIN}",
)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the process would write to standard error."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logger = logging.getLogger("mural")
    logger.addHandler(handler)
    yield written
    logger.removeHandler(handler)


# Keys are drawn anew in each process, and no name of a test may hold one.
@pytest.mark.parametrize("text", SETTINGS, ids=[f"settings{at}" for at in range(len(SETTINGS))])
async def test_settings_that_are_refused_are_told_without_what_they_hold(
    text: str, tmp_path: Path, log: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("queue: {wait_s: 1}")
    config = Config(path, {}, Secrets())
    path.write_text(text)
    for _ in range(2):
        await config.poll(lambda settings: None)
    assert commands.main(["--config", str(path)]) == 1

    assert config.numbers.refused == 1
    written = {"log": log.getvalue(), "at the start": capsys.readouterr().err}
    assert "refused" in written["log"]
    assert not found_in(written)


TENANTS = (
    f"tenants: [{{id: acme, keys: [{ACME.key}]}}]",
    f"tenants: [{{id: '{ACME.key}'}}]",
    f"tenants: [{{id: acme, {GUESS}: 1}}]",
    f"tenants: [{{id: acme, keys: [{{id: {ACME.key_id}, sha256: '{ACME.key[-43:]}'}}]}}]",
    f"tenants: [{{id: acme, keys: [{{id: '{ACME.key}', sha256: '{ACME.sha256}'}}]}}]",
    f"tenants: [{{id: acme, grants: ['{ACME.key}!']}}]",
    f"tenants: [{{id: acme, weight: {ACME.key}}}]",
    f"admin_keys: ['{ADMIN}']",
    f"admin_keys: {ADMIN}",
    f"tenants: ['{ADMIN}",
)


@pytest.mark.parametrize("text", TENANTS, ids=[f"tenants{at}" for at in range(len(TENANTS))])
async def test_tenants_that_are_refused_are_told_without_their_keys(
    text: str, tmp_path: Path, log: io.StringIO
) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("tenants: []")
    tenants = TenantsFile(path)
    path.write_text(text)
    for _ in range(2):
        await tenants.look()
    with pytest.raises(MuralError) as caught:
        TenantsFile(path)

    written = {"log": log.getvalue(), "at the start": caught.value.message}
    assert "refused" in written["log"]
    assert not found_in(written)
