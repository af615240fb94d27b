"""Servers that take uploads, clients that send them, and what is sent."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from mural_resolvers.tenants import mint_key
from mural_resolvers.uploads import Intake, Uploads

ADMIN_KEY = "the-admins-own-key"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEEK_S = 7 * 86_400


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """A key each for acme, globex, small, which may keep one adapter of 1,000 bytes, hubbed,
    which may use the source ``hub`` alone, and rare, which may ask twice a minute.
    """
    minted = {tenant: mint_key() for tenant in ("acme", "globex", "small", "hubbed", "rare")}
    tenants: list[dict[str, Any]] = [
        {"id": tenant, "keys": [{"id": key.key_id, "sha256": key.sha256}]}
        for tenant, key in minted.items()
    ]
    tenants[0]["grants"] = ["globex/sql"]
    tenants[2]["limits"] = {"adapters": 1, "bytes": 1000}
    tenants[3]["sources"] = ["hub"]
    tenants[4]["limits"] = {"requests_per_minute": 2}
    file = tmp_path / "tenants.yaml"
    file.write_bytes(msgspec.json.encode({"tenants": tenants}))
    return {tenant: key.key for tenant, key in minted.items()} | {
        "file": str(file),
        "admin": ADMIN_KEY,
    }


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "store").mkdir()
    return {"store": tmp_path / "store", "quarantine": tmp_path / "quarantine"}


@pytest.fixture
def start_uploads(start_server, keys, places):
    async def start(**settings):
        server = await start_server(
            tenants_file=keys["file"],
            api_key=(ADMIN_KEY,),
            upload_store=str(places["store"]),
            upload_dir=str(places["quarantine"]),
            **settings,
        )
        return Uploader(server, keys)

    return start


@pytest.fixture
async def uploader(start_uploads, places) -> AsyncIterator[Uploader]:
    made = await start_uploads()
    yield made
    # Whatever happened, nothing is left of it once it is answered.
    assert os.listdir(places["quarantine"]) == []
    made.server.state.uploads.check_integrity()


class Uploader:
    """Asks a server on behalf of tenants."""

    def __init__(self, server, keys: dict[str, str]) -> None:
        self.server = server
        self._keys = keys

    def headers(self, tenant: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._keys[tenant]}"}

    async def form(
        self, name: str, files: dict[str, bytes], tenant: str = "acme"
    ) -> httpx.Response:
        parts = [("files", (file, data)) for file, data in files.items()]
        return await self.server.http.post(
            f"/v1/adapters/{name}", files=parts, headers=self.headers(tenant)
        )

    async def archive(
        self, name: str, data: object, kind: str = "application/x-tar", tenant: str = "acme"
    ) -> httpx.Response:
        return await self.server.http.post(
            f"/v1/adapters/{name}",
            content=data,
            headers=self.headers(tenant) | {"content-type": kind},
        )

    @asynccontextmanager
    async def unfinished(
        self, data: bytes, length: int, tenant: str = "acme"
    ) -> AsyncIterator[tuple[Any, Any]]:
        """An upload of ``length`` bytes of which only ``data`` is sent yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(
            f"POST /v1/adapters/{tenant}:v1 HTTP/1.1\r\nhost: x\r\n"
            "content-type: application/x-tar\r\n"
            f"authorization: {self.headers(tenant)['authorization']}\r\n"
            f"content-length: {length}\r\n\r\n".encode()
            + data
        )
        try:
            yield reader, writer
        finally:
            writer.close()

    async def answer_to_part(self, data: bytes, length: int = 1 << 24) -> tuple[int, str]:
        """Status and code of what is answered before the whole upload was sent."""
        async with asyncio.timeout(60), self.unfinished(data, length) as (reader, _):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            status = int(head.split()[1])
            body = await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
        return status, json.loads(body)["error"]["code"]

    async def ask(self, method: str, path: str, tenant: str = "acme") -> httpx.Response:
        return await self.server.http.request(method, path, headers=self.headers(tenant))

    async def point(self, place: str, tenant: str = "acme", **weights: float) -> httpx.Response:
        """Point an alias, ``TENANT/ADAPTER/aliases/ALIAS``, at versions by weight."""
        versions = [{"version": name, "weight": weight} for name, weight in weights.items()]
        return await self.server.http.put(
            f"/v1/adapters/{place}", json={"versions": versions}, headers=self.headers(tenant)
        )

    async def complete(self, model: str, tenant: str = "acme") -> httpx.Response:
        body = {"model": model, "prompt": "x"}
        return await self.server.http.post(
            "/v1/completions", json=body, headers=self.headers(tenant)
        )


class Intakes(NamedTuple):
    """Released for each upload that begins, and for each of which nothing is left."""

    begun: asyncio.Semaphore
    gone: asyncio.Semaphore


@pytest.fixture
async def intakes(monkeypatch: pytest.MonkeyPatch) -> Intakes:
    told = Intakes(asyncio.Semaphore(0), asyncio.Semaphore(0))
    loop, begin, receive = asyncio.get_running_loop(), Intake.__init__, Uploads.receive

    def tell_begin(self: Intake, *args: Any) -> None:
        begin(self, *args)
        loop.call_soon_threadsafe(told.begun.release)

    async def tell_end(self: Uploads, *args: Any) -> object:
        try:
            return await receive(self, *args)
        finally:
            told.gone.release()

    monkeypatch.setattr(Intake, "__init__", tell_begin)
    monkeypatch.setattr(Uploads, "receive", tell_end)
    return told


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tar_of(files: dict[str, bytes], prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def adapter(tmp_path: Path, make_adapter) -> dict[str, bytes]:
    return files_of(make_adapter(tmp_path / "trained", 1, template="{{ messages }}"))


@pytest.fixture
def other(tmp_path: Path, make_adapter) -> dict[str, bytes]:
    return files_of(make_adapter(tmp_path / "trained anew", 2))


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]
