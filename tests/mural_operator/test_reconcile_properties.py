"""Whatever happens to a pool, acting on what `reconcile` says ends, and then all is right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mural_operator.owners import Owners
from mural_operator.reconcile import FINALIZER, Declare, Load, Plan, Unload, reconcile
from mural_operator.verdict import verdict
from mural_operator.world import World
from mural_router.placement import Fleet, Loads, PlacementRequest, Replica, choose, order
from tests.mural_operator.simulated_pool import (
    SimulatedPod,
    SimulatedPool,
    make_adapter,
    make_limits,
    make_pool,
)

PODS = ["pod-a", "pod-b", "pod-c", "pod-d"]
NAMES = ["v1", "v2", "v3", "v4", "v5", "v6"]

limits = st.builds(
    make_limits,
    slots=st.sampled_from([0, 1, 2, 4]),
    max_cpu_loras=st.integers(1, 5),
    host_bytes=st.sampled_from([0, 25, 100]),
    max_lora_rank=st.sampled_from([8, 16]),
)
placements = st.fixed_dictionaries(
    {
        "replicas": st.sampled_from([0, 1, 1, 2, 3, "All"]),
        "level": st.sampled_from(["host", "slot"]),
        "pinned": st.booleans(),
        "priority": st.sampled_from([0, 100, 200]),
    }
)
KINDS = (
    *("declare", "declare", "change", "delete", "add", "add", "restart", "remove", "leave"),
    *("refuse", "heal", "silence", "speak", "act", "act", "act"),
)
Step = Callable[[SimulatedPool], None]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind = draw(st.sampled_from(KINDS))
    pod, name = draw(st.sampled_from(PODS)), draw(st.sampled_from(NAMES))
    match kind:
        case "declare":
            twin = draw(st.sampled_from(["", "-twin"]))
            made = make_adapter(
                f"{name}{twin}",
                draw(st.integers(0, 3)),
                version=name,
                placement=draw(placements),
            )
            return lambda pool: _declare(pool, made)
        case "change":
            changed = make_adapter(name, placement=draw(placements)).spec.placement
            return lambda pool: pool.change(f"team/{name}", changed)
        case "delete":
            return lambda pool: _delete(pool, name)
        case "add":
            more = {"limits": draw(limits), "slow": draw(st.booleans())}
            return lambda pool: _add(pool, pod, more)
        case "remove":
            return lambda pool: _remove(pool, pod)
        case "refuse":
            status = draw(st.sampled_from([0, 404, 409, 422, 503]))
            return lambda pool: _refuse(pool, pod, f"acme/default:{name}", status)
        case "act":
            return _act
        case _:
            return lambda pool: _on_pod(pool, pod, kind)


def _act(pool: SimulatedPool) -> None:
    pool.apply_all(pool.plan().actions)
    pool.tick()


def _declare(pool: SimulatedPool, made) -> None:
    if made.metadata.key not in pool.objects:
        pool.declare(made)


def _delete(pool: SimulatedPool, name: str) -> None:
    if f"team/{name}" in pool.objects:
        pool.delete(f"team/{name}")


def _add(pool: SimulatedPool, name: str, more) -> None:
    if name not in pool.pods:
        pool.add_pod(name, **more)


def _remove(pool: SimulatedPool, name: str) -> None:
    pool.pods.pop(name, None)


def _refuse(pool: SimulatedPool, name: str, adapter: str, status: int) -> None:
    if name in pool.pods:
        pool.pods[name].refuses[adapter] = status


def _on_pod(pool: SimulatedPool, name: str, kind: str) -> None:
    pod = pool.pods.get(name)
    if pod is None:
        return
    match kind:
        case "restart":
            pod.restart()
        case "leave":
            pod.terminating = True
        case "heal":
            pod.refuses, pod.refusals = {}, {}
        case "silence" | "speak":
            pod.heard = kind == "speak"


@st.composite
def histories(draw: st.DrawFn) -> SimulatedPool:
    """A pool to which things have happened, at any moment of what was being done about them."""
    capacity = draw(st.sampled_from([{}, {"adapters": 2}, {"bytes": 40}]))
    pool = SimulatedPool(make_pool(capacity=capacity))
    for name in NAMES:
        pool.sizes[f"acme/default:{name}"] = draw(st.sampled_from([10, 20, 30]))
        pool.ranks[f"acme/default:{name}"] = draw(st.sampled_from([8, 16]))
    for step in draw(st.lists(steps(), max_size=25)):
        step(pool)
    return pool


def is_suited(pod: SimulatedPod, made) -> bool:
    status = pod.held.get(made.exact)
    if status is None or status.loading or status.pinned != made.spec.placement.pinned:
        return False
    return made.spec.placement.level == "host" or not status.pinned or status.level == "slot"


def check_settled(pool: SimulatedPool, plan: Plan) -> None:
    world = pool.world()
    accepted = [
        made
        for key, made in pool.objects.items()
        if not made.is_deleted and key not in plan.rejected
    ]
    for made in accepted:
        homes = plan.places[made.exact].pods
        resident = [name for name in homes if is_suited(pool.pods[name], made)]
        found = verdict(made, world, plan)
        for name in set(homes) - set(resident):
            assert not pool.pods[name].heard or made.exact in pool.pods[name].refusals
        is_ready = len(homes) >= plan.places[made.exact].wanted and resident == list(homes)
        if not all(pool.pods[name].heard for name in homes):
            # Whatever they hold, nobody has said so.
            assert found.reason != "Ready"
            continue
        if is_ready and plan.places[made.exact].wanted:
            assert found.reason == "Ready"
            assert FINALIZER in made.metadata.finalizers
        elif not is_ready:
            # It is on its way nowhere: the status says why, and what to do.
            assert found.reason not in ("Ready", "Loading"), found
    for pod in pool.pods.values():
        if not pod.heard or pod.terminating:
            continue
        of_it = {made.exact for made in accepted if pod.name in places_of(plan, pod, made.exact)}
        wanted = {n for n in of_it if n in pod.held or n not in pod.refusals}
        assert wanted <= pod.declared
        # A copy that waits for those which replace it: a home has not been heard, or refuses.
        assert pod.declared - wanted <= {n for n in pod.held if lacks_a_home(plan, world, n)}
        # Pins are ours; what is left of others was left by a refusal of another pod's.
        kept = pod.declared & pod.held.keys()
        most = min(pod.limits.max_cpu_loras, pool.pool.spec.capacity.adapters or 99)
        assert len(kept) <= most
        most_bytes = pool.pool.spec.capacity.bytes or pod.limits.host_bytes or 10**9
        assert sum(pod.held[name].bytes for name in kept) <= most_bytes


def lacks_a_home(plan: Plan, world: World, exact: str) -> bool:
    if exact not in plan.places:
        return False
    homes = plan.places[exact].pods or plan.coming[exact].pods
    return any(not pod.holds(exact) for pod in world.pods if pod.name in homes)


def places_of(plan: Plan, pod: SimulatedPod, exact: str) -> tuple[str, ...]:
    serves = pod.ready and pod.latched
    return (plan.places if serves else plan.coming)[exact].pods


@settings(max_examples=200, deadline=None)
@given(pool=histories())
def test_acting_ends_and_then_everything_is_where_it_belongs_or_is_told(pool: SimulatedPool):
    plan = pool.settle()
    check_settled(pool, plan)
    assert pool.plan().actions == ()


@settings(max_examples=120, deadline=None)
@given(pool=histories(), seed=st.integers(0, 2**32))
def test_actions_repeated_or_in_another_order_do_no_harm(pool: SimulatedPool, seed: int):
    chance = random.Random(seed)
    for _ in range(60):
        actions = list(pool.plan().actions)
        late = [action for action in actions if chance.random() < 0.3]
        actions += late
        chance.shuffle(actions)
        pool.apply_all(actions)
        pool.tick()
        # The answer to something that was decided before this plan comes late, too.
        pool.apply_all(each for each in late if isinstance(each, Load | Declare))
        if not actions:
            break
    check_settled(pool, pool.settle())


@settings(max_examples=200, deadline=None)
@given(pool=histories())
def test_the_last_copy_is_not_taken_away_before_another_holds_it(pool: SimulatedPool):
    for _ in range(60):
        plan, world = pool.plan(), pool.world()
        for action in plan.actions:
            if isinstance(action, Unload):
                check_unload(action, plan, world)
        pool.apply_all(plan.actions)
        pool.tick()
        if not plan.actions:
            break


def check_unload(action: Unload, plan: Plan, world: World) -> None:
    places = plan.places.get(action.name)
    if places is None:
        return
    homes = places.pods or plan.coming[action.name].pods
    lacking = [name for name in homes if not world.by_name[name].holds(action.name)]
    # Where all that lack it refuse it, waiting for them would be for nothing.
    assert all(action.name in world.by_name[name].refusals for name in lacking)
    # One that will be a home when others have started may have no room for it until then.
    assert action.pod not in places.pods


@settings(max_examples=100, deadline=None)
@given(
    pool=histories(),
    unread=st.sets(st.sampled_from(NAMES)),
    judged=st.booleans(),
)
def test_nothing_goes_because_of_an_object_that_cannot_be_judged(
    pool: SimulatedPool, unread: set[str], judged: bool
):
    """Some adapters were never readable to who has just begun to lead, and perhaps no Tenant is."""
    world = pool.world()
    known = tuple(each for each in world.adapters if each.spec.version not in unread)
    owners = world.owners if judged else Owners({}, frozenset({"acme"}))
    doubted = replace(world, adapters=known, owners=owners, complete=not unread)
    plan = reconcile(doubted, pool.now)
    standing = {each.exact for each in world.adapters if not each.is_deleted}
    spoilt = {f"acme/default:{version}" for version in unread}
    safe = (standing & spoilt) | (set() if judged else standing)
    declared = {each.pod: set(each.names) for each in plan.actions if isinstance(each, Declare)}
    for action in plan.actions:
        assert not (isinstance(action, Unload) and action.name in safe), action
    for pod in world.pods:
        if pod.name in declared and pod.state is not None:
            assert safe & set(pod.state.declared) <= declared[pod.name]


@settings(max_examples=60, deadline=None)
@given(pool=histories(), broken=st.sets(st.sampled_from(PODS)))
def test_a_deletion_ends_within_two_minutes_whatever_pods_do(pool: SimulatedPool, broken: set[str]):
    for key in list(pool.objects):
        pool.delete(key)
    for name in broken & pool.pods.keys():
        pool.pods[name].heard = False
    for _ in range(125):
        # Whoever is broken does nothing that it is asked for.
        pool.apply_all(
            each for each in pool.plan().actions if getattr(each, "pod", None) not in broken
        )
        pool.tick(1.0)
    assert pool.objects == {}
    for pod in pool.pods.values():
        if pod.heard and not pod.terminating and pod.name not in broken:
            assert pod.declared == frozenset()


@settings(max_examples=100, deadline=None)
@given(
    pods=st.lists(st.sampled_from(PODS), unique=True, max_size=4),
    k=st.integers(1, 5),
    starting=st.sets(st.sampled_from(PODS)),
)
def test_homes_are_those_that_routers_compute(pods: list[str], k: int, starting: set[str]):
    pool = SimulatedPool()
    for name in pods:
        pool.add_pod(name, latched=name not in starting, ready=name not in starting, told=True)
    for version in NAMES:
        pool.declare(make_adapter(version, placement={"replicas": k}))
    pool.apply_all(pool.plan().actions)
    plan, fleet = pool.plan(), fleet_of_a_router(pool)
    for version in NAMES:
        exact = f"acme/default:{version}"
        homes = plan.places[exact].pods
        assert homes == tuple(each.name for each in order(exact, fleet)[:k])
        choice = choose(PlacementRequest(exact), fleet, Loads(), declared=plan.places[exact].wanted)
        assert choice is None or choice.homes == homes


def fleet_of_a_router(pool: SimulatedPool) -> Fleet:
    """As it makes it out of what the same pods report."""
    replicas = []
    for name in sorted(pool.pods):
        pod = pool.pods[name].seen()
        assert pod.state is not None
        limits = pod.state.limits
        replicas.append(
            Replica(
                name,
                ready=pod.ready and pod.state.ready and not pod.terminating,
                slots=limits.slots,
                host_bytes=limits.host_bytes,
                max_lora_rank=limits.max_lora_rank,
                max_num_seqs=limits.max_num_seqs,
                adapters=pod.state.adapters,
            )
        )
    return Fleet(tuple(replicas))


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.sampled_from(PODS[:3]), unique=True, min_size=1),
    k=st.integers(1, 3),
    slow=st.booleans(),
)
def test_routers_find_every_adapter_resident_at_each_step_of_a_scale_up(
    before: list[str], k: int, slow: bool
):
    pool = SimulatedPool()
    for name in before:
        pool.add_pod(name)
    for version in NAMES:
        pool.declare(make_adapter(version, placement={"replicas": k}))
    pool.settle()
    pool.add_pod("pod-new", slow=slow)
    for _ in range(12):
        plan, fleet = pool.plan(), fleet_of_a_router(pool)
        for version in NAMES:
            exact = f"acme/default:{version}"
            choice = choose(PlacementRequest(exact), fleet, Loads(), declared=k)
            assert choice is not None
            assert choice.reason == "resident"
        pool.apply_all(plan.actions)
        pool.tick()
    assert pool.pods["pod-new"].ready
    assert pool.plan().actions == ()
    assert reconcile(pool.world(), pool.now).actions == ()
