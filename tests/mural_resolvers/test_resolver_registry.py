"""The registry: who is asked, once, within bounds, and what is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import FileEntry, compute_digest
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    MuralError,
    RateLimited,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.manifest import Manifest, PeftFacts
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.registry import LoRAResolverRegistry, RegistrySettings
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import AdapterDescription, LoRAResolver
from mural_resolvers.tenants import ANYONE, Principal

ACME = Principal(tenant="acme")
V1 = parse_name("acme:v1")
Answer = Callable[[AdapterName], Awaitable[AdapterDescription | None]]


def adapter(name: AdapterName, content: str = "x") -> AdapterDescription:
    files = (FileEntry("adapter_config.json", len(content), content.encode().hex().zfill(64)),)
    facts = PeftFacts(rank=1, alpha=1, targets=())
    manifest = Manifest(files=files, facts=facts, digest=compute_digest(files))
    return AdapterDescription.of_folder(name, Path("/adapters") / name.version, manifest)


class FakeResolver(LoRAResolver):
    """Answers as it is told and counts who asked what."""

    def __init__(self, answer: Answer, name: str = "fake") -> None:
        self._answer = answer
        self._name = name
        self.asked: list[AdapterName] = []
        self.closed = False

    @property
    def name(self) -> str:
        return self._name

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        self.asked.append(name)
        return await self._answer(name)

    async def close(self) -> None:
        self.closed = True


async def found(name: AdapterName) -> AdapterDescription | None:
    return adapter(name)


async def absent(name: AdapterName) -> AdapterDescription | None:
    return None


def raising(error: Exception) -> Answer:
    async def answer(name: AdapterName) -> AdapterDescription | None:
        raise error

    return answer


class Gate:
    """An answer that waits until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = asyncio.Semaphore(0)

    async def __call__(self, name: AdapterName) -> AdapterDescription | None:
        self.entered.release()
        await self.open.wait()
        return adapter(name)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry_of(base_spec: BaseSpec) -> Callable[..., LoRAResolverRegistry]:
    def make(
        *resolvers: LoRAResolver, clock: Callable[[], float] | None = None, **settings: float
    ) -> LoRAResolverRegistry:
        return LoRAResolverRegistry(
            resolvers,
            base_spec,
            LoRAIdAllocator(),
            RegistrySettings(**settings),  # type: ignore[arg-type] # ints and floats by name
            clock=clock or Clock(),
        )

    return make


Make = Callable[..., LoRAResolverRegistry]


async def test_an_adapter_becomes_a_request_with_an_id(registry_of: Make) -> None:
    registry = registry_of(FakeResolver(found))

    one, again = await registry.get(ACME, V1), await registry.get(ACME, V1)

    assert one == again
    assert (one.lora_name, one.lora_int_id, one.lora_path) == ("acme:v1", 1, "/adapters/v1")
    assert one.digest
    registry.check_integrity()


async def test_two_names_with_one_content_share_an_id(registry_of: Make) -> None:
    registry = registry_of(FakeResolver(found))

    one = await registry.get(ACME, V1)
    other = await registry.get(ACME, parse_name("acme:v2"))

    assert one.lora_int_id == other.lora_int_id
    assert one != other


async def test_an_alias_is_answered_with_its_exact_version(registry_of: Make) -> None:
    async def latest(name: AdapterName) -> AdapterDescription | None:
        return adapter(name.at("v7"))

    assert (await registry_of(FakeResolver(latest)).get(ACME, parse_name("acme"))).lora_name == (
        "acme:v7"
    )


async def test_nobody_is_asked_before_the_caller_is_authorised(registry_of: Make) -> None:
    resolver = FakeResolver(found)
    registry = registry_of(resolver)
    await registry.get(ANYONE, parse_name("globex:v1"))

    for name in ("globex:v1", "globex:absent"):
        with pytest.raises(Forbidden):
            await registry.get(ACME, parse_name(name))

    assert resolver.asked == [parse_name("globex:v1")]


