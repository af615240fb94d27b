"""Whatever a pod says of itself, a status is one that the API server takes and people can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_operator.conditions import MAX_SAID_BYTES
from mural_operator.credentials import PoolCredentials
from mural_operator.metrics import Metrics
from mural_operator.pool_verdict import pool_verdict
from mural_operator.reconcile import reconcile
from mural_operator.refusals import Refusals
from mural_operator.replicas import Follower, Target, exact_state
from mural_operator.status_writer import StatusWriter
from mural_operator.verdict import MAX_REPLICAS, verdict
from mural_operator.world import Pod
from mural_resolvers.tenants import mint_key
from mural_server.protocol import Base, ControlError, Limits, Snapshot
from mural_server.protocol.caution import MAX_COUNT, MAX_NAME_CHARS
from tests.mural_operator.simulated_pool import (
    make_adapter,
    make_pool,
    make_state,
    make_status,
    make_world,
)

CRDS = Path(__file__).parents[2] / "charts" / "mural" / "crds"
V1 = "acme/default:v1"
KEY = mint_key().key
MAX_OBJECT_BYTES = 1_000_000
"""The API server takes 1.5 MB, with the object's own part and who manages which field."""


@cache
def schema(plural: str) -> Any:
    found = yaml.safe_load((CRDS / f"{plural}.yaml").read_text(encoding="utf-8"))
    of = found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return of["properties"]["status"]


def faults(schema: Any, value: object, path: str = "status") -> Iterator[str]:
    """What the API server would refuse."""
    match schema["type"]:
        case "object":
            assert isinstance(value, dict), path
            yield from (f"{path}.{n}" for n in schema.get("required", ()) if n not in value)
            for name, each in value.items():
                if name not in schema["properties"]:
                    yield f"{path}.{name} is unknown"
                else:
                    yield from faults(schema["properties"][name], each, f"{path}.{name}")
        case "array":
            assert isinstance(value, list), path
            if len(value) > schema["maxItems"]:
                yield f"{path} has {len(value)} items"
            for each in value:
                yield from faults(schema["items"], each, f"{path}[]")
        case "string":
            limit = schema.get("maxLength", MAX_NAME_CHARS)
            fits = isinstance(value, str) and len(value) <= limit and value.isprintable()
            if not fits or value not in schema.get("enum", [value]):
                yield f"{path}: {value!r}"
        case "integer":
            if not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                yield f"{path}: {value!r}"
        case "boolean":
            if not isinstance(value, bool):
                yield f"{path}: {value!r}"


class Api:
    """Keeps the status that is written on any object."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}

    async def get(self, path: str) -> bytes:
        return b'{"metadata": {"uid": "1", "resourceVersion": "1"}}'

    async def patch(
        self, path: str, body: Mapping[str, Any], *, kind: str, params: object
    ) -> bytes:
        self.status = json.loads(msgspec.json.encode(body["status"]))
        return b'{"metadata": {"uid": "1", "resourceVersion": "2"}}'


def refused(*messages: str) -> dict[str, Any]:
    noted = Refusals(lambda: 0.0)
    for message in messages:
        noted.note("uid", V1, ControlError(message, 422))
    return dict(noted.of("uid"))


def pod_of(name: str, state: Snapshot, **more: Any) -> Pod:
    return Pod(name, ready=True, state=exact_state(state), **more)


def write(pods: list[Pod]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The statuses of an adapter that shall be on all of these pods, and of their pool."""
    placement = {"replicas": len(pods)}
    adapter, pool = make_adapter("v1", placement=placement), make_pool()
    meta = msgspec.structs.replace(adapter.metadata, uid="1")
    world = make_world([adapter], pods, pool=pool)
    plan = reconcile(world, 0.0)
    api = Api()
    writer = StatusWriter(api, metrics=Metrics(**NOTHING))
    send(writer.write_adapter(meta, verdict(adapter, world, plan)))
    of_adapter = api.status
    meta = msgspec.structs.replace(pool.metadata, uid="1")
    send(writer.write_pool(meta, pool_verdict(world, plan)))
    return of_adapter, api.status


NOTHING: dict[str, Any] = {
    "watches": dict,
    "calls": dict,
    "leading": lambda: True,
    "adapters": dict,
}


def send(writing: Any) -> None:
    """Nothing here waits for anything."""
    with pytest.raises(StopIteration):
        writing.send(None)


