"""The picker's certificate, as a TLS client sees it, while its files are renewed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.picker import Picker, PickerSettings, start_picker
from mural_router.running import Router
from mural_router.settings import Secrets

if TYPE_CHECKING:
    from tests.mural_router.picker.conftest import Readiness, ToldRouting

BOUND_S = 20.0


class Files:
    """A certificate and its key on disk."""

    def __init__(self, folder: Path) -> None:
        self.certfile, self.keyfile = folder / "tls.crt", folder / "tls.key"
        self.authority = self.renew()

    def renew(self) -> trustme.CA:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(str(self.keyfile))
        self.certfile.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        return self.authority


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
async def picker(routing: ToldRouting, readiness: Readiness, files: Files) -> AsyncIterator[Picker]:
    settings = PickerSettings(
        "127.0.0.1", 0, certfile=str(files.certfile), keyfile=str(files.keyfile)
    )
    running = await start_picker(settings, routing, not_ready=readiness)
    yield running
    await running.drain(0)


def channel_to(picker: Picker, authority: trustme.CA) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    # Each test's channel does its own handshake.
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(f"127.0.0.1:{picker.port}", credentials, options=options)


async def is_trusted(picker: Picker, authority: trustme.CA) -> bool:
    async with channel_to(picker, authority) as channel:
        return await answers(channel)


async def answers(channel: grpc.aio.Channel) -> bool:
    try:
        answer = await HealthStub(channel).Check(
            HealthCheckRequest(service="liveness"), timeout=BOUND_S
        )
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return bool(answer.status == HealthCheckResponse.SERVING)


async def test_new_connections_are_shown_the_renewed_certificate(
    picker: Picker, files: Files
) -> None:
    first = files.authority
    async with channel_to(picker, first) as held:
        assert await answers(held)
        second = await asyncio.to_thread(files.renew)
        assert not await is_trusted(picker, second), "not read yet"
        picker.reload_certificates()
        assert await is_trusted(picker, second)
        assert not await is_trusted(picker, first)
        assert await answers(held), "what is connected stays so"
    third = await asyncio.to_thread(files.renew)
    picker.reload_certificates()
    assert await is_trusted(picker, third)


@pytest.mark.parametrize("spoilt", ["certfile", "keyfile"])
async def test_files_that_do_not_fit_leave_the_certificate_in_use(
    picker: Picker, files: Files, spoilt: str
) -> None:
    first = files.authority
    path: Path = getattr(files, spoilt)
    old = await asyncio.to_thread(path.read_bytes)
    await asyncio.to_thread(files.renew)
    for content in (old, b"", b"no certificate", None):
        if content is None:
            await asyncio.to_thread(path.unlink)
        else:
            await asyncio.to_thread(path.write_bytes, content)
        with pytest.raises(ValueError, match="the certificate cannot be used"):
            picker.reload_certificates()
        assert await is_trusted(picker, first)


async def test_a_picker_without_a_certificate_has_nothing_to_read(
    routing: ToldRouting, readiness: Readiness
) -> None:
    picker = await start_picker(PickerSettings("127.0.0.1", 0), routing, not_ready=readiness)
    picker.reload_certificates()
    await picker.drain(0)


async def test_files_that_do_not_fit_are_told_at_the_start(
    routing: ToldRouting, readiness: Readiness, files: Files
) -> None:
    files.keyfile.write_text("no key")
    settings = PickerSettings(
        "127.0.0.1", 0, certfile=str(files.certfile), keyfile=str(files.keyfile)
    )
    with pytest.raises(ValueError, match="the certificate cannot be used"):
        await start_picker(settings, routing, not_ready=readiness)


async def test_the_routers_watch_of_certificates_is_the_pickers_too(
    picker: Picker, files: Files
) -> None:
    tls = {"certfile": str(files.certfile), "keyfile": str(files.keyfile)}
    router = Router(Config(None, {"http": {"tls": tls}}, Secrets()), LocalLimiter())
    router.picker = picker
    second = await asyncio.to_thread(files.renew)
    for _ in range(2):
        router.file_watches()["certificates"].poll()
    assert await is_trusted(picker, second)
    await router.close()
