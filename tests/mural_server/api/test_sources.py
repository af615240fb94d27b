"""A server whose adapters come from S3: found on the first request, kept on disk, served alone.

The store is moto's server in this process; real ones are in the ``stores`` suite.
"""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import boto3
import pytest

from mural_resolvers.disk_cache import CacheUsage, DiskCache
from mural_resolvers.errors import InvalidInput
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest
from mural_resolvers.sources import build_resolvers
from mural_resolvers.tenants import mint_key
from mural_server.settings import ServerSettings, SettingsError

BUCKET = "adapters"


@pytest.fixture
def store(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The endpoint of an S3 server with a bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mural")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "muralsecret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=BUCKET)
    return s3_endpoint


def publish(endpoint: str, key: str, folder: Path) -> None:
    """As any S3 client would: the files, then the manifest."""
    client = boto3.client("s3", endpoint_url=endpoint)
    manifest = build_manifest(folder)
    for file in manifest.files:
        data = (folder / file.path).read_bytes()
        client.put_object(Bucket=BUCKET, Key=f"{key}/{file.path}", Body=data)
    client.put_object(Bucket=BUCKET, Key=f"{key}/{MANIFEST_FILE}", Body=manifest.to_json())


@pytest.fixture
def sources(store: str, tmp_path: Path) -> dict[str, object]:
    url = f"s3://{BUCKET}/prod?endpoint_url={store}"
    return {"adapter_source": (url,), "adapter_cache_dir": str(tmp_path / "cache")}


async def test_an_adapter_is_fetched_on_its_first_request_and_kept(
    start_server, engine, adapter_dir, store, sources, tmp_path
):
    publish(store, "prod/acme/default/v1", adapter_dir / "acme/default/v1")
    server = await start_server(**sources)
    first = await server.complete(model="acme:v1")
    second = await server.complete(model="acme")

    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json()["model"] == second.json()["model"] == "acme:v1"
    assert Path(engine.loads[0].lora_path).is_relative_to(tmp_path / "cache")
    assert len(engine.loads) == 1
    metrics = (await server.http.get("/metrics")).text
    assert 'mural:adapter_fetches_total{result="downloaded"} 1.0' in metrics
    assert "mural:adapter_cache_versions 1.0" in metrics
    assert 'mural:adapter_source_down{source="s3"} 0.0' in metrics


async def test_another_tenant_s_key_is_refused_whatever_is_there(
    start_server, adapter_dir, store, sources, tmp_path
):
    publish(store, "prod/acme/default/v1", adapter_dir / "acme/default/v1")
    keys = {tenant: mint_key() for tenant in ("acme", "globex")}
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        "tenants:\n"
        + "".join(
            f"  - id: {tenant}\n    keys:\n      - id: {key.key_id}\n        sha256: {key.sha256}\n"
            for tenant, key in keys.items()
        )
    )
    server = await start_server(tenants_file=str(tenants), **sources)
    ask = {"model": "acme:v1", "prompt": "Hi"}
    before = await server.post("/v1/completions", ask, keys["globex"].key)
    assert (await server.post("/v1/completions", ask, keys["acme"].key)).status_code == 200
    after = await server.post("/v1/completions", ask, keys["globex"].key)
    absent = await server.post("/v1/completions", {**ask, "model": "acme:none"}, keys["globex"].key)

    assert before.status_code == after.status_code == absent.status_code == 403
    assert before.json() == after.json() == absent.json()


async def test_a_server_starts_without_its_store_and_says_503(start_server, sources):
    down = f"s3://{BUCKET}/prod?endpoint_url=http://127.0.0.1:9&max_attempts=1"
    server = await start_server(**{**sources, "adapter_source": (down,)})
    answer = await server.complete(model="acme:v1")

    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    metrics = (await server.http.get("/metrics")).text
    assert 'mural:adapter_source_down{source="s3"} 1.0' in metrics


async def test_a_resident_adapter_has_its_template_when_the_disk_cache_has_dropped_it(
    start_server, make_adapter, store, sources, tmp_path
):
    folder = make_adapter(tmp_path / "v3", 3, template="<<{{ messages[0].content }}>>")
    publish(store, "prod/acme/default/v3", folder)
    server = await start_server(**sources)
    assert (await server.complete(model="acme:v3")).status_code == 200
    shutil.rmtree(server.engine.loads[0].lora_path)

    assert (await server.chat(model="acme:v3")).status_code == 200
    prompt = server.engine.requests[-1].prompt_token_ids
    assert await server.state.texts.decode(prompt) == "<<Hi>>"
    assert len(server.engine.loads) == 1


