"""What an operator names beside an adapter: the one source that is asked, or the disk alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import boto3
import pytest

from mural_resolvers.manifest import MANIFEST_FILE, build_manifest
from mural_server.protocol import ControlClient, ControlError

BUCKET = "adapters"


@pytest.fixture
def store(s3_endpoint, monkeypatch):
    """The endpoint of an S3 server with a bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mural")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "muralsecret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=BUCKET)
    return s3_endpoint


@pytest.fixture
async def server(start_server, store, tmp_path):
    """Two buckets' worth of sources, and a folder behind them."""
    local = tmp_path / "local"
    local.mkdir()
    path = tmp_path / "sources.yaml"
    s3 = f"type: s3, bucket: {BUCKET}, endpoint_url: {store}"
    path.write_text(
        f"cache: {{path: {tmp_path / 'cache'}, quota: 1Gi}}\n"
        "resolvers:\n"
        f"  - {{{s3}, name: main, prefix: {tmp_path.name}/main}}\n"
        f"  - {{{s3}, name: mirror, prefix: {tmp_path.name}/mirror}}\n"
        f"  - {{type: directory, name: local, path: {local}}}\n"
    )
    made = await start_server(adapter_sources=str(path))
    made.store = store
    made.local = local
    # The stand-in forgets nothing between two servers of one process.
    made.prefix = tmp_path.name
    return made


@pytest.fixture
def control(server) -> ControlClient:
    return ControlClient("127.0.0.1", server.control_port)


def publish(server, source: str, name: str, folder: Path) -> str:
    client = boto3.client("s3", endpoint_url=server.store)
    manifest = build_manifest(folder)
    place = f"{server.prefix}/{source}/{name}"
    for file in manifest.files:
        data = (folder / file.path).read_bytes()
        client.put_object(Bucket=BUCKET, Key=f"{place}/{file.path}", Body=data)
    client.put_object(Bucket=BUCKET, Key=f"{place}/{MANIFEST_FILE}", Body=manifest.to_json())
    return manifest.digest


async def refused(control: ControlClient, name: str, **more: Any) -> ControlError:
    with pytest.raises(ControlError) as caught:
        await control.set_resident(name, **more)
    return caught.value


async def test_a_fetch_to_disk_loads_nothing_and_may_be_repeated(
    server, control, engine, adapter_dir, tmp_path
):
    digest = publish(server, "main", "acme/default/v1", adapter_dir / "acme/default/v1")
    for _ in range(2):
        status = await control.set_resident("acme:v1", level="disk", digest=digest)
        assert (status.name, status.level, status.digest) == ("acme:v1", "disk", digest)
    assert engine.loads == []
    assert list((tmp_path / "cache").rglob("adapter_model.safetensors"))
    states = control.states()
    assert (await anext(states)).adapters["acme:v1"].level == "disk"
    await states.aclose()


async def test_what_has_left_the_disk_is_fetched_to_it_again(
    server, control, adapter_dir, tmp_path
):
    publish(server, "main", "acme/default/v1", adapter_dir / "acme/default/v1")
    await control.set_resident("acme:v1", level="disk")
    [weights] = (tmp_path / "cache").rglob("adapter_model.safetensors")
    shutil.rmtree(weights.parent)
    await control.set_resident("acme:v1", level="disk")
    assert weights.exists()


async def test_a_fetch_to_disk_leaves_what_is_resident_as_it_is(server, control, adapter_dir):
    publish(server, "main", "acme/default/v1", adapter_dir / "acme/default/v1")
    await control.set_resident("acme:v1", level="slot", pinned=True)
    status = await control.set_resident("acme:v1", level="disk")
    assert (status.level, status.pinned) == ("slot", True)


async def test_a_folder_s_content_is_on_disk_already(server, control, adapter_dir):
    shutil.copytree(adapter_dir / "acme", server.local / "acme")
    status = await control.set_resident("acme:v1", level="disk")
    assert status.level == "disk"


async def test_a_fetch_to_disk_is_refused_as_a_load_is(server, control, adapter_dir):
    publish(server, "main", "acme/default/v1", adapter_dir / "acme/default/v1")
    assert (await refused(control, "acme:v9", level="disk")).status == 404
    assert (await refused(control, "acme:v1", level="disk", digest="0" * 64)).status == 409


async def test_only_the_named_source_is_asked(server, control, adapter_dir):
    digest = publish(server, "mirror", "acme/default/v1", adapter_dir / "acme/default/v1")
    assert (await refused(control, "acme:v1", source="main")).status == 404
    status = await control.set_resident("acme:v1", source="mirror")
    assert status.digest == digest


async def test_an_unknown_source_is_named(control):
    error = await refused(control, "acme:v1", source="minor")
    assert error.status == 400
    assert "'minor'" in error.message
    assert "main, mirror, local" in error.message


async def test_the_same_content_from_another_source_is_not_fetched_again(
    server, control, adapter_dir
):
    folder = adapter_dir / "acme/default/v1"
    for source in ("main", "mirror"):
        publish(server, source, "acme/default/v1", folder)
    first = await control.set_resident("acme:v1", source="main")
    second = await control.set_resident("acme:v1", source="mirror")
    assert first.digest == second.digest
    metrics = (await server.http.get("/metrics")).text
    assert 'mural:adapter_fetches_total{result="downloaded"} 1.0' in metrics


@pytest.mark.parametrize("first", ["main", "local"])
async def test_other_content_in_the_named_source_is_a_conflict(server, control, adapter_dir, first):
    mine, other = (adapter_dir / f"acme/default/{version}" for version in ("v1", "v2"))
    if first == "main":
        digest = publish(server, "main", "acme/default/v1", mine)
    else:
        shutil.copytree(mine, server.local / "acme/default/v1")
        digest = build_manifest(mine).digest
    publish(server, "mirror", "acme/default/v1", other)
    assert (await control.set_resident("acme:v1", source=first)).digest == digest
    assert (await refused(control, "acme:v1", source="mirror")).status == 409
    assert (await control.set_resident("acme:v1", source=first)).digest == digest


async def test_a_name_of_the_server_s_own_is_of_no_source(start_server, adapter_dir):
    server = await start_server(adapter_dir=str(adapter_dir), allow_runtime_lora_updating=True)
    control = ControlClient("127.0.0.1", server.control_port)
    path = str(adapter_dir / "acme/default/v1")
    await server.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": path})
    assert (await control.set_resident("sql")).name == "sql"
    assert (await refused(control, "sql", source="directory")).status == 400
