"""Quota, fairness between tenants, and the order in which versions go."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
    run_state_machine_as_test,
)

from mural_resolvers.disk_cache import CacheSettings, DiskCache, Lease, NotCached, Staging
from mural_resolvers.disk_cache.eviction import Candidate, eviction_order
from mural_resolvers.disk_cache.name_records import levelled
from mural_resolvers.errors import Unavailable
from mural_resolvers.names import AdapterName, parse_name

OpenCache = Callable[..., DiskCache]
Make = Callable[..., Any]

candidates = st.lists(
    st.builds(
        Candidate,
        digest=st.uuids().map(str),
        tenant=st.sampled_from("abc"),
        num_bytes=st.integers(1, 100),
        stamp_ns=st.integers(0, 10),
        charge=st.integers(1, 100),
    ),
    unique_by=lambda candidate: candidate.digest,
)


@given(candidates, st.dictionaries(st.sampled_from("abcd"), st.integers(0, 300)), st.data())
def test_always_the_oldest_of_the_tenant_that_holds_most_goes(
    found: list[Candidate], held: dict[str, int], data: st.DataObject
) -> None:
    left, charged = list(found), dict(held)
    for candidate in found:
        charged[candidate.tenant] = charged.get(candidate.tenant, 0) + candidate.charge
    order = eviction_order(found, held)
    victim = next(order, None)
    while victim is not None:
        most = max(charged[candidate.tenant] for candidate in left)
        assert charged[victim.tenant] == most
        stamps = [candidate.stamp_ns for candidate in left if candidate.tenant == victim.tenant]
        assert victim.stamp_ns == min(stamps)
        left.remove(victim)
        gone = data.draw(st.booleans())
        charged[victim.tenant] -= victim.charge if gone else 0
        try:
            victim = order.send(gone)
        except StopIteration:
            victim = None
    assert not left


def test_what_is_leased_after_it_was_chosen_stays(
    open_cache: OpenCache, make: Make, monkeypatch: Any
) -> None:
    cache = open_cache(quota_bytes=250)
    leased = cache.lease(make(1).put(cache, "acme:v1").manifest.digest)
    make(2).put(cache, "acme:v2")
    monkeypatch.setattr("mural_resolvers.disk_cache.eviction._is_leased", lambda *_: False)

    with pytest.raises(Unavailable, match="in use"):
        cache.stage(200, "acme")

    assert cache.content(leased.digest) is not None
    cache.stage(100, "acme").discard()
    cache.check_integrity(deep=True)


def test_one_tenant_that_stages_ten_thousand_versions_does_not_flush_the_others(
    open_cache: OpenCache, make: Make, monkeypatch: Any
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    cache = open_cache(quota_bytes=40 * 100)
    kept = [make(f"kept {i}").put(cache, f"t{i % 5}:v{i}") for i in range(20)]

    for i in range(10_000):
        cache.stage(100, "flood").discard() if i % 20 else make(i).put(cache, f"flood:v{i}")

    assert all(cache.find(found.name) == found for found in kept)
    assert cache.usage().by_tenant["flood"] <= 20 * 100


def test_a_tenant_that_brings_more_gives_way_itself(open_cache: OpenCache, make: Make) -> None:
    cache = open_cache(quota_bytes=1000)
    for i in range(5):
        make(i).put(cache, f"big:v{i}")
    for i in range(5, 9):
        make(i).put(cache, f"small:v{i}")

    cache.stage(350, "small").discard()

    # With what it stages, 750 bytes would be the newcomer's.
    assert cache.usage().by_tenant == {"big": 500, "small": 100}


def test_many_versions_go_with_the_bytes(open_cache: OpenCache, make: Make) -> None:
    cache = open_cache(max_versions=3)
    for i in range(5):
        make(i).put(cache, f"acme:v{i}")

    assert cache.usage().versions == 3
    assert cache.find(parse_name("acme:v1")) is None
    cache.check_integrity()


def test_a_tenant_with_many_small_versions_gives_up_its_slots(
    open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache(max_versions=20, quota_bytes=20_000)
    for i in range(5):
        make(f"big {i}", 1500).put(cache, f"big:v{i}")
    for i in range(40):
        make(i).put(cache, f"small:v{i}")

    assert cache.usage().versions <= 20
    assert cache.usage().by_tenant["big"] == 5 * 1500


def test_names_are_bounded_and_a_tenant_with_many_gives_them_up(
    open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache(max_names=20)
    digest = make(1).put(cache, "small:v1").manifest.digest
    for i in range(100):
        name = AdapterName("flood", "default", f"v{i}")
        cache.link(name, digest, source="s3", revision="r", tenant="flood")

    assert cache.find(parse_name("small:v1")) is not None
    assert cache.find(parse_name("flood:v99")) is not None
    assert cache.find(parse_name("flood:v0")) is None
    cache.check_integrity()


def test_a_quota_that_has_become_less_is_held_at_the_start(
    open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache()
    for i in range(5):
        make(i).put(cache, f"acme:v{i}")

    smaller = open_cache(quota_bytes=250)

    assert smaller.usage().bytes <= 250
    assert smaller.find(parse_name("acme:v4")) is not None


def test_eviction_keeps_the_order_of_leases_when_the_clock_goes_back(
    folder: Path, make: Make
) -> None:
    now = [10**18]
    bounds = CacheSettings(quota_bytes=300, min_free_bytes=0)
    cache = DiskCache(folder / "cache", bounds, now_ns=lambda: now[0])
    cache.open()
    digests = []
    for i in range(3):
        digests.append(make(i).put(cache, f"acme:v{i}").manifest.digest)
        now[0] -= 10**15
    cache.lease(digests[0]).release()
    make(3).put(cache, "acme:v3")
    assert [cache.content(d) is not None for d in digests] == [True, False, True]

    # Another process, which starts after the clock went back, goes on after the newest stamp.
    later = DiskCache(folder / "cache", bounds, now_ns=lambda: 5)
    later.open()
    later.lease(digests[2]).release()
    make(4).put(later, "acme:v4")
    assert [later.content(d) is not None for d in digests] == [False, False, True]


# -- a model of quota and leases -------------------------------------------------------------------

QUOTA = 1000
SIZES = (60, 100, 250, 500)
TENANTS = ("a", "b", "c")


def test_quota_and_leases_hold_whatever_happens(folder: Path, make: Make, monkeypatch: Any) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    versions = [make(i, SIZES[i % len(SIZES)]) for i in range(10)]

    class Machine(RuleBasedStateMachine):
        stagings = Bundle("stagings")
        leases = Bundle("leases")

        def __init__(self) -> None:
            super().__init__()
            self.root = tempfile.TemporaryDirectory(dir=folder)
            bounds = CacheSettings(quota_bytes=QUOTA, min_free_bytes=0, max_versions=8)
            # Two, as two processes.
            self.caches = [DiskCache(Path(self.root.name) / "c", bounds) for _ in range(2)]
            for cache in self.caches:
                cache.open()
            self.leased: list[tuple[Lease, int]] = []
            self.reserved: dict[int, int] = {}

        @rule(target=stagings, which=st.integers(0, 1), number=st.integers(0, 9))
        def stage(self, which: int, number: int) -> tuple[Staging, int] | None:
            tenant = TENANTS[number % 3]
            try:
                staging = versions[number].stage(self.caches[which], tenant)
            except Unavailable:
                held = sum(versions[n].num_bytes for n in {n for _, n in self.leased})
                taken = held + sum(self.reserved.values())
                slots = len({n for _, n in self.leased}) + len(self.reserved)
                full = taken + versions[number].num_bytes > QUOTA or slots + 1 > 8
                assert full, "refused although what is in use leaves room"
                return None
            self.reserved[id(staging)] = versions[number].num_bytes
            return staging, number

        @rule(staged=consumes(stagings))
        def commit(self, staged: tuple[Staging, int] | None) -> None:
            if staged is None:
                return
            staging, number = staged
            del self.reserved[id(staging)]
            name = AdapterName(TENANTS[number % 3], "default", f"v{number}")
            found = staging.commit(versions[number].manifest, name, "s3", "r")
            assert found.manifest.digest == versions[number].digest

        @rule(staged=consumes(stagings))
        def discard(self, staged: tuple[Staging, int] | None) -> None:
            if staged is not None:
                del self.reserved[id(staged[0])]
                staged[0].discard()

        @rule(target=leases, which=st.integers(0, 1), number=st.integers(0, 9))
        def lease(self, which: int, number: int) -> tuple[Lease, int] | None:
            cached = self.caches[1 - which].content(versions[number].digest) is not None
            try:
                lease = self.caches[which].lease(versions[number].digest)
            except NotCached:
                assert not cached
                return None
            self.leased.append((lease, number))
            return lease, number

        @rule(leased=consumes(leases))
        def release(self, leased: tuple[Lease, int] | None) -> None:
            if leased is not None:
                self.leased.remove(leased)
                leased[0].release()

        @rule(which=st.integers(0, 1))
        def restart(self, which: int) -> None:
            report = self.caches[which].open()
            assert report.broken_versions == report.orphaned_blobs == report.strays == 0

        @invariant()
        def never_above_the_quota(self) -> None:
            usage = self.caches[0].usage()
            assert usage.bytes + sum(self.reserved.values()) <= QUOTA

        @invariant()
        def what_is_leased_is_there(self) -> None:
            for lease, number in self.leased:
                for path, data in versions[number].files.items():
                    assert (lease.path / path).read_bytes() == data

        @invariant()
        def the_usage_is_what_lies_on_the_disk(self) -> None:
            blobs = Path(self.root.name, "c", "blobs").glob("*/*")
            assert self.caches[1].usage().bytes == sum(blob.stat().st_size for blob in blobs)

        def teardown(self) -> None:
            for lease, _ in self.leased:
                lease.release()
            self.caches[0].check_integrity(deep=True)
            self.root.cleanup()

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1),
    st.integers(0, 300),
)
def test_names_are_given_up_one_by_one_by_whoever_has_most(
    numbers: dict[str, int], surplus: int
) -> None:
    surplus = min(surplus, sum(numbers.values()))
    left = dict(numbers)
    for _ in range(surplus):
        left[max(left, key=lambda tenant: left[tenant])] -= 1

    doomed = levelled(numbers, surplus)

    assert doomed.total() == surplus
    assert sorted(numbers[t] - doomed[t] for t in numbers) == sorted(left.values())
