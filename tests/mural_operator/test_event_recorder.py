"""Events: one for what is said again, bounded, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mural_operator import events
from mural_operator.events import EventRecorder
from mural_operator.metrics import Metrics
from mural_resolvers.kubernetes.client import JsonObject, KubeError
from mural_resolvers.kubernetes.objects import Adapter, AdapterSpec, ObjectMeta


class Api:
    """Takes Events, or refuses them."""

    def __init__(self) -> None:
        self.made: list[JsonObject] = []
        self.series: list[tuple[str, Any]] = []
        self.tries = 0
        self.failing: list[KubeError] = []
        self.open = asyncio.Event()
        self.open.set()
        self._told = asyncio.Event()

    async def create(self, path: str, body: JsonObject) -> bytes:
        await self._answer()
        assert path == "/apis/events.k8s.io/v1/namespaces/team/events"
        self.made.append(body)
        self._told.set()
        return b"{}"

    async def patch(self, path: str, body: JsonObject) -> bytes:
        await self._answer()
        self.series.append((path.rpartition("/")[2], body["series"]))
        self._told.set()
        return b"{}"

    async def _answer(self) -> None:
        self.tries += 1
        await self.open.wait()
        if self.failing:
            self._told.set()
            raise self.failing.pop(0)

    async def until(self, made: int, series: int = 0) -> None:
        async with asyncio.timeout(20):
            while len(self.made) < made or len(self.series) < series:
                await self._told.wait()
                self._told.clear()


def adapter(name: str = "a", uid: str = "1") -> Adapter:
    meta = ObjectMeta(name=name, namespace="team", uid=uid, resource_version="7")
    return Adapter(meta, AdapterSpec(pool="p", tenant="acme", version="v1"))


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(watches=dict, calls=dict, leading=lambda: True, adapters=dict)


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
async def recorder(
    api: Api, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EventRecorder]:
    monkeypatch.setattr(events, "COUNT_S", 0.05)
    monkeypatch.setattr(events, "SPACING_S", 0.0)
    recorder = EventRecorder(api, metrics=metrics, instance="operator-0")
    task = asyncio.create_task(recorder.run())
    yield recorder
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


async def test_an_event_says_what_happened_to_which_object(
    api: Api, recorder: EventRecorder
) -> None:
    recorder.note(adapter(), "Adapter", "Warning", "NotFound", "No source has it.")
    await api.until(made=1)
    (event,) = api.made
    assert event["type"] == "Warning"
    assert event["reason"] == "NotFound"
    assert event["note"] == "No source has it."
    assert event["reportingController"] == "mural.dev/operator"
    assert event["reportingInstance"] == "operator-0"
    assert event["regarding"] == {
        "apiVersion": "mural.dev/v1alpha1",
        "kind": "Adapter",
        "namespace": "team",
        "name": "a",
        "uid": "1",
        "resourceVersion": "7",
    }


async def test_what_is_said_again_raises_the_count_of_one_event(
    api: Api, recorder: EventRecorder
) -> None:
    recorder.note(adapter(), "Adapter", "Warning", "NotFound", "No source has it.")
    await api.until(made=1)
    for _ in range(9):
        recorder.note(adapter(), "Adapter", "Warning", "NotFound", "No source has it.")
    await api.until(made=1, series=1)
    ((name, series),) = api.series
    assert series["count"] == 10
    metadata = api.made[0]["metadata"]
    assert isinstance(metadata, dict)
    assert name == metadata["name"]


async def test_what_was_said_again_before_it_was_sent_is_in_the_event(
    api: Api, recorder: EventRecorder
) -> None:
    for _ in range(3):
        recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    await api.until(made=1)
    series = api.made[0]["series"]
    assert isinstance(series, dict)
    assert series["count"] == 3


async def test_other_words_objects_and_types_are_other_events(
    api: Api, recorder: EventRecorder
) -> None:
    recorder.note(adapter(), "Adapter", "Warning", "NoRoom", "Full.")
    recorder.note(adapter(), "Adapter", "Warning", "NoRoom", "Fuller.")
    recorder.note(adapter("b", "2"), "Adapter", "Warning", "NoRoom", "Full.")
    recorder.note(adapter(), "Adapter", "Normal", "NoRoom", "Full.")
    await api.until(made=4)
    names = [event["metadata"] for event in api.made]
    assert len({str(name) for name in names}) == 4


async def test_what_is_said_again_much_later_is_a_new_event(
    api: Api, recorder: EventRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    await api.until(made=1)
    monkeypatch.setattr(events, "SERIES_S", 0.0)
    recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    await api.until(made=2)
    assert not api.series


async def test_an_event_that_the_api_server_has_forgotten_is_made_anew(
    api: Api, recorder: EventRecorder
) -> None:
    recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    await api.until(made=1)
    api.failing = [KubeError(404, "NotFound", "gone")]
    recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    await api.until(made=2)
    first, second = (event["metadata"] for event in api.made)
    assert first != second


async def test_an_outage_is_waited_out_and_a_refusal_is_not(
    api: Api, recorder: EventRecorder, metrics: Metrics
) -> None:
    api.failing = [KubeError(0, "NoAnswer", "no answer"), KubeError(403, "Forbidden", "no")]
    recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    recorder.note(adapter(), "Adapter", "Normal", "Other", "Resident.")
    await api.until(made=1)
    assert api.made[0]["reason"] == "Other"
    assert metrics.events_dropped == 1
    assert api.tries == 3


async def test_an_attempt_that_arrived_without_an_answer_is_not_repeated(
    api: Api, recorder: EventRecorder, metrics: Metrics
) -> None:
    api.failing = [
        KubeError(0, "NoAnswer", "no answer"),
        KubeError(409, "AlreadyExists", "it is there"),
    ]
    recorder.note(adapter(), "Adapter", "Normal", "Ready", "Resident.")
    recorder.note(adapter(), "Adapter", "Normal", "Last", "Resident.")
    await api.until(made=1)
    assert api.made[0]["reason"] == "Last"
    assert metrics.events_dropped == 0


async def test_who_notes_is_never_kept_waiting_and_what_is_too_much_is_counted(
    api: Api, recorder: EventRecorder, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_WAITING", 3)
    api.open.clear()
    for number in range(10):
        recorder.note(adapter(uid=str(number)), "Adapter", "Normal", "Ready", "Resident.")
    assert metrics.events_dropped == 7
    api.open.set()
    await api.until(made=3)


async def test_a_note_fits_what_the_api_server_takes_in_bytes(
    api: Api, recorder: EventRecorder
) -> None:
    recorder.note(adapter("n" * 253), "Adapter", "Normal", "R" * 300, "é" * 5000)
    await api.until(made=1)
    (event,) = api.made
    assert len(str(event["note"]).encode()) <= 1024
    assert len(str(event["reason"])) <= 128
    metadata = event["metadata"]
    assert isinstance(metadata, dict)
    assert len(metadata["name"]) <= 253
