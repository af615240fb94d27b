"""What an operator relies on, asked of the real server and of the simulated one alike.

The real one is `mural serve` without its engine; `test_residency_contract.py` has that too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from mural_resolvers.errors import UnusableAdapter
from mural_server.protocol import ControlClient, ControlError, Delta, Snapshot, apply
from tests.mural_operator.simulated_server import Knobs, Refusal
from tests.mural_server.api import scripted_server

engine = scripted_server.engine
start_server = scripted_server.start_server
adapter_dir = scripted_server.adapter_dir

WAIT_S = 20.0
TOKEN = "the-control-token"
ABSENT = "acme:v9"


class Subject:
    """A server that has acme:v1, acme:v2 and globex:v1, and cannot use globex:v1."""

    def __init__(self, port: int, control_port: int, token: str | None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.control_url = f"http://127.0.0.1:{control_port}"
        self.control_port = control_port
        self.control = ControlClient("127.0.0.1", control_port, token=token)

    def client(self, token: str | None) -> ControlClient:
        return ControlClient("127.0.0.1", self.control_port, token=token)

    async def state(self) -> Snapshot:
        async with aclosing(self.control.events()) as events:
            snapshot = await anext(events)
        assert isinstance(snapshot, Snapshot)
        return snapshot

    async def until(self, holds: Callable[[Snapshot], object]) -> Snapshot:
        """The first state of the stream for which something holds."""
        async with asyncio.timeout(WAIT_S), aclosing(self.control.states()) as states:
            async for state in states:
                if holds(state):
                    return state
        raise AssertionError("the stream ended")

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=WAIT_S) as http:
            return await http.post(path, json=body)

    async def raw(self, method: str, path: str, **more: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.control_url, timeout=WAIT_S) as http:
            return await http.request(method, path, **more)


Start = Callable[..., Awaitable[Subject]]


@pytest.fixture(params=["simulated", "real"])
def start(request, start_simulated, start_server, adapter_dir, engine) -> Start:
    """``await start(await_declared=…, token=…)``."""

    async def simulated(*, await_declared: bool = False, token: str | None = None) -> Subject:
        knobs = Knobs(await_declared=await_declared, sources=("directory",), disk_cache=False)
        knobs.refusals["acme:v9"] = Refusal(404, "The adapter does not exist.")
        knobs.refusals["globex:v1"] = Refusal(422, "rank 64 is above 8")
        server = await start_simulated(token=token, knobs=knobs)
        return Subject(server.port, server.control_port, token)

    async def real(*, await_declared: bool = False, token: str | None = None) -> Subject:
        engine.refusals["globex:v1"] = UnusableAdapter("rank 64 is above 8")
        server = await start_server(
            adapter_dir=str(adapter_dir),
            allow_runtime_lora_updating=True,
            control_token=token,
            await_declared_s=600 if await_declared else 0,
        )
        return Subject(server.port, server.control_port, token)

    return simulated if request.param == "simulated" else real


@pytest.fixture
async def subject(start: Start) -> Subject:
    return await start()


async def refused(answer: Awaitable[object]) -> ControlError:
    with pytest.raises(ControlError) as caught:
        await answer
    return caught.value


# -- the state stream -----------------------------------------------------------------------------


async def test_the_stream_begins_with_the_whole_state(subject):
    state = await subject.state()
    assert state.base.model_names[0] == "tiny"
    assert len(state.base.spec_hash) == 64
    assert state.limits.slots > 0
    assert (state.accepting, state.ready) == (True, True)
    assert (state.declared, state.adapters) == ((), {})


async def test_each_process_has_a_boot_id_of_its_own(start):
    first, second = await start(), await start()
    assert (await first.state()).boot_id != (await second.state()).boot_id
    assert (await first.state()).boot_id == (await first.state()).boot_id


async def test_changes_follow_on_the_snapshot_without_a_gap(subject):
    async with asyncio.timeout(WAIT_S), aclosing(subject.control.events()) as events:
        state = await anext(events)
        status = await subject.control.set_resident("acme:v1")
        await subject.control.declare(("acme:v1",))
        while state.declared != ("acme:v1",) or state.adapters.get("acme:v1") != status:
            state = apply(state, await anext(events))
    now = await subject.state()
    assert (now.adapters, now.declared) == (state.adapters, state.declared)


async def test_a_reader_that_was_away_is_told_what_it_missed(subject):
    before = await subject.state()
    await subject.control.set_resident("acme:v1")
    after = await subject.until(lambda state: "acme:v1" in state.adapters)
    async with aclosing(subject.control.events(since=before.seq)) as events:
        missed = await anext(events)
    assert isinstance(missed, Delta)
    assert missed.boot_id == before.boot_id
    assert missed.seq == before.seq + 1
    assert after.seq > before.seq


async def test_a_number_that_never_was_gets_a_snapshot(subject):
    async with aclosing(subject.control.events(since=10**6)) as events:
        assert isinstance(await anext(events), Snapshot)


async def test_a_number_that_is_none_is_400(subject):
    for since in ("-1", "x", "9" * 30):
        response = await subject.raw("GET", "/mural/v1/state", params={"since": since})
        assert response.status_code == 400, since


# -- residency ------------------------------------------------------------------------------------


async def test_what_is_made_resident_is_seen_and_taken_away(subject):
    status = await subject.control.set_resident("acme:v1")
    assert (status.name, status.level, status.pinned) == ("acme:v1", "host", False)
    assert len(status.digest) == 64
    seen = await subject.until(
        lambda state: (
            state.adapters.get("acme:v1", status).level == "host" and "acme:v1" in state.adapters
        )
    )
    assert seen.adapters["acme:v1"] == status
    freed = await subject.control.remove("acme:v1")
    assert freed.name == "acme:v1"
    assert freed.freed.host > 0
    await subject.until(lambda state: "acme:v1" not in state.adapters)


async def test_asking_again_changes_nothing_and_a_pin_is_what_it_was_last_said_to_be(subject):
    first = await subject.control.set_resident("acme:v1", pinned=True)
    again = await subject.control.set_resident("acme/default:v1", digest=first.digest, pinned=True)
    unpinned = await subject.control.set_resident("acme:v1")
    assert again == first
    assert not unpinned.pinned


async def test_a_slot_is_kept_by_who_asks_for_less(subject):
    assert (await subject.control.set_resident("acme:v1", level="slot")).level == "slot"
    assert (await subject.control.set_resident("acme:v1", level="host")).level == "slot"


async def test_other_content_is_a_conflict_and_loads_nothing(subject):
    error = await refused(subject.control.set_resident("acme:v1", digest="0" * 64))
    assert error.status == 409
    state = await subject.until(lambda state: "acme:v1" in state.adapters)
    assert state.adapters["acme:v1"].level == "disk"
    assert state.adapters["acme:v1"].digest in error.message


async def test_what_cannot_be_used_is_422_with_the_reason(subject):
    error = await refused(subject.control.set_resident("globex:v1"))
    assert error.status == 422
    assert "rank 64 is above 8" in error.message
    state = await subject.until(lambda state: "globex:v1" in state.adapters)
    assert state.adapters["globex:v1"].level == "disk"


async def test_what_is_nowhere_is_404_and_stays_unknown(subject):
    assert (await refused(subject.control.set_resident(ABSENT))).status == 404
    assert ABSENT not in (await subject.state()).adapters


async def test_what_makes_no_sense_is_400(subject):
    for name, more in (
        ("a:b:c", {}),
        ("../x:v1", {}),
        ("tiny", {}),
        ("acme:v1", {"source": "nowhere"}),
        ("acme:v1", {"level": "disk", "pinned": True}),
        # Its sources are folders, so that there is no cache.
        ("acme:v1", {"level": "disk"}),
    ):
        error = await refused(subject.control.set_resident(name, **more))
        assert error.status == 400, (name, more)
        assert error.message
    assert (await subject.state()).adapters == {}


async def test_the_source_that_has_it_may_be_named(subject):
    status = await subject.control.set_resident("acme:v1", source="directory")
    assert status.level == "host"


async def test_bodies_that_are_none_are_400(subject):
    bodies = (b"", b"[]", b"{}", b'{"names": 5}', b'{"name": "acme:v1", "x": 1}')
    for path in ("/mural/v1/resident", "/mural/v1/declared"):
        for body in (*bodies, b'{"name": "acme:v1", "level": "gpu"}'):
            response = await subject.raw("PUT", path, content=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["message"]


async def test_what_is_not_there_frees_nothing(subject):
    freed = (await subject.control.remove("acme/default:v1")).freed
    assert (freed.slot, freed.host, freed.kv_blocks, freed.disk) == (0, 0, 0, 0)


async def test_what_cannot_be_unloaded_is_400(subject):
    for name in ("..", "a:b:c", "tiny"):
        assert (await refused(subject.control.remove(name))).status == 400, name


# -- what is declared -----------------------------------------------------------------------------


async def test_declaring_says_what_is_there_and_what_is_not_yet(subject):
    await subject.control.set_resident("acme:v1")
    answer = await subject.control.declare(("globex:v1", "acme/default:v2", "acme:v1"))
    assert answer.resident == ("acme:v1",)
    assert answer.missing == ("acme:v2", "globex:v1")
    await subject.until(lambda state: state.declared == ("acme:v1", "acme:v2", "globex:v1"))
    assert (await subject.control.declare(())).missing == ()
    await subject.until(lambda state: state.declared == ())
    assert (await refused(subject.control.declare(("a:b:c",)))).status == 400


async def test_a_server_that_awaits_its_declaration_is_ready_with_it_and_stays_so(start):
    subject = await start(await_declared=True)
    assert not await subject.control.ready()
    await subject.control.declare(("acme:v1",))
    assert not await subject.control.ready()
    assert not (await subject.state()).ready
    await subject.control.set_resident("acme:v1")
    await subject.until(lambda state: state.ready)
    assert await subject.control.ready()
    await subject.control.remove("acme:v1")
    await subject.control.declare(("acme:v1", "acme:v2"))
    assert await subject.control.ready()
    assert (await subject.state()).ready


async def test_an_empty_declaration_is_one(start):
    subject = await start(await_declared=True)
    await subject.control.declare(())
    assert await subject.control.ready()


async def test_who_awaits_nothing_is_ready_whatever_is_declared(subject):
    await subject.control.declare(("acme:v1",))
    assert await subject.control.ready()
    assert (await subject.state()).ready


# -- drain and access -----------------------------------------------------------------------------


async def test_a_drain_ends_readiness_and_takes_no_more_requests(subject):
    answer = await subject.control.drain()
    assert (answer.accepting, answer.open_sequences) == (False, 0)
    state = await subject.until(lambda state: not state.accepting)
    assert not state.ready
    assert not await subject.control.ready()
    assert await subject.control.healthy()
    response = await subject.post("/v1/completions", {"model": "tiny", "prompt": "Hi"})
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert not (await subject.control.drain()).accepting


async def test_without_the_token_all_is_401_but_the_probes(start):
    subject = await start(token=TOKEN)
    for token in (None, "wrong"):
        client = subject.client(token)
        assert await client.healthy()
        assert await client.ready()
        for call in (client.drain(), client.set_resident("acme:v1"), client.remove("acme:v1")):
            assert (await refused(call)).status == 401
        assert (await refused(anext(client.events()))).status == 401
    assert (await subject.state()).accepting
    assert (await subject.control.set_resident("acme:v1")).level == "host"


async def test_a_page_in_a_browser_reaches_nothing(subject):
    response = await subject.raw(
        "POST", "/mural/v1/drain", headers={"origin": "https://example.org"}
    )
    assert response.status_code == 403
    assert (await subject.state()).accepting


async def test_an_unknown_path_is_404(subject):
    assert (await subject.raw("GET", "/mural/v1/nothing")).status_code == 404


# -- the OpenAI port ------------------------------------------------------------------------------


async def test_a_request_for_one_token_warms_and_lists_an_adapter(subject):
    body = {"model": "acme:v1", "prompt": [5], "max_tokens": 1}
    answer = await subject.post("/v1/completions", body)
    assert answer.status_code == 200
    assert answer.json()["model"] == "acme:v1"
    await subject.until(
        lambda state: "acme:v1" in state.adapters and state.adapters["acme:v1"].level != "disk"
    )
    async with httpx.AsyncClient(base_url=subject.url) as http:
        cards = (await http.get("/v1/models")).json()["data"]
    assert {card["id"]: card["parent"] for card in cards if card["parent"]} == {"acme:v1": "tiny"}
    assert cards[0]["id"] == "tiny"


async def test_the_unload_of_the_openai_port_is_200_then_404(subject):
    await subject.control.set_resident("acme:v1")
    body = {"lora_name": "acme:v1"}
    assert (await subject.post("/v1/unload_lora_adapter", body)).status_code == 200
    await subject.until(lambda state: "acme:v1" not in state.adapters)
    assert (await subject.post("/v1/unload_lora_adapter", body)).status_code == 404


async def test_requests_for_what_cannot_be_had_keep_their_status(subject):
    for model, status in ((ABSENT, 404), ("globex:v1", 422)):
        body = {"model": model, "prompt": [5], "max_tokens": 1}
        assert (await subject.post("/v1/completions", body)).status_code == status, model