hostile = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["\x1b[2J", "‮", "a\nb", KEY, "x" * 5000, "𝕏" * 5000, "sha256:", "d" * 64, ""]),
)
numbers = st.integers(-(1 << 63), (1 << 63) - 1)
reports = st.builds(
    lambda name, digest, level, rank, size, base, spec, boot, limit, declared: make_state(
        make_status(name, digest=digest, level=level, rank=rank, bytes=size, pinned=True),
        make_status(V1, digest=digest, level=level, rank=rank, bytes=size, pinned=True),
        base=Base(model_names=tuple(base), spec_hash=spec),
        boot_id=boot,
        declared=declared,
        limits=Limits(
            slots=limit,
            max_cpu_loras=limit,
            host_bytes=limit,
            max_lora_rank=limit,
            max_num_seqs=limit,
            max_model_len=limit,
        ),
    ),
    *(hostile, hostile, st.sampled_from(["disk", "host", "slot"]), numbers, numbers),
    *(st.lists(hostile, max_size=20), hostile, hostile, numbers, st.lists(hostile, max_size=5)),
)


@settings(max_examples=150, deadline=None)
@given(reports, reports, hostile, hostile)
def test_no_report_makes_a_status_that_is_refused_or_cannot_be_read(one, two, error, message):
    silent = Pod("c", ready=True, refusals=refused(error, message))
    pods = [pod_of("a", one, refusals=refused(message)), pod_of("b", two), silent]
    of_adapter, of_pool = write(pods)
    assert not list(faults(schema("adapters"), of_adapter))
    assert not list(faults(schema("servingpools"), of_pool))
    assert KEY not in json.dumps([of_adapter, of_pool])


@given(reports)
def test_what_is_kept_of_a_report_is_bounded_and_can_be_shown(state):
    kept = exact_state(state)
    texts = [kept.boot_id, kept.base.spec_hash, *kept.base.model_names, *kept.declared]
    for name, status in kept.adapters.items():
        assert name == status.name
        texts.append(name)
        assert status.digest == "" or len(status.digest) == 64
        assert 0 <= status.bytes <= MAX_COUNT
    assert all(each.isprintable() and len(each) <= MAX_NAME_CHARS for each in texts)
    assert all(0 <= each <= MAX_COUNT for each in msgspec.structs.astuple(kept.limits))
    assert exact_state(kept) == kept


def test_the_status_of_the_largest_pool_that_lies_in_everything_fits_into_an_object():
    names = [f"{at:04}-{'p' * 248}" for at in range(MAX_REPLICAS)]
    lies = make_state(
        make_status(V1, digest="d" * 64, pinned=True, bytes=1 << 62),
        base=Base(model_names=("b" * 256,), spec_hash="𝕏" * 9000),
    )
    pods = [pod_of(name, lies, refusals=refused("𝕏" * 9000)) for name in names]
    of_adapter, of_pool = write(pods)
    assert len(of_adapter["replicas"]) == MAX_REPLICAS
    assert not list(faults(schema("adapters"), of_adapter))
    assert not list(faults(schema("servingpools"), of_pool))
    assert len(json.dumps(of_adapter, ensure_ascii=False).encode()) < MAX_OBJECT_BYTES


class Unasked(PoolCredentials):
    """Of a pool that nothing is asked of."""

    def __init__(self) -> None:
        pass


class Failing(Follower):
    """Of a pod that says something odd instead of how it is."""

    def __init__(self, target: Target, on_change: Callable[[bool], None]) -> None:
        super().__init__(target, Unasked(), on_change)

    async def _follow(self) -> None:
        raise ControlError(f"no {KEY}\x1b\n" + "𝕏" * 5000)


async def test_why_a_pod_is_not_heard_is_fit_for_a_status_too():
    changed = asyncio.Event()
    target = Target("a", "uid", "127.0.0.1", 1, 2, "mural")
    follower = Failing(target, lambda _: changed.set())
    running = asyncio.create_task(follower.run())
    await asyncio.wait_for(changed.wait(), 20)
    running.cancel()
    assert KEY not in follower.error
    assert follower.error.isprintable()
    assert len(follower.error.encode()) <= MAX_SAID_BYTES + 3


def test_a_key_is_not_told_however_much_stands_before_it():
    """What is cut off before it is looked for in may leave the half of one."""
    for at in range(400, 700, 7):
        padding = (f"{KEY} " * 20)[:at]
        [kept] = refused(padding + KEY).values()
        assert KEY.rpartition("_")[2][:8] not in kept.message
        assert len(kept.message.encode()) <= MAX_SAID_BYTES + 3
