"""What it costs to find an adapter: cold from S3, a hundred at once, warm, and in a large cache.

As in a server, the event loop is uvloop's. The S3 server runs in a process of its own on this
machine: versitygw where ``--server`` names its binary, else moto's. A cold resolve is a look-up, a
download into the disk cache, the hash, the check and the publication with fsync; beside it, in
turns, the same files with boto3's ``download_file``, which checks and keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import boto3
import uvloop
from botocore.config import Config

from mural_resolvers.base_spec import BaseSpec, ModuleSpec
from mural_resolvers.disk_cache import CacheSettings, DiskCache
from mural_resolvers.download import Downloader
from mural_resolvers.fetcher import AdapterFetcher, FetcherSettings
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.registry import LoRAResolverRegistry, RegistrySettings
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.s3 import S3Resolver, S3Settings
from mural_resolvers.tenants import Principal
from mural_server.bench.stand_in import catalog_of

BUCKET = "adapters"
ACME = Principal(tenant="acme")
KEY, SECRET = "mural", "muralsecret"
MB = 1_000_000
CONFIG = json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]})
BASE = BaseSpec(
    model_names=("bench",),
    modules={"model.layers.0.self_attn.q_proj": ModuleSpec("linear", 8, 8)},
    vocab_size=8,
    hidden_size=8,
    num_layers=1,
    max_lora_rank=8,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--names", type=int, default=100, help="asked for at once")
    parser.add_argument("--cached", type=int, default=10_000, help="versions in the large cache")
    parser.add_argument("--server", type=Path, metavar="BINARY", help="versitygw's")
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not how fast")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.megabytes, args.names, args.cached = 2, 0.2, 8, 100
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    with tempfile.TemporaryDirectory() as text, ExitStack() as held:
        work = Path(text)
        endpoint = held.enter_context(s3_server(work, args.server))
        names = publish(endpoint, work / "made", args.rounds * 2 + 1, int(args.megabytes * MB))
        many = publish(endpoint, work / "made", args.names, 200_000, "small")
        uvloop.run(cold(endpoint, work, names))
        uvloop.run(at_once(endpoint, work, many))
        uvloop.run(warm(endpoint, work, many[0]))
        large_cache(work, args.cached)
    return 0


@contextmanager
def s3_server(work: Path, binary: Path | None) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    if binary is None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        for name in ("iam", "ver", "data"):
            (work / name).mkdir()
        command = [str(binary), "--quiet", "--access", KEY, "--secret", SECRET]
        command += ["--port", f"127.0.0.1:{port}", "--iam-dir", str(work / "iam")]
        command += ["posix", "--versioning-dir", str(work / "ver"), str(work / "data")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        print(f"S3 server: {'moto' if binary is None else binary.name}")
        client(endpoint).create_bucket(Bucket=BUCKET)
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)


def client(endpoint: str) -> Any:
    """boto3 makes the class of its clients at run time."""
    config = Config(s3={"addressing_style": "path"}, max_pool_connections=64)
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


def make_adapter(folder: Path, num_bytes: int, seed: int) -> Path:
    """Weights of the right form and of random bytes: two tensors of rank 8."""
    folder.mkdir(parents=True)
    columns = num_bytes // 64
    shapes = {"lora_A": [8, columns], "lora_B": [columns, 8]}
    header, end = {}, 0
    for part, shape in shapes.items():
        size = 4 * 8 * columns
        key = f"base_model.model.model.layers.0.self_attn.q_proj.{part}.weight"
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    data = len(raw).to_bytes(8, "little") + raw + random.Random(seed).randbytes(end)
    (folder / "adapter_model.safetensors").write_bytes(data)
    (folder / "adapter_config.json").write_text(CONFIG)
    return folder


def publish(
    endpoint: str, made: Path, count: int, num_bytes: int, adapter: str = "default"
) -> list[AdapterName]:
    store = client(endpoint)
    names = []
    for number in range(count):
        name = AdapterName("acme", adapter, f"v{number}")
        folder = make_adapter(made / adapter / name.version, num_bytes, hash((adapter, number)))
        manifest = build_manifest(folder)
        place = f"acme/{adapter}/{name.version}"
        for file in manifest.files:
            data = (folder / file.path).read_bytes()
            store.put_object(Bucket=BUCKET, Key=f"{place}/{file.path}", Body=data)
        store.put_object(Bucket=BUCKET, Key=f"{place}/{MANIFEST_FILE}", Body=manifest.to_json())
        names.append(name)
    return names


def registry(endpoint: str, cache_root: Path) -> LoRAResolverRegistry:
    settings = S3Settings(bucket=BUCKET, endpoint_url=endpoint, region="us-east-1")
    cache = DiskCache(cache_root, CacheSettings(min_free_bytes=0))
    cache.open()
    bounds = FetcherSettings(
        cold_loads_per_minute=1e6, cold_burst=10**6, max_pending_per_tenant=1000
    )
    bounds_of_looks = RegistrySettings(timeout_s=300, max_pending_per_tenant=10_000)
    return LoRAResolverRegistry(
        [S3Resolver(settings)],
        BASE,
        LoRAIdAllocator(),
        bounds_of_looks,
        fetcher=AdapterFetcher(cache, Downloader(), bounds),
    )


def download(store: Any, name: AdapterName, folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        key = f"{name.tenant}/{name.adapter}/{name.version}/{file}"
        store.download_file(BUCKET, key, str(folder / file))


async def cold(endpoint: str, work: Path, names: list[AdapterName]) -> None:
    ours, theirs, ratios = [], [], []
    chain, store = registry(endpoint, work / "cold"), client(endpoint)
    await chain.get(ACME, names[0])
    download(store, names[0], work / "boto" / "first")
    for turn in range(len(names) // 2):
        name, other = names[2 * turn + 1], names[2 * turn + 2]
        started = time.perf_counter()
        await chain.get(ACME, name)
        middle = time.perf_counter()
        download(store, other, work / "boto" / other.version)
        ended = time.perf_counter()
        ours.append(middle - started)
        theirs.append(ended - middle)
        ratios.append(ours[-1] / theirs[-1])
    await chain.close()
    print(
        f"cold resolve: {statistics.median(ours) * 1e3:.0f} ms, boto3 download_file "
        f"{statistics.median(theirs) * 1e3:.0f} ms, ratio {statistics.median(ratios):.2f} "
        f"(rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
    )


async def at_once(endpoint: str, work: Path, names: list[AdapterName]) -> None:
    chain, store = registry(endpoint, work / "many"), client(endpoint)
    started = time.perf_counter()
    await asyncio.gather(*(chain.get(ACME, name) for name in names))
    middle = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        folders = [work / "boto" / f"many-{name.version}" for name in names]
        list(threads.map(download, [store] * len(names), names, folders))
    ended = time.perf_counter()
    again = time.perf_counter()
    await asyncio.gather(*(chain.get(ACME, name) for name in names))
    warm_s = time.perf_counter() - again
    await chain.close()
    print(
        f"{len(names)} names at once: {middle - started:.2f} s, boto3 in 8 threads "
        f"{ended - middle:.2f} s, ratio {(middle - started) / (ended - middle):.2f}; the same "
        f"again {warm_s:.2f} s"
    )


async def warm(endpoint: str, work: Path, name: AdapterName) -> None:
    """The request path of a server for a name that it knows: the catalog's look-up."""
    chain = registry(endpoint, work / "many")
    catalog = catalog_of(chain, BASE)
    async with catalog.use(ACME, name.short):
        pass
    opened: list[object] = []
    sys.addaudithook(lambda event, _: opened.append(event) if event in IO_EVENTS else None)
    times = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(2000):
        started = time.perf_counter()
        async with catalog.use(ACME, name.short):
            pass
        times.append(time.perf_counter() - started)
    after = resource.getrusage(resource.RUSAGE_SELF)
    blocks = after.ru_inblock - before.ru_inblock + after.ru_oublock - before.ru_oublock
    await catalog.close()
    await chain.close()
    print(
        f"warm name: {statistics.median(times) * 1e6:.0f} us (p99 "
        f"{sorted(times)[int(len(times) * 0.99)] * 1e6:.0f}); files and sockets opened: "
        f"{len(opened)}, blocks read or written: {blocks}"
    )


