"""What moto forgives, on a real S3 server, and with a real fault proxy in between."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
import trustme

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.download import Downloader, DownloadSettings
from mural_resolvers.errors import Forbidden, Unavailable
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription
from mural_resolvers.s3 import CredentialsRefused, S3Resolver, S3Settings, S3Store
from mural_resolvers.tenants import Principal

pytestmark = pytest.mark.stores

NAME = AdapterName("t1", "default", "v1")
OTHERS = AdapterName("t2", "default", "v1")
BIG = 6 << 20


@pytest.fixture
def adapter(tmp_path: Path, write_adapter: Callable[..., Path]) -> Path:
    """An adapter of 6 MiB."""
    rows = BIG // 64
    tensors = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [rows, 8]),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": ("F32", [8, rows]),
    }
    return write_adapter(tmp_path / "adapter", tensors=tensors)


@pytest.fixture
async def gateway(versitygw: Any, new_bucket: Any, adapter: Path) -> AsyncIterator[Any]:
    """A bucket on versitygw with one version of two tenants."""
    bucket = new_bucket(versitygw)
    store = S3Store(bucket.settings())
    for name in (NAME, OTHERS):
        await store.publish(name, adapter, build_manifest(adapter))
    await store.close()
    yield bucket
    bucket.boto.close()


@asynccontextmanager
async def resolving(settings: S3Settings) -> AsyncIterator[S3Resolver]:
    resolver = S3Resolver(settings)
    try:
        yield resolver
    finally:
        await resolver.close()


async def fetch(
    settings: S3Settings, base: BaseSpec, folder: Path, **bounds: Any
) -> AdapterDescription:
    """Resolve and download over a client of its own."""
    os.mkdir(folder)
    small: dict[str, Any] = {"part_bytes": 1 << 20, "backoff_s": 0.02, "max_backoff_s": 0.2}
    downloader = Downloader(DownloadSettings(**(small | bounds)))
    async with resolving(settings) as resolver:
        try:
            found = await resolver.resolve(Principal("t1"), NAME, base)
            assert found is not None
            await downloader.download(resolver, found, folder, lambda _: None)
        finally:
            await downloader.close()
    return found


class TestCredentials:
    @pytest.mark.parametrize(("key_id", "secret"), [("mural", "wrong"), ("nobody", "muralsecret")])
    async def test_a_bad_key_is_the_sources_trouble_and_the_stores_users(
        self,
        gateway: Any,
        base_spec: BaseSpec,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        adapter: Path,
        key_id: str,
        secret: str,
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        async with resolving(gateway.settings()) as resolver:
            with pytest.raises(Unavailable):
                await resolver.resolve(Principal("t1"), NAME, base_spec)
        assert "refuses its credentials" in caplog.text
        assert secret not in caplog.text
        store = S3Store(gateway.settings())
        with pytest.raises(CredentialsRefused):
            await store.publish(NAME.at("v2"), adapter, build_manifest(adapter))
        await store.close()

    async def test_a_skewed_clock_is_the_sources_trouble(
        self,
        gateway: Any,
        base_spec: BaseSpec,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        ahead = datetime.timedelta(hours=1)
        real = botocore.auth.get_current_datetime
        monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda **k: real(**k) + ahead)
        async with resolving(gateway.settings(max_attempts=1)) as resolver:
            with pytest.raises(Unavailable):
                await resolver.resolve(Principal("t1"), NAME, base_spec)
        assert "RequestTimeTooSkewed" in caplog.text

    @pytest.fixture
    def limited(
        self, gateway: Any, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., None]]:
        """Makes this process a user who may get what lies under t1, and list as told."""
        user = f"user{os.getpid()}"
        create = [
            *gateway.server.admin,
            "create-user",
            "-a",
            user,
            "-s",
            "usersecret",
            "-r",
            "user",
        ]
        subprocess.run(create, check=True, capture_output=True)

        def become(*, may_list: bool) -> None:
            place = f"arn:aws:s3:::{gateway.name}"
            statements = [
                {"Action": "s3:GetObject", "Resource": f"{place}/adapters/t1/*"},
                *([{"Action": "s3:ListBucket", "Resource": place}] if may_list else []),
            ]
            policy = {
                "Version": "2012-10-17",
                "Statement": [
                    {"Effect": "Allow", "Principal": {"AWS": [user]}} | statement
                    for statement in statements
                ],
            }
            gateway.boto.put_bucket_policy(Bucket=gateway.name, Policy=json.dumps(policy))
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "usersecret")

        yield become
        delete = [*gateway.server.admin, "delete-user", "-a", user]
        subprocess.run(delete, check=True, capture_output=True)

    async def test_a_tenant_whose_objects_are_refused_is_forbidden(
        self, gateway: Any, base_spec: BaseSpec, limited: Callable[..., None]
    ) -> None:
        limited(may_list=True)
        async with resolving(gateway.settings()) as resolver:
            assert await resolver.resolve(Principal("t1"), NAME, base_spec) is not None
            with pytest.raises(Forbidden) as caught:
                await resolver.resolve(Principal("t2"), OTHERS, base_spec)
            assert not isinstance(caught.value, CredentialsRefused)

    async def test_credentials_that_may_not_list_cannot_tell_refused_from_absent(
        self,
        gateway: Any,
        base_spec: BaseSpec,
        limited: Callable[..., None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        limited(may_list=False)
        async with resolving(gateway.settings()) as resolver:
            with pytest.raises(Unavailable):
                await resolver.resolve(Principal("t2"), OTHERS, base_spec)
        assert "list the prefix" in caplog.text

    async def test_a_user_who_may_only_read_cannot_publish(
        self, gateway: Any, adapter: Path, limited: Callable[..., None]
    ) -> None:
        limited(may_list=True)
        store = S3Store(gateway.settings())
        with pytest.raises(Forbidden, match="AccessDenied"):
            await store.publish(NAME.at("v2"), adapter, build_manifest(adapter))
        await store.close()


class TestNetwork:
    @pytest.mark.parametrize(
        "toxic",
        [
            ("limit_data", {"bytes": 300_000}),
            ("reset_peer", {"timeout": 60}),
            ("bandwidth", {"rate": 4_000}),
            ("latency", {"latency": 100, "jitter": 50}),
            ("slicer", {"average_size": 500, "size_variation": 200, "delay": 10}),
        ],
    )
    async def test_a_bad_line_gives_the_whole_content_in_the_end(
        self,
        gateway: Any,
        toxiproxy: Any,
        base_spec: BaseSpec,
        adapter: Path,
        tmp_path: Path,
        toxic: tuple[str, dict[str, int]],
    ) -> None:
        name, url = toxiproxy.front(gateway.server)
        kind, attributes = toxic
        settings = gateway.settings(endpoint_url=url, max_connections=8)
        async with resolving(settings) as resolver:
            found = await resolver.resolve(Principal("t1"), NAME, base_spec)
            assert found is not None
            toxiproxy.poison(name, kind, **attributes)
            if kind == "reset_peer":
                asyncio.get_running_loop().call_later(1.0, toxiproxy.heal, name, kind)
            (tmp_path / "back").mkdir()
            downloader = Downloader(
                DownloadSettings(
                    part_bytes=1 << 20, backoff_s=0.05, max_backoff_s=0.5, max_attempts=30
                )
            )
            await downloader.download(resolver, found, tmp_path / "back", lambda _: None)
            await downloader.close()
        assert build_manifest(tmp_path / "back") == build_manifest(adapter)

    async def test_a_black_hole_is_unavailable_within_its_bounds(
        self, gateway: Any, toxiproxy: Any, base_spec: BaseSpec
    ) -> None:
        name, url = toxiproxy.front(gateway.server)
        toxiproxy.poison(name, "timeout", timeout=0)
        settings = gateway.settings(endpoint_url=url, read_timeout_s=0.5, max_attempts=2)
        async with resolving(settings) as resolver:
            with pytest.raises(Unavailable):
                await asyncio.wait_for(resolver.resolve(Principal("t1"), NAME, base_spec), 60)

    async def test_a_black_hole_in_mid_download_is_a_stall(
        self, gateway: Any, toxiproxy: Any, base_spec: BaseSpec, tmp_path: Path
    ) -> None:
        name, url = toxiproxy.front(gateway.server)
        async with resolving(gateway.settings(endpoint_url=url)) as resolver:
            found = await resolver.resolve(Principal("t1"), NAME, base_spec)
            assert found is not None
            downloader = Downloader(DownloadSettings(stall_s=0.5, max_attempts=2, backoff_s=0.01))

            def after_some(num_bytes: int) -> None:
                if not poisoned:
                    poisoned.append(True)
                    toxiproxy.poison(name, "timeout", timeout=0)

            poisoned: list[bool] = []
            # The proxy may cut a connection that is being opened as it is poisoned: the last of the
            # attempts says one or the other.
            with pytest.raises(Unavailable, match=r"stalled|connection to the store .* failed"):
                async with asyncio.timeout(30):
                    await downloader.download(resolver, found, tmp_path, after_some)
            assert poisoned
            await downloader.close()

    async def test_a_server_that_refuses_connections_is_unavailable(
        self, gateway: Any, toxiproxy: Any, base_spec: BaseSpec
    ) -> None:
        name, url = toxiproxy.front(gateway.server)
        toxiproxy.refuse(name)
        async with resolving(gateway.settings(endpoint_url=url, max_attempts=1)) as resolver:
            with pytest.raises(Unavailable):
                await resolver.resolve(Principal("t1"), NAME, base_spec)

    async def test_an_upload_that_is_cut_is_not_seen_and_can_be_gone_over_again(
        self, gateway: Any, toxiproxy: Any, adapter: Path
    ) -> None:
        name, url = toxiproxy.front(gateway.server)
        manifest, new = build_manifest(adapter), NAME.at("v2")
        settings = gateway.settings(
            endpoint_url=url, max_attempts=1, multipart_bytes=1 << 20, upload_part_bytes=5 << 20
        )
        toxiproxy.poison(name, "limit_data", "upstream", bytes=2 << 20)
        store = S3Store(settings)
        with pytest.raises(Unavailable):
            await store.publish(new, adapter, manifest)
        assert await store.manifest(new) is None
        assert gateway.uploads() == []
        toxiproxy.heal(name, "limit_data")
        assert await store.publish(new, adapter, manifest)
        assert await store.manifest(new) == manifest
        await store.close()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, start_versitygw: Any) -> Iterator[Any]:
    authority = trustme.CA()
    with start_versitygw(tmp_path_factory.mktemp("tls"), authority) as server:
        yield server


class TestTransport:
    @pytest.mark.parametrize("checksums", ["when_supported", "when_required"])
    async def test_an_own_authority_is_trusted_where_it_is_named(
        self,
        secured: Any,
        new_bucket: Any,
        adapter: Path,
        base_spec: BaseSpec,
        tmp_path: Path,
        checksums: str,
    ) -> None:
        bucket = new_bucket(secured)
        settings = bucket.settings(
            checksums=checksums, multipart_bytes=1 << 20, upload_part_bytes=5 << 20
        )
        store = S3Store(settings)
        assert await store.publish(NAME, adapter, build_manifest(adapter))
        await fetch(settings, base_spec, tmp_path / "back")
        assert build_manifest(tmp_path / "back") == build_manifest(adapter)
        await store.close()
        bucket.boto.close()

    async def test_a_certificate_that_nobody_vouches_for_is_refused(
        self, secured: Any, new_bucket: Any, base_spec: BaseSpec
    ) -> None:
        bucket = new_bucket(secured)
        async with resolving(bucket.settings(ca_bundle=None, max_attempts=1)) as resolver:
            with pytest.raises(Unavailable, match="certificate"):
                await resolver.resolve(Principal("t1"), NAME, base_spec)
        bucket.boto.close()

    async def test_the_environment_may_name_the_authority(
        self,
        secured: Any,
        new_bucket: Any,
        base_spec: BaseSpec,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        bucket = new_bucket(secured)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(secured.ca))
        async with resolving(bucket.settings(ca_bundle=None)) as resolver:
            assert await resolver.resolve(Principal("t1"), NAME, base_spec) is None
        bucket.boto.close()


class TestAddressing:
    @pytest.mark.parametrize("path_style", [True, False])
    async def test_the_bucket_is_in_the_path_or_in_the_host(
        self,
        gateway: Any,
        adapter: Path,
        base_spec: BaseSpec,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        path_style: bool,
    ) -> None:
        asked: set[object] = set()
        resolved = socket.getaddrinfo

        def here(host: Any, *more: Any, **options: Any) -> Any:
            asked.add(host)
            # Any name below localhost is this machine, though few resolvers know.
            return resolved(
                "127.0.0.1" if str(host).endswith("localhost") else host, *more, **options
            )

        monkeypatch.setattr(socket, "getaddrinfo", here)
        url = f"http://localhost:{gateway.server.port}"
        settings = gateway.settings(endpoint_url=url, path_style=path_style)
        await fetch(settings, base_spec, tmp_path / "back")
        assert build_manifest(tmp_path / "back") == build_manifest(adapter)
        store = S3Store(settings)
        for name in (NAME.at("v2"), NAME.at("v3")):
            assert await store.publish(name, adapter, build_manifest(adapter))
        await store.delete(NAME.at("v2"))
        assert [found.name.version for found in await store.list("t1")] == ["v1", "v3"]
        await store.close()
        assert asked == {"localhost" if path_style else f"{gateway.name}.localhost"}


class TestProcesses:
    async def test_of_several_processes_one_publishes(
        self, gateway: Any, tmp_path: Path, write_adapter: Callable[..., Path]
    ) -> None:
        script = (
            "import asyncio, sys; from pathlib import Path\n"
            "from mural_resolvers.errors import Conflict\n"
            "from mural_resolvers.manifest import build_manifest\n"
            "from mural_resolvers.names import parse_name\n"
            "from mural_resolvers.s3 import S3Settings, S3Store\n"
            "async def main():\n"
            "    store, folder = S3Store(S3Settings.from_url(sys.argv[1])), Path(sys.argv[2])\n"
            "    manifest = build_manifest(folder)\n"
            "    await store.manifest(parse_name('t1:raced'))\n"
            "    print('ready', flush=True); sys.stdin.readline()\n"
            "    try:\n"
            "        print(await store.publish(parse_name('t1:raced'), folder, manifest))\n"
            "    except Conflict:\n"
            "        print('conflict')\n"
            "    await store.close()\n"
            "asyncio.run(main())\n"
        )
        url = f"s3://{gateway.name}/adapters?endpoint_url={gateway.server.url}&region=us-east-1"
        folders = [
            write_adapter(tmp_path / str(number), fill=bytes([number])) for number in range(1, 7)
        ]
        writers = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", script, url, str(folder)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for folder in folders
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert await writer.stdout.readline() == b"ready\n"
        answers = await asyncio.gather(*(writer.communicate(b"go\n") for writer in writers))
        said = [answer[0].decode().strip() for answer in answers]
        assert sorted(set(said)) == ["True", "conflict"]
        assert said.count("True") == 1
        (tmp_path / "back").mkdir()
        store = S3Store(gateway.settings())
        got = await store.fetch(NAME.at("raced"), tmp_path / "back")
        assert got == build_manifest(folders[said.index("True")])
        await store.close()
