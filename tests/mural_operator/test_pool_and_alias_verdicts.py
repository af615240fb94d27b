"""One line for each reason that the statuses of pools and aliases may have."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from mural_operator.alias_verdict import alias_verdicts
from mural_operator.alias_verdict import of_unreadable as of_unreadable_alias
from mural_operator.conditions import listed
from mural_operator.pool_verdict import PoolVerdict, pool_verdict
from mural_operator.pool_verdict import of_unreadable as of_unreadable_pool
from mural_operator.reconcile import reconcile
from mural_operator.unreadable import Outdated, Unreadable
from mural_operator.world import Pod
from mural_resolvers.kubernetes.aliases import judge_aliases
from mural_resolvers.kubernetes.objects import AdapterAlias, read_alias
from tests.mural_operator.simulated_pool import make_adapter, make_state, make_world

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
TEAM = {"acme": frozenset({"team"})}
V1 = "acme/default:v1"
FOREIGN = make_state(base=msgspec.structs.replace(make_state().base, model_names=("big",)))


def pod(name: str, **more: Any) -> Pod:
    fields: dict[str, Any] = {"ready": True, "state": make_state()}
    return Pod(name, **(fields | more))


def judge(pods, adapters=()) -> PoolVerdict:
    world = make_world(adapters, pods)
    return pool_verdict(world, reconcile(world, 0.0))


RULES = [
    ([], "False", "NoPods", "labels app=server"),
    ([pod("a"), pod("b"), pod("c", state=FOREIGN)], "False", "BasesDiffer", "c serve another"),
    ([pod("a", state=None, error="401 no")], "False", "NotHeard", "network policies. 401 no"),
    ([pod("a", ready=False)], "False", "NoneReady", "kubectl describe pod a"),
    ([pod("a"), pod("b", ready=False)], "True", "Starting", "b"),
    ([pod("a"), pod("b")], "True", "Serving", "All of its 2 pods serve"),
]


@pytest.mark.parametrize(("pods", "truth", "reason", "words"), RULES)
def test_each_reason_of_a_pool_has_its_rule_and_says_what_to_do(pods, truth, reason, words):
    found = judge(pods)
    healthy = found.conditions[0]
    assert (healthy.type, healthy.status, healthy.reason) == ("Healthy", truth, reason)
    assert words in healthy.message
    assert found.reason == reason


def test_a_pool_tells_its_base_and_how_many_of_its_pods_serve():
    found = judge([pod("a"), pod("b", ready=False), pod("c", terminating=True)])
    assert (found.base, found.spec_hash, found.ready) == ("tiny", "spec", "1/2")


def test_a_pool_names_some_of_the_adapters_that_have_too_few_replicas():
    adapters = [make_adapter(f"v{i}", placement={"replicas": 2}) for i in range(9)]
    placed = judge([pod("a")], adapters).conditions[1]
    assert (placed.status, placed.reason) == ("False", "TooFewReplicas")
    assert placed.message.startswith("9 declared adapters")
    assert "acme/default:v3 and 5 more" in placed.message
    assert judge([pod("a")], adapters).adapters == 9
    assert judge([pod("a"), pod("b")], adapters).conditions[1].reason == "AllPlaced"


def test_a_pool_that_stands_as_it_was_says_so_first():
    world = replace(make_world([], [pod("a")]), outdated_pool=Outdated(7, "`selector` is odd"))
    found = pool_verdict(world, reconcile(world, 0.0))
    healthy, _, accepted = found.conditions
    assert (healthy.status, found.reason, found.ready) == ("True", "Malformed", "1/1")
    assert (accepted.type, accepted.status, accepted.reason) == ("Accepted", "False", "Malformed")
    assert "generation 7" in accepted.message
    assert "`selector` is odd" in accepted.message


def test_pools_and_aliases_that_never_could_be_read_say_what_is_wrong_in_them():
    unread = Unreadable(make_alias("a").metadata, "`selector` is odd")
    for found in (of_unreadable_pool(unread), of_unreadable_alias(unread)):
        told = {each.type: each for each in found.conditions}
        assert (told["Accepted"].status, found.reason) == ("False", "Malformed")
        assert "mend what is wrong in it" in told["Accepted"].message
        assert "`selector` is odd" in told["Accepted"].message
        others = {each.status for each in found.conditions if each.type != "Accepted"}
        assert others == {"Unknown"}


def test_long_lists_are_cut():
    assert listed("abcd") == "a, b, c, d"
    assert listed("abcdef") == "a, b, c, d and 2 more"


def make_alias(name: str, created_s: float = 0, **spec: object) -> AdapterAlias:
    fields = {"tenant": "acme", "alias": "latest", "versions": [{"version": "v1"}]}
    read = read_alias({"metadata": {"name": name, "namespace": "team"}, "spec": fields | spec})
    created = EPOCH + timedelta(seconds=created_s)
    return msgspec.structs.replace(
        read, metadata=msgspec.structs.replace(read.metadata, creation_timestamp=created)
    )


ALIAS_RULES = [
    ({}, TEAM, {V1}, ("True", "Accepted"), ("True", "AllDeclared")),
    ({}, TEAM, set(), ("True", "Accepted"), ("False", "NotDeclared")),
    ({"alias": "v1"}, TEAM, {V1}, ("True", "HidesVersion"), ("True", "AllDeclared")),
    ({}, {}, {V1}, ("False", "NotAllowed"), ("True", "AllDeclared")),
    (
        {"versions": [{"version": "v1", "weight": 0}]},
        *(TEAM, set(), ("False", "NoVersion"), ("True", "AllDeclared")),
    ),
]


@pytest.mark.parametrize(("spec", "namespaces", "declared", "accepted", "hot"), ALIAS_RULES)
def test_each_reason_of_an_alias_has_its_rule(spec, namespaces, declared, accepted, hot):
    found = alias_verdicts([make_alias("a", **spec)], namespaces, declared)["team/a"]
    said = [(each.status, each.reason) for each in found.conditions]
    assert said == [accepted, hot]
    assert found.reason == accepted[1]


def test_of_two_objects_for_one_alias_the_oldest_counts_and_then_the_next():
    old, young = make_alias("old", 1), make_alias("young", 2)
    accepted, refused = judge_aliases([young, old], TEAM)
    assert accepted == (old,)
    assert refused["team/young"].reason == "Conflict"
    assert "team/old" in refused["team/young"].message
    assert judge_aliases([young], TEAM) == ((young,), {})


def test_an_alias_from_a_foreign_namespace_takes_nobodys_place():
    foreign = make_alias("first", 0)
    foreign = msgspec.structs.replace(
        foreign, metadata=msgspec.structs.replace(foreign.metadata, namespace="evil")
    )
    own = make_alias("own", 5)
    accepted, refused = judge_aliases([foreign, own], TEAM)
    assert accepted == (own,)
    assert refused["evil/first"].reason == "NotAllowed"
