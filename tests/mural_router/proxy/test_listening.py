"""How the port treats clients: bounds on time, size and number, paths, and TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from mural_resolvers.errors import Unauthorized
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.settings import HttpSettings, TlsSettings

if TYPE_CHECKING:
    from tests.mural_router.proxy.conftest import MakeStand
    from tests.mural_router.proxy.scripted_replica import Received

GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


async def echo(received: Received) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(received.body)
    await received.send(head + received.body)


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


async def test_a_head_that_does_not_end_is_answered_408_and_closed(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, head_timeout_s=0.3))
    client = await here.client()
    client.send(b"GET / HTTP/1.1\r\nhost: a\r\n")
    status, fields, body = await client.answer()
    assert (status, code(body), fields["connection"]) == (408, "request_timeout", "close")
    assert await client.rest() == b""


async def test_a_head_that_drips_is_not_given_more_time(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, head_timeout_s=0.3))
    client = await here.client()

    async def drip() -> None:
        while True:
            client.send(b"a: b\r\n")
            await asyncio.sleep(0.02)

    client.send(b"GET / HTTP/1.1\r\n")
    dripping = asyncio.create_task(drip())
    assert (await client.answer())[0] == 408
    dripping.cancel()


async def test_a_body_that_does_not_end_is_answered_408_and_given_up(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, body_timeout_s=0.3))
    client = await here.client()
    client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n12345")
    assert (await client.answer())[0] == 408
    assert here.routing.asks == []
    assert here.proxy.state().buffered_bytes == 0


async def test_an_idle_connection_ends_without_a_word(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, keep_alive_s=0.3))
    client = await here.client()
    assert await client.rest() == b""
    client = await here.client()
    client.send(GET)
    assert (await client.answer())[0] == 200
    assert await client.rest() == b""


async def test_too_large_a_head_is_431(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, max_head_bytes=1000, max_head_fields=10))
    client = await here.client()
    client.send(b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 2000)
    assert (await client.answer())[0] == 431
    client = await here.client()
    client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 10 + b"\r\n")
    assert (await client.answer())[0] == 431


async def test_too_large_a_body_is_413_before_it_is_sent(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, max_body_bytes=10))
    client = await here.client()
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
        b"content-length: 11\r\n\r\n"
    )
    status, fields, _ = await client.answer()
    assert (status, fields["connection"]) == (413, "close")


async def test_a_client_that_sends_on_reads_its_413(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, max_body_bytes=10))
    client = await here.client()
    client.post(b"x" * 4_000_000)
    assert (await client.answer())[0] == 413


async def test_a_chunked_body_is_bounded_as_well(stand: MakeStand) -> None:
    here = await stand(echo, settings=HttpSettings(port=0, max_body_bytes=10))
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    client = await here.client()
    client.send(head + chunk(b"12345") + chunk(b"67890") + LAST_CHUNK + GET)
    assert (await client.answer())[2] == b"1234567890"
    assert (await client.answer())[0] == 200
    client.send(head + chunk(b"12345") + chunk(b"678901"))
    assert (await client.answer())[0] == 413


async def test_all_bodies_together_are_bounded(stand: MakeStand) -> None:
    here = await stand(echo, settings=HttpSettings(port=0, max_buffered_bytes=100))
    here.routing.gate = asyncio.Event()
    first, second = await here.client(), await here.client()
    first.post(b"x" * 90)
    await here.routing.asked()
    second.post(b"x" * 20)
    status, fields, _ = await second.answer()
    assert (status, fields["retry-after"]) == (503, "1")
    here.routing.gate.set()
    assert (await first.answer())[0] == 200
    assert here.proxy.state().buffered_bytes == 0


async def test_connections_are_bounded(stand: MakeStand) -> None:
    here = await stand(settings=HttpSettings(port=0, max_connections=2))
    clients = [await here.client() for _ in range(2)]
    for client in clients:
        client.send(GET)
        await client.answer()
    third = await here.client()
    assert (await third.answer())[0] == 503
    assert await third.rest() == b""


async def test_a_client_is_told_to_send_its_body(stand: MakeStand) -> None:
    here = await stand(echo)
    client = await here.client()
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-Continue\r\n"
        b"content-length: 3\r\n\r\n"
    )
    assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"abc")
    assert (await client.answer())[2] == b"abc"


async def test_another_expectation_fails(stand: MakeStand) -> None:
    here = await stand()
    client = await here.client()
    client.send(b"GET /health HTTP/1.1\r\nhost: a\r\nexpect: miracles\r\n\r\n")
    assert (await client.answer())[0] == 417


async def test_a_client_that_sends_far_ahead_is_held_back_and_answered(stand: MakeStand) -> None:
    here = await stand(echo)
    client = await here.client()
    for i in range(40):
        client.post(b"%d" % i * 10_000)
    for i in range(40):
        assert (await client.answer())[2] == b"%d" % i * 10_000


async def test_many_requests_at_once_are_no_deep_recursion(stand: MakeStand) -> None:
    here = await stand()
    client = await here.client()
    client.send(GET * 3000)
    for _ in range(3000):
        assert (await client.answer())[0] == 200


async def test_a_client_that_takes_no_answers_is_asked_for_no_more_requests(
    stand: MakeStand,
) -> None:
    here = await stand(settings=HttpSettings(port=0, stall_timeout_s=0.5))
    client = await here.client()
    client.reader._limit = 1024  # type: ignore[attr-defined] # the stream's own buffer takes none
    request = b"GET /v1/models/%b HTTP/1.1\r\nhost: a\r\n\r\n" % (b"x" * 20_000)

    async def flood() -> None:
        while True:
            client.send(request)
            await client.writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(flood(), 20)
    # What the kernel's buffers hold on both sides, and not what a client likes to send.
    assert here.proxy.state().requests_total < 1500
    assert here.proxy.state().connections == 0


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /health", 200),
        ("GET /version", 200),
        ("GET /v1/models", 200),
        ("GET /v1/models/acme/support:v3", 200),
        ("GET http://a/health", 200),
        ("POST /health", 405),
        ("GET /v1/completions", 405),
        ("DELETE /v1/models/x", 405),
        ("GET /", 404),
        ("GET /metrics", 404),
        ("GET /ready", 404),
        ("GET /docs", 404),
        ("GET /openapi.json", 404),
        ("GET /mural/v1/state", 404),
        ("PUT /mural/v1/resident", 404),
        ("POST /v1/load_lora_adapter", 404),
        ("POST /v1/unload_lora_adapter", 404),
        ("POST /v1/pin_lora_adapter", 404),
        ("POST //v1/completions", 404),
        ("POST /v1/completions/", 404),
        ("POST /V1/completions", 404),
        ("POST /v1/%63ompletions", 404),
        ("POST /v1/adapters/../load_lora_adapter", 404),
        ("POST /v1/adapters/%2e%2e/load_lora_adapter", 404),
        ("POST /v1/adapters/..%2fload_lora_adapter", 404),
        ("POST /v1/adapters//metrics", 404),
        ("GET /v1/adapters/%ff", 404),
        ("GET /v1/adapters/a%00b", 404),
        ("GET /v1/adaptersx", 404),
        ("PATCH /v1/adapters/a", 405),
        ("OPTIONS /v1/completions", 405),
        ("CONNECT a:443", 400),
        ("OPTIONS *", 400),
        ("GET http://b/health", 400),
        ("GET http://a@b/health", 400),
        ("GET health", 400),
        ("get /health", 400),
    ],
)
async def test_only_known_paths_have_answers(
    stand: MakeStand, request_line: str, status: int
) -> None:
    here = await stand()
    client = await here.client()
    client.send(f"{request_line} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    assert (await client.answer())[0] == status
    assert here.replicas == []


async def test_a_405_says_what_is_allowed(stand: MakeStand) -> None:
    here = await stand()
    client = await here.client()
    client.send(b"GET /tokenize HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[1]["allow"] == "POST"


async def test_head_is_answered_without_a_body(stand: MakeStand) -> None:
    here = await stand()
    client = await here.client()
    client.send(b"HEAD /version HTTP/1.1\r\nhost: a\r\n\r\n" + GET)
    assert b"content-length: 19\r\n" in await client.until(b"\r\n\r\n")
    assert (await client.answer())[0] == 200


async def test_http_1_0_is_enough_for_a_probe_and_not_for_a_stream(stand: MakeStand) -> None:
    here = await stand()
    client = await here.client()
    client.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await client.rest()).startswith(b"HTTP/1.1 200 OK\r\n")
    client = await here.client()
    client.send(b"POST /v1/completions HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
    assert (await client.answer())[0] == 505


async def test_models_are_answered_by_routing(stand: MakeStand) -> None:
    here = await stand()
    client = await here.client()
    client.send(
        b"GET /v1/models/acme%2Fsupport:v3 HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\n\r\n"
    )
    assert (await client.answer())[2] == b'{"id":"acme/support:v3"}'
    here.routing.error = Unauthorized()
    client.send(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[0] == 401
    assert here.routing.asks[0].authorization == ("Bearer k",)


async def test_a_client_that_closes_its_half_is_gone(stand: MakeStand) -> None:
    here = await stand(echo)
    here.routing.gate = asyncio.Event()
    client = await here.client()
    client.post(b"{}")
    await here.routing.asked()
    client.writer.write_eof()
    async with asyncio.timeout(20):
        await here.routing.ended.wait()
    assert here.routing.cancelled == 1


class Certificates:
    """One authority's, in files."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)
        self._folder = folder

    def issue(self, name: str) -> tuple[str, str]:
        certificate = self.authority.issue_cert("127.0.0.1", "localhost", name)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        return str(cert), str(key)

    def spoil(self, key: str) -> None:
        Path(key).write_text("no key")

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)