IO_EVENTS = frozenset({"open", "os.scandir", "os.listdir", "socket.connect", "os.utime"})


def large_cache(work: Path, count: int) -> None:
    times = {}
    for size in (100, count):
        root = work / f"cache-{size}"
        cache, digests = fill(root, size)
        cache.close()
        started = time.perf_counter()
        cache = DiskCache(root, CacheSettings(min_free_bytes=0))
        report = cache.open()
        opened_s = time.perf_counter() - started
        sample = random.Random(0).sample(range(size), 100)
        started = time.perf_counter()
        for number in sample:
            assert cache.find(AdapterName("acme", "large", f"v{number}")) is not None
            cache.lease(digests[number]).release()
        look_s = (time.perf_counter() - started) / len(sample)
        times[size] = (opened_s, look_s, report.versions)
        used = cache.usage().bytes
        cache.close()
        started = time.perf_counter()
        smaller = DiskCache(root, CacheSettings(quota_bytes=used // 2, min_free_bytes=0))
        smaller.open()
        evicted_s = time.perf_counter() - started
        left = smaller.usage().versions
        smaller.close()
        shutil.rmtree(root)
        print(
            f"cache of {size}: start-up sweep {opened_s * 1e3:.0f} ms, find + lease "
            f"{look_s * 1e6:.0f} us, eviction of {size - left} at a start with half the quota "
            f"{evicted_s * 1e3:.0f} ms"
        )
    print(f"find + lease, {count} against 100 versions: {times[count][1] / times[100][1]:.2f}")


def fill(root: Path, count: int) -> tuple[DiskCache, list[str]]:
    cache = DiskCache(root, CacheSettings(min_free_bytes=0))
    cache.open()
    digests = []
    for number in range(count):
        name = AdapterName("acme", "large", f"v{number}")
        staging = cache.stage(4096, "acme")
        shutil.rmtree(staging.folder)
        make_adapter(staging.folder, 640, number)
        manifest = build_manifest(staging.folder)
        staging.commit(manifest, name, "bench", manifest.digest)
        staging.discard()
        digests.append(manifest.digest)
    return cache, digests


if __name__ == "__main__":
    raise SystemExit(main())
