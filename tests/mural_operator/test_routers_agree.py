"""Routers send each adapter's requests to where the operator has put it, and nowhere else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mural_operator.verdict import verdict
from mural_resolvers.kubernetes.objects import Adapter, AdapterStatusFields, Tenant, read_tenant
from mural_router.objects import Declared
from mural_router.placement import Fleet, Loads, PlacementRequest, Replica, choose
from tests.mural_operator.simulated_pool import SimulatedPool, make_adapter, make_limits, make_pool

PODS = ["pod-a", "pod-b", "pod-c", "pod-d"]
NAMES = ["v1", "v2", "v3", "v4", "v5", "v6"]
ACME: Tenant = read_tenant({"metadata": {"name": "acme"}, "spec": {"namespaces": ["team"]}})

placements = st.fixed_dictionaries(
    {
        "replicas": st.sampled_from([1, 1, 2, 3, "All"]),
        "priority": st.sampled_from([0, 100]),
        "podSelector": st.sampled_from([{}, {"matchLabels": {"zone": "x"}}]),
    }
)


def fleet(pool: SimulatedPool) -> Fleet:
    """As routers make it out of what the pods report."""
    replicas = []
    for name in sorted(pool.pods):
        state = pool.pods[name].seen().state
        assert state is not None
        replicas.append(
            Replica(
                name,
                ready=state.ready,
                slots=state.limits.slots,
                max_lora_rank=state.limits.max_lora_rank,
                max_num_seqs=state.limits.max_num_seqs,
                adapters=state.adapters,
            )
        )
    return Fleet(tuple(replicas))


@settings(max_examples=150, deadline=None)
@given(
    zones=st.lists(st.sampled_from(["x", "y"]), min_size=2, max_size=4),
    capacity=st.integers(1, 6),
    wanted=st.lists(placements, min_size=1, max_size=len(NAMES)),
)
def test_the_homes_of_routers_are_those_of_the_operator(
    zones: list[str], capacity: int, wanted: list[dict[str, object]]
):
    pool = SimulatedPool(make_pool(capacity={"adapters": capacity}))
    for name, zone in zip(PODS, zones, strict=False):
        limits = make_limits(slots=8, max_cpu_loras=16)
        pool.add_pod(name, labels={"zone": zone}, limits=limits, latched=True, ready=True)
    for name, placement in zip(NAMES, wanted, strict=False):
        pool.declare(make_adapter(name, placement=placement))
    plan = pool.settle()
    told = Declared()
    told.tell_tenants([ACME], {})
    told.tell_adapters({key: published(pool, each) for key, each in pool.objects.items()})
    seen = fleet(pool)
    for exact, places in plan.places.items():
        k = told.replicas(exact)
        choice = choose(PlacementRequest(exact), seen, Loads(), declared=k)
        assert choice is not None
        if places.pods:
            assert (choice.reason, choice.replica.name in places.pods) == ("resident", True)
        if len(places.pods) == places.wanted > 0:
            assert (k, set(choice.homes)) == (places.wanted, set(places.pods))


def published(pool: SimulatedPool, adapter: Adapter) -> Adapter:
    """The object with k in its status, as the leader writes it."""
    desired = verdict(adapter, pool.world(), pool.plan()).desired
    return replace(adapter, status=AdapterStatusFields(desired_replicas=desired))
