"""What becomes of an upload: for how long it is kept, and who is given it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from mural_resolvers.errors import Unavailable
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.store import TOMBSTONE_FILE
from mural_server.api import adapter_content
from tests.mural_server.api.uploads.uploading import (
    CONFIG,
    WEIGHTS,
    error_of,
)

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
            raise AssertionError("it hangs until it is left")
            yield
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
