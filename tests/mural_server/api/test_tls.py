"""Both ports over TLS: who is believed, by which name, and a certificate that is renewed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

import mural_resolvers.file_watch
from mural_server.api.tls import PortTls
from mural_server.protocol import ControlClient, ControlError
from mural_server.settings import ServerSettings

NAME = "servers.mural.svc"


class Pair:
    """A certificate and its key in files, as a mounted Secret holds them."""

    def __init__(self, folder: Path, ca: trustme.CA) -> None:
        self.cert = folder / "tls.crt"
        self.key = folder / "tls.key"
        self.write(ca.issue_cert(NAME))

    def write(self, issued: trustme.LeafCert) -> None:
        self.cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        self.key.write_bytes(issued.private_key_pem.bytes())

    @property
    def flags(self) -> dict[str, str]:
        return {"ssl_certfile": str(self.cert), "ssl_keyfile": str(self.key)}


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pair(tmp_path, ca) -> Pair:
    return Pair(tmp_path, ca)


def believing(ca: trustme.CA) -> ssl.SSLContext:
    """Who believes this authority alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    return context


async def shown_by(port: int, ca: trustme.CA) -> bytes:
    """The certificate that a new connection is shown."""
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=believing(ca), server_hostname=NAME
    )
    try:
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()


async def test_a_pod_is_reached_by_address_and_believed_by_name(start_server, pair, ca):
    server = await start_server(**pair.flags, control_token="the-control-token")

    def client(**more: Any) -> ControlClient:
        return ControlClient("127.0.0.1", server.control_port, token="the-control-token", **more)

    good = client(ssl=believing(ca), server_name=NAME)
    assert await good.ready()
    assert (await good.declare(())).missing == ()
    for more in (
        {"ssl": believing(ca)},
        {"ssl": believing(ca), "server_name": "another.svc"},
        {"ssl": believing(trustme.CA()), "server_name": NAME},
        {},
    ):
        with pytest.raises(ControlError) as caught:
            await client(**more).declare(())
        assert caught.value.status == 0
    async with httpx.AsyncClient(verify=believing(ca)) as http:
        answer = await http.get(
            f"https://127.0.0.1:{server.port}/ready", extensions={"sni_hostname": NAME}
        )
    assert answer.status_code == 200


async def test_a_renewed_certificate_is_shown_to_new_connections(
    start_server, pair, ca, monkeypatch
):
    monkeypatch.setattr(mural_resolvers.file_watch, "POLL_S", 0.01)
    server = await start_server(**pair.flags)
    ports = (server.port, server.control_port)
    first = [await shown_by(port, ca) for port in ports]
    pair.write(ca.issue_cert(NAME))
    async with asyncio.timeout(20):
        while (second := [await shown_by(port, ca) for port in ports])[0] == first[0]:
            pass
    assert first[0] == first[1] != second[1] == second[0]


async def test_a_pair_that_does_not_fit_leaves_the_old_one(pair, ca):
    tls = PortTls(ServerSettings(**pair.flags))
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=tls.context
    )
    port = server.sockets[0].getsockname()[1]
    before = await shown_by(port, ca)
    pair.key.write_bytes(trustme.CA().issue_cert(NAME).private_key_pem.bytes())
    with pytest.raises(ValueError, match="no certificate with its key"):
        tls.reload()
    assert await shown_by(port, ca) == before
    server.close()
