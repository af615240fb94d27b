"""Tenants upload adapters over HTTP: what is taken, from whom, and into which store."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
from pathlib import Path

import boto3
import pytest

from mural_resolvers.errors import Forbidden
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.store import TOMBSTONE_FILE, StoredVersion
from mural_resolvers.versions import AliasTarget
from mural_server.settings import ServerSettings, SettingsError
from tests.mural_server.api.uploads.uploading import (
    ADMIN_KEY,
    CONFIG,
    WEEK_S,
    WEIGHTS,
    Uploader,
    error_of,
    files_of,
    tar_of,
)

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


# -- the store is S3 ------------------------------------------------------------------------------


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An unused prefix in moto's server, whose buckets this process shares."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mural")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "muralsecret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket="uploads")
    return f"s3://uploads/{tmp_path.name}?endpoint_url={s3_endpoint}"


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
