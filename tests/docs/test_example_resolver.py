"""The resolver of the how-to, as printed there, brings an adapter into the cache."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.disk_cache import CacheSettings, DiskCache
from mural_resolvers.download import Downloader, DownloadSettings
from mural_resolvers.errors import AdapterNotFound
from mural_resolvers.fetcher import AdapterFetcher
from mural_resolvers.limits import DEFAULT_LIMITS
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import LoRAResolver
from mural_resolvers.sources import build_resolvers, read_sources
from mural_resolvers.tenants import Principal

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/write-a-resolver.md"
ACME = Principal(tenant="acme")
BASE = BaseSpec(
    model_names=("b",), modules={}, vocab_size=1, hidden_size=1, num_layers=1, max_lora_rank=8
)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    """A web server over a folder, with ranges and ETags."""
    app = Starlette(routes=[Mount("/", StaticFiles(directory=tmp_path))])
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    await serving


def printed(language: str) -> str:
    """The first example in a language."""
    found = re.findall(
        rf"```{language}[^\n]*\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return str(found[0])


def example(url: str) -> LoRAResolver:
    named: dict[str, object] = {}
    exec(compile(printed("python"), str(PAGE), "exec"), named)
    factory = named["web"]
    assert callable(factory)
    made = factory("web", {"url": url}, DEFAULT_LIMITS)
    assert isinstance(made, LoRAResolver)
    return made


async def test_the_printed_resolver_serves_what_a_web_server_has(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "acme-default-v1"
    folder.mkdir()
    header = b'{"a.lora_A.weight":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]}}'
    config = {"peft_type": "LORA", "r": 1, "target_modules": ["a"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\0" * 4
    )
    cache = DiskCache(tmp_path / "cache", CacheSettings(min_free_bytes=0))
    cache.open()
    fetcher = AdapterFetcher(cache, Downloader(DownloadSettings(max_attempts=1)))
    registry = LoRAResolverRegistry([example(url)], BASE, LoRAIdAllocator(), fetcher=fetcher)

    found = await registry.resolve(ACME, parse_name("acme:v1"))
    with pytest.raises(AdapterNotFound):
        await registry.resolve(ACME, parse_name("acme:v2"))
    await registry.close()

    assert found.manifest == build_manifest(folder)


def test_an_installed_package_adds_a_type_of_source_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    installed = site / "my_package-1.0.dist-info"
    installed.mkdir(parents=True)
    (site / "my_package.py").write_text(printed("python"))
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    declared = tomllib.loads(printed("toml"))["project"]["entry-points"]["mural.resolvers"]
    lines = [f"{name} = {place}" for name, place in declared.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[mural.resolvers]", *lines]))
    monkeypatch.syspath_prepend(str(site))
    sources = tmp_path / "sources.yaml"
    sources.write_text("resolvers: [{type: web, url: 'http://127.0.0.1:9'}]")

    [resolver] = build_resolvers(read_sources(sources).resolvers)

    assert resolver.name == "web"
    assert type(resolver).__module__ == "my_package"
