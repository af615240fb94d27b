"""Watches of an API server by hand: outages, what is forgotten, what cannot be read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes import client as client_module
from mural_resolvers.kubernetes import watch as watch_module
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.paths import TENANTS
from mural_resolvers.kubernetes.watch import Watch, from_json

WAIT_S = 20.0


def thing(name: str, value: Any = 1) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "prod"}, "value": value}


def read(fields: Any) -> Any:
    if fields["value"] == "bad":
        raise InvalidInput("This value is bad.")
    return fields["value"]


class Kept:
    """A running watch, and what it has told."""

    def __init__(self, client: KubeClient, **more: Any) -> None:
        self.client = client
        self.watch = Watch(client, TENANTS.of("prod"), from_json(read), what="things", **more)
        self.told: list[tuple[str | None, bool]] = []
        self.task = asyncio.create_task(self.watch.run(self._changed))
        self._more = asyncio.Event()

    def _changed(self, key: str | None) -> None:
        self.told.append((key, self.watch.fresh))
        self._more.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._more.clear()
                waiting = asyncio.create_task(self._more.wait())
                await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if self.task.done():
                    self.task.result()

    async def has(self, **values: Any) -> None:
        """Wait until it holds exactly these and is watched."""
        wanted = {f"prod/{name}": value for name, value in values.items()}
        await self.until(lambda: self.watch.fresh and dict(self.watch.objects) == wanted)


@pytest.fixture
async def keep(kube_api: Any) -> AsyncIterator[Callable[..., Kept]]:
    running: list[Kept] = []

    def start(**more: Any) -> Kept:
        running.append(Kept(KubeClient(kube_api.config()), **more))
        return running[-1]

    yield start
    for each in running:
        each.task.cancel()
        await asyncio.gather(each.task, return_exceptions=True)
        await each.client.__aexit__(None, None, None)


async def test_it_lists_once_and_then_hears_of_changes(kube_api, keep):
    kube_api.objects["a"] = thing("a")
    kept = keep()
    await kept.has(a=1)
    assert kept.told == [(None, False), (None, True)]
    kube_api.put(thing("b"))
    await kept.has(a=1, b=1)
    kube_api.put(thing("a", 2))
    await kept.has(a=2, b=1)
    kube_api.remove("b")
    await kept.has(a=2)
    assert kept.told[2:] == [("prod/b", True), ("prod/a", True), ("prod/b", True)]
    assert kept.client.calls == {"list": 1, "watch": 1}


async def test_selectors_go_into_lists_and_watches(kube_api, keep):
    kept = keep(label_selector="app=mural,tier!=x", field_selector="metadata.name=keys")
    await kept.has()
    listed, watched = kube_api.asked
    for asked in (listed, watched):
        assert asked.path == "/apis/mural.dev/v1alpha1/namespaces/prod/tenants"
        assert asked.query["labelSelector"] == "app=mural,tier!=x"
        assert asked.query["fieldSelector"] == "metadata.name=keys"
    assert watched.query["allowWatchBookmarks"] == "true"


async def test_ten_thousand_objects_come_in_pages(kube_api, keep):
    for number in range(10_000):
        kube_api.objects[f"t{number}"] = thing(f"t{number}", number)
    kept = keep()
    await kept.until(lambda: kept.watch.fresh)
    assert len(kept.watch.objects) == 10_000
    assert kept.watch.objects["prod/t9999"] == 9999
    assert kept.client.calls["list"] == 10_000 // watch_module.PAGE
    # Whoever looks never sees the half of a list.
    assert kept.told == [(None, False), (None, True)]


async def test_a_page_whose_list_has_expired_begins_the_list_again(kube_api, keep, caplog):
    for number in range(1200):
        kube_api.objects[f"t{number}"] = thing(f"t{number}", number)
    first = kube_api._page({"limit": "500"})
    kube_api.answer(200, first)
    kube_api.answer(410, {"code": 410, "reason": "Expired", "message": "continue"})
    kept = keep()
    await kept.until(lambda: kept.watch.fresh)
    assert len(kept.watch.objects) == 1200
    assert kept.client.calls["list"] == 2 + 3
    assert "cannot be watched" not in caplog.text


async def test_a_list_without_end_is_given_up(kube_api, keep, monkeypatch, caplog):
    monkeypatch.setattr(watch_module, "MAX_PAGES", 3)
    endless = {"metadata": {"resourceVersion": "1", "continue": "more"}, "items": []}
    kube_api.answer(200, endless, times=3)
    kept = keep()
    await kept.has()
    assert "more than 3 pages" in caplog.text


@pytest.mark.parametrize("cut", [False, True])
async def test_a_connection_that_breaks_is_no_outage_and_loses_nothing(kube_api, keep, caplog, cut):
    kube_api.objects["a"] = thing("a")
    kept = keep()
    await kept.has(a=1)
    await kube_api.watched()
    kube_api.end(cut=cut)
    # In between nobody watches.
    kube_api.put(thing("b"))
    kube_api.remove("a")
    await kept.has(b=1)
    assert kube_api.since() == ["10", "10"]
    kube_api.end(cut=cut)
    await kube_api.watched()
    await kube_api.watched()
    assert kube_api.since() == ["10", "10", "12"]
    assert kept.client.calls["list"] == 1
    assert all(fresh for _, fresh in kept.told[1:])
    assert "cannot be watched" not in caplog.text


async def test_a_bookmark_moves_the_place_and_changes_nothing(kube_api, keep):
    kept = keep()
    await kept.has()
    await kube_api.watched()
    kube_api.version = 500
    kube_api.send("BOOKMARK", {"metadata": {"name": ""}})
    kube_api.put(thing("a"))
    kube_api.send("BOOKMARK", {"metadata": {}})
    await kept.has(a=1)
    kube_api.end(cut=False)
    await kube_api.watched()
    assert kube_api.since() == ["10", "503"]
    assert len(kept.told) == 3


@pytest.mark.parametrize("in_the_stream", [True, False])
async def test_what_the_server_has_forgotten_is_listed_again_without_a_word(
    kube_api, keep, caplog, in_the_stream
):
    kube_api.objects = {name: thing(name) for name in "ab"}
    kept = keep()
    await kept.has(a=1, b=1)
    await kube_api.watched()
    kube_api.end(cut=True)
    kube_api.objects = {name: thing(name, 2) for name in "bc"}
    kube_api.version = 90
    kube_api.forget()
    if not in_the_stream:
        kube_api.answer(410, {"code": 410, "reason": "Gone"})
    await kept.has(b=2, c=2)
    assert kept.client.calls["list"] == 2
    assert kube_api.since() == ["10", "10", "90"]
    assert all(fresh for _, fresh in kept.told[1:])
    assert "cannot be watched" not in caplog.text


async def test_a_server_that_went_back_in_time_is_listed_again(kube_api, keep):
    kube_api.objects["a"] = thing("a")
    kept = keep()
    await kept.has(a=1)
    await kube_api.watched()
    # As when etcd was restored: the version in hand is yet to come.
    kube_api.end(cut=True)
    kube_api.answer(504, {"code": 504, "reason": "Timeout"})
    kube_api.objects = {"b": thing("b")}
    kube_api.version = 3
    await kept.has(b=1)
    assert kube_api.since() == ["10", "10", "3"]


async def test_through_an_outage_all_stays_and_is_said_once(kube_api, keep, caplog):
    caplog.set_level(logging.INFO)
    kube_api.objects["a"] = thing("a")
    kept = keep()
    await kept.has(a=1)
    kube_api.down()
    await kept.until(lambda: not kept.watch.fresh)
    assert dict(kept.watch.objects) == {"prod/a": 1}
    assert kept.watch.synced
    assert "ConnectError" in kept.watch.trouble
    kube_api.put(thing("b"))
    await kube_api.up()
    await kept.has(a=1, b=1)
    assert kept.watch.trouble == ""
    # List, watched, outage, watched, and what came in between.
    assert [fresh for _, fresh in kept.told] == [False, True, False, True, True]
    assert kept.client.calls["list"] == 1
    said = [(each.levelname, each.message) for each in caplog.records if "things" in each.message]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert said[1][1] == "things are watched again"


async def test_a_refusal_is_an_outage_with_its_reason(kube_api, keep, caplog):
    kube_api.refusal = (403, "tenants is forbidden")
    kept = keep()
    await kept.until(lambda: bool(kept.told))
    # Whoever waits for the first list hears that there is none yet.
    assert kept.told == [(None, False)]
    assert not kept.watch.synced
    assert "403" in kept.watch.trouble
    for _ in range(3):
        kube_api.refused.clear()
        await asyncio.wait_for(kube_api.refused.wait(), WAIT_S)
    assert caplog.text.count("tenants is forbidden") == 1
    kube_api.refusal = None
    kube_api.objects["a"] = thing("a")
    await kept.has(a=1)
    assert kept.watch.synced


async def test_an_object_that_is_refused_stands_apart_until_it_is_good(kube_api, keep, caplog):
    kube_api.objects = {"a": thing("a"), "b": thing("b", "bad")}
    kept = keep()
    await kept.has(a=1)
    assert dict(kept.watch.invalid) == {"prod/b": "This value is bad."}
    kube_api.put(thing("a", "bad"))
    await kept.has()
    assert set(kept.watch.invalid) == {"prod/a", "prod/b"}
    kube_api.put(thing("b", 2))
    await kept.has(b=2)
    assert set(kept.watch.invalid) == {"prod/a"}
    kube_api.remove("a")
    await kept.until(lambda: not kept.watch.invalid)
    assert kept.client.calls == {"list": 1, "watch": 1}
    assert "prod/b is left out: This value is bad." in caplog.text


async def test_an_object_without_the_fields_that_are_read_does_not_end_the_watch(kube_api, keep):
    def decode(data: bytes) -> Any:
        raise ValueError("no such field")

    kube_api.objects["a"] = thing("a")
    kept = keep()
    kept.watch._decode = decode
    await kept.until(lambda: kept.watch.fresh)
    assert dict(kept.watch.invalid) == {"prod/a": "no such field"}


@pytest.mark.parametrize(
    "line",
    [
        b"{{{\n",
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
        b'{"type":"NONSENSE","object":{"metadata":{"name":"x","resourceVersion":"11"}}}\n',
        b'{"type":"ADDED","object":7}\n',
        b'{"type":"ADDED"}\n',
        b'{"type":"ADDED","object":{"metadata":{"name":7,"resourceVersion":"11"}}}\n',
        b'{"type":"ADDED","object":{"metadata":{"name":"x"}}}\n',
        b'{"type":"ERROR","object":{"code":500,"message":"etcdserver: request timed out"}}\n',
        b'{"type":"ERROR","object":"?"}\n',
        b"null\n",
    ],
    ids=range(11),
)
async def test_a_line_that_cannot_be_read_costs_one_list(kube_api, keep, line, caplog):
    kube_api.objects["a"] = thing("a")
    kept = keep()
    await kept.has(a=1)
    await kube_api.watched()
    # What the line may have said is in the list.
    kube_api.objects["b"] = thing("b")
    kube_api.version += 1
    kube_api.send_raw(line)
    await kept.has(a=1, b=1)
    assert kept.client.calls == {"list": 2, "watch": 2}
    assert "cannot be watched" not in caplog.text


async def test_a_line_without_end_is_given_up(kube_api, keep, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_LINE_BYTES", 1000)
    kept = keep()
    await kept.has()
    await kube_api.watched()
    kube_api.send_raw(b"x" * 2000)
    await kube_api.watched()
    kube_api.put(thing("a"))
    await kept.has(a=1)


async def test_what_looks_like_a_line_end_to_others_is_text(kube_api, keep):
    text = "a\u0085b\u2028c\u2029d\x0b\x0ce"
    kept = keep()
    await kept.has()
    await kube_api.watched()
    line = json.dumps(
        {
            "type": "ADDED",
            "object": thing("a", "a\u0085b\u2028c\u2029d")
            | {"metadata": {"name": "a", "namespace": "prod", "resourceVersion": "11"}},
        },
        ensure_ascii=False,
    )
    kube_api.send_raw(line.encode() + b"\n\n")
    await kept.has(a="a\u0085b\u2028c\u2029d")
    assert text.splitlines() != [text]
    assert kept.client.calls == {"list": 1, "watch": 1}


async def test_an_event_may_come_in_any_pieces(kube_api, keep):
    kept = keep()
    await kept.has()
    await kube_api.watched()
    each = thing("a", "ä" * 50)
    each["metadata"]["resourceVersion"] = "11"
    line = json.dumps({"type": "ADDED", "object": each}, ensure_ascii=False).encode() + b"\n"
    for at in range(len(line)):
        kube_api.send_raw(line[at : at + 1])
    await kept.has(a="ä" * 50)


async def test_silence_ends_a_watch_and_the_next_goes_on(kube_api, keep, monkeypatch):
    monkeypatch.setattr(watch_module, "SILENCE_S", 0.05)
    kept = keep()
    await kept.has()
    kube_api.put(thing("a"))
    await kept.has(a=1)
    for _ in range(3):
        await kube_api.watched()
    assert kept.client.calls["list"] == 1
    assert kube_api.since()[-1] == "11"


async def test_a_server_that_never_answers_is_an_outage(kube_api, keep):
    kept = keep()
    await kept.has()
    kept.client._timeout_s = 0.05
    kube_api.hanging = True
    kube_api.end(cut=True)
    await kept.until(lambda: not kept.watch.fresh)
    assert "within 0.05 s" in kept.watch.trouble
    kube_api.hanging = False
    kube_api.put(thing("a"))
    await kept.has(a=1)
    assert kept.client.calls["list"] == 1


async def test_watches_that_end_at_once_are_opened_more_and_more_slowly(kube_api, monkeypatch):
    waits: list[float] = []
    sleep = asyncio.sleep

    async def record(wait_s: float) -> None:
        waits.append(wait_s)
        if len(waits) == 8:
            raise RuntimeError("enough")
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", record)
    monkeypatch.setattr(watch_module, "RETRY_FIRST_S", 1.0)
    monkeypatch.setattr(watch_module, "RETRY_MOST_S", 60.0)
    nothing = {"metadata": {"resourceVersion": "1"}, "items": []}
    kube_api.answer(200, nothing)
    kube_api.answer(200, b"", times=8)
    async with KubeClient(kube_api.config()) as client:
        watch = Watch(client, TENANTS.of("prod"), from_json(read), what="things")
        with pytest.raises(RuntimeError, match="enough"):
            await watch.run(lambda _: None)
    for at, wait_s in enumerate(waits):
        bound = min(2.0**at, 60.0)
        assert bound / 2 <= wait_s <= bound
    assert client.calls == {"list": 1, "watch": 8}


async def test_a_server_that_asks_for_patience_gets_it(kube_api, monkeypatch):
    waits: list[float] = []

    async def record(wait_s: float) -> None:
        waits.append(wait_s)
        raise RuntimeError("enough")

    monkeypatch.setattr(asyncio, "sleep", record)
    monkeypatch.setattr(watch_module, "RETRY_MOST_S", 10.0)
    kube_api.answer(429, {"message": "slow down"}, retry_after="7")
    async with KubeClient(kube_api.config()) as client:
        watch = Watch(client, TENANTS.of("prod"), from_json(read), what="things")
        with pytest.raises(RuntimeError, match="enough"):
            await watch.run(lambda _: None)
    assert waits == [7.0]


async def test_a_fault_in_whoever_is_told_is_not_swallowed(kube_api):
    def changed(key: str | None) -> None:
        raise RuntimeError("a fault of ours")

    async with KubeClient(kube_api.config()) as client:
        watch = Watch(client, TENANTS.of("prod"), from_json(read), what="things")
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await watch.run(changed)


async def test_views_stay_live_through_lists(kube_api, keep):
    kube_api.objects["a"] = thing("a")
    kept = keep()
    await kept.has(a=1)
    objects, invalid = kept.watch.objects, kept.watch.invalid
    await kube_api.watched()
    kube_api.objects = {"b": thing("b"), "c": thing("c", "bad")}
    kube_api.send("ERROR", {"code": 410})
    await kept.has(b=1)
    assert dict(objects) == {"prod/b": 1}
    assert set(invalid) == {"prod/c"}
