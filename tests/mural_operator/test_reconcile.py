"""What is to be done, case by case."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest

from mural_operator.owners import Owners
from mural_operator.reconcile import (
    FINALIZER,
    MAX_SILENCE_S,
    AddFinalizer,
    Declare,
    Forget,
    Load,
    Prefetch,
    RemoveFinalizer,
    Unload,
    Warm,
    reconcile,
    release,
)
from mural_operator.world import Pod, Refusal
from mural_resolvers.kubernetes.objects import Adapter
from mural_server.protocol import Load as Busy
from tests.mural_operator.simulated_pool import (
    EPOCH,
    SimulatedPool,
    make_adapter,
    make_limits,
    make_pool,
    make_state,
    make_status,
    make_world,
)

V1, V2 = "acme/default:v1", "acme/default:v2"
NOW = EPOCH.timestamp()


def kept(adapter: Adapter, **more: object) -> Adapter:
    """With the finalizer already there."""
    metadata = msgspec.structs.replace(adapter.metadata, finalizers=(FINALIZER,), **more)
    return msgspec.structs.replace(adapter, metadata=metadata)


def deleted(adapter: Adapter, seconds_ago: float = 0) -> Adapter:
    return kept(adapter, deletion_timestamp=EPOCH - timedelta(seconds=seconds_ago))


def pod(name: str, *held, declared=(), **more: Any) -> Pod:
    fields: dict[str, Any] = {"ready": True, "state": make_state(*held, declared=declared)}
    return Pod(name, **(fields | more))


def actions_on(adapters, pods, now=NOW, **more):
    return reconcile(make_world(adapters, pods, **more), now).actions


def test_a_declared_adapter_is_declared_and_loaded_with_all_that_its_object_says():
    adapter = make_adapter(
        "v1",
        digest=f"sha256:{'a' * 64}",
        source="s3",
        placement={"level": "slot", "pinned": True},
    )
    assert actions_on([adapter], [pod("a")]) == (
        AddFinalizer(adapter),
        Declare("a", (V1,)),
        Load("a", V1, "a" * 64, "s3", "slot", True),
    )


@pytest.mark.parametrize(
    ("status", "loads"),
    [
        (make_status(V1, pinned=True), False),
        (make_status(V1, pinned=True, level="slot"), False),
        (make_status(V1, pinned=False), True),
        (make_status(V1, pinned=True, level="disk"), True),
        (make_status(V1, level="disk", loading=True), False),
    ],
)
def test_what_is_held_as_declared_or_on_its_way_is_not_loaded_again(status, loads):
    found = actions_on([kept(make_adapter("v1"))], [pod("a", status, declared=[V1])])
    assert any(isinstance(action, Load) for action in found) is loads


def test_other_content_than_the_pinned_digest_is_asked_for_again_so_that_the_pod_says_so():
    adapter = kept(make_adapter("v1", digest=f"sha256:{'a' * 64}"))
    found = actions_on([adapter], [pod("a", V1, declared=[V1])])
    assert found == (Load("a", V1, "a" * 64, None, "host", True),)


def test_an_orphan_is_unloaded_and_declared_until_it_is_gone():
    assert actions_on([], [pod("a", V1, declared=[V1])]) == (Unload("a", V1),)
    assert actions_on([], [pod("a", declared=[V1])]) == (Declare("a", ()),)


def test_a_new_pod_that_is_to_hold_nothing_is_told_so():
    waiting = Pod("a", state=make_state(awaits_declared=True, ready=False))
    assert actions_on([], [waiting]) == (Declare("a", ()),)
    assert actions_on([], [Pod("a", state=make_state(ready=False))]) == ()


def test_what_nobody_declared_is_left_alone():
    assert actions_on([], [pod("a", V1, "sql", declared=["sql"])]) == ()


def test_nothing_is_unloaded_for_want_of_an_object_while_one_cannot_be_read():
    assert actions_on([], [pod("a", V1, declared=[V1, V2])], complete=False) == ()


UNJUDGED = Owners({}, frozenset({"acme"}))


@pytest.mark.parametrize("doubt", [UNJUDGED, Owners({}, complete=False)])
def test_nothing_is_loaded_or_unloaded_for_a_tenant_that_cannot_be_judged(doubt):
    adapter = kept(make_adapter("v1"))
    assert actions_on([adapter], [pod("a", V1, declared=[V1])], owners=doubt) == ()
    assert actions_on([adapter], [pod("a", declared=[V1])], owners=doubt) == ()
    assert actions_on([adapter], [pod("a")], owners=doubt) == ()
    # Its deletion is plain enough, and so is another tenant's want of permission.
    assert Unload("a", V1) in actions_on(
        [deleted(adapter)], [pod("a", V1, declared=[V1])], owners=doubt
    )
    other = Owners({}, frozenset({"globex"}))
    assert Unload("a", V1) in actions_on([adapter], [pod("a", V1, declared=[V1])], owners=other)


def test_a_deleted_twin_takes_nothing_from_one_whose_tenant_cannot_be_judged():
    twin = deleted(kept(make_adapter("twin", 1, version="v1")))
    found = actions_on(
        [kept(make_adapter("v1")), twin], [pod("a", V1, declared=[V1])], owners=UNJUDGED
    )
    assert found == (RemoveFinalizer(twin),)


def test_what_a_pod_refuses_is_not_in_its_declared_set_and_is_tried_again_in_time():
    adapter = kept(make_adapter("v1"))
    refusing = pod("a", declared=[V1], refusals={V1: Refusal(404, "none", NOW + 5)})
    assert actions_on([adapter], [refusing]) == (Declare("a", ()),)
    assert [type(each) for each in actions_on([adapter], [refusing], now=NOW + 6)] == [
        Declare,
        Load,
    ]


def test_a_clock_that_is_set_back_keeps_nothing_waiting_for_hours():
    adapter = kept(make_adapter("v1"))
    refusing = pod("a", refusals={V1: Refusal(404, "none", NOW + 60)})
    assert actions_on([adapter], [refusing]) == ()
    assert [type(each) for each in actions_on([adapter], [refusing], now=NOW - 3600)] == [Load]


def test_a_pod_that_drains_or_terminates_or_is_not_heard_is_left_in_peace():
    draining = pod("a", state=make_state(V1, declared=[V1], accepting=False))
    assert actions_on([], [draining]) == ()
    assert actions_on([], [pod("a", V1, declared=[V1], terminating=True)]) == ()
    assert actions_on([], [pod("a", state=None)]) == ()


def test_a_copy_stays_until_its_new_home_holds_it():
    adapter = kept(make_adapter("v1", placement={"podSelector": {"matchLabels": {"gpu": "new"}}}))
    old = pod("a", V1, declared=[V1])
    new = pod("b", declared=[V1], labels={"gpu": "new"})
    assert actions_on([adapter], [old, new]) == (Load("b", V1, None, None, "host", True),)
    new = pod("b", V1, declared=[V1], labels={"gpu": "new"})
    assert actions_on([adapter], [old, new]) == (Unload("a", V1),)


def test_a_copy_whose_new_home_refuses_it_stays_while_its_room_is_not_needed():
    moved = kept(make_adapter("v1", placement={"podSelector": {"matchLabels": {"gpu": "new"}}}))
    stays = kept(make_adapter("v2", placement={"podSelector": {"matchLabels": {"gpu": "old"}}}))
    refusing = pod("b", labels={"gpu": "new"}, refusals={V1: Refusal(503, "full", NOW + 9)})
    old = pod("a", V1, declared=[V1, V2], labels={"gpu": "old"})
    assert Unload("a", V1) not in actions_on([moved, stays], [old, refusing])
    full = make_pool(capacity={"adapters": 1})
    assert Unload("a", V1) in actions_on([moved, stays], [old, refusing], pool=full)


def test_an_adapter_found_too_large_is_not_loaded_there_again_and_again():
    pool = SimulatedPool(make_pool(capacity={"bytes": 40}))
    pool.sizes = {V1: 30, V2: 20}
    pool.add_pod("a")
    pool.declare(make_adapter("v1", 0))
    pool.declare(make_adapter("v2", 1))
    plan = pool.settle()
    assert plan.places[V2].full == ("a",)
    assert list(pool.pods["a"].held) == [V1]


def test_pods_of_another_base_are_no_homes_and_lose_what_was_declared():
    other = make_state(
        V1, declared=[V1], base=msgspec.structs.replace(make_state().base, model_names=("other",))
    )
    adapter = kept(make_adapter("v1", placement={"replicas": "All"}))
    held = pod("a", V1, declared=[V1])
    more = pod("b", V1, declared=[V1])
    assert actions_on([adapter], [held, more, pod("c", state=other)]) == (Unload("c", V1),)


def test_priority_and_then_age_decide_who_has_the_room():
    # One place is always left to what nobody declared.
    state = make_state(limits=make_limits(max_cpu_loras=2))
    old, new = make_adapter("v1", 0), make_adapter("v2", 9)
    first = make_adapter("v3", 99, placement={"priority": 200})
    world = make_world([new, old], [pod("a", state=state)])
    assert reconcile(world, NOW).places[V1].pods == ("a",)
    world = make_world([new, old, first], [pod("a", state=state)])
    assert reconcile(world, NOW).places["acme/default:v3"].pods == ("a",)
    assert reconcile(world, NOW).places[V1].full == ("a",)


def test_the_next_object_takes_over_from_the_oldest_without_an_unload():
    first = deleted(make_adapter("v1", 0))
    second = make_adapter("twin", 1, version="v1")
    assert actions_on([first, second], [pod("a", V1, declared=[V1])]) == (
        RemoveFinalizer(first),
        AddFinalizer(second),
    )


def test_a_deleted_object_waits_for_the_unload_and_not_longer():
    gone = deleted(make_adapter("v1"))
    assert actions_on([gone], [pod("a", V1, declared=[V1])]) == (Unload("a", V1),)
    assert RemoveFinalizer(gone) in actions_on([gone], [pod("a")])
    stuck = pod("a", V1, declared=[V1], refusals={V1: Refusal(0, "silence", NOW + 60)})
    assert actions_on([gone], [stuck]) == ()
    assert RemoveFinalizer(gone) in actions_on([gone], [stuck], now=NOW + 120)


def test_a_deletion_finds_what_a_refusal_had_kept_out_of_the_declared_set():
    assert actions_on([deleted(make_adapter("v1"))], [pod("a", V1)])[-1] == Unload("a", V1)


def test_a_deletion_waits_a_little_for_a_pod_that_is_not_heard():
    gone = deleted(make_adapter("v1"))
    silent = pod("a", state=None)
    assert actions_on([gone], [silent]) == ()
    assert actions_on([gone], [silent], now=NOW + MAX_SILENCE_S) == (RemoveFinalizer(gone),)


def test_objects_without_a_pool_go_at_once():
    gone = deleted(make_adapter("v1"))
    assert release([gone, kept(make_adapter("v2"))]) == (RemoveFinalizer(gone),)


def test_pods_that_are_no_home_prefetch_what_is_to_be_prewarmed():
    adapter = kept(make_adapter("v1", prewarm="Disk", source="s3"))
    pods = [pod("a"), pod("b")]
    home = reconcile(make_world([adapter], pods), NOW).places[V1].pods[0]
    other = "b" if home == "a" else "a"
    assert Prefetch(other, V1, None, "s3") in actions_on([adapter], pods)
    known = {home: pod(home, V1, declared=[V1]), other: pod(other, make_status(V1, level="disk"))}
    assert actions_on([adapter], known.values()) == ()


def test_vllm_pods_are_warmed_and_forget_only_what_is_deleted():
    vllm = make_pool(engine="vllm")
    cold = Pod("a", ready=True, listed=frozenset({V2}), served=("tiny",))
    assert actions_on([kept(make_adapter("v1"))], [cold], pool=vllm) == (Warm("a", V1),)
    warm = Pod("a", ready=True, listed=frozenset({V1, V2}), served=("tiny",))
    assert actions_on([kept(make_adapter("v1"))], [warm], pool=vllm) == ()
    gone = deleted(make_adapter("v1"))
    assert actions_on([gone], [warm], pool=vllm) == (Forget("a", V1),)
    assert actions_on([gone], [cold], pool=vllm) == (RemoveFinalizer(gone),)


@pytest.mark.parametrize(
    ("placement", "wanted"),
    [
        ({}, 1),
        ({"replicas": 2}, 2),
        ({"replicas": 9}, 9),
        ({"replicas": "All"}, 3),
        ({"minReplicas": 2, "maxReplicas": 3}, 2),
        ({"minReplicas": 0, "maxReplicas": 1}, 1),
    ],
)
def test_how_many_replicas_it_gets_follows_from_its_placement(placement, wanted):
    world = make_world([make_adapter("v1", placement=placement)], [pod("a"), pod("b"), pod("c")])
    places = reconcile(world, NOW).places[V1]
    assert places.wanted == wanted
    assert len(places.pods) == min(wanted, 3)


def test_load_adds_replicas_within_the_range_of_the_object():
    busy = make_status(V1, pinned=True, load=100.0)
    full = Busy(running=8, waiting=8, tokens_per_s=100.0)
    state = make_state(busy, declared=[V1], load=full)
    adapter = make_adapter("v1", placement={"minReplicas": 1, "maxReplicas": 2})
    world = make_world([adapter], [pod("a", state=state), pod("b"), pod("c")])
    assert reconcile(world, NOW).places[V1].wanted == 2
