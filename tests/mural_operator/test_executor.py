"""Plans are done against simulated servers: in parallel, once each, and later again what failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from mural_operator.credentials import Credentials, PoolCredentials
from mural_operator.executor import PARALLEL, PARALLEL_PER_POD, Executor, Outcome, PoolHands
from mural_operator.reconcile import (
    FINALIZER,
    Action,
    AddFinalizer,
    Declare,
    Forget,
    Load,
    Prefetch,
    RemoveFinalizer,
    Unload,
    Warm,
)
from mural_operator.refusals import LYING, Refusals
from mural_operator.replicas import Replicas, Target
from mural_operator.troubles import Troubles
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.objects import Adapter, AdapterSpec, ObjectMeta
from tests.mural_operator.simulated_server import Knobs, Refusal, SimulatedServer
from tests.mural_operator.virtual_time import in_virtual_time

WAIT_S = 20


class Keys(PoolCredentials):
    """Stands for a pool's credentials."""

    def __init__(self) -> None:
        pass

    def now(self) -> Credentials:
        return Credentials()

    def suspect(self) -> None:
        raise AssertionError("nobody has refused a token")


class Api(KubeClient):
    """Stands for the API server: takes patches, or refuses them."""

    def __init__(self) -> None:
        self.patched: list[tuple[str, object]] = []
        self.refusal: KubeError | None = None

    async def patch(self, path: str, body: object, **_: object) -> bytes:
        self.patched.append((path, body))
        if self.refusal is not None:
            raise self.refusal
        return b"{}"


