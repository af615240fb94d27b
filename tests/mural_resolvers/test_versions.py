"""The order of versions, and aliases."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput, TooLarge, UnusableAdapter
from mural_resolvers.versions import (
    AliasTarget,
    change_aliases,
    encode_aliases,
    highest_version,
    parse_aliases,
    pick_target,
    version_key,
)

ASCENDING = [
    "alpha",
    "prod",
    "v0.9",
    "1.0.0-alpha",
    "1.0.0-alpha.1",
    "1.0.0-alpha.beta",
    "1.0.0-beta",
    "1.0.0-beta.2",
    "1.0.0-beta.11",
    "1.0.0-rc.1",
    "1.0.0",
    "v1.2",
    "v1.10",
    "v2",
    "v9",
    "v10",
    "2024.12.01",
]


def test_versions_stand_in_the_documented_order() -> None:
    shuffled = list(ASCENDING)
    random.Random(0).shuffle(shuffled)

    assert sorted(shuffled, key=version_key) == ASCENDING


@given(st.permutations(["v1", "1", "1.0", "v1.0.0"]))
def test_versions_that_say_the_same_have_one_order(versions: list[str]) -> None:
    assert highest_version(versions) == "v1.0.0"


@given(st.lists(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True), min_size=1))
def test_the_highest_is_the_same_in_any_order(versions: list[str]) -> None:
    highest = highest_version(versions)

    assert highest in versions
    assert highest == highest_version(reversed(versions))


def test_there_is_no_highest_of_none() -> None:
    assert highest_version([]) is None


TARGETS = (AliasTarget("v1", 3), AliasTarget("v0", 0), AliasTarget("v2", 1))


@pytest.mark.parametrize(
    ("draw", "version"), [(0.0, "v1"), (0.7499, "v1"), (0.75, "v2"), (0.999999999999, "v2")]
)
def test_a_draw_decides(draw: float, version: str) -> None:
    assert pick_target(TARGETS, draw) == version


@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=5).filter(lambda w: sum(w) > 0),
    st.floats(0, 1, exclude_max=True),
)
def test_a_weight_of_zero_is_never_picked(weights: list[float], draw: float) -> None:
    targets = [AliasTarget(f"v{n}", weight) for n, weight in enumerate(weights)]

    picked = pick_target(targets, draw)

    assert {t.version: t.weight for t in targets}[picked] > 0


def test_aliases_are_read() -> None:
    data = json.dumps({"stable": [{"version": "v1", "weight": 3}, {"version": "v2"}]}).encode()

    assert parse_aliases(data) == {"stable": (AliasTarget("v1", 3.0), AliasTarget("v2", 1.0))}


@pytest.mark.parametrize(
    "aliases",
    [
        [],
        {"stable": []},
        {"stable": "v1"},
        {"stable": {"version": "v1"}},
        {"stable": ["v1"]},
        {"stable": [{"weight": 1}]},
        {"stable": [{"version": "../v1"}]},
        {"stable": [{"version": "v1", "weight": -1}]},
        {"stable": [{"version": "v1", "weight": 0}]},
        {"stable": [{"version": "v1", "weight": True}]},
        {"stable": [{"version": "v1", "weight": "1"}]},
        {"stable": [{"version": "v1", "weight": None}]},
        {"stable": [{"version": "v1", "weight": 1e300}]},
        {"stable": [{"version": "v1", "x": 1}]},
        {"stable": [{"version": 1}]},
        {"../x": [{"version": "v1"}]},
        {"": [{"version": "v1"}]},
    ],
    ids=str,
)
def test_a_wrong_record_of_aliases_is_refused(aliases: object) -> None:
    with pytest.raises(UnusableAdapter, match="alias"):
        parse_aliases(json.dumps(aliases).encode())


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 9999, b'{"a": [], "a": []}'])
def test_hostile_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(UnusableAdapter, match="aliases"):
        parse_aliases(data)


def test_every_pair_compares_one_way() -> None:
    for one, other in itertools.permutations(ASCENDING, 2):
        assert (version_key(one) < version_key(other)) != (version_key(other) < version_key(one))


def test_an_encoded_record_is_read_back() -> None:
    aliases = {"stable": (AliasTarget("v1", 1.0),), "canary": (AliasTarget("v2", 0.5),) * 2}

    assert parse_aliases(encode_aliases(aliases)) == aliases


def test_an_alias_is_pointed_anew_beside_the_others() -> None:
    aliases = {"stable": (AliasTarget("v1", 1.0),), "canary": (AliasTarget("v2", 1.0),)}

    changed = change_aliases(aliases, "stable", [AliasTarget("v3", 2.0)])

    assert changed == aliases | {"stable": (AliasTarget("v3", 2.0),)}
    assert change_aliases(changed, "stable", []) == {"canary": aliases["canary"]}


@pytest.mark.parametrize(
    "targets",
    [
        [AliasTarget("v1", 0.0)],
        [AliasTarget("v1", -1.0)],
        [AliasTarget("v1", float("nan"))],
        [AliasTarget("v1", float("inf"))],
        [AliasTarget("../v1", 1.0)],
    ],
)
def test_what_a_record_cannot_hold_is_no_target(targets: list[AliasTarget]) -> None:
    with pytest.raises(InvalidInput):
        change_aliases({}, "stable", targets)


@pytest.mark.parametrize("alias", ["", "_aliases", "a/b", "..", "x" * 129])
def test_what_is_no_name_is_no_alias(alias: str) -> None:
    with pytest.raises(InvalidInput):
        change_aliases({}, alias, [AliasTarget("v1", 1.0)])


def test_a_record_has_a_limit() -> None:
    with pytest.raises(TooLarge):
        change_aliases({}, "all", [AliasTarget("v" * 128, 1.0)] * 10_000)