async def test_a_scrape_leaves_the_disk_to_other_threads(start_server, sources, monkeypatch):
    threads = []

    def usage(cache):
        threads.append(threading.current_thread())
        return CacheUsage(bytes=7, quota=9, versions=1, by_tenant={})

    monkeypatch.setattr(DiskCache, "usage", usage)
    server = await start_server(**sources)
    metrics = (await server.http.get("/metrics")).text
    assert "mural:adapter_cache_bytes 7.0" in metrics
    assert threads
    assert threading.current_thread() not in threads


async def test_the_file_of_sources_says_the_same(start_server, adapter_dir, store, tmp_path):
    publish(store, "prod/acme/default/v1", adapter_dir / "acme/default/v1")
    path = tmp_path / "sources.yaml"
    path.write_text(
        f"cache: {{path: {tmp_path / 'cache'}, quota: 1Gi}}\n"
        "resolvers:\n"
        f"  - {{type: directory, path: {tmp_path}}}\n"
        f"  - {{type: s3, name: main, bucket: {BUCKET}, prefix: prod, endpoint_url: {store}}}\n"
    )
    server = await start_server(adapter_sources=str(path))
    assert (await server.complete(model="acme:v1")).status_code == 200
    metrics = (await server.http.get("/metrics")).text
    assert re.findall(r'mural:adapter_source_down{source="(\w+)"}', metrics) == [
        "directory",
        "main",
    ]


def test_the_log_says_where_the_sources_are():
    settings = ServerSettings(
        adapter_dir="my", adapter_source=("s3://bucket/prod?region=eu", "hub+https://hub.internal")
    )
    shown = [str(source) for source in settings.sources().resolvers]
    assert shown == ["directory my", "s3 s3://bucket/prod", "hub https://hub.internal"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("resolvers: [{type: ftp}]", "known are directory, hub, s3"),
        ("resolvers: [{path: /x}]", r"resolvers\[0\]\.type: s3, hub, directory or another"),
        ("resolvers: [{type: s3, bucket: b, colour: red}]", "colour"),
        ("resolvers: [{type: hub, colour: red}]", "colour"),
        ("resolvers: [{type: directory}]", "path"),
        ("resolvers: [{type: directory, path: a}, {type: directory, path: b}]", "share a name"),
        ("cache: {quota: much}\nresolvers: []", "no size"),
        ("cache: {colour: red}\nresolvers: []", "colour"),
        ("fetch: {cold_burst: 0}\nresolvers: []", "fetch.cold_burst"),
        ("cache: {verify: so}\nresolvers: []", "cache.verify: true or false is wanted, not 'so'"),
        ("fetch: {deadline_s: inf}\nresolvers: []", "fetch.deadline_s: a finite number is wanted"),
        ("resolvers: {", "sources.yaml: Line 2, column 1: "),
        ("- 1", "a mapping is wanted, not a list"),
        ("&a [*a]", "sources.yaml: Line 1"),
    ],
)
async def test_a_wrong_file_of_sources_is_refused_with_the_place(
    start_server, tmp_path, text, reason
):
    path = tmp_path / "sources.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=reason):
        await start_server(adapter_sources=str(path), adapter_cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("url", ["ftp://host/x", "gopher://x"])
def test_a_source_of_no_known_kind_is_refused_before_anything_starts(url):
    with pytest.raises(SettingsError, match="begins no source of adapters"):
        ServerSettings(adapter_source=(url,)).validate()


def test_a_source_of_no_known_kind_is_not_repeated():
    with pytest.raises(SettingsError) as caught:
        ServerSettings(adapter_source=("ftp://S3CRET@x/y?token=S3CRET",)).validate()
    assert "S3CRET" not in str(caught.value)
    assert "ftp:" in str(caught.value)


@pytest.mark.parametrize("url", ["s3://", "hub+https://host", "s3://b?colour=red"])
def test_a_source_that_cannot_be_meant_is_refused(url):
    with pytest.raises(InvalidInput, match="The source"):
        build_resolvers(ServerSettings(adapter_source=(url,)).sources().resolvers)
