"""An alias that is changed by way of a router holds for that router's next request."""

from __future__ import annotations

import pytest

from mural_resolvers.versions import AliasTarget
from mural_router.routing.ask import Ask
from mural_router.routing.versions import KnownVersions, Versions, VersionSource
from tests.mural_router.routing.made_up_fleet import Made, MadeUpFleet, done, resident


class Record(VersionSource):
    """A store's record of which a server changes the alias."""

    def __init__(self) -> None:
        self.version = "v4"
        self.reads = 0

    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        self.reads += 1
        return KnownVersions({"stable": (AliasTarget(self.version, 1),)}, {"v3": None, "v4": None})


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
async def made(record: Record) -> Made:
    # The clock stands still: nothing that is known becomes old by itself.
    fleet = MadeUpFleet(resident("acme:v3", "acme:v4", "globex:v4"))
    return Made(fleet, versions=Versions(record, clock=lambda: 0.0))


async def asked(made: Made, tenant: str = "acme") -> str:
    routed = await made.ask(f"{tenant}:stable", tenant)
    done(routed)
    return dict(routed.answer_headers)["x-mural-adapter"]


async def change(made: Made, method: str, status: int) -> None:
    path = "/v1/adapters/acme/default/aliases/stable"
    routed = await made.routing.forward(Ask(path, ("Bearer acme",), method=method))
    routed.answered(status)
    done(routed, status)


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
async def test_a_roll_back_by_way_of_the_router_holds_at_once(
    made: Made, record: Record, method: str
) -> None:
    assert await asked(made) == "acme:v4"
    record.version = "v3"
    assert await asked(made) == "acme:v4", "kept for seconds"
    await change(made, method, 200)
    assert await asked(made) == "acme:v3"
    assert record.reads == 2


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("PUT", 403), ("PUT", 503)])
async def test_what_changes_nothing_has_nothing_looked_up(
    made: Made, record: Record, method: str, status: int
) -> None:
    await asked(made)
    await change(made, method, status)
    await asked(made)
    assert record.reads == 1


async def test_one_tenant_s_changes_cost_no_other_a_look_up(made: Made, record: Record) -> None:
    assert await asked(made, "globex") == "globex:v4"
    await change(made, "PUT", 200)
    await asked(made, "globex")
    assert record.reads == 1
