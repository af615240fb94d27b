"""Aliases of the router's own file."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import AdapterNotFound, MuralError
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.versions import AliasTarget
from mural_router.routing.aliases_file import AliasesFile, parse_aliases_file
from mural_router.routing.versions import Exact, KnownVersions, Versions, VersionSource

GOOD = b"""
acme:
  stable: [{version: v3, weight: 90}, {version: v4, weight: 10}]
acme/sql:
  latest: [{version: "1"}]
"""


def test_it_says_what_a_stores_record_says():
    found = parse_aliases_file(GOOD)
    assert found["acme", "default"]["stable"] == (AliasTarget("v3", 90), AliasTarget("v4", 10))
    assert found["acme", "sql"]["latest"] == (AliasTarget("1", 1),)
    assert parse_aliases_file(b"") == {}


@pytest.mark.parametrize(
    "data",
    [
        b"acme: 5",
        b"acme:v1: {stable: [{version: v1}]}",
        b"'../x': {stable: [{version: v1}]}",
        b"acme: {stable: []}",
        b"acme: {stable: [{version: v1, weight: -1}]}",
        b"acme: {stable: [{version: v1, weight: 0}]}",
        b"acme: {stable: [{version: v1, wieght: 1}]}",
        b"acme: {stable: [{weight: 1}]}",
        b"acme: {a: [{version: b}], b: [{version: a}]}",
        b"acme: {stable: [{version: stable}]}",
        b"\xff",
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(MuralError):
        parse_aliases_file(data)


def test_the_refusal_names_the_adapter_and_the_alias():
    data = b"acme/sql: {stable: [{version: v1}], canary: [{version: v1, wieght: 1}]}"
    with pytest.raises(MuralError, match=r"^acme/sql\.canary\[0\]\.wieght: there is no such"):
        parse_aliases_file(data)
    with pytest.raises(MuralError, match="acme/sql: a mapping is wanted, not '5'"):
        parse_aliases_file(b"acme/sql: 5")


async def settle(file: AliasesFile) -> None:
    """A content is taken when it was seen twice."""
    await file.poll()
    await file.poll()


STABLE = parse_name("acme:stable")


def versions_of(file: AliasesFile, alias: AdapterName) -> list[str | None]:
    targets = file.targets(alias)
    assert targets is not None
    return [each.version for each in targets]


def now(versions: Versions, name: AdapterName) -> Exact:
    """What is known without asking anybody."""
    found = versions.resolve_now(name)
    assert found is not None
    return found


async def test_a_change_holds_and_a_bad_one_leaves_the_last_good_one(tmp_path, caplog):
    path = tmp_path / "aliases.yaml"
    path.write_bytes(GOOD)
    file = AliasesFile(path)
    path.write_bytes(GOOD.replace(b"v3", b"v9"))
    await settle(file)
    assert versions_of(file, STABLE)[0] == "v9"
    for bad in (b"acme: {", b"acme: {stable: []}"):
        path.write_bytes(bad)
        await settle(file)
        assert versions_of(file, STABLE)[0] == "v9"
    assert (file.numbers.reloads, file.numbers.refused, file.numbers.stale) == (1, 2, True)
    path.unlink()
    await settle(file)
    assert versions_of(file, STABLE)[0] == "v9"
    assert "refused" in caplog.text
    assert file.targets(parse_name("globex:stable")) is None
    assert file.targets(parse_name("acme:canary")) is None


async def test_the_file_holds_over_the_store_alias_by_alias_and_at_once(tmp_path):
    class Store(VersionSource):
        async def read(self, tenant: str, adapter: str) -> KnownVersions:
            of_store = {
                "stable": (AliasTarget("v1", 1),),
                "canary": (AliasTarget("v2", 1),),
            }
            return KnownVersions(of_store, {"v1": None, "v3": "3" * 64})

    path = tmp_path / "aliases.yaml"
    path.write_bytes(GOOD.replace(b"weight: 10", b"weight: 0"))
    file = AliasesFile(path)
    versions = Versions(Store(), overlay=file)
    found = await versions.resolve(STABLE)
    assert (found.name.version, found.digest, found.alias) == ("v3", "3" * 64, STABLE)
    assert (await versions.resolve(parse_name("acme:canary"))).name.version == "v2"
    path.write_bytes(GOOD.replace(b"v3", b"v4"))  # Without a turn of the store's cache.
    await settle(file)
    assert now(versions, STABLE).name.version == "v4"


async def test_without_a_store_the_file_alone_says_what_an_alias_is(tmp_path):
    path = tmp_path / "aliases.yaml"
    path.write_bytes(GOOD)
    versions = Versions(None, overlay=AliasesFile(path))
    assert now(versions, parse_name("acme/sql")).name.exact == "acme/sql:1"
    assert now(versions, parse_name("acme:v1")).alias is None
    with pytest.raises(AdapterNotFound):
        versions.resolve_now(parse_name("acme"))
