"""One line for each reason that an Adapter's status may have: what is seen, and what it says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mural_operator.conditions import Condition
from mural_operator.owners import Owners
from mural_operator.reconcile import reconcile
from mural_operator.unreadable import Outdated, Unreadable, UnreadableAdapter
from mural_operator.verdict import (
    AdapterVerdict,
    ReplicaEntry,
    of_unreadable,
    of_unreadable_pool,
    verdict,
    without_pool,
)
from mural_operator.world import Pod, Refusal
from tests.mural_operator.simulated_pool import (
    DIGEST,
    EPOCH,
    make_adapter,
    make_pool,
    make_state,
    make_status,
    make_world,
)

V1 = "acme/default:v1"
NOW = EPOCH.timestamp()


def pod(name="a", *held, **more) -> Pod:
    fields: dict[str, Any] = {"ready": True, "state": make_state(*held)}
    return Pod(name, **(fields | more))


def refusing(status: int, message: str = "so it is") -> Pod:
    return pod(refusals={V1: Refusal(status, message, NOW + 60)})


def judge(adapter=None, pods=(), others=(), **more) -> AdapterVerdict:
    adapter = adapter or make_adapter("v1")
    world = make_world([adapter, *others], pods, **more)
    return verdict(adapter, world, reconcile(world, NOW))


def conditions(found: AdapterVerdict) -> dict[str, Condition]:
    return {each.type: each for each in found.conditions}


PINNED = make_adapter("v1", digest=f"sha256:{'a' * 64}")
ALL = make_adapter("v1", placement={"replicas": "All"})
TWO = make_adapter("v1", placement={"replicas": 2})
ON_SLOTS = make_adapter("v1", placement={"level": "slot"})
OTHER = make_status(V1, pinned=True, digest="e" * 64)
NO_SLOTS = make_state(limits=msgspec.structs.replace(make_state().limits, slots=1))
FOREIGN = make_state(base=msgspec.structs.replace(make_state().base, model_names=("big",)))

OUTDATED = {"team/v1": Outdated(7, "`replicas` is odd")}
UNJUDGED = Owners({}, frozenset({"acme"}))
VLLM = {
    "pool": make_pool(engine="vllm"),
    "pods": [Pod("a", ready=True, listed=frozenset({V1}), served=("tiny",))],
}
WITHOUT_EFFECT = make_adapter(
    "v1",
    digest=f"sha256:{'a' * 64}",
    source="s3",
    prewarm="Disk",
    placement={"level": "slot", "minReplicas": 1, "maxReplicas": 3},
)

RULES = [
    # what is seen, condition, its truth, its reason, and words of what to do
    ({"pods": [pod("a", V1)]}, "Ready", "True", "Ready", "Resident on 1 of 1"),
    ({"pods": [pod("a", V1)]}, "Resolved", "True", "Found", "source has it"),
    ({"pods": [pod("a", V1)]}, "Compatible", "True", "Accepted", "accepted"),
    ({"pods": [pod("a", V1)]}, "Placed", "True", "Placed", "Its replicas: a"),
    ({"pods": [pod("a", V1)]}, "Degraded", "False", "Healthy", "agree"),
    ({"pods": [pod()]}, "Ready", "False", "Loading", "being loaded"),
    ({"pods": [pod()]}, "Resolved", "Unknown", "NotAsked", "yet"),
    ({"pods": [pod()]}, "Compatible", "Unknown", "NotLoaded", "yet"),
    ({"pods": [refusing(404)]}, "Resolved", "False", "NotFound", "push it"),
    ({"pods": [refusing(404)]}, "Ready", "False", "NotFound", "push it"),
    ({"pods": [refusing(403)]}, "Resolved", "False", "NotPermitted", "rights"),
    ({"pods": [refusing(503)]}, "Resolved", "Unknown", "Unavailable", "tried again"),
    ({"pods": [refusing(503)]}, "Ready", "False", "Unavailable", "tried again"),
    ({"pods": [refusing(422)]}, "Compatible", "False", "Unusable", "publish it as another"),
    ({"pods": [refusing(413)]}, "Compatible", "False", "Unusable", "publish it as another"),
    ({"pods": [refusing(500)]}, "Ready", "False", "ReplicaRefuses", "a answered 500"),
    ({"pods": [refusing(0)]}, "Degraded", "True", "ReplicaRefuses", "a did not answer"),
    (
        {"adapter": PINNED, "pods": [refusing(409)]},
        *("Resolved", "False", "DigestDiffers", "publish the new content as another version"),
    ),
    ({"adapter": ON_SLOTS, "pods": [refusing(409)]}, "Ready", "False", "ReplicaRefuses", "409"),
    ({"adapter": PINNED, "pods": [pod("a", V1)]}, "Ready", "False", "Loading", "0 of 1"),
    ({"adapter": TWO, "pods": [pod()]}, "Placed", "False", "TooFewReplicas", "Add pods"),
    ({"adapter": ALL, "pods": []}, "Placed", "False", "NoReplica", "start one"),
    ({"adapter": ALL, "pods": []}, "Ready", "False", "NoReplica", "start one"),
    (
        {"adapter": ON_SLOTS, "pods": [pod(state=NO_SLOTS)]},
        *("Placed", "False", "NoRoom", "Add replicas, raise the capacity"),
    ),
    (
        {"adapter": make_adapter("v1", placement={"replicas": 0}), "pods": [pod()]},
        *("Ready", "True", "NotWanted", "0 of 0"),
    ),
    ({"pods": [pod(state=None)]}, "Ready", "False", "ReplicaUnknown", "Not heard from: a"),
    (
        {"pods": [pod(state=None, error="401 who are you")]},
        *("Degraded", "Unknown", "ReplicaUnknown", "Healthy. 401 who are you"),
    ),
    (
        {"adapter": TWO, "pods": [pod("a", V1), pod("b", OTHER)]},
        *("Degraded", "True", "DigestsDiffer", "Publish the new content as another version"),
    ),
    ({"outdated": OUTDATED, "pods": [pod("a", V1)]}, "Ready", "False", "Malformed", "on 1 of 1"),
    ({"outdated": OUTDATED, "pods": [pod("a", V1)]}, "Accepted", "False", "Malformed", "ion 7 of"),
    ({"outdated": OUTDATED, "pods": [pod("a", V1)]}, "Resolved", "True", "Found", "has it"),
    ({"outdated": OUTDATED, "pods": [pod()]}, "Ready", "False", "Malformed", "`replicas` is odd"),
    ({"owners": UNJUDGED}, "Placed", "False", "TenantNotAccepted", "what is resident stays"),
    ({"owners": UNJUDGED}, "Ready", "False", "TenantNotAccepted", "mend"),
    ({"namespaces": {}}, "Placed", "False", "NotAllowed", "spec.namespaces"),
    ({"namespaces": {}}, "Ready", "False", "NotAllowed", "spec.namespaces"),
    (
        {"adapter": make_adapter("v1", source="hub"), "pool": make_pool(sources=["s3"])},
        *("Resolved", "False", "SourceNotAllowed", "spec.sources"),
    ),
    (
        {"adapter": make_adapter("v1", base="tiny"), "pods": [pod(state=FOREIGN)]},
        *("Compatible", "False", "OtherBase", "pool that serves its base"),
    ),
    (
        {"adapter": make_adapter("twin", 1, version="v1"), "others": [make_adapter("v1", 0)]},
        *("Conflict", "True", "Conflict", "team/v1 declares acme/default:v1 already"),
    ),
    (VLLM, "Ready", "Unknown", "EngineCannotTell", "vLLM does not say; nor does it pin"),
    (VLLM, "Resolved", "True", "Found", "source has it"),
    (
        VLLM | {"adapter": PINNED},
        *("Resolved", "Unknown", "DigestNotChecked", "vLLM does not say"),
    ),
    (
        VLLM | {"adapter": WITHOUT_EFFECT},
        *("FieldsIgnored", "True", "EngineCannot", "spec.digest, spec.source, spec.prewarm, spec."),
    ),
    (
        {
            "pool": make_pool(engine="vllm"),
            "pods": [Pod("a", ready=True, listed=frozenset(), served=("tiny",))],
        },
        *("Ready", "False", "Loading", "Listed by 0 of 1"),
    ),
]


@pytest.mark.parametrize(
    ("seen", "kind", "truth", "reason", "words"),
    RULES,
    ids=[f"{kind}-{reason}-{at}" for at, (_, kind, _, reason, _) in enumerate(RULES)],
)
def test_each_reason_has_its_rule_and_says_what_to_do(seen, kind, truth, reason, words):
    found = conditions(judge(**seen))[kind]
    assert (found.status, found.reason) == (truth, reason)
    assert words in found.message


@pytest.mark.parametrize("seen", [rule[0] for rule in RULES])
def test_every_status_keeps_to_its_schema(seen):
    found = judge(**seen)
    kinds = [each.type for each in found.conditions]
    assert kinds[:5] == ["Resolved", "Compatible", "Placed", "Ready", "Degraded"]
    assert found.reason == found.conditions[3].reason
    assert all(len(each.reason) <= 128 and each.message for each in found.conditions)


def test_the_status_tells_rank_bytes_digest_and_each_replica():
    found = judge(TWO, [pod("a", V1), pod("b", refusals={V1: Refusal(503, "full", NOW)})])
    assert (found.rank, found.bytes, found.digest) == (8, 10, DIGEST)
    assert (found.ready, found.ready_replicas, found.desired) == ("1/2", 1, 2)
    assert set(found.replicas) == {
        ReplicaEntry("a", "host", True, DIGEST),
        ReplicaEntry("b", "absent", last_error="full"),
    }


def test_what_was_known_of_the_content_stays_while_no_replica_holds_it():
    status = msgspec.structs.replace(make_adapter("v1").status, digest=DIGEST, rank=8, bytes=10)
    adapter = msgspec.structs.replace(make_adapter("v1"), status=status)
    found = judge(adapter, [pod()])
    assert (found.rank, found.bytes, found.digest) == (8, 10, DIGEST)


def test_a_slot_that_is_taken_for_a_moment_is_no_news():
    on_slot = make_status(V1, pinned=True, level="slot")
    assert judge(pods=[pod("a", on_slot)]) == judge(pods=[pod("a", V1)])
    assert judge(ON_SLOTS, [pod("a", on_slot)]).replicas[0].level == "slot"


def test_vllm_replicas_count_as_unknown():
    vllm = Pod("a", ready=True, listed=frozenset({V1}), served=("tiny",))
    found = judge(pods=[vllm], pool=make_pool(engine="vllm"))
    assert (found.ready, found.ready_replicas) == ("?/1", 0)
    assert found.replicas == (ReplicaEntry("a", "unknown"),)


def test_fields_that_have_their_effect_are_not_said_to_have_none():
    assert "FieldsIgnored" not in conditions(judge(**VLLM))
    assert "FieldsIgnored" not in conditions(judge(WITHOUT_EFFECT, [pod()]))
    plain = make_adapter(
        "v1", base="tiny", placement={"replicas": 1, "priority": 5, "pinned": False}
    )
    assert "FieldsIgnored" not in conditions(judge(plain, **VLLM))
    found = conditions(judge(WITHOUT_EFFECT, **VLLM))["FieldsIgnored"]
    named = ("digest", "source", "prewarm", "placement.level", "placement.maxReplicas")
    assert all(f"spec.{each}" in found.message for each in named)


def test_no_digest_is_told_of_what_nobody_has_checked():
    status = msgspec.structs.replace(PINNED.status, digest=PINNED.spec.digest, rank=8)
    found = judge(msgspec.structs.replace(PINNED, status=status), **VLLM)
    assert (found.digest, found.rank) == ("", 8)
    assert all(each.digest == "" for each in found.replicas)


def test_what_waits_for_a_mend_keeps_the_k_by_which_routers_find_it():
    told = msgspec.structs.replace(make_adapter("v1").status, desired_replicas=2)
    adapter = msgspec.structs.replace(make_adapter("v1"), status=told)
    spoilt = UnreadableAdapter(adapter.metadata, "`replicas` is odd", "pool", told)
    pool = Unreadable(adapter.metadata, "`selector` is odd")
    for found in (
        judge(adapter, owners=UNJUDGED),
        of_unreadable(spoilt),
        of_unreadable_pool(adapter, pool),
    ):
        assert (found.desired, found.ready) == (2, "?/2")
    assert judge(adapter, namespaces={}).desired == 0
    never = of_unreadable_pool(make_adapter("v1"), pool)
    assert (never.desired, never.ready, never.reason) == (None, "?", "PoolMalformed")


def test_an_object_that_never_could_be_read_is_told_what_is_wrong_in_it():
    meta, status = make_adapter("v1").metadata, make_adapter("v1").status
    found = of_unreadable(UnreadableAdapter(meta, "`replicas` is odd", "pool", status))
    accepted = conditions(found)["Accepted"]
    assert (accepted.status, accepted.reason, found.reason) == ("False", "Malformed", "Malformed")
    assert "mend what is wrong in it" in accepted.message
    assert "`replicas` is odd" in accepted.message
    assert conditions(found)["Ready"].message == accepted.message


def test_an_object_that_stands_as_it_was_is_told_as_it_stands_and_never_ready():
    found = judge(TWO, [pod("a", V1), pod("b", V1)], outdated=OUTDATED)
    assert (found.ready, found.desired, found.reason) == ("2/2", 2, "Malformed")
    assert len(found.replicas) == 2


def test_an_object_without_its_pool_says_where_one_is_looked_for():
    found = without_pool(make_adapter("v1"), "mural")
    assert found.reason == "NoPool"
    assert "no ServingPool pool in the namespace mural" in conditions(found)["Placed"].message
