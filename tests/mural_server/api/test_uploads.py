"""Tenants upload adapters over HTTP: what is taken, what is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import logging
import os
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import httpx
import msgspec
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from safetensors.numpy import load_file, save_file

from mural_resolvers.errors import Forbidden, Unavailable
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.store import TOMBSTONE_FILE, StoredVersion
from mural_resolvers.tenants import mint_key
from mural_resolvers.uploads import Intake, Uploads
from mural_resolvers.versions import AliasTarget
from mural_server.api import adapter_content
from mural_server.settings import ServerSettings, SettingsError

ADMIN_KEY = "the-admins-own-key"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WEEK_S = 7 * 86_400


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """A key each for acme, globex, small, which may keep one adapter of 1,000 bytes, hubbed,
    which may use the source ``hub`` alone, and rare, which may ask twice a minute.
    """
    minted = {tenant: mint_key() for tenant in ("acme", "globex", "small", "hubbed", "rare")}
    tenants = [
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

    def tell_begin(self, *args: object) -> None:
        begin(self, *args)
        loop.call_soon_threadsafe(told.begun.release)

    async def tell_end(self, *args: object) -> object:
        try:
            return await receive(self, *args)
        finally:
            told.gone.release()

    monkeypatch.setattr(Intake, "__init__", tell_begin)
    monkeypatch.setattr(Uploads, "receive", tell_end)
    return told


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def tar_of(files: dict[str, bytes], prefix: str = "", mode: str = "w:") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
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


# -- what is taken --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["multipart", "tar", "tar in a folder", "tar.gz"])
async def test_what_is_uploaded_answers_the_next_request(
    uploader, adapter, tmp_path: Path, places, form: str
) -> None:
    manifest = build_manifest(tmp_path / "trained")
    # "Not found" is remembered for seconds, and must not outlive the upload.
    for model in ("acme/sql:v1", "acme/sql"):
        assert error_of(await uploader.complete(model)) == (404, "model_not_found")

    if form == "multipart":
        response = await uploader.form("acme/sql:v1", adapter)
    else:
        data = tar_of(adapter, "out/" if form == "tar in a folder" else "")
        gzipped = form == "tar.gz"
        response = await uploader.archive(
            "acme/sql:v1",
            gzip.compress(data) if gzipped else data,
            "application/gzip" if gzipped else "application/x-tar",
        )

    assert response.status_code == 201, response.text
    card = response.json()
    assert card | {"uploaded_at": 0, "expires_at": 0} == {
        "id": "acme/sql:v1",
        "object": "adapter",
        "digest": manifest.digest,
        "bytes": manifest.num_bytes,
        "rank": 4,
        "uploaded_at": 0,
        "expires_at": 0,
    }
    assert card["expires_at"] - card["uploaded_at"] == WEEK_S
    for model in ("acme/sql:v1", "acme/sql"):
        answer = await uploader.complete(model)
        assert answer.status_code == 200
        assert answer.json()["model"] == "acme/sql:v1"
    assert uploader.server.engine.loads[0].digest == manifest.digest
    record = json.loads((places["store"] / "acme/sql/v1/_upload.json").read_bytes())
    assert record["digest"] == manifest.digest
    assert record["key_id"]


async def test_an_upload_is_told_of_to_its_tenant_alone(uploader, adapter, other) -> None:
    cards = [
        (await uploader.form("acme:v1", adapter)).json(),
        (await uploader.form("acme/sql:v1", other)).json(),
    ]
    await uploader.form("globex:v1", adapter, "globex")

    listed = await uploader.ask("GET", "/v1/adapters")
    one = await uploader.ask("GET", "/v1/adapters/acme/sql:v1")
    everybodys = await uploader.ask("GET", "/v1/adapters", "admin")
    globexs = await uploader.ask("GET", "/v1/adapters?tenant=globex", "admin")

    assert listed.json() == {"object": "list", "data": cards}
    assert one.json() == cards[1]
    ids = [card["id"] for card in everybodys.json()["data"]]
    assert ids == ["acme:v1", "acme/sql:v1", "globex:v1"]
    assert [card["id"] for card in globexs.json()["data"]] == ["globex:v1"]
    foreign = await uploader.ask("GET", "/v1/adapters?tenant=globex")
    assert error_of(foreign) == (403, "forbidden")
    assert error_of(await uploader.ask("GET", "/v1/adapters?tenant=..", "admin"))[0] == 400


async def test_the_same_content_again_is_200_and_stays_as_it_was(uploader, adapter) -> None:
    first = await uploader.form("acme:v1", adapter)
    again = await uploader.archive("acme:v1", tar_of(adapter))

    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()


async def test_other_content_under_a_taken_name_is_409(uploader, adapter, other) -> None:
    first = await uploader.form("acme:v1", adapter)

    assert error_of(await uploader.form("acme:v1", other)) == (409, "conflict")
    assert (await uploader.ask("GET", "/v1/adapters/acme:v1")).json() == first.json()


async def test_of_two_at_once_under_one_name_one_is_taken(uploader, adapter, other) -> None:
    answers = await asyncio.gather(
        uploader.form("acme:v1", adapter), uploader.archive("acme:v1", tar_of(other))
    )

    assert sorted(answer.status_code for answer in answers) == [201, 409]
    [won] = [answer.json() for answer in answers if answer.status_code == 201]
    assert (await uploader.ask("GET", "/v1/adapters/acme:v1")).json() == won


async def test_a_deleted_upload_is_gone_and_its_name_never_used_again(
    uploader, adapter, other, places
) -> None:
    await uploader.form("acme:v1", adapter)
    assert (await uploader.complete("acme:v1")).status_code == 200

    deleted = await uploader.ask("DELETE", "/v1/adapters/acme:v1")

    assert deleted.json() == {"id": "acme:v1", "object": "adapter", "deleted": True}
    assert error_of(await uploader.complete("acme:v1")) == (404, "model_not_found")
    for method in ("GET", "DELETE"):
        gone = await uploader.ask(method, "/v1/adapters/acme:v1")
        assert error_of(gone) == (404, "model_not_found")
    for files in (adapter, other):
        assert error_of(await uploader.form("acme:v1", files)) == (409, "conflict")
    assert os.listdir(places["store"] / "acme/default/v1") == [TOMBSTONE_FILE]
    assert uploader.server.engine.resident == {}


async def test_an_admin_uploads_for_anybody_and_is_written_down(
    uploader, adapter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mural.audit"):
        card = (await uploader.form("globex:v1", adapter, "admin")).json()
        await uploader.ask("DELETE", "/v1/adapters/globex:v1", "admin")
        await asyncio.to_thread(uploader.server.state.audit.close)

    assert card["id"] == "globex:v1"
    lines = [record.getMessage() for record in caplog.records if record.name == "mural.audit"]
    assert len(lines) == 2
    assert all(card["digest"] in line for line in lines)


async def test_a_server_is_a_store_to_its_clients(uploader, adapter, tmp_path: Path, keys) -> None:
    folder, name = tmp_path / "trained", parse_name("acme/sql:v1")
    manifest = build_manifest(folder)
    store = open_store(uploader.server.url, api_key=keys["acme"])

    assert await store.publish(name, folder, manifest)
    assert not await store.publish(name, folder, manifest)
    assert await store.list("acme") == (StoredVersion(name, manifest.digest, manifest.num_bytes),)
    with pytest.raises(Forbidden):
        await store.publish(parse_name("globex:v1"), folder, manifest)
    assert await store.manifest(name) == manifest
    assert await store.manifest(name.at("v2")) is None
    (tmp_path / "fetched").mkdir()
    sizes: list[int] = []
    assert await store.fetch(name, tmp_path / "fetched", sizes.append) == manifest
    assert files_of(tmp_path / "fetched") == adapter
    assert sum(sizes) == manifest.num_bytes
    stable = {"stable": (AliasTarget("v1", 1.0),)}
    assert await store.set_alias("acme", "sql", "stable", stable["stable"]) == stable
    assert await store.aliases("acme", "sql") == stable
    assert await store.set_alias("acme", "sql", "stable", ()) == {}
    assert await store.delete(name)
    assert not await store.delete(name)
    assert await store.list("acme") == ()
    await store.close()


# -- who may --------------------------------------------------------------------------------------


async def test_a_foreign_namespace_is_one_403_and_nothing_is_read(
    uploader, adapter, places
) -> None:
    await uploader.form("globex/sql:v1", adapter, "globex")
    bodies = set()
    # acme may use globex/sql, by a grant; that is no right to change it.
    for name in ("globex/sql:v1", "globex/sql:v9", "nobody:v1"):
        for method in ("GET", "DELETE"):
            answer = await uploader.ask(method, f"/v1/adapters/{name}")
            assert answer.status_code == 403
            bodies.add(answer.text)
        adapter_path = f"/v1/adapters/{name.partition(':')[0]}"
        aliases = f"{adapter_path if '/' in name else adapter_path + '/default'}/aliases"
        for method, path in (
            ("GET", f"/v1/adapters/{name}/manifest"),
            ("GET", f"/v1/adapters/{name}/files/{CONFIG}"),
            ("GET", f"/v1/adapters/{name}/files/nothing"),
            ("GET", aliases),
            ("PUT", f"{aliases}/stable"),
            ("DELETE", f"{aliases}/stable"),
        ):
            answer = await uploader.ask(method, path)
            assert answer.status_code == 403
            bodies.add(answer.text)
        answer = await uploader.form(name, adapter)
        assert answer.status_code == 403
        bodies.add(answer.text)
    assert len(bodies) == 1
    assert (await uploader.complete("globex/sql:v1")).status_code == 200
    assert not (places["store"] / "nobody").exists()


async def test_a_tenant_that_may_not_use_uploads_may_not_upload(uploader, adapter, places) -> None:
    answer = await uploader.form("hubbed:v1", adapter, tenant="hubbed")
    assert answer.status_code == 403
    assert not os.listdir(places["store"])


async def test_without_a_key_nothing_is_taken(uploader, adapter) -> None:
    for method, path in (
        ("POST", "/v1/adapters/acme:v1"),
        ("GET", "/v1/adapters/acme:v1"),
        ("GET", "/v1/adapters"),
        ("DELETE", "/v1/adapters/acme:v1"),
        ("GET", "/v1/adapters/acme:v1/manifest"),
        ("GET", f"/v1/adapters/acme:v1/files/{CONFIG}"),
        ("GET", "/v1/adapters/acme/default/aliases"),
        ("PUT", "/v1/adapters/acme/default/aliases/stable"),
        ("DELETE", "/v1/adapters/acme/default/aliases/stable"),
    ):
        assert (await uploader.server.http.request(method, path)).status_code == 401


async def test_uploads_are_off_unless_there_is_a_store(start_server, keys) -> None:
    server = await start_server(tenants_file=keys["file"])
    headers = {"authorization": f"Bearer {keys['acme']}"}

    for method, path in (("POST", "/v1/adapters/acme:v1"), ("GET", "/v1/adapters")):
        response = await server.http.request(method, path, headers=headers)
        assert error_of(response) == (404, "not_found")
        assert "--upload-store" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "settings",
    [
        {"upload_store": "/tmp"},
        {"upload_store": "/tmp", "api_key": (ADMIN_KEY,), "upload_ttl_s": -1.0},
        {"upload_store": "/tmp", "api_key": (ADMIN_KEY,), "upload_max_bytes": 0},
        {"upload_store": "/tmp", "api_key": (ADMIN_KEY,), "upload_quota_adapters": 0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings) -> None:
    with pytest.raises(SettingsError):
        ServerSettings(**settings).validate()


@pytest.mark.parametrize("place", ["/no/such/folder", "ftp://host/x", "http://localhost:1"])
async def test_a_store_that_is_none_stops_the_start(start_server, place: str, tmp_path) -> None:
    with pytest.raises(SettingsError, match="--upload-store"):
        await start_server(
            api_key=(ADMIN_KEY,), upload_store=place, upload_dir=str(tmp_path / "quarantine")
        )


# -- names and bodies that are refused ------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status"),
    [("acme", 400), ("acme:latest", 400), ("acme/sql", 400), ("acme:..", 400), ("Acme:v1", 400)],
)
async def test_an_upload_names_its_version(uploader, adapter, name: str, status: int) -> None:
    assert (await uploader.form(name, adapter)).status_code == status


@pytest.mark.parametrize(
    "file",
    [
        "adapter_model.bin",
        "README.md",
        "../adapter_config.json",
        "manifest.json",
        "_upload.json",
        "Adapter_Config.json",
    ],
)
async def test_a_file_of_no_known_name_is_refused(uploader, adapter, file: str) -> None:
    files = {file: b"x"} | adapter
    for answer in (
        await uploader.form("acme:v1", files),
        await uploader.archive("acme:v1", tar_of(files)),
    ):
        assert error_of(answer) == (422, "unusable_adapter")


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
async def test_half_an_adapter_is_refused(uploader, adapter, missing: str) -> None:
    del adapter[missing]

    response = await uploader.form("acme:v1", adapter)

    assert error_of(response) == (422, "unusable_adapter")
    assert missing in response.json()["error"]["message"]


async def test_a_file_that_is_sent_twice_is_refused(uploader, adapter) -> None:
    parts = [("files", (CONFIG, adapter[CONFIG]))] * 2
    response = await uploader.server.http.post(
        "/v1/adapters/acme:v1", files=parts, headers=uploader.headers("acme")
    )

    assert error_of(response) == (422, "unusable_adapter")


async def test_a_field_that_is_no_file_is_refused(uploader, adapter) -> None:
    response = await uploader.server.http.post(
        "/v1/adapters/acme:v1",
        data={"digest": "x"},
        files={"files": (CONFIG, adapter[CONFIG])},
        headers=uploader.headers("acme"),
    )

    assert error_of(response) == (400, "invalid_input")


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "",
        "text/plain",
        "multipart/form-data",
        "multipart/form-data; boundary=" + "x" * 71,
        "application/zip",
    ],
)
async def test_a_body_of_another_kind_is_refused(uploader, adapter, kind: str) -> None:
    response = await uploader.archive("acme:v1", tar_of(adapter), kind)

    assert error_of(response) == (400, "invalid_input")


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=b", "application/x-tar"])
@pytest.mark.parametrize("body", [b"", b"\0", b"nonsense" * 200])
async def test_a_body_that_is_not_what_it_says_is_refused(uploader, kind: str, body: bytes) -> None:
    response = await uploader.archive("acme:v1", body, kind)

    assert error_of(response) == (400, "invalid_input")


async def test_a_truncated_body_is_refused(uploader, adapter) -> None:
    for data in (tar_of(adapter), gzip.compress(tar_of(adapter))):
        for length in (3, 300, 700):
            response = await uploader.archive("acme:v1", data[:length])
            assert error_of(response) == (400, "invalid_input")
    request = uploader.server.http.build_request(
        "POST", "/", files=[("files", (name, data)) for name, data in adapter.items()]
    )
    form, kind = request.read(), request.headers["content-type"]
    for length in (len(form) // 2, len(form) - 5):
        response = await uploader.archive("acme:v1", form[:length], kind)
        assert error_of(response) == (400, "invalid_input")


async def test_a_content_encoding_is_refused(uploader, adapter) -> None:
    response = await uploader.server.http.post(
        "/v1/adapters/acme:v1",
        content=gzip.compress(tar_of(adapter)),
        headers=uploader.headers("acme")
        | {"content-type": "application/x-tar", "content-encoding": "gzip"},
    )

    assert error_of(response) == (400, "invalid_input")


# -- adapters that are refused --------------------------------------------------------------------


def respell(adapter: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    config = json.loads(adapter[CONFIG]) | changes
    return adapter | {CONFIG: json.dumps(config).encode()}


def reweigh(adapter: dict[str, bytes], tmp_path: Path, change: Callable) -> dict[str, bytes]:
    path = tmp_path / "weights"
    path.write_bytes(adapter[WEIGHTS])
    save_file(change(load_file(path)), path)
    return adapter | {WEIGHTS: path.read_bytes()}


def with_nan(tensors):
    for tensor in tensors.values():
        tensor[0, 0] = np.nan
    return tensors


def with_rank_16(tensors):
    return {name: np.ones((16, 8) if "lora_A" in name else (8, 16), np.float32) for name in tensors}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("NaN", "NaN"),
        ("rank", "rank"),
        ("shape", "shape"),
        ("module", "k_proj"),
        ("DoRA", "dora"),
        ("config", "adapter_config.json"),
        ("header", "safetensors"),
        ("trailing", "last tensor"),
        ("template", "chat_template"),
    ],
)
async def test_an_adapter_that_cannot_be_served_is_422_with_the_reason(
    uploader, adapter, tmp_path: Path, places, fault: str, reason: str
) -> None:
    spoilt = {
        "NaN": lambda: reweigh(adapter, tmp_path, with_nan),
        "rank": lambda: reweigh(respell(adapter, r=16), tmp_path, with_rank_16),
        "shape": lambda: reweigh(
            adapter, tmp_path, lambda t: {k: np.ones((4, 5), np.float32) for k in t}
        ),
        "module": lambda: reweigh(
            adapter,
            tmp_path,
            lambda t: {k.replace("q_proj", "k_proj"): v for k, v in t.items()},
        ),
        "DoRA": lambda: respell(adapter, use_dora=True),
        "config": lambda: adapter | {CONFIG: b"[]"},
        "header": lambda: adapter | {WEIGHTS: b"\x80" + adapter[WEIGHTS][1:]},
        "trailing": lambda: adapter | {WEIGHTS: adapter[WEIGHTS] + b"\0"},
        "template": lambda: adapter | {"chat_template.jinja": b"x" * (256 << 10) + b"x"},
    }[fault]()

    response = await uploader.form("acme:v1", spoilt)

    status = 413 if fault == "template" else 422
    assert response.status_code == status, response.text
    assert reason.lower() in response.json()["error"]["message"].lower()
    assert not (places["store"] / "acme").exists()
    assert str(places["quarantine"]) not in response.text
    assert error_of(await uploader.complete("acme:v1")) == (404, "model_not_found")


async def test_the_weights_header_is_judged_before_the_weights_have_come(uploader) -> None:
    bad = (8).to_bytes(8, "little") + b'{"a": 1}'
    data = tar_of({WEIGHTS: bad + bytes(8 << 20)})

    assert await uploader.answer_to_part(data[: 2 << 20]) == (422, "unusable_adapter")


# -- limits ---------------------------------------------------------------------------------------


async def test_an_upload_above_its_limit_is_413(start_uploads, adapter, places) -> None:
    uploader = await start_uploads(upload_max_bytes=600)

    for send in (
        uploader.form("acme:v1", adapter),
        uploader.archive("acme:v1", tar_of(adapter)),
        uploader.archive("acme:v1", gzip.compress(tar_of(adapter))),
    ):
        assert error_of(await send) == (413, "too_large")
    assert os.listdir(places["quarantine"]) == []
    assert not (places["store"] / "acme").exists()


async def test_a_body_that_is_announced_too_large_is_refused_unread(start_uploads) -> None:
    uploader = await start_uploads(upload_max_bytes=600)

    assert await uploader.answer_to_part(b"", 99_999_999) == (413, "too_large")


async def test_a_tenants_quota_of_adapters_is_429(start_uploads, adapter, other) -> None:
    uploader = await start_uploads(upload_quota_adapters=2)
    for version in ("v1", "v2"):
        assert (await uploader.form(f"acme:{version}", adapter)).status_code == 201

    over = await uploader.form("acme:v3", other)

    assert error_of(over) == (429, "rate_limit_exceeded")
    assert int(over.headers["retry-after"]) > 0
    # What is there already is no more, and other tenants have quotas of their own.
    assert (await uploader.form("acme:v2", adapter)).status_code == 200
    assert (await uploader.form("globex:v1", other, "globex")).status_code == 201
    await uploader.ask("DELETE", "/v1/adapters/acme:v1")
    assert (await uploader.form("acme:v3", other)).status_code == 201


async def test_a_tenants_quota_of_bytes_is_429(start_uploads, adapter, other, tmp_path) -> None:
    size = build_manifest(tmp_path / "trained").num_bytes
    uploader = await start_uploads(upload_quota_bytes=size)
    assert (await uploader.form("acme:v1", adapter)).status_code == 201

    assert error_of(await uploader.form("acme:v2", other)) == (429, "rate_limit_exceeded")
    data = tar_of(other)
    assert error_of(await uploader.archive("acme:v2", data)) == (429, "rate_limit_exceeded")


async def test_a_tenants_own_limits_come_before_the_servers(uploader, adapter, other) -> None:
    small = {name: data for name, data in adapter.items() if name != "chat_template.jinja"}
    assert (await uploader.form("small:v1", small, "small")).status_code == 201

    over = await uploader.form("small:v2", other, "small")

    assert error_of(over) == (429, "rate_limit_exceeded")
    assert "1 adapters" in over.json()["error"]["message"]


async def test_two_uploads_at_once_share_what_is_left_of_a_quota(
    start_uploads, adapter, other
) -> None:
    uploader = await start_uploads(upload_quota_adapters=1)
    uploader.server.engine.check_gate = asyncio.Event()

    sent = [
        asyncio.create_task(uploader.form("acme:v1", adapter)),
        asyncio.create_task(uploader.form("acme:v2", other)),
    ]
    uploader.server.engine.check_gate.set()
    answers = await asyncio.gather(*sent)

    assert sorted(answer.status_code for answer in answers) == [201, 429]


async def test_uploads_at_one_time_are_bounded(uploader, adapter, intakes) -> None:
    """By tenant with 429, in all with 503; each tells when to come back."""
    uploads = uploader.server.state.uploads
    uploads._settings = replace(uploads._settings, max_concurrent=2, max_concurrent_per_tenant=1)
    data = tar_of(adapter)
    async with asyncio.timeout(60):
        async with (
            uploader.unfinished(data[:700], len(data)),
            uploader.unfinished(data[:700], len(data), "globex"),
        ):
            for _ in range(2):
                await intakes.begun.acquire()
            own = await uploader.form("acme:v2", adapter)
            another = await uploader.form("small:v1", adapter, "small")
        # The two that went away, and the two that were refused.
        for _ in range(4):
            await intakes.gone.acquire()

    assert error_of(own) == (429, "rate_limit_exceeded")
    assert error_of(another) == (503, "unavailable")
    assert all("retry-after" in answer.headers for answer in (own, another))
    assert (await uploader.form("acme:v2", adapter)).status_code == 201


async def test_uploads_have_a_rate(uploader, adapter) -> None:
    statuses = [(await uploader.archive("acme:v1", b"x")).status_code for _ in range(25)]

    assert set(statuses) == {400, 429}
    assert (await uploader.form("globex:v1", adapter, "globex")).status_code == 201


@pytest.mark.parametrize("length", [0, 600])
async def test_a_client_that_stalls_is_408(uploader, adapter, length: int) -> None:
    uploads = uploader.server.state.uploads
    uploads._settings = replace(uploads._settings, grace_s=0.05, min_bytes_per_s=1e9)

    answer = await uploader.answer_to_part(tar_of(adapter)[:length])

    assert answer == (408, "request_timeout")


async def test_a_client_that_is_slow_meets_the_deadline(uploader, adapter) -> None:
    uploads = uploader.server.state.uploads
    uploads._settings = replace(uploads._settings, deadline_s=0.05)

    answer = await uploader.answer_to_part(tar_of(adapter)[:600])

    assert answer == (408, "request_timeout")


async def test_a_client_that_goes_away_leaves_nothing(uploader, adapter, places, intakes) -> None:
    async with asyncio.timeout(60):
        async with uploader.unfinished(tar_of(adapter)[:2000], 1 << 20):
            await intakes.begun.acquire()
        await intakes.gone.acquire()

    assert os.listdir(places["quarantine"]) == []
    assert not (places["store"] / "acme").exists()


async def test_a_full_disk_is_503_and_is_cleaned_up(
    uploader, adapter, places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mural_resolvers.uploads.intake._IncomingFile._keep", full)
        response = await uploader.form("acme:v1", adapter)

    assert error_of(response) == (503, "unavailable")
    assert "retry-after" in response.headers
    assert os.listdir(places["quarantine"]) == []
    assert (await uploader.form("acme:v1", adapter)).status_code == 201


async def test_a_store_that_is_down_is_503(uploader, adapter, places) -> None:
    places["store"].rename(places["store"].with_name("away"))

    assert error_of(await uploader.form("acme:v1", adapter)) == (503, "unavailable")
    assert error_of(await uploader.ask("GET", "/v1/adapters")) == (503, "unavailable")


async def test_a_draining_server_takes_no_uploads(uploader, adapter) -> None:
    uploader.server.state.admission.close("The server is draining.")

    assert error_of(await uploader.form("acme:v1", adapter)) == (503, "unavailable")


# -- time to live ---------------------------------------------------------------------------------


async def test_an_expired_upload_is_absent_at_once_and_then_removed(
    start_uploads, adapter, other, places, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = await start_uploads(upload_ttl_s=100.0, upload_quota_adapters=1)
    uploads = uploader.server.state.uploads
    [resolver] = uploader.server.state.catalog._registry._resolvers.values()
    end = (await uploader.form("acme:v1", adapter)).json()["expires_at"]
    uploads._now = resolver._now = lambda: end + 1.0

    # Not reaped yet, and gone for whoever asks.
    assert error_of(await uploader.complete("acme:v1")) == (404, "model_not_found")
    assert (await uploader.ask("GET", "/v1/adapters")).json()["data"] == []
    for method in ("GET", "DELETE"):
        gone = await uploader.ask(method, "/v1/adapters/acme:v1")
        assert error_of(gone) == (404, "model_not_found")
    assert error_of(await uploader.form("acme:v1", adapter)) == (409, "conflict")
    assert (places["store"] / "acme/default/v1/manifest.json").exists()

    assert await uploads.reap() == 1

    assert os.listdir(places["store"] / "acme/default/v1") == [TOMBSTONE_FILE]
    assert await uploads.reap() == 0
    assert error_of(await uploader.form("acme:v1", adapter)) == (409, "conflict")
    assert (await uploader.form("acme:v2", other)).status_code == 201


async def test_what_expired_or_was_deleted_elsewhere_is_served_for_a_minute_at_most(
    start_uploads, adapter, other, places
) -> None:
    """And for as long as the store is away: a store that is down takes nothing away."""
    uploader = await start_uploads(upload_ttl_s=100.0)
    [resolver] = uploader.server.state.catalog._registry._resolvers.values()
    look_up, now = uploader.server.state.catalog._look_up, 0.0
    look_up._clock = lambda: now
    end = (await uploader.form("acme:v1", adapter)).json()["expires_at"]
    await uploader.form("acme:v2", other)
    for name in ("acme:v1", "acme:v2"):
        assert (await uploader.complete(name)).status_code == 200
    resolver._now = lambda: end + 1.0
    away = places["store"].with_name("away")
    places["store"].rename(away)
    now = 1000.0
    assert (await uploader.complete("acme:v1")).status_code == 200

    away.rename(places["store"])
    now = 1060.0
    assert error_of(await uploader.complete("acme:v1")) == (404, "model_not_found")
    resolver._now = lambda: end - 1.0
    assert (await uploader.complete("acme:v2")).status_code == 200
    await open_store(str(places["store"])).delete(parse_name("acme:v2"))
    assert (await uploader.complete("acme:v2")).status_code == 200
    now = 1120.0
    assert error_of(await uploader.complete("acme:v2")) == (404, "model_not_found")


async def test_what_reads_the_store_counts_as_other_requests_do(uploader) -> None:
    paths = [
        "/v1/adapters",
        "/v1/adapters/rare:v1",
        "/v1/adapters/rare:v1/manifest",
        f"/v1/adapters/rare:v1/files/{CONFIG}",
        "/v1/adapters/rare/default/aliases",
    ]
    first = [(await uploader.ask("GET", path, "rare")).status_code for path in paths[:2]]
    assert first == [200, 404]
    for path in paths:
        over = await uploader.ask("GET", path, "rare")
        assert error_of(over) == (429, "rate_limit_exceeded")
        assert "retry-after" in over.headers


async def test_uploads_are_counted_by_what_became_of_them(uploader, adapter, other) -> None:
    for files in (adapter, adapter, other):
        await uploader.form("acme:v1", files)
    await uploader.archive("acme:v2", b"x")
    await uploader.form("globex:v1", adapter)
    await uploader.ask("DELETE", "/v1/adapters/acme:v1")
    told = (await uploader.server.http.get("/metrics")).text.splitlines()
    rows = dict(row.rsplit(" ", 1) for row in told if row.startswith("mural:upload"))
    num_bytes = sum(map(len, adapter.values()))
    assert {name: float(value) for name, value in rows.items() if "_created" not in name} == {
        'mural:uploads_total{result="created"}': 1,
        'mural:uploads_total{result="unchanged"}': 1,
        'mural:uploads_total{result="refused"}': 3,
        'mural:upload_refusals_total{reason="conflict"}': 1,
        'mural:upload_refusals_total{reason="forbidden"}': 1,
        'mural:upload_refusals_total{reason="invalid_input"}': 1,
        "mural:uploaded_bytes_total": num_bytes,
        "mural:uploads_removed_total": 1,
    }


async def test_uploads_stay_where_the_time_to_live_is_0(start_uploads, adapter) -> None:
    uploader = await start_uploads(upload_ttl_s=0.0)

    card = (await uploader.form("acme:v1", adapter)).json()

    assert card["expires_at"] is None
    assert card["uploaded_at"] is not None


async def test_a_reaper_goes_on_after_a_failure(uploader, monkeypatch) -> None:
    uploads = uploader.server.state.uploads
    uploads._settings = replace(uploads._settings, reap_interval_s=0.0)
    rounds = asyncio.Semaphore(0)

    async def fail() -> int:
        rounds.release()
        raise RuntimeError("a bug")

    monkeypatch.setattr(uploads, "reap", fail)
    running = asyncio.create_task(uploads.run())
    async with asyncio.timeout(60):
        for _ in range(3):
            await rounds.acquire()
    running.cancel()


async def test_an_upload_that_an_alias_points_at_stays_hidden(
    start_uploads, adapter, places
) -> None:
    uploader = await start_uploads(upload_ttl_s=100.0)
    uploads = uploader.server.state.uploads
    end = (await uploader.form("acme:v1", adapter)).json()["expires_at"]
    (places["store"] / "acme/default/_aliases.json").write_text('{"stable": [{"version": "v1"}]}')

    conflict = await uploader.ask("DELETE", "/v1/adapters/acme:v1")
    uploads._now = lambda: end + 1.0

    assert error_of(conflict) == (409, "conflict")
    assert await uploads.reap() == 0
    assert (await uploader.ask("GET", "/v1/adapters")).json()["data"] == []


async def test_what_others_put_into_the_store_is_listed_and_never_expires(
    uploader, tmp_path: Path, make_adapter, places
) -> None:
    make_adapter(places["store"] / "acme/default/v1", 3)
    (places["store"] / "acme/default/broken").mkdir()
    (places["store"] / "acme/default/broken/adapter_config.json").write_text("[]")
    (places["store"] / "acme/default/broken/adapter_model.safetensors").write_text("")

    [card] = (await uploader.ask("GET", "/v1/adapters")).json()["data"]

    assert (card["id"], card["uploaded_at"], card["expires_at"]) == ("acme:v1", None, None)
    assert (await uploader.complete("acme:v1")).status_code == 200
    assert await uploader.server.state.uploads._find(parse_name("acme:v1")) is not None


# -- what is given out ----------------------------------------------------------------------------


async def test_what_was_uploaded_is_given_back_byte_for_byte(
    uploader, adapter, tmp_path: Path
) -> None:
    await uploader.form("acme/files:v1", adapter)

    manifest = await uploader.ask("GET", "/v1/adapters/acme/files:v1/manifest")

    assert manifest.content == build_manifest(tmp_path / "trained").to_json()
    for name, data in adapter.items():
        answer = await uploader.ask("GET", f"/v1/adapters/acme/files:v1/files/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-length"] == str(len(data))
        assert answer.content == data


async def test_only_files_of_the_manifest_are_given_out(uploader, adapter) -> None:
    await uploader.form("acme:v1", adapter)

    for path in ("_upload.json", "manifest.json", "x", "%2e%2e", "..%2f_aliases.json"):
        answer = await uploader.ask("GET", f"/v1/adapters/acme:v1/files/{path}")
        assert answer.status_code in (400, 404), path
    for path in ("acme:v2/manifest", f"acme:v2/files/{CONFIG}"):
        answer = await uploader.ask("GET", f"/v1/adapters/{path}")
        assert error_of(answer) == (404, "model_not_found")
    assert error_of(await uploader.ask("GET", "/v1/adapters/acme/manifest"))[0] == 400


async def test_an_expired_upload_is_not_given_out_nor_aliased(uploader, adapter) -> None:
    uploads = uploader.server.state.uploads
    end = (await uploader.form("acme:v1", adapter)).json()["expires_at"]
    uploads._now = lambda: end + 1.0

    for path in ("manifest", f"files/{CONFIG}"):
        answer = await uploader.ask("GET", f"/v1/adapters/acme:v1/{path}")
        assert error_of(answer) == (404, "model_not_found")
    pointed = await uploader.point("acme/default/aliases/stable", v1=1)
    assert error_of(pointed) == (404, "model_not_found")


async def test_downloads_have_bounds_and_a_client_that_leaves_gives_its_place_back(
    uploader, adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = uploader.server.state.uploads
    await uploader.form("acme:v1", adapter)
    path = f"/v1/adapters/acme:v1/files/{WEIGHTS}"
    begun, gone = asyncio.Semaphore(0), asyncio.Semaphore(0)

    @asynccontextmanager
    async def hang(name: object, file: object) -> AsyncIterator[AsyncIterator[bytes]]:
        begun.release()
        try:
            await asyncio.Event().wait()
            yield aiter(())
        finally:
            gone.release()

    with monkeypatch.context() as patched:
        patched.setattr(uploads._store, "open", hang)
        asking = [asyncio.create_task(uploader.ask("GET", path)) for _ in range(4)]
        async with asyncio.timeout(60):
            for _ in asking:
                await begun.acquire()
            refused = await uploader.ask("GET", path)
            for task in asking:
                task.cancel()
            for _ in asking:
                await gone.acquire()

    assert refused.status_code == 429
    assert not uploads._reads
    assert (await uploader.ask("GET", path)).content == adapter[WEIGHTS]


async def test_a_client_that_takes_nothing_is_left(
    uploader, adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = uploader.server.state.uploads
    await uploader.form("acme:v1", adapter)
    gone = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)

    @asynccontextmanager
    async def opened(name: object, file: object) -> AsyncIterator[AsyncIterator[bytes]]:
        try:
            yield endless()
        finally:
            gone.set()

    monkeypatch.setattr(uploads._store, "open", opened)
    monkeypatch.setattr(adapter_content, "WRITE_S", 0.05)
    _, writer = await asyncio.open_connection("127.0.0.1", uploader.server.port, limit=1)
    writer.write(
        f"GET /v1/adapters/acme:v1/files/{WEIGHTS} HTTP/1.1\r\nhost: x\r\n"
        f"authorization: {uploader.headers('acme')['authorization']}\r\n\r\n".encode()
    )
    await asyncio.wait_for(gone.wait(), 60)
    assert not uploads._reads
    writer.close()


async def test_a_file_that_breaks_off_is_no_whole_answer(
    uploader, adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = uploader.server.state.uploads
    await uploader.form("acme:v1", adapter)

    async def half() -> AsyncIterator[bytes]:
        yield adapter[CONFIG][:10]
        raise Unavailable("The store went away.")

    @asynccontextmanager
    async def opened(name: object, file: object) -> AsyncIterator[AsyncIterator[bytes]]:
        yield half()

    monkeypatch.setattr(uploads._store, "open", opened)
    with pytest.raises(httpx.RemoteProtocolError):
        await uploader.ask("GET", f"/v1/adapters/acme:v1/files/{CONFIG}")


async def test_an_alias_answers_at_once_where_it_was_asked_for_in_vain(
    uploader, adapter, other
) -> None:
    for name, files in (("acme/sql:v1", adapter), ("acme/sql:v2", other)):
        await uploader.form(name, files)
    assert error_of(await uploader.complete("acme/sql:stable")) == (404, "model_not_found")

    pointed = await uploader.point("acme/sql/aliases/stable", v1=1)

    held = {"stable": [{"version": "v1", "weight": 1.0}]}
    assert pointed.json() == {"id": "acme/sql", "object": "adapter.aliases", "aliases": held}
    assert (await uploader.complete("acme/sql:stable")).json()["model"] == "acme/sql:v1"
    assert (await uploader.ask("GET", "/v1/adapters/acme/sql/aliases")).json() == pointed.json()
    await uploader.point("acme/sql/aliases/stable", v2=1)
    assert (await uploader.complete("acme/sql:stable")).json()["model"] == "acme/sql:v2"
    removed = await uploader.ask("DELETE", "/v1/adapters/acme/sql/aliases/stable")
    assert removed.json()["aliases"] == {}


async def test_an_alias_that_cannot_be_is_refused(uploader, adapter) -> None:
    await uploader.form("acme:v1", adapter)
    place = "acme/default/aliases"

    assert error_of(await uploader.point(f"{place}/v1", v1=1)) == (409, "conflict")
    assert error_of(await uploader.point(f"{place}/s", v9=1)) == (404, "model_not_found")
    assert (await uploader.point(f"{place}/s", v1=0)).status_code == 400
    assert (await uploader.point(f"{place}/s")).status_code == 400
    assert (await uploader.point(f"{place}/..s", v1=1)).status_code == 400


async def test_an_admin_s_aliases_are_written_down(
    uploader, adapter, caplog: pytest.LogCaptureFixture
) -> None:
    await uploader.form("acme:v1", adapter)
    place = "acme/default/aliases/stable"
    with caplog.at_level(logging.INFO, "mural.audit"):
        await uploader.point(place, v1=1)
        assert (await uploader.point(place, "admin", v1=1)).status_code == 200
        await uploader.ask("DELETE", f"/v1/adapters/{place}", "admin")
        await asyncio.to_thread(uploader.server.state.audit.close)

    lines = [record.getMessage() for record in caplog.records if record.name == "mural.audit"]
    assert len(lines) == 2
    assert all("acme/default:stable" in line for line in lines)


# -- the store is S3 ------------------------------------------------------------------------------


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An unused prefix in moto's server, whose buckets this process shares."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mural")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "muralsecret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="uploads")
    yield f"s3://uploads/{tmp_path.name}?endpoint_url={endpoint}"
    server.stop()


async def test_an_upload_to_s3_answers_on_every_replica(
    start_server, keys, adapter, other, s3: str, tmp_path: Path
) -> None:
    replicas = [
        Uploader(
            await start_server(
                tenants_file=keys["file"],
                upload_store=s3,
                upload_dir=str(tmp_path / "quarantine"),
                upload_ttl_s=100.0,
                adapter_cache_dir=str(tmp_path / f"cache-{number}"),
            ),
            keys,
        )
        for number in range(2)
    ]
    one, two = replicas
    assert error_of(await one.complete("acme:v1")) == (404, "model_not_found")

    created = await one.form("acme:v1", adapter)

    assert created.status_code == 201
    for replica in replicas:
        assert (await replica.complete("acme:v1")).status_code == 200
        assert (await replica.ask("GET", "/v1/adapters/acme:v1")).json() == created.json()
        assert (await replica.ask("GET", "/v1/adapters")).json()["data"] == [created.json()]
        weights = await replica.ask("GET", f"/v1/adapters/acme:v1/files/{WEIGHTS}")
        assert weights.content == adapter[WEIGHTS]
    assert (await two.archive("acme:v1", tar_of(adapter))).status_code == 200
    assert error_of(await two.form("acme:v1", other)) == (409, "conflict")

    deleted = await two.ask("DELETE", "/v1/adapters/acme:v1")

    assert deleted.json()["deleted"]
    assert error_of(await two.complete("acme:v1")) == (404, "model_not_found")
    assert error_of(await one.form("acme:v1", adapter)) == (409, "conflict")


async def test_an_expired_upload_to_s3_is_absent_and_reaped(
    start_server, keys, adapter, s3: str, tmp_path: Path
) -> None:
    server = await start_server(
        tenants_file=keys["file"],
        upload_store=s3,
        upload_dir=str(tmp_path / "quarantine"),
        upload_ttl_s=100.0,
        adapter_cache_dir=str(tmp_path / "cache"),
    )
    uploader, uploads = Uploader(server, keys), server.state.uploads
    [resolver] = server.state.catalog._registry._resolvers.values()
    end = (await uploader.form("acme:v1", adapter)).json()["expires_at"]
    uploads._now = resolver._now = lambda: end + 1.0

    assert error_of(await uploader.complete("acme:v1")) == (404, "model_not_found")
    assert error_of(await uploader.form("acme:v1", adapter)) == (409, "conflict")
    assert await uploads.reap() == 1
    assert await uploads.reap() == 0
    assert (await uploader.ask("GET", "/v1/adapters")).json()["data"] == []
