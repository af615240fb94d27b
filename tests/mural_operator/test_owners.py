"""Who may declare for whom, while Tenants are accepted, refused, unreadable and mended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_operator.owners import Owners, owners
from mural_operator.unreadable import UnreadableTenant
from mural_resolvers.kubernetes.objects import Tenant, read_tenant

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MALFORMED: dict[str, Any] = {"grants": ["no!"]}


def make_tenant(name: str, *namespaces: str, created_s: float = 0, **spec: object) -> Tenant:
    read = read_tenant(
        {
            "metadata": {"name": name, "namespace": "mural", "uid": f"uid-{name}"},
            "spec": {"namespaces": namespaces} | spec,
        }
    )
    created = EPOCH + timedelta(seconds=created_s)
    return msgspec.structs.replace(
        read, metadata=msgspec.structs.replace(read.metadata, creation_timestamp=created)
    )


def unread(name: str, owner: str | None, *namespaces: str) -> UnreadableTenant:
    return UnreadableTenant(make_tenant(name).metadata, "odd", owner, frozenset(namespaces))


def allowed(found: Owners) -> dict[str, set[str]]:
    return {tenant: set(each) for tenant, each in found.namespaces.items()}


ACCEPTED = owners([make_tenant("acme", "team")], {})
RULES = [
    # After it was accepted with the namespace team: what is there, what it allows, whether it may
    # mean more, whether all say who they are.
    ("as it was", {"tenants": [make_tenant("acme", "team")]}, {"team"}, False, True),
    ("changed", {"tenants": [make_tenant("acme", "other")]}, {"other"}, False, True),
    (
        "refused, and says less",
        {"tenants": [make_tenant("acme", **MALFORMED)]},
        *({"team"}, True, True),
    ),
    (
        "refused, and says more",
        {"tenants": [make_tenant("acme", "other", **MALFORMED)]},
        *({"team", "other"}, True, True),
    ),
    (
        "as it was when it could last be read",
        {"tenants": [make_tenant("acme", "team")], "outdated": {"mural/acme"}},
        *({"team"}, True, True),
    ),
    (
        "unreadable, but for its namespaces",
        {"unreadable": [unread("acme", "acme", "other")]},
        *({"team", "other"}, True, True),
    ),
    ("unreadable, even who it is", {"unreadable": [unread("acme", None)]}, set(), True, False),
    ("one is left out", {"complete": False}, set(), True, False),
    ("gone", {}, set(), False, True),
]


@pytest.mark.parametrize(
    ("now", "namespaces", "doubtful", "complete"),
    [rule[1:] for rule in RULES],
    ids=[rule[0] for rule in RULES],
)
def test_a_tenant_that_is_not_accepted_allows_what_it_did(now, namespaces, doubtful, complete):
    now = dict(now)
    found = owners(now.pop("tenants", ()), ACCEPTED.last, **now)
    assert allowed(found).get("acme", set()) == namespaces
    assert found.may_allow("acme") is doubtful
    assert found.complete is complete


def test_after_a_restart_a_refused_tenant_allows_what_it_says_and_may_mean_more():
    found = owners([make_tenant("acme", "team", **MALFORMED)], {})
    assert allowed(found) == {"acme": {"team"}}
    assert found.may_allow("acme")
    assert not found.may_allow("globex")


def test_what_was_allowed_is_remembered_for_as_long_as_the_object_is_the_same():
    refused = make_tenant("acme", **MALFORMED)
    still = owners([refused], owners([refused], ACCEPTED.last).last)
    assert allowed(still) == {"acme": {"team"}}
    other = msgspec.structs.replace(
        refused, metadata=msgspec.structs.replace(refused.metadata, uid="another")
    )
    assert allowed(owners([other], ACCEPTED.last)) == {"acme": set()}
    assert owners([], ACCEPTED.last).last == {}
    unknown = owners([], ACCEPTED.last, unreadable=[unread("acme", None)])
    assert allowed(owners([refused], unknown.last)) == {"acme": {"team"}}


@pytest.mark.parametrize("old", [make_tenant("acme", "team", **MALFORMED), make_tenant("acme")])
def test_a_younger_object_never_speaks_for_a_tenant(old):
    young = make_tenant("intruder", "evil", tenant="acme", created_s=9)
    found = owners([young, old], {})
    assert not found.allow("acme", "evil")
    found = owners([young], {}, unreadable=[replace(unread("acme", "acme"))])
    assert allowed(found) == {"acme": set()}


names = st.sampled_from(["acme", "globex"])
spaces = st.sets(st.sampled_from(["a", "b", "c"]))


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, str, set[str]]:
    return draw(names), draw(st.sampled_from(["fine", "malformed", "spoilt"])), draw(spaces)


@given(st.lists(edits(), max_size=12))
def test_no_edit_that_is_not_accepted_takes_a_namespace_away(history):
    """Whatever happened before: only what is accepted, or gone, takes anything away."""
    state: dict[str, tuple[str, set[str]]] = {}
    found = Owners({})
    for name, kind, said in history:
        before, state[name] = found, (kind, said)
        found = owners(
            [
                make_tenant(each, *told, **({} if how == "fine" else MALFORMED))
                for each, (how, told) in state.items()
                if how != "spoilt"
            ],
            before.last,
            unreadable=[unread(each, each) for each, (how, _) in state.items() if how == "spoilt"],
        )
        for tenant in state:
            accepted = before.last.get(f"mural/{tenant}")
            if state[tenant][0] == "fine":
                assert found.namespaces[tenant] == state[tenant][1]
                assert not found.may_allow(tenant)
            else:
                assert found.may_allow(tenant)
                if accepted is not None:
                    assert accepted.namespaces <= found.namespaces[tenant]
