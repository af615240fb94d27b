"""Aliases of the router's own file."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import MuralError
from mural_resolvers.versions import AliasTarget
from mural_router.routing.aliases_file import AliasesFile, LayeredVersions, parse_aliases_file
from mural_router.routing.versions import KnownVersions, VersionSource

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


async def test_a_change_holds_and_a_bad_one_leaves_the_last_good_one(tmp_path, caplog):
    path = tmp_path / "aliases.yaml"
    path.write_bytes(GOOD)
    file = AliasesFile(path)
    path.write_bytes(GOOD.replace(b"v3", b"v9"))
    assert (await file.aliases("acme", "default"))["stable"][0].version == "v9"
    for bad in (b"acme: {", b"acme: {stable: []}"):
        path.write_bytes(bad)
        assert (await file.aliases("acme", "default"))["stable"][0].version == "v9"
    path.unlink()
    assert (await file.aliases("acme", "default"))["stable"][0].version == "v9"
    assert "refused" in caplog.text
    assert await file.aliases("globex", "default") == {}


async def test_a_refusal_is_told_once_and_so_is_the_files_return(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "aliases.yaml"
    path.write_bytes(GOOD)
    file = AliasesFile(path)
    for change in (lambda: path.write_bytes(b"acme: 5"), path.unlink):
        change()
        for tenant in ("acme", "globex", "initech"):
            await file.aliases(tenant, "default")
    path.write_bytes(GOOD)
    for _ in range(3):
        assert (await file.aliases("acme", "default"))["stable"][0].version == "v3"
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"]
    assert str(path) in caplog.messages[0]


async def test_the_file_holds_over_the_store_alias_by_alias(tmp_path):
    class Store(VersionSource):
        async def read(self, tenant: str, adapter: str) -> KnownVersions:
            of_store = {
                "stable": (AliasTarget("v1", 1),),
                "canary": (AliasTarget("v2", 1),),
            }
            return KnownVersions(of_store, {"v1": None})

    path = tmp_path / "aliases.yaml"
    path.write_bytes(GOOD)
    known = await LayeredVersions(AliasesFile(path), Store()).read("acme", "default")
    assert known.aliases["stable"][0].version == "v3"
    assert known.aliases["canary"][0].version == "v2"
    assert known.digests == {"v1": None}
