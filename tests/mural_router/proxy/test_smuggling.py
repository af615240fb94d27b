"""Requests of which two readers could see different ones: none of them is taken, none passes.

The classes are those of public lists: the mutations of a Transfer-Encoding of defparam's
`smuggler` (its exhaustive list: https://github.com/defparam/smuggler), the conformance cases of
`h1spec` (https://github.com/uNetworking/h1spec), RFC 9112 section 11.2, and the classes that "HTTP
Desync Attacks: Request Smuggling Reborn" (Kettle, 2019) names CL.TE, TE.CL, TE.TE and CL.CL.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest

from mural_router.http.scan import plain_request
from tests.mural_router.proxy.express_stage import Here, Setting, request
from tests.mural_router.proxy.scripted_replica import BOUND_S

if TYPE_CHECKING:
    from tests.mural_router.proxy.conftest import MakeStand, Stand
    from tests.mural_router.proxy.scripted_replica import Received

SMUGGLED = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
TE = b"Transfer-Encoding"
CHUNKED = b"0\r\n\r\n" + SMUGGLED


def with_gadget(gadget: bytes) -> bytes:
    """A request with a length that covers what a reader of ``gadget`` would take for the next."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n%b\r\ncontent-length: %d\r\n\r\n"
        % (gadget, len(CHUNKED))
        + CHUNKED
    )