async def test_tls_on_both_sides_with_certificates_of_both(
    stand: MakeStand, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path)
    cert, key = certificates.issue("router.test")
    replica_cert, replica_key = certificates.issue("replica.test")
    here = await stand(
        echo,
        settings=HttpSettings(
            port=0,
            tls=TlsSettings(
                certfile=cert,
                keyfile=key,
                replica_ca_file=certificates.ca,
                replica_certfile=cert,
                replica_keyfile=key,
            ),
        ),
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.load_cert_chain(replica_cert, replica_key)
    context.verify_mode = ssl.CERT_REQUIRED
    here.replicas[0].close()
    endpoint = await here.replicas[0].listen("r0", context=context)
    here.routing.endpoints = [replace(endpoint, host="localhost")]
    reader, writer = await asyncio.open_connection(
        "localhost", here.proxy.port, ssl=certificates.client_context()
    )
    for size in (10, 1_000_000):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size
            + b"x" * size
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert await reader.readexactly(size) == b"x" * size
    here.proxy.reload_certificates()
    certificates.spoil(key)
    with pytest.raises(ValueError, match="certificate"):
        here.proxy.reload_certificates()
    _, again = await asyncio.open_connection(
        "localhost", here.proxy.port, ssl=certificates.client_context()
    )
    again.close()
    writer.close()


async def test_a_replica_of_another_authority_is_not_spoken_to(
    stand: MakeStand, tmp_path: Path
) -> None:
    certificates = Certificates(tmp_path)
    here = await stand(
        echo, settings=HttpSettings(port=0, tls=TlsSettings(replica_ca_file=certificates.ca))
    )
    stranger = trustme.CA().issue_cert("localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    stranger.configure_cert(context)
    here.replicas[0].close()
    endpoint = await here.replicas[0].listen("r0", context=context)
    here.routing.endpoints = [replace(endpoint, host="localhost")]
    client = await here.client()
    client.post(b"{}")
    assert (await client.answer())[0] == 503
    assert here.replicas[0].requests == []


async def test_a_port_that_is_taken_is_said_at_the_start(stand: MakeStand) -> None:
    here = await stand()
    with pytest.raises(OSError, match="in use"):
        await stand(settings=HttpSettings(port=here.proxy.port))