async def test_a_flight_of_somebody_else_lets_nobody_in(registry_of: Make) -> None:
    gate = Gate()
    registry = registry_of(FakeResolver(gate))
    flight = asyncio.create_task(registry.get(Principal(tenant="globex"), parse_name("globex:v1")))
    await gate.entered.acquire()

    with pytest.raises(Forbidden):
        await registry.get(ACME, parse_name("globex:v1"))

    gate.open.set()
    await flight


async def test_sources_are_asked_in_order_until_one_has_it(registry_of: Make) -> None:
    first, second, third = (
        FakeResolver(absent, "a"),
        FakeResolver(found, "b"),
        FakeResolver(found, "c"),
    )

    await registry_of(first, second, third).get(ACME, V1)

    assert [len(r.asked) for r in (first, second, third)] == [1, 1, 0]


async def test_what_no_source_has_is_not_found(registry_of: Make) -> None:
    registry = registry_of(
        FakeResolver(absent, "a"), FakeResolver(raising(AdapterNotFound("")), "b")
    )

    with pytest.raises(AdapterNotFound, match="acme:v1"):
        await registry.get(ACME, V1)


async def test_a_source_that_is_down_is_no_not_found(registry_of: Make) -> None:
    down = FakeResolver(raising(Unavailable("down")), "a")
    registry = registry_of(down, FakeResolver(absent, "b"))

    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await registry.get(ACME, V1)
        assert caught.value.retry_after_s

    assert len(down.asked) == 2


async def test_a_source_that_is_down_does_not_hide_the_next(registry_of: Make) -> None:
    registry = registry_of(
        FakeResolver(raising(Unavailable("down")), "a"), FakeResolver(found, "b")
    )

    assert await registry.get(ACME, V1)


