"""What uploads are refused for: names, bodies, adapters, and limits. Nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mural_resolvers.manifest import build_manifest
from tests.mural_server.api.uploads.uploading import (
    CONFIG,
    WEIGHTS,
    error_of,
    tar_of,
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
