"""Replicas behind TLS that are reached by address, and known by a name."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
import uvloop

from mural_router.http.settings import TlsSettings
from mural_router.http.tls import replica_side

LOOPS: tuple[Callable[[], asyncio.AbstractEventLoop], ...] = (
    asyncio.new_event_loop,
    uvloop.new_event_loop,
)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(authority: trustme.CA, tmp_path: Path) -> Iterator[str]:
    with authority.cert_pem.tempfile(dir=str(tmp_path)) as path:
        yield path


@asynccontextmanager
async def served(authority: trustme.CA, name: str) -> AsyncIterator[int]:
    """A server at 127.0.0.1 whose certificate is for a name; gives its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def greeting(port: int, context: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_replica_is_known_by_the_name_that_the_settings_say(
    authority: trustme.CA, ca_file: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    settings = TlsSettings(replica_ca_file=ca_file, replica_server_name="servers.mural.svc")

    async def ask() -> bytes:
        async with served(authority, "servers.mural.svc") as port:
            return await greeting(port, replica_side(settings))

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(ask()) == b"hello"


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["servers.mural.svc", None])
def test_a_certificate_for_another_name_is_refused(
    authority: trustme.CA,
    ca_file: str,
    name: str | None,
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    settings = TlsSettings(replica_ca_file=ca_file, replica_server_name=name)

    async def ask() -> bytes:
        async with served(authority, "somebody.else.svc") as port:
            return await greeting(port, replica_side(settings))

    with (
        asyncio.Runner(loop_factory=loop) as runner,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        runner.run(ask())


async def test_a_name_does_not_stand_in_for_an_authority(
    authority: trustme.CA, tmp_path: Path
) -> None:
    with trustme.CA().cert_pem.tempfile(dir=str(tmp_path)) as other:
        settings = TlsSettings(replica_ca_file=other, replica_server_name="servers.mural.svc")
        async with served(authority, "servers.mural.svc") as port:
            with pytest.raises(ssl.SSLCertVerificationError):
                await greeting(port, replica_side(settings))
