"""What serves and who asks, seen alike with and without the express way."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from mural_resolvers.names import AdapterName
from mural_resolvers.tenants import KeyRing, TenantLimits
from mural_resolvers.versions import AliasTarget
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.placement import Base, Residency
from mural_router.routing.versions import AliasOverlay, KnownVersions, VersionSource
from tests.mural_router.proxy.express_scenarios import Scenario, Scenarios
from tests.mural_router.proxy.express_stage import (
    ACME,
    ADMIN,
    DIGEST,
    GLOBEX,
    Here,
    bearer,
    held,
    whole,
)
from tests.mural_router.proxy.scripted_answers import ANSWER, DONE_EVENT, EVENTS, USAGE_EVENT
from tests.mural_router.proxy.scripted_replica import says

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")

scenario = Scenarios()


# -- what serves ----------------------------------------------------------------------------------


@scenario("whole", replicas=(held("acme:v1", digest=""), {}))
async def a_digest_that_nobody_knows(here: Here) -> None:
    assert b"x-mural-digest" not in await here.ask()


@scenario("unfolded", "whole", replicas=(held("acme:v1", digest=""), {}))
async def a_digest_that_the_replica_tells(here: Here) -> None:
    here.plays(says(whole(ANSWER, "200 OK", "x-mural-digest: " + "e" * 64)))
    assert b"\r\nx-mural-digest: " + b"e" * 64 in await here.ask()
    here.replica("a", adapters=held("acme:v1"))
    here.plays(says(whole(ANSWER, "200 OK", "x-mural-digest: " + "e" * 64)))
    assert b"\r\nx-mural-digest: " + DIGEST.encode() in await here.ask()


class Digests(VersionSource):
    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        return KnownVersions({"stable": (AliasTarget("v1", 1),)}, {"v1": "f" * 64, "v2": None})


@scenario("whole", "whole", source=Digests())
async def a_digest_that_the_store_knows(here: Here) -> None:
    await here.ask()
    assert b"x-mural-digest: " + b"f" * 64 in here.replicas["a"].requests[-1].raw
    here.now += 6.0  # It has to be looked up anew, by the slow way.
    await here.ask()
    await here.until(lambda: not here.versions._flights)
    await here.ask()


@scenario(source=Digests())
async def an_alias_of_the_store(here: Here) -> None:
    for _ in range(2):
        assert b"x-mural-adapter: acme:v1\r\n" in await here.ask("acme:stable")


class Overlay(AliasOverlay):
    def targets(self, name: AdapterName) -> list[AliasTarget] | None:
        return [AliasTarget("v2", 1)] if name.version == "v1" else None


@scenario("whole", "whole")
async def an_exact_name_becomes_an_alias_and_is_none_again(here: Here) -> None:
    await here.ask()
    here.versions.overlay = Overlay()
    for _ in range(2):
        assert b"x-mural-adapter: acme:v2\r\n" in await here.ask()
    here.versions.overlay = None
    here.replica("a")
    assert b"x-mural-adapter: acme:v1\r\n" in await here.ask()


@scenario("whole", "whole")
async def two_names_of_one_version(here: Here) -> None:
    await here.ask("acme:v1")
    await here.ask("acme/default:v1")
    assert b'"model": "acme:v1"' in here.replicas["a"].requests[-1].raw


@scenario()
async def names_that_are_no_exact_version(here: Here) -> None:
    here.replica("b", adapters={"sql-expert": Residency("slot")})
    for model in ("tiny", "sql-expert", "acme", "acme:latest", "acme:", ":v1", "acme:..", "a b:c"):
        await here.ask(model)
    here.routing.options = replace(here.routing.options, shared_names=frozenset({"sql-expert"}))
    await here.ask("sql-expert")


@scenario()
async def a_base_that_is_named_like_a_version(here: Here) -> None:
    here.source.base = Base(("acme:v1",), "")
    assert b"x-mural-adapter" not in await here.ask()


@scenario("whole")
async def a_base_that_comes_to_be_named_like_a_version(here: Here) -> None:
    await here.ask()
    here.source.base = Base(("tiny", "acme:v1"), "")
    assert b"x-mural-adapter" not in await here.ask()


@scenario(*["whole"] * 4)
async def bounds_of_tokens(here: Here) -> None:
    await here.ask(max_tokens=5)
    await here.ask(max_completion_tokens=7)
    await here.ask(max_tokens=0)
    for odd in (None, -1, 10**12, 1.5, "5", True):
        await here.ask(max_tokens=odd)
    await here.ask(n=2)
    await here.ask(prompt=["a", "b"])
    await here.ask(prompt=[1, 2])


@scenario("whole", engine="vllm", replicas=({}, {}))
async def a_vllm_replica(here: Here) -> None:
    await here.ask()
    got = next(each.requests[-1].raw for each in here.replicas.values() if each.requests)
    assert b"authorization: Bearer pod-1\r\n" in got
    assert b"cache_salt" in got
    assert b"x-mural-tenant" not in got


@scenario("unfolded", engine="vllm", replicas=({}, {}))
async def a_vllm_stream(here: Here) -> None:
    home = next(name for name, each in here.replicas.items() if each.requests)
    here.plays(says(EVENTS, chunk(USAGE_EVENT), chunk(DONE_EVENT), LAST_CHUNK), replica=home)
    assert b"prompt_tokens" not in await here.ask(stream=True)
    assert b"include_usage" in here.replicas[home].requests[-1].raw


# -- who asks -------------------------------------------------------------------------------------


@scenario("whole", "whole")
async def other_tenants_adapters_and_bad_keys(here: Here) -> None:
    await here.ask("globex:v4", key=bearer(GLOBEX))
    for _ in range(2):
        assert (await here.ask("globex:v4")).startswith(b"HTTP/1.1 403")
        assert (await here.ask("acme:v1", key=bearer(GLOBEX))).startswith(b"HTTP/1.1 403")
        for key in (
            None,
            bearer("nobody00"),
            bearer(ACME) + "x",
            "authorization: Basic a",
            "authorization:",
        ):
            assert (await here.ask(key=key)).startswith(b"HTTP/1.1 401")
    await here.ask()


@scenario("whole")
async def a_key_that_is_revoked(here: Here) -> None:
    await here.ask()
    here.keys.without(ACME)
    for _ in range(2):
        assert (await here.ask()).startswith(b"HTTP/1.1 401")


@scenario("whole", "whole", "refused")
async def a_key_whose_limits_are_changed(here: Here) -> None:
    await here.ask()
    stored = here.keys.ring[ACME]
    limited = replace(stored.principal, limits=TenantLimits(requests_per_minute=1), weight=3.0)
    here.keys.ring = KeyRing([replace(stored, principal=limited)])
    await here.ask()
    assert (await here.ask()).startswith(b"HTTP/1.1 429")
    assert b"x-mural-weight: 3\r\n" in here.replicas["a"].requests[-1].raw


@scenario()
async def a_key_that_expires(here: Here) -> None:
    for _ in range(2):
        assert (await here.ask(key=bearer("acmeexpires"))).startswith(b"HTTP/1.1 200")
    here.today += timedelta(days=2)
    assert (await here.ask(key=bearer("acmeexpires"))).startswith(b"HTTP/1.1 401")


@scenario("whole", "whole")
async def an_admin_key(here: Here) -> None:
    await here.ask(key=ADMIN)
    await here.ask("globex:v4", key=ADMIN)
    assert (await here.ask(key=ADMIN + "x")).startswith(b"HTTP/1.1 401")


@scenario("whole", "whole", auth="open")
async def nobody_is_asked_who_they_are(here: Here) -> None:
    await here.ask(key=None)
    await here.ask("globex:v4")


@scenario.each
async def test_all_is_seen_alike(played: Scenario, authorities: str) -> None:
    await played.is_seen_alike(authorities)
