"""Reading a file of a described commit: ranges, what is checked, what is told of a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import AdapterNotFound, Conflict, Forbidden, Unavailable
from mural_resolvers.hub import HubResolver, HubSettings
from mural_resolvers.names import parse_name
from mural_resolvers.resolver import AdapterDescription
from mural_resolvers.tenants import Principal

Files = dict[str, bytes]
Tools = dict[str, Any]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


class Opened:
    """A resolver and a description, to read from."""

    def __init__(self, resolver: HubResolver, found: AdapterDescription) -> None:
        self.resolver = resolver
        self.found = found
        self.got = bytearray()

    async def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        file = next(file for file in self.found.files if file.path == path)
        self.got = bytearray()
        stop = file.size if stop is None else stop
        async with self.resolver.open(self.found, file, start, stop) as pieces:
            async for piece in pieces:
                self.got += piece
        return bytes(self.got)


@pytest.fixture
async def opened(
    hub: Any,
    settings: HubSettings,
    adapter_files: Files,
    base_spec: BaseSpec,
    make_resolver: Callable[[HubSettings], HubResolver],
    small_hub_tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
) -> Opened:
    monkeypatch.setenv("MURAL_HUB_TOKEN", small_hub_tools["token"])
    hub.add("acme/sql", adapter_files, "v1", private=True)
    settings = replace(settings, token_env="MURAL_HUB_TOKEN", read_timeout_s=5)
    resolver = make_resolver(settings)
    found = await resolver.resolve(Principal("acme"), parse_name("acme/sql:v1"), base_spec)
    assert found is not None
    hub.asked.clear()
    return Opened(resolver, found)


def alter(hub: Any, tools: Tools, part: str, **changes: Any) -> None:
    """Change the answers of the requests whose path has the part."""
    hub.alter = lambda asked, answer: (
        tools["replace"](answer, **changes) if part in asked.path else None
    )


@pytest.mark.parametrize("path", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("window", [(0, None), (0, 10), (7, 31), (7, None), (5, 5)])
async def test_a_window_of_a_file_is_read(
    opened: Opened, adapter_files: Files, path: str, window: tuple[int, int | None]
) -> None:
    start, stop = window

    assert await opened.read(path, start, stop) == adapter_files[path][start:stop]


async def test_only_the_window_of_an_lfs_file_crosses_the_network(hub: Any, opened: Opened) -> None:
    await opened.read(WEIGHTS, 7, 31)

    assert [asked.headers["range"] for asked in hub.asked] == ["bytes=7-30", "bytes=7-30"]


async def test_the_pinned_commit_is_read_whatever_the_tag_is_now(
    hub: Any, opened: Opened, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files | {CONFIG: b"{}", WEIGHTS: b"new"}, "v1")

    assert await opened.read(CONFIG) == adapter_files[CONFIG]
    assert await opened.read(WEIGHTS) == adapter_files[WEIGHTS]


async def test_the_store_is_not_sent_the_token(hub: Any, opened: Opened) -> None:
    await opened.read(WEIGHTS)

    assert {asked.server for asked in hub.asked if asked.token is not None} == {"hub"}
    assert [asked.token for asked in hub.asked if asked.server == "store"] == [None]


async def test_a_redirect_back_to_the_hub_does_not_get_the_token_either(
    hub: Any, opened: Opened, small_hub_tools: Tools
) -> None:
    def back(asked: Any, answer: Any) -> Any:
        if asked.server == "store":
            return small_hub_tools["answer"](302, {"Location": f"{hub.url}/elsewhere"})
        return small_hub_tools["answer"](200) if asked.path == "/elsewhere" else None

    hub.alter = back

    with pytest.raises((Unavailable, Conflict)):
        await opened.read(WEIGHTS)
    assert hub.asked[-1].path == "/elsewhere"
    assert hub.asked[-1].token is None


async def test_a_store_that_knows_no_ranges_is_read_all_the_same(
    hub: Any, opened: Opened, adapter_files: Files, small_hub_tools: Tools
) -> None:
    data = adapter_files[WEIGHTS]
    alter(hub, small_hub_tools, "/lfs/", status=200, headers={}, body=data)

    assert await opened.read(WEIGHTS, 7, 31) == data[7:31]


async def test_a_body_without_a_length_is_counted(
    hub: Any, opened: Opened, adapter_files: Files, small_hub_tools: Tools
) -> None:
    data = adapter_files[WEIGHTS]

    def chunked(part: bytes) -> dict[str, Any]:
        # One chunk, as a body whose length nobody stated.
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(part), part)
        return {"status": 200, "headers": {"Transfer-Encoding": "chunked"}, "body": body}

    alter(hub, small_hub_tools, "/lfs/", **chunked(data))
    assert await opened.read(WEIGHTS) == data

    alter(hub, small_hub_tools, "/lfs/", **chunked(data[:-1]))
    with pytest.raises(Unavailable, match="broke off"):
        await opened.read(WEIGHTS)

    alter(hub, small_hub_tools, "/lfs/", **chunked(data + b"x"))
    with pytest.raises(Conflict, match="more bytes"):
        await opened.read(WEIGHTS)


@pytest.mark.parametrize(("path", "part"), [(CONFIG, "resolve-cache"), (WEIGHTS, "/lfs/")])
async def test_a_body_that_is_cut_gives_what_came_and_can_be_read_on(
    hub: Any, opened: Opened, adapter_files: Files, small_hub_tools: Tools, path: str, part: str
) -> None:
    data = adapter_files[path]
    alter(hub, small_hub_tools, part, cut_at=20)
    with pytest.raises(Unavailable):
        await opened.read(path)
    first = bytes(opened.got)
    hub.alter = lambda asked, answer: None

    assert first == data[:20]
    assert first + await opened.read(path, len(first)) == data


@pytest.mark.parametrize(("path", "part"), [(CONFIG, "resolve-cache"), (WEIGHTS, "/lfs/")])
@pytest.mark.parametrize("how", [{"hangs": True}, {"cut_at": 5, "hangs_in_body": True}])
async def test_a_read_that_hangs_is_left(
    hub: Any,
    opened: Opened,
    settings: HubSettings,
    small_hub_tools: Tools,
    make_resolver: Callable[[HubSettings], HubResolver],
    path: str,
    part: str,
    how: dict[str, Any],
) -> None:
    opened.resolver = make_resolver(
        replace(settings, token_env="MURAL_HUB_TOKEN", read_timeout_s=0.2)
    )
    alter(hub, small_hub_tools, part, **how)

    with pytest.raises(Unavailable, match="in time"):
        await opened.read(path)


@pytest.mark.parametrize("window", [(0, None), (7, 31), (30, None)])
async def test_a_small_file_is_held_to_gits_sha1_whatever_part_of_it_is_read(
    hub: Any,
    opened: Opened,
    adapter_files: Files,
    small_hub_tools: Tools,
    window: tuple[int, int | None],
) -> None:
    data = adapter_files[CONFIG]
    alter(hub, small_hub_tools, "resolve-cache", body=data[:-1] + b" ")

    with pytest.raises(Conflict, match="other content"):
        await opened.read(CONFIG, *window)


@pytest.mark.parametrize(("path", "part"), [(CONFIG, "resolve-cache"), (WEIGHTS, "/lfs/")])
async def test_another_size_is_a_conflict_before_a_byte_is_given(
    hub: Any, opened: Opened, small_hub_tools: Tools, path: str, part: str
) -> None:
    alter(hub, small_hub_tools, part, body=b"short")

    with pytest.raises(Conflict, match="another size"):
        await opened.read(path)
    assert opened.got == b""


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"status": 206, "headers": {"Content-Range": "bytes 7-30/99"}}, Conflict),
        ({"status": 206, "headers": {"Content-Range": "bytes 0-23/{size}"}}, Unavailable),
        ({"status": 206, "headers": {}}, Unavailable),
        ({"status": 416}, Conflict),
        (
            {
                "status": 206,
                "headers": {"Content-Range": "bytes 7-30/*", "Content-Encoding": "gzip"},
            },
            Unavailable,
        ),
        (
            {"status": 206, "headers": {"Content-Range": "bytes 7-30/*"}, "body": b"x" * 25},
            Conflict,
        ),
        (
            {"status": 206, "headers": {"Content-Range": "bytes 7-30/*"}, "body": b"x" * 23},
            Unavailable,
        ),
    ],
)
async def test_a_wrong_range_is_not_taken(
    hub: Any,
    opened: Opened,
    adapter_files: Files,
    small_hub_tools: Tools,
    answer: dict[str, Any],
    error: type[Exception],
) -> None:
    size = str(len(adapter_files[WEIGHTS]))
    headers = {k: v.replace("{size}", size) for k, v in answer.get("headers", {}).items()}
    alter(hub, small_hub_tools, "/lfs/", **(answer | {"headers": headers}))

    with pytest.raises(error):
        await opened.read(WEIGHTS, 7, 31)


async def test_another_commit_is_a_conflict(
    hub: Any, opened: Opened, small_hub_tools: Tools
) -> None:
    alter(hub, small_hub_tools, "resolve-cache", headers={"X-Repo-Commit": "0" * 40})

    with pytest.raises(Conflict, match="another commit"):
        await opened.read(CONFIG)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Unavailable),
        (401, Forbidden),
        (403, Forbidden),
        (404, AdapterNotFound),
        (410, AdapterNotFound),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
async def test_each_refusal_of_the_hub_has_its_meaning(
    hub: Any, opened: Opened, small_hub_tools: Tools, status: int, error: type[Exception]
) -> None:
    alter(hub, small_hub_tools, "/resolve/", status=status, headers={})

    with pytest.raises(error):
        await opened.read(WEIGHTS)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 429, 500, 503])
async def test_a_store_that_refuses_is_down_and_says_nothing_of_rights(
    hub: Any, opened: Opened, small_hub_tools: Tools, status: int
) -> None:
    alter(hub, small_hub_tools, "/lfs/", status=status, headers={})

    with pytest.raises(Unavailable):
        await opened.read(WEIGHTS)


async def test_a_store_says_when_to_come_back(
    hub: Any, opened: Opened, small_hub_tools: Tools
) -> None:
    alter(hub, small_hub_tools, "/lfs/", status=503, headers={"Retry-After": "9"})

    with pytest.raises(Unavailable) as down:
        await opened.read(WEIGHTS)
    assert down.value.retry_after_s == 9


async def test_a_reader_that_leaves_midway_gives_its_connection_back(
    hub: Any,
    opened: Opened,
    settings: HubSettings,
    adapter_files: Files,
    make_resolver: Callable[[HubSettings], HubResolver],
) -> None:
    resolver = make_resolver(replace(settings, token_env="MURAL_HUB_TOKEN", max_connections=1))
    weights = opened.found.files[1]
    for _ in range(3):
        async with resolver.open(opened.found, weights, 0, weights.size) as pieces:
            async for _piece in pieces:
                break

    opened.resolver = resolver
    assert await opened.read(WEIGHTS) == adapter_files[WEIGHTS]


async def test_parallel_ranges_are_the_file(opened: Opened, adapter_files: Files) -> None:
    data = adapter_files[WEIGHTS]
    edges = [*range(0, len(data), 97), len(data)]
    file = next(file for file in opened.found.files if file.path == WEIGHTS)

    async def read(start: int, stop: int) -> bytes:
        async with opened.resolver.open(opened.found, file, start, stop) as pieces:
            return b"".join([piece async for piece in pieces])

    parts = await asyncio.gather(*map(read, edges, edges[1:]))

    assert b"".join(parts) == data
