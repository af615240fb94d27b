"""What is remembered of names never outlives what it followed from."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import AdapterNotFound, Forbidden
from mural_resolvers.tenants import Principal
from mural_resolvers.versions import AliasTarget
from mural_router.placement import Base, Fleet, Replica, Residency
from mural_router.routing.target import Target, Targets, find_target
from mural_router.routing.versions import KnownVersions, Versions, VersionSettings, VersionSource

BASE = Base(("tiny",), "")
NONE: frozenset[str] = frozenset()


class Records(VersionSource):
    """One alias, which a test points elsewhere."""

    def __init__(self) -> None:
        self.version = "v1"
        self.digests: dict[str, str | None] = {"v1": "1" * 64, "v2": "2" * 64}

    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        return KnownVersions({"stable": (AliasTarget(self.version, 1),)}, self.digests)


def test_a_principal_without_the_grant_is_refused_after_one_that_has_it() -> None:
    targets = Targets(Versions(None))
    granted = Principal(tenant="acme", grants=("globex",))
    for _ in range(2):
        found = targets.find_now(granted, "globex:v1", Fleet(), BASE, NONE, None)
        assert found == Target("globex:v1", "globex/default:v1")
    changed = Principal(tenant="acme")
    for _ in range(2):
        with pytest.raises(Forbidden):
            targets.find_now(changed, "globex:v1", Fleet(), BASE, NONE, None)


def test_principals_that_come_and_go_are_not_taken_for_one_another() -> None:
    targets = Targets(Versions(None))
    for number in range(300):
        # Each may get the address of one that is gone.
        allowed = number % 2 == 0
        principal = Principal(tenant="acme", grants=("globex",) if allowed else ())
        if allowed:
            targets.find_now(principal, "globex:v1", Fleet(), BASE, NONE, None)
        else:
            with pytest.raises(Forbidden):
                targets.find_now(principal, "globex:v1", Fleet(), BASE, NONE, None)
        del principal


def test_a_name_that_becomes_the_bases_is_the_base_from_then_on() -> None:
    targets, principal = Targets(Versions(None)), Principal(tenant="acme")
    assert targets.find_now(principal, "acme:v1", Fleet(), BASE, NONE, None) is not None
    base = Base(("acme:v1",), "")
    found = targets.find_now(principal, "acme:v1", Fleet(), base, NONE, None)
    assert found == Target("acme:v1", None)
    with pytest.raises(Forbidden):
        targets.find_now(Principal("acme", base=False), "acme:v1", Fleet(), base, NONE, None)


def test_a_registered_name_is_one_only_while_a_replica_has_it() -> None:
    targets, principal = Targets(Versions(None)), Principal(tenant="acme", grants=("@acme",))
    has_it = Fleet((Replica("a", adapters={"acme": Residency("slot")}),))
    found = targets.find_now(principal, "acme", has_it, BASE, NONE, None)
    assert found == Target("acme", "acme")
    with pytest.raises(AdapterNotFound):
        targets.find_now(principal, "acme", Fleet(), BASE, NONE, None)


async def test_an_alias_that_is_pointed_elsewhere_holds_as_soon_as_versions_say_so() -> None:
    now, records = [0.0], Records()
    versions = Versions(records, VersionSettings(ttl_s=5.0), clock=lambda: now[0])
    targets, principal = Targets(versions), Principal(tenant="acme")

    def find(model: str) -> Target | None:
        return targets.find_now(principal, model, Fleet(), BASE, NONE, "s")

    assert find("acme:stable") is None  # It has to be looked up.
    awaited = await find_target(principal, "acme:stable", Fleet(), BASE, versions, sticky="s")
    assert find("acme:stable") == awaited
    assert awaited.model == "acme:v1"
    assert find("acme:v2") == Target("acme:v2", "acme/default:v2", "2" * 64, listed=True)
    records.version, records.digests = "v2", {"v2": "3" * 64}
    now[0] = 11.0
    assert find("acme:stable") is None
    awaited = await find_target(principal, "acme:stable", Fleet(), BASE, versions, sticky="s")
    assert find("acme:stable") == awaited
    assert (awaited.model, awaited.digest) == ("acme:v2", "3" * 64)
    found = find("acme:v2")
    assert found is not None
    assert found.digest == "3" * 64
    await versions.close()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mural_router.routing.target.MAX_NAMES", 10)
    targets, principal = Targets(Versions(None)), Principal(tenant="acme")
    for number in range(100):
        targets.find_now(principal, f"acme:v{number}", Fleet(), BASE, NONE, None)
        assert len(targets._allowed) <= 10
