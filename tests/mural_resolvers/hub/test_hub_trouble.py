"""A hub that cannot tell, the manners of whoever asks it, and its downloads."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import _http as hub_http

from mural_resolvers.digest import compute_digest
from mural_resolvers.download import Downloader
from mural_resolvers.errors import (
    Conflict,
    InvalidInput,
    ManifestMismatch,
    Unavailable,
)
from mural_resolvers.hub import HubResolver, HubSettings
from mural_resolvers.manifest import build_manifest, manifest_of

Files = dict[str, bytes]
Make = Callable[[HubSettings], HubResolver]
Tools = dict[str, Any]

READ = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}


# -- a hub that cannot tell ---------------------------------------------------------------------

PARTS = ["/revision/", "/tree/", "/resolve/"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_hub_is_unavailable_for_as_long_as_it_says(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools, part: str, status: int
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.alter = lambda asked, answer: (
        small_hub_tools["answer"](status, {"Retry-After": "17"}) if part in asked.path else None
    )

    with pytest.raises(Unavailable) as down:
        await resolve("acme/sql:v1")

    assert down.value.retry_after_s == 17


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "limits", [{"answer_timeout_s": 0.2}, {"read_timeout_s": 0.2}], ids=["answer", "read"]
)
async def test_a_hung_hub_is_left(
    hub: Any,
    settings: HubSettings,
    resolve: Any,
    adapter_files: Files,
    small_hub_tools: Tools,
    part: str,
    limits: dict[str, Any],
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.alter = lambda asked, answer: (
        small_hub_tools["answer"](hangs=True) if part in asked.path else None
    )

    with pytest.raises(Unavailable, match="in time"):
        await resolve("acme/sql:v1", replace(settings, **limits))


async def test_a_body_that_stops_midway_is_left(
    hub: Any, settings: HubSettings, resolve: Any, adapter_files: Files, small_hub_tools: Tools
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.alter = lambda asked, answer: small_hub_tools["replace"](
        answer, cut_at=5, hangs_in_body=True
    )

    with pytest.raises(Unavailable, match="in time"):
        await resolve("acme/sql:v1", replace(settings, read_timeout_s=0.2))


async def test_a_body_that_is_cut_is_unavailable(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.alter = lambda asked, answer: small_hub_tools["replace"](answer, cut_at=5)

    with pytest.raises(Unavailable):
        await resolve("acme/sql:v1")


async def test_a_hub_that_is_not_there_is_unavailable(settings: HubSettings, resolve: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"

        with pytest.raises(Unavailable, match="cannot be reached"):
            await resolve("acme/sql:v1", replace(settings, endpoint=endpoint))


async def test_a_host_without_an_address_is_unavailable(
    settings: HubSettings, resolve: Any
) -> None:
    with pytest.raises(Unavailable, match="cannot be reached"):
        await resolve("acme/sql:v1", replace(settings, endpoint="http://hub.invalid"))


@pytest.mark.parametrize("part", ["/revision/", "/tree/"])
@pytest.mark.parametrize("body", [b"<html>log in</html>", b'{"id": 1}', b"[" * 100_000, b"\xff"])
async def test_an_answer_that_cannot_be_read_is_unavailable(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools, part: str, body: bytes
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.alter = lambda asked, answer: (
        small_hub_tools["answer"](body=body) if part in asked.path else None
    )

    with pytest.raises(Unavailable):
        await resolve("acme/sql:v1")


async def test_an_answer_without_an_end_is_unavailable(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    body = json.dumps({"id": "acme/sql", "sha": "0" * 40, "x": "y" * (9 << 20)}).encode()
    hub.alter = lambda asked, answer: small_hub_tools["answer"](body=body)

    with pytest.raises(Unavailable, match="too large"):
        await resolve("acme/sql:v1")


async def test_another_commit_than_the_one_asked_for_is_not_taken(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools
) -> None:
    commit = hub.add("acme/sql", adapter_files, "v1")
    body = json.dumps({"id": "acme/sql", "sha": commit}).encode()
    hub.alter = lambda asked, answer: (
        small_hub_tools["answer"](body=body) if "/revision/" in asked.path else None
    )

    with pytest.raises(Unavailable):
        await resolve(f"acme/sql:{'0' * 40}")


# -- manners ------------------------------------------------------------------------------------


async def test_over_tls_the_sources_own_authority_is_believed(
    tls_hub: Any,
    ca_file: Path,
    settings: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
) -> None:
    tls_hub.add("acme/sql", adapter_files, "v1")
    over_tls = replace(settings, endpoint=tls_hub.url)
    resolver = make_resolver(replace(over_tls, ca_bundle=ca_file))

    found = await resolve("acme/sql:v1", resolver=resolver)

    for file in found.files:
        async with resolver.open(found, file, 0, file.size) as pieces:
            assert b"".join([piece async for piece in pieces]) == adapter_files[file.path]
    with pytest.raises(Unavailable, match="cannot be reached"):
        await resolve("acme/sql:v1", replace(over_tls, ca_bundle=None))


def test_an_authority_that_is_none_is_refused_at_the_start(
    settings: HubSettings, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("nothing")

    for path in (tmp_path / "ca.pem", tmp_path / "none.pem"):
        with pytest.raises(InvalidInput, match="ca_bundle"):
            HubResolver(replace(settings, ca_bundle=path))


async def test_many_look_ups_share_few_connections(
    hub: Any, settings: HubSettings, resolve: Any, make_resolver: Make, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, *[f"v{i}" for i in range(40)])
    resolver = make_resolver(replace(settings, max_connections=2))

    found = await asyncio.gather(*[resolve(f"acme/sql:v{i}", resolver=resolver) for i in range(40)])

    assert {str(one.name) for one in found} == {f"acme/sql:v{i}" for i in range(40)}


async def test_a_cancelled_look_up_gives_its_connection_back(
    hub: Any,
    settings: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
    small_hub_tools: Tools,
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    resolver = make_resolver(replace(settings, max_connections=1))
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(asked: Any, answer: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        return small_hub_tools["answer"](hangs=True)

    hub.alter = hang
    asking = asyncio.create_task(resolve("acme/sql:v1", resolver=resolver))
    await reached.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    hub.alter = lambda asked, answer: None

    assert await resolve("acme/sql:v1", resolver=resolver) is not None


async def test_nothing_of_the_process_is_changed(
    hub: Any, with_token: HubSettings, resolve: Any, adapter_files: Files, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    before = dict(os.environ), hub_http._GLOBAL_CLIENT_FACTORY, hub_http._GLOBAL_CLIENT
    handlers = logging.getLogger().handlers[:]

    await resolve("acme/sql:v1", with_token)

    after = dict(os.environ), hub_http._GLOBAL_CLIENT_FACTORY, hub_http._GLOBAL_CLIENT
    assert after == before
    assert logging.getLogger().handlers == handlers


async def test_no_secret_reaches_a_log_or_an_error(
    hub: Any,
    with_token: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
    small_hub_tools: Tools,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    hub.add("acme/sql", adapter_files, "v1")
    resolver = make_resolver(with_token)
    found = await resolve("acme/sql:v1", resolver=resolver)
    told = [repr(found), repr(with_token), repr(resolver)]
    for status in (200, 400, 401, 403, 404, 416, 429, 500):
        hub.alter = lambda asked, answer, status=status: (
            small_hub_tools["replace"](answer, status=status)
            if asked.server == "store" and status != 200
            else None
        )
        weights = found.files[1]
        try:
            async with resolver.open(found, weights, 0, weights.size) as pieces:
                async for _ in pieces:
                    pass
        except (Unavailable, Conflict) as error:
            told += [repr(error), repr(error.__cause__), repr(error.__context__)]

    everything = caplog.text + "".join(told)
    assert "answered 500" in everything
    assert small_hub_tools["token"] not in everything
    assert "canary-signature" not in everything


# -- with the downloader ------------------------------------------------------------------------


async def test_a_download_has_the_digest_that_a_local_folder_has(
    hub: Any,
    with_token: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
    tmp_path: Path,
) -> None:
    hub.add("acme/sql", adapter_files, "v1", private=True)
    resolver = make_resolver(with_token)
    found = await resolve("acme/sql:v1", resolver=resolver)
    downloader = Downloader()
    folder = tmp_path / "downloaded"
    folder.mkdir()

    entries = await downloader.download(resolver, found, folder, lambda _: None)
    await downloader.close()

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path: data for path, data in adapter_files.items() if path in READ
    }
    (tmp_path / "adapter" / "chat_template.jinja").write_bytes(adapter_files["chat_template.jinja"])
    expected = build_manifest(tmp_path / "adapter").digest
    assert manifest_of(folder, entries).digest == compute_digest(entries) == expected


async def test_wrong_bytes_of_the_right_size_are_not_taken(
    hub: Any,
    settings: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
    small_hub_tools: Tools,
    tmp_path: Path,
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    resolver = make_resolver(settings)
    found = await resolve("acme/sql:v1", resolver=resolver)
    downloader = Downloader()
    for name, error in (("lfs", ManifestMismatch), ("resolve-cache", Conflict)):
        hub.alter = lambda asked, answer, name=name: (
            small_hub_tools["replace"](answer, body=bytes(len(answer.body)))
            if name in asked.path
            else None
        )
        folder = tmp_path / name
        folder.mkdir()

        with pytest.raises(error):
            await downloader.download(resolver, found, folder, lambda _: None)
    await downloader.close()