async def test_a_fault_of_a_source_is_logged_and_not_told(
    registry_of: Make, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of(FakeResolver(raising(RuntimeError("s3cret"))))

    with caplog.at_level(logging.ERROR), pytest.raises(Unavailable) as caught:
        await registry.get(ACME, V1)

    assert "s3cret" not in caught.value.message
    assert "RuntimeError: s3cret" in caplog.text


@pytest.mark.parametrize("error", [UnusableAdapter("rank"), Conflict("changed"), Forbidden()])
async def test_a_typed_refusal_ends_the_look_up(registry_of: Make, error: MuralError) -> None:
    after = FakeResolver(found, "b")
    registry = registry_of(FakeResolver(raising(error), "a"), after)

    with pytest.raises(type(error)):
        await registry.get(ACME, V1)

    assert after.asked == []


async def test_an_answer_for_another_tenant_is_not_believed(registry_of: Make) -> None:
    async def foreign(name: AdapterName) -> AdapterDescription | None:
        return adapter(parse_name("globex:v1"))

    with pytest.raises(Unavailable):
        await registry_of(FakeResolver(foreign)).get(ACME, V1)


async def test_many_waiters_share_one_flight(registry_of: Make) -> None:
    gate = Gate()
    resolver = FakeResolver(gate)
    registry = registry_of(resolver)
    waiters = [asyncio.create_task(registry.get(ACME, V1)) for _ in range(10)]
    await gate.entered.acquire()
    gate.open.set()

    requests = await asyncio.gather(*waiters)

    assert len(set(requests)) == 1
    assert resolver.asked == [V1]
    registry.check_integrity()


async def test_cancelling_one_waiter_leaves_the_others_alone(registry_of: Make) -> None:
    gate = Gate()
    resolver = FakeResolver(gate)
    registry = registry_of(resolver)
    first = asyncio.create_task(registry.get(ACME, V1))
    await gate.entered.acquire()
    second = asyncio.create_task(registry.get(ACME, V1))
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.wait({first})
    gate.open.set()

    assert first.cancelled()
    assert (await second).lora_name == "acme:v1"
    assert resolver.asked == [V1]


async def test_a_flight_that_nobody_waits_for_ends_at_its_timeout(registry_of: Make) -> None:
    cancelled = asyncio.Event()

    async def forever(name: AdapterName) -> AdapterDescription | None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return None

    registry = registry_of(FakeResolver(forever), timeout_s=0.01)
    waiter = asyncio.create_task(registry.get(ACME, V1))
    await asyncio.sleep(0)
    waiter.cancel()

    await cancelled.wait()
    await registry.close()
    registry.check_integrity()


async def test_a_look_up_that_takes_too_long_is_unavailable(registry_of: Make) -> None:
    registry = registry_of(FakeResolver(Gate()), timeout_s=0.01, retry_after_s=7)

    with pytest.raises(Unavailable, match="in time") as caught:
        await registry.get(ACME, V1)

    assert caught.value.retry_after_s == 7


async def test_a_source_that_ignores_its_cancellation_keeps_nobody(registry_of: Make) -> None:
    let_go = asyncio.Event()

    async def stubborn(name: AdapterName) -> AdapterDescription | None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue
        return None

    registry = registry_of(FakeResolver(stubborn), timeout_s=0.01)

    with pytest.raises(Unavailable):
        await registry.get(ACME, V1)
    let_go.set()


async def test_a_timeout_inside_a_source_is_a_source_that_is_down(registry_of: Make) -> None:
    registry = registry_of(FakeResolver(raising(TimeoutError()), "a"), FakeResolver(found, "b"))

    assert await registry.get(ACME, V1)


async def test_not_found_is_remembered_for_seconds(registry_of: Make) -> None:
    clock = Clock()
    resolver = FakeResolver(absent)
    registry = registry_of(resolver, clock=clock, negative_ttl_s=5)

    for now, asked in ((100.0, 1), (104.9, 1), (105.0, 2), (109.9, 2)):
        clock.now = now
        with pytest.raises(AdapterNotFound):
            await registry.get(ACME, V1)
        assert len(resolver.asked) == asked


async def test_a_name_that_was_just_made_is_asked_again(registry_of: Make) -> None:
    resolver = FakeResolver(absent)
    registry = registry_of(resolver)
    with pytest.raises(AdapterNotFound):
        await registry.get(ACME, V1)

    registry.forget(V1)
    resolver._answer = found

    assert await registry.get(ACME, V1)


async def test_a_name_that_is_made_while_it_is_looked_for_is_found(registry_of: Make) -> None:
    asked, made = asyncio.Semaphore(0), asyncio.Event()
    names: set[AdapterName] = set()

    async def slow(name: AdapterName) -> AdapterDescription | None:
        there = name in names
        asked.release()
        await made.wait()
        return adapter(name) if there else None

    registry = registry_of(FakeResolver(slow))
    waiting = asyncio.create_task(registry.get(ACME, V1))
    await asked.acquire()
    names.add(V1)
    registry.forget(V1)
    joining = asyncio.create_task(registry.get(ACME, V1))
    made.set()

    assert (await waiting).lora_name == (await joining).lora_name == "acme:v1"
    registry.check_integrity()


async def test_not_found_is_remembered_within_a_bound(registry_of: Make) -> None:
    resolver = FakeResolver(absent)
    registry = registry_of(resolver, max_negative=2)
    for version in ("v1", "v2", "v3", "v1", "v3"):
        with pytest.raises(AdapterNotFound):
            await registry.get(ACME, V1.at(version))

    registry.check_integrity()
    assert [name.version for name in resolver.asked] == ["v1", "v2", "v3", "v1"]


async def test_one_principal_s_not_found_is_not_another_s(registry_of: Make) -> None:
    resolver = FakeResolver(absent)
    registry = registry_of(resolver)
    for principal in (ACME, ANYONE):
        with pytest.raises(AdapterNotFound):
            await registry.get(principal, V1)

    assert len(resolver.asked) == 2


async def test_a_tenant_has_a_bounded_share_of_the_look_ups(registry_of: Make) -> None:
    gate = Gate()
    resolver = FakeResolver(gate)
    registry = registry_of(resolver, max_concurrent=4, max_concurrent_per_tenant=2)
    acme = [asyncio.create_task(registry.get(ACME, V1.at(f"v{n}"))) for n in range(6)]
    for _ in range(2):
        await gate.entered.acquire()
    globex = asyncio.create_task(registry.get(Principal("globex"), parse_name("globex:v1")))

    await gate.entered.acquire()

    assert [name.tenant for name in resolver.asked] == ["acme", "acme", "globex"]
    gate.open.set()
    await asyncio.gather(*acme, globex)
    assert len(resolver.asked) == 7
    await asyncio.sleep(0)
    registry.check_integrity()


async def test_the_total_of_look_ups_is_bounded(registry_of: Make) -> None:
    gate = Gate()
    resolver = FakeResolver(gate)
    registry = registry_of(resolver, max_concurrent=2)
    tasks = [asyncio.create_task(registry.get(ANYONE, parse_name(f"t{n}:v1"))) for n in range(5)]
    for _ in range(2):
        await gate.entered.acquire()
    for _ in range(10):
        await asyncio.sleep(0)

    assert len(resolver.asked) == 2
    gate.open.set()
    await asyncio.gather(*tasks)


async def test_a_tenant_with_too_many_waiting_is_told_to_slow_down(registry_of: Make) -> None:
    gate = Gate()
    registry = registry_of(FakeResolver(gate), max_pending_per_tenant=2)
    tasks = [asyncio.create_task(registry.get(ACME, V1.at(f"v{n}"))) for n in range(2)]
    await gate.entered.acquire()

    with pytest.raises(RateLimited) as caught:
        await registry.get(ACME, V1.at("v9"))
    assert caught.value.retry_after_s
    other = asyncio.create_task(registry.get(Principal("globex"), parse_name("globex:v1")))

    gate.open.set()
    await asyncio.gather(*tasks, other)


async def test_too_many_waiting_in_total_is_unavailable(registry_of: Make) -> None:
    gate = Gate()
    registry = registry_of(FakeResolver(gate), max_pending=2)
    tasks = [
        asyncio.create_task(registry.get(Principal(t), parse_name(f"{t}:v1"))) for t in ("a", "b")
    ]
    await gate.entered.acquire()

    with pytest.raises(Unavailable):
        await registry.get(ACME, V1)

    gate.open.set()
    await asyncio.gather(*tasks)


async def test_closing_ends_every_wait_and_every_source(registry_of: Make) -> None:
    gate = Gate()
    resolver = FakeResolver(gate)
    registry = registry_of(resolver)
    waiter = asyncio.create_task(registry.get(ACME, V1))
    await gate.entered.acquire()

    await registry.close()

    with pytest.raises(Unavailable, match="shutting down"):
        await waiter
    with pytest.raises(Unavailable, match="shutting down"):
        await registry.get(ACME, V1)
    assert resolver.closed
    registry.check_integrity()


async def test_a_lease_gives_the_folder(registry_of: Make) -> None:
    registry = registry_of(FakeResolver(found))
    request = await registry.get(ACME, V1)

    async with registry.lease(ACME, request) as path:
        assert str(path) == request.lora_path


async def test_a_lease_of_what_was_forgotten_asks_again(registry_of: Make) -> None:
    resolver = FakeResolver(found)
    registry = registry_of(resolver, max_resolved=1)
    request = await registry.get(ACME, V1)
    await registry.get(ACME, V1.at("v2"))

    async with registry.lease(ACME, request):
        assert [name.version for name in resolver.asked] == ["v1", "v2", "v1"]


async def test_a_lease_never_gives_other_content(registry_of: Make) -> None:
    contents = iter(["one", "two", "three"])

    async def changing(name: AdapterName) -> AdapterDescription | None:
        return adapter(name, next(contents))

    registry = registry_of(FakeResolver(changing), max_resolved=1)
    request = await registry.get(ACME, V1)
    await registry.get(ACME, V1.at("v2"))

    with pytest.raises(Unavailable):
        async with registry.lease(ACME, request):
            pytest.fail("other content was given")


def test_two_sources_of_one_name_are_refused(registry_of: Make) -> None:
    with pytest.raises(InvalidInput, match="share a name"):
        registry_of(FakeResolver(found), FakeResolver(absent))