def post(fields: bytes, body: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + fields + b"\r\n\r\n" + body


# smuggler's exhaustive list: a byte before, within, after the name, and after the value. A byte
# that HTTP allows there makes it a Transfer-Encoding beside a length; one that makes the name
# another one makes it a field like any other.
BYTES = [bytes([byte]) for byte in (*range(0x20), *range(0x7F, 0x100))]
WITH_A_BYTE = [
    *(TE + b":" + byte + b"chunked" for byte in BYTES if byte not in b"\n"),
    *(TE + byte + b": chunked" for byte in BYTES if byte not in b"\n"),
    *(byte + TE + b": chunked" for byte in BYTES if byte not in b"\n"),
    *(TE + b": chunked" + byte for byte in BYTES if byte not in b"\n"),
]
WITH_MORE = [
    b" " + TE + b": chunked",
    TE + b" : chunked",
    TE + b"\t:\tchunked",
    b"Transfer Encoding: chunked",
    b"Transfer Encoding:chunked",
    TE + b":  chunked",
    TE + b": chunked, cow",
    TE + b": cow, chunked",
    TE + b": chunked, chunked",
    TE + b":\n chunked",
    TE + b":\r\n chunked",
    TE + b': "chunked"',
    TE + b": 'chunked'",
    TE + b": chunk",
    TE + b": identity",
    TE + b": cow chunked bar",
    TE + b":",
    b"TrAnSFer-EnCODinG: cHuNkeD",
    TE + b": cow\r\n" + TE + b": chunked",
    TE + b": chunked\r\n" + TE + b": cow",
    b"Transfer\r-Encoding: chunked",
    b"X:X\r" + TE + b": chunked",
    b"X:X\n" + TE + b": chunked",
    b"X:X\r\n\r" + TE + b": chunked",
    TE + b": chunked\n",
]
GADGETS = WITH_A_BYTE + WITH_MORE
HARMLESS = [
    b"Transfer_Encoding: chunked",
    b"Transfer-Encoding-X: chunked",
    b"X-Transfer-Encoding: chunked",
]
REQUESTS = {
    "CL.TE": post(b"content-length: 6\r\ntransfer-encoding: chunked", b"0\r\n\r\nG"),
    "TE.CL": post(b"transfer-encoding: chunked\r\ncontent-length: 4", b"5c\r\n" + CHUNKED),
    "CL.CL alike": post(b"content-length: 2\r\ncontent-length: 2", b"{}"),
    "CL.CL unlike": post(b"content-length: 0\r\ncontent-length: 2", b"{}"),
    "CL list alike": post(b"content-length: 2, 2", b"{}"),
    "CL list unlike": post(b"content-length: 0, 2", b"{}"),
    "CL plus": post(b"content-length: +2", b"{}"),
    "CL minus": post(b"content-length: -2", b"{}"),
    "CL minus large": post(b"content-length: -123456789123456789123456789"),
    "CL text": post(b"content-length: abc"),
    "CL empty": post(b"content-length:"),
    "CL hexadecimal": post(b"content-length: 0x2", b"{}"),
    "CL underscore": post(b"content-length: 1_0", b"{}"),
    "CL inner space": post(b"content-length: 1 0", b"{}"),
    "CL overflow": post(b"content-length: 18446744073709551618", b"{}"),
    "CL quoted": post(b'content-length: "2"', b"{}"),
    "CL space before colon": post(b"content-length : 2", b"{}"),
    "CL NUL": post(b"content-length: 2\0", b"{}"),
    "CL folded": post(b"content-length:\r\n 2", b"{}"),
    "CL in another script": post("content-length: ٢".encode(), b"{}"),
    "GET with a body": b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}",
    "HEAD with a body": b"HEAD /health HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}",
    "TE in 1.0": b"POST /v1/completions HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    + CHUNKED,
    "chunk extension": post(b"transfer-encoding: chunked", b"2;a=b\r\n{}\r\n" + CHUNKED),
    "chunk extension LF": post(b"transfer-encoding: chunked", b"2;\nxx\r\n{}\r\n" + CHUNKED),
    "chunk size overflow": post(
        b"transfer-encoding: chunked", b"10000000000000002\r\n{}\r\n" + CHUNKED
    ),
    "chunk size sign": post(b"transfer-encoding: chunked", b"+2\r\n{}\r\n" + CHUNKED),
    "chunk size prefix": post(b"transfer-encoding: chunked", b"0x2\r\n{}\r\n" + CHUNKED),
    "chunk size space": post(b"transfer-encoding: chunked", b"2 \r\n{}\r\n" + CHUNKED),
    "chunk size empty": post(b"transfer-encoding: chunked", b"\r\n{}\r\n" + CHUNKED),
    "chunk bare LF": post(b"transfer-encoding: chunked", b"2\n{}\n0\n\n"),
    "chunk bare CR": post(b"transfer-encoding: chunked", b"2\r{}\r0\r\r"),
    "chunk end of two other bytes": post(b"transfer-encoding: chunked", b"2\r\n{}XX" + CHUNKED),
    "chunk too long": post(b"transfer-encoding: chunked", b"2\r\n{}{}\r\n" + CHUNKED),
    "trailer": post(b"transfer-encoding: chunked", b"0\r\ncontent-length: 2\r\n\r\n{}"),
    "no Host": b"GET /health HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "two Hosts alike": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n",
    "Host with a path": b"GET /health HTTP/1.1\r\nhost: a/b\r\n\r\n",
    "Host with a user": b"GET /health HTTP/1.1\r\nhost: a@b\r\n\r\n",
    "Host empty": b"GET /health HTTP/1.1\r\nhost:\r\n\r\n",
    "target of another host": b"GET http://b/health HTTP/1.1\r\nhost: a\r\n\r\n",
    "bare LF": b"GET /health HTTP/1.1\nhost: a\n\n",
    "bare LF in the middle": b"GET /health HTTP/1.1\r\nhost: a\nx: y\r\n\r\n",
    "bare CR": b"GET /health HTTP/1.1\rhost: a\r\r",
    "CR before CRLF": b"GET /health HTTP/1.1\r\nhost: a\r\r\n\r\n",
    "line of a CR": b"GET /health HTTP/1.1\r\nhost: a\r\n\rX: y\r\n\r\n",
    "folded line": b"GET /health HTTP/1.1\r\nhost: a\r\n b\r\n\r\n",
    "folded first line": b"GET /health HTTP/1.1\r\n x: y\r\nhost: a\r\n\r\n",
    "leading empty line": b"\r\nGET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "leading space": b" GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "two spaces": b"GET  /health HTTP/1.1\r\nhost: a\r\n\r\n",
    "tab": b"GET\t/health\tHTTP/1.1\r\nhost: a\r\n\r\n",
    "space in the target": b"GET /health /b HTTP/1.1\r\nhost: a\r\n\r\n",
    "control byte in the target": b"GET /he\x01alth HTTP/1.1\r\nhost: a\r\n\r\n",
    "byte above 127 in the target": b"GET /he\xe4lth HTTP/1.1\r\nhost: a\r\n\r\n",
    "fragment": b"GET /health#x HTTP/1.1\r\nhost: a\r\n\r\n",
    "backslash": b"GET \\health HTTP/1.1\r\nhost: a\r\n\r\n",
    "no version": b"GET /health\r\nhost: a\r\n\r\n",
    "version of three": b"GET /health HTTP/1.1.1\r\nhost: a\r\n\r\n",
    "version in lower case": b"GET /health http/1.1\r\nhost: a\r\n\r\n",
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version 9.9": b"GET / HTTP/9.9\r\nhost: a\r\n\r\n",
    "name with brackets": b"GET /health HTTP/1.1\r\nhost: a\r\nx[]: y\r\n\r\n",
    "name empty": b"GET /health HTTP/1.1\r\nhost: a\r\n: y\r\n\r\n",
    "no colon": b"GET /health HTTP/1.1\r\nhost: a\r\nxy\r\n\r\n",
    "NUL in a value": b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
    "bell in a value": b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\x07\r\n\r\n",
    "DEL in a value": b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\x7f\r\n\r\n",
    "Connection takes a key": b"GET /health HTTP/1.1\r\nhost: a\r\n"
    b"connection: close, authorization\r\n\r\n",
    "Connection takes a length": post(b"content-length: 2\r\nconnection: content-length", b"{}"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "prefix": b"Extra lineGET /health HTTP/1.1\r\nhost: a\r\n\r\n",
}


async def answer(received: Received) -> None:
    await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


async def statuses_of(here: Stand, data: bytes) -> list[int]:
    """The status of every answer until the connection ends."""
    client = await here.client()
    client.send(data + SMUGGLED)
    text = await client.rest()
    client.close()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", text)]


async def taken(stand: MakeStand, requests: list[bytes]) -> list[tuple[bytes, list[int]]]:
    """The requests that were not refused with one answer and the end of the connection."""
    here = await stand(answer)
    wrong = []
    for data in requests:
        statuses = await statuses_of(here, data)
        if len(statuses) != 1 or not 400 <= statuses[0] <= 505 or statuses[0] == 408:
            wrong.append((data, statuses))
    assert here.replicas[0].requests == []
    assert here.routing.asks == []
    return wrong


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_ambiguous_request_is_refused_and_ends_the_connection(
    stand: MakeStand, name: str
) -> None:
    assert await taken(stand, [REQUESTS[name]]) == []


async def test_every_mutation_of_a_transfer_encoding_beside_a_length_is_refused(
    stand: MakeStand,
) -> None:
    assert len(GADGETS) > 650
    assert await taken(stand, [with_gadget(gadget) for gadget in GADGETS]) == []


@pytest.mark.parametrize("gadget", HARMLESS)
async def test_a_field_of_another_name_is_not_passed_on(stand: MakeStand, gadget: bytes) -> None:
    here = await stand(answer)
    client = await here.client()
    client.send(with_gadget(gadget))
    assert (await client.answer())[0] == 200
    received = here.replicas[0].requests[0]
    assert received.body == CHUNKED
    assert b"ransfer" not in received.head


async def test_a_body_that_looks_like_a_request_stays_a_body(stand: MakeStand) -> None:
    here = await stand(answer)
    client = await here.client()
    client.post(SMUGGLED)
    client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[0] == 200
    assert (await client.answer())[2] == b""
    assert [received.body for received in here.replicas[0].requests] == [SMUGGLED]


async def test_what_a_client_puts_into_a_header_makes_no_header_of_the_replicas(
    stand: MakeStand,
) -> None:
    here = await stand(answer)
    client = await here.client()
    client.post(b"{}", "/v1/completions", "x-request-id: a\tb\xe4", "traceparent: 00-1")
    await client.answer()
    assert set(here.replicas[0].requests[0].fields) == {
        "host",
        "content-type",
        "content-length",
        "x-mural-tenant",
        "authorization",
    }


# -- with the express way in front: what is plain is taken before any of the above is looked at ----

PLAIN = request()
"""What is taken there, once one like it was."""


def in_a_plain_request(gadget: bytes) -> bytes:
    """`PLAIN` with a field more, so that nothing but this field can have it refused."""
    return PLAIN.replace(b"\r\nhost: a\r\n", b"\r\nhost: a\r\n%b\r\n" % gadget, 1)


def with_lengths(*lengths: bytes) -> bytes:
    """`PLAIN` with these lengths for its own."""
    lines = b"".join(b"content-length: %b\r\n" % length for length in lengths)
    return re.sub(rb"content-length: \d+\r\n", lambda _: lines, PLAIN, count=1)


TRUE_LENGTH = b"%d" % len(PLAIN.partition(b"\r\n\r\n")[2])
ALMOST_PLAIN = [
    with_lengths(TRUE_LENGTH, TRUE_LENGTH),
    with_lengths(b"0", TRUE_LENGTH),
    with_lengths(TRUE_LENGTH, b"0"),
    *(with_lengths(form % TRUE_LENGTH) for form in (b"+%b", b"%b, %b" % (b"%b", TRUE_LENGTH))),
    *(with_lengths(TRUE_LENGTH + end) for end in (b"\0", b"\x0b", b"_0", b" 0", b",", b";")),
    in_a_plain_request(b"host: a"),
    in_a_plain_request(b"connection: content-length"),
    in_a_plain_request(b"connection: authorization"),
    *(PLAIN.replace(b"host: a", host, 1) for host in (b"host: a/b", b"host: a@b", b"x: y")),
    *(PLAIN.replace(b"\r\n", end, 1) for end in (b"\n", b"\r", b"\r\r\n", b"\r\n\r")),
    PLAIN.replace(b"\r\n\r\n", b"\n\n", 1),
    PLAIN.replace(b"\r\nhost: a", b"\r\n host: a", 1),
    PLAIN.replace(b"HTTP/1.1", b"HTTP/1.1.1", 1),
    b"\r\n" + PLAIN,
]


FORMS = (with_gadget, in_a_plain_request)


def deliveries(data: bytes) -> list[list[bytes]]:
    """The ways in which a request and a plain one behind it may come."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return [[data + PLAIN], [data, PLAIN], [piece for piece in (head + end, rest + PLAIN) if piece]]


async def express_statuses_of(here: Here, pieces: list[bytes]) -> list[int]:
    """As `statuses_of`, on a connection that a plain request has come on."""
    client = await here.client()
    client.send(PLAIN)
    answered = re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", await client.answer())
    for piece in pieces:
        client.send(piece)
        # Each is read by itself: both ends are in this loop.
        for _ in range(3):
            await asyncio.sleep(0)
    try:
        async with asyncio.timeout(BOUND_S):
            text = await client.reader.read()
    except ConnectionResetError:
        text = b""
    client.leave()
    return [int(status) for status in answered + re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", text)]


async def express_taken(here: Here, requests: list[bytes]) -> list[tuple[list[bytes], list[int]]]:
    """As `taken`: those that were not refused with one answer, after the plain one's."""
    got = here.replicas["a"].requests
    wrong = []
    for data in requests:
        for pieces in deliveries(data):
            got.clear()
            here.used.clear()
            statuses = await express_statuses_of(here, pieces)
            refused = len(statuses) == 2 and 400 <= statuses[1] <= 505 and statuses[1] != 408
            # The plain one before it went the express way; it, and what lay behind it, went none.
            if statuses[:1] != [200] or not refused or here.used != ["whole"] or len(got) != 1:
                wrong.append((pieces, statuses))
    return wrong


@pytest.fixture
async def express(authorities: str) -> AsyncIterator[Here]:
    if plain_request is None:
        pytest.skip("nothing native is built")
    here = Here(Setting(), authorities, express=True)
    await here.begin()
    yield here
    await here.close()


async def test_an_ambiguous_request_after_a_plain_one_is_refused_alike(express: Here) -> None:
    assert await express_taken(express, list(REQUESTS.values())) == []


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.full)])
async def test_what_would_be_plain_but_for_one_field_or_byte_is_refused_alike(
    express: Here, every: int
) -> None:
    gadgets = WITH_MORE + WITH_A_BYTE[::every]
    cases = ALMOST_PLAIN + [form(each) for each in gadgets for form in FORMS]
    assert await express_taken(express, cases) == []


@pytest.mark.parametrize("gadget", HARMLESS)
async def test_a_plain_requests_field_of_another_name_is_not_passed_on(
    express: Here, gadget: bytes
) -> None:
    for _ in range(2):
        client = await express.client()
        client.send(in_a_plain_request(gadget))
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
        assert b"ransfer" not in express.replicas["a"].requests[-1].raw
    assert express.used[-1:] == ["whole"]