class Bench:
    """An executor of one pool, and what came of its actions."""

    def __init__(self) -> None:
        self.api = Api()
        self.executor = Executor(self.api, lambda: self.may_act, Troubles())
        self.may_act = True
        self.replicas = Replicas(Keys(), lambda pod, load_only: None)
        self.refusals = Refusals(time.time)
        self.outcomes: list[Outcome] = []
        self.overtaken = 0
        self._changed = asyncio.Event()
        self.executor.open(
            "pool",
            PoolHands(self.replicas.get, self.refusals, self._done, self._take_overtaken),
        )

    def _done(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._changed.set()

    def _take_overtaken(self) -> None:
        self.overtaken += 1
        self._changed.set()

    def follow(self, *servers: SimulatedServer) -> None:
        self.replicas.follow(
            Target(f"pod-{at}", f"uid-{at}", one.host, one.port, one.control_port, one.engine)
            for at, one in enumerate(servers)
        )

    def submit(self, *actions: Action) -> None:
        self.executor.submit("pool", actions)

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await self._changed.wait()
                self._changed.clear()

    async def ended(self, number: int) -> list[Outcome]:
        await self.until(lambda: len(self.outcomes) >= number)
        return self.outcomes

    async def close(self) -> None:
        await self.executor.close("pool")
        await self.replicas.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


def load(name: str, pod: str = "pod-0") -> Load:
    return Load(pod=pod, name=name, digest=None, source=None, level="host", pinned=True)


def an_adapter(*finalizers: str) -> Adapter:
    metadata = ObjectMeta(
        name="a", namespace="team", uid="u", resource_version="7", finalizers=finalizers
    )
    return Adapter(metadata, AdapterSpec(pool="pool", tenant="acme", version="v1"))


async def test_a_plan_is_done_with_the_declaration_before_the_loads(start_simulated, bench):
    server = await start_simulated()
    bench.follow(server)
    names = [f"acme/default:v{at}" for at in range(6)]
    bench.submit(*map(load, names), Declare("pod-0", tuple(names)))
    outcomes = await bench.ended(7)
    assert [one.error for one in outcomes] == [None] * 7
    assert server.done[0].what == "declare"
    assert set(server.resident) == {f"acme:v{at}" for at in range(6)}
    assert all(one.pinned for one in server.resident.values())


async def test_a_pod_is_asked_for_few_things_at_a_time_and_all_pods_for_a_bounded_number(
    start_simulated, bench
):
    servers = [await start_simulated(knobs=Knobs(load_delay_s=3600)) for _ in range(10)]
    bench.follow(*servers)
    bench.submit(*(load(f"acme/a:v{n}", f"pod-{p}") for p in range(10) for n in range(5)))
    assert bench.executor.busy == PARALLEL
    running = [key.pod for key in bench.executor._pools["pool"].running]
    assert max(map(running.count, running)) == PARALLEL_PER_POD


async def test_what_drains_for_long_does_not_keep_a_lost_adapter_from_coming_back(
    start_simulated, bench
):
    server = await start_simulated(knobs=Knobs(unload_delay_s=3600))
    bench.follow(server)
    bench.submit(*(Unload("pod-0", f"acme/a:v{n}") for n in range(4)), load("acme/b:v1"))
    [done] = await bench.ended(1)
    assert done.action == load("acme/b:v1")


async def test_the_same_plan_again_starts_nothing_twice(start_simulated, bench):
    server = await start_simulated()
    bench.follow(server)
    server.freeze()
    for _ in range(5):
        bench.submit(load("acme/default:v1"))
    assert bench.executor.busy == 1
    server.thaw()
    await bench.ended(1)
    bench.submit(load("acme/default:v1"))
    # Its state has not shown the load yet: there is time to wait for that.
    assert bench.executor.busy == 0
    assert bench.executor.next_due("pool") is not None
    assert server.count("resident") == 1


async def test_a_refusal_is_remembered_and_success_forgets_it(start_simulated, bench):
    server = await start_simulated()
    server.knobs.refusals["acme:v1"] = Refusal(422, "rank 128 is over 64")
    bench.follow(server)
    bench.submit(load("acme/default:v1"))
    await bench.ended(1)
    refusal = bench.refusals.of("uid-0")["acme/default:v1"]
    assert (refusal.status, refusal.message) == (422, "rank 128 is over 64")
    assert refusal.retry_at - time.time() > 40
    server.knobs.refusals.clear()
    bench.submit()
    bench.submit(load("acme/default:v1"))
    await bench.ended(2)
    assert bench.refusals.of("uid-0") == {}


async def test_a_pod_that_says_yes_and_does_not_do_it_is_asked_less_and_less(
    start_simulated, bench
):
    server = await start_simulated(knobs=Knobs(phantoms={"acme:v1"}))
    bench.follow(server)
    for tries in range(1, 4):
        bench.submit(load("acme/default:v1"))
        await bench.ended(tries)
        waits = bench.executor._pools["pool"].waits
        [wait] = waits.values()
        assert wait.tries == tries
        wait.until = 0.0
    assert bench.refusals.of("uid-0")["acme/default:v1"].status == LYING


async def test_a_load_gives_way_to_the_unload_of_the_same_adapter(start_simulated, bench):
    server = await start_simulated(knobs=Knobs(load_delay_s=3600))
    bench.follow(server)
    bench.submit(load("acme/default:v1"))
    await asyncio.sleep(0)
    bench.submit(Unload("pod-0", "acme/default:v1"))
    await bench.until(lambda: bench.overtaken)
    bench.submit(Unload("pod-0", "acme/default:v1"))
    [done] = await bench.ended(1)
    assert done.error is None
    assert server.count("remove", "acme:v1") == 1


async def test_what_has_not_begun_and_is_not_planned_any_more_is_not_done(start_simulated, bench):
    server = await start_simulated()
    bench.follow(server)
    server.freeze()
    bench.submit(*(load(f"acme/a:v{n}") for n in range(8)))
    bench.submit(load("acme/a:v0"), load("acme/a:v1"))
    server.thaw()
    await bench.ended(2)
    assert bench.executor.busy == 0
    assert server.count("resident") == 2


async def test_actions_of_a_pod_that_is_gone_are_ended(start_simulated, bench):
    server = await start_simulated(knobs=Knobs(load_delay_s=3600))
    bench.follow(server)
    bench.submit(load("acme/default:v1"))
    bench.follow()
    bench.submit()
    await bench.until(lambda: bench.overtaken)
    assert bench.executor.busy == 0


async def test_vllm_pods_are_warmed_and_told_to_forget(start_simulated, bench):
    server = await start_simulated(engine="vllm")
    bench.follow(server)
    bench.submit(Warm("pod-0", "acme/default:v1"))
    await bench.ended(1)
    bench.submit(Forget("pod-0", "acme/default:v1"))
    await bench.ended(2)
    assert [one.error for one in bench.outcomes] == [None, None]
    assert [one.what for one in server.done] == ["complete", "unload"]


async def test_a_prefetch_that_is_refused_says_nothing_against_the_adapter(start_simulated, bench):
    server = await start_simulated(knobs=Knobs(disk_cache=False))
    bench.follow(server)
    bench.submit(Prefetch("pod-0", "acme/default:v1", None, None))
    [done] = await bench.ended(1)
    assert done.error is not None
    assert bench.refusals.of("uid-0") == {}


async def test_a_pod_that_dies_in_the_midst_of_a_load_has_not_answered(start_simulated, bench):
    server = await start_simulated(knobs=Knobs(load_delay_s=3600))
    bench.follow(server)
    bench.submit(load("acme/default:v1"))
    await server.until(lambda one: "acme:v1" in one.adapters)
    await server.stop()
    await bench.ended(1)
    assert bench.refusals.of("uid-0")["acme/default:v1"].status == 0


async def test_finalizers_are_put_only_on_the_version_of_the_object_that_was_seen(bench):
    bench.submit(AddFinalizer(an_adapter("other")))
    await bench.ended(1)
    bench.submit(RemoveFinalizer(an_adapter("other", FINALIZER)))
    await bench.ended(2)
    [(path, added), (_, removed)] = bench.api.patched
    assert path.endswith("/namespaces/team/adapters/a")
    assert added["metadata"] == {"resourceVersion": "7", "finalizers": ["other", FINALIZER]}
    assert removed["metadata"] == {"resourceVersion": "7", "finalizers": ["other"]}


@pytest.mark.parametrize(("status", "is_error"), [(404, False), (409, True)])
async def test_an_object_that_is_gone_is_no_error_and_one_that_changed_is_seen_again(
    bench, status, is_error
):
    bench.api.refusal = KubeError(status, "", "")
    bench.submit(RemoveFinalizer(an_adapter(FINALIZER)))
    [done] = await bench.ended(1)
    assert (done.error is not None) == is_error


async def test_nothing_begins_when_this_one_may_not_act(start_simulated, bench):
    server = await start_simulated()
    bench.follow(server)
    bench.may_act = False
    bench.submit(load("acme/default:v1"))
    assert bench.executor.busy == 0


async def test_the_end_ends_everything_that_is_under_way(start_simulated, bench):
    server = await start_simulated(knobs=Knobs(load_delay_s=3600))
    bench.follow(server)
    bench.submit(load("acme/a:v1"), load("acme/a:v2"))
    async with asyncio.timeout(WAIT_S):
        await bench.executor.close("pool")
    assert bench.executor.busy == 0


@pytest.mark.parametrize(
    "refusal",
    [
        KubeError(409, "Conflict", "not the last version"),
        KubeError(403, "Forbidden", "no right"),
        KubeError(429, "TooManyRequests", "later", retry_after_s=9.0),
        KubeError(500, "InternalError", "etcd"),
    ],
)
def test_a_finalizer_that_is_refused_for_a_minute_is_asked_for_less_and_less(refusal):
    async def refused() -> None:
        bench = Bench()
        bench.api.refusal = refusal
        action = AddFinalizer(an_adapter("v1"))
        for _ in range(600):
            # As a worker that is woken all the time decides again and again.
            bench.submit(action)
            await asyncio.sleep(0.1)
        assert 2 < len(bench.api.patched) <= 9
        bench.api.refusal = None
        while bench.outcomes[-1].error is not None:
            bench.submit(action)
            await asyncio.sleep(1.0)
        await bench.close()

    in_virtual_time(refused())


async def test_what_is_being_loaded_stays_declared_though_nothing_wants_it_any_more(
    bench, start_simulated
):
    # Else it would be resident there, known as nobody's, for ever.
    server = await start_simulated(knobs=Knobs(load_delay_s=0.2))
    bench.follow(server)
    name = "acme/default:v1"
    bench.submit(Declare("pod-0", (name,)))
    await bench.ended(1)
    bench.submit(load(name))
    # Its object goes. What the pod says is that it has nothing.
    bench.submit(Declare("pod-0", ()))
    await bench.until(lambda: any(isinstance(each.action, Load) for each in bench.outcomes))
    bench.submit(Declare("pod-0", ()))
    await bench.ended(3)
    assert set(server.resident) == {"acme:v1"}
    assert server.declared == ("acme:v1",)
    # That is seen, and taken away.
    bench.submit(Unload("pod-0", name))
    await bench.ended(4)
    bench.submit(Declare("pod-0", ()))
    await bench.ended(5)
    assert server.resident == {}
    assert server.declared == ()


async def test_what_could_not_be_loaded_is_not_declared_any_longer(bench, start_simulated):
    server = await start_simulated(knobs=Knobs(refusals={"acme:v1": Refusal(404)}))
    bench.follow(server)
    name = "acme/default:v1"
    bench.submit(load(name))
    await bench.ended(1)
    bench.submit(Declare("pod-0", ()))
    await bench.ended(2)
    assert server.declared == ()
