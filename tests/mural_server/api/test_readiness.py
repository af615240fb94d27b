"""When a server may get its first request, by the test's own clock."""

from __future__ import annotations

import logging

import pytest

from mural_server.api.readiness import Readiness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def resident(*names: str):
    return lambda: set(names)


def test_without_a_wait_it_is_ready_and_stays_so_whatever_is_declared(clock):
    readiness = Readiness(0, clock)
    assert readiness.waits_for(resident()) is None
    readiness.declare(["acme:v1"])
    assert readiness.waits_for(resident()) is None
    assert readiness.missing(set()) == ["acme:v1"]


def test_it_waits_for_the_declaration_then_for_what_was_declared(clock):
    readiness = Readiness(60, clock)
    assert "not been told" in (readiness.waits_for(resident("acme:v1")) or "")
    readiness.declare(["acme:v1", "acme:v2"])
    assert "1 of 2" in (readiness.waits_for(resident("acme:v1")) or "")
    assert readiness.waits_for(resident("acme:v1", "acme:v2")) is None


def test_an_empty_declaration_is_one(clock):
    readiness = Readiness(60, clock)
    assert readiness.awaits_declared
    readiness.declare([])
    assert not readiness.awaits_declared
    assert readiness.waits_for(resident()) is None


def test_what_is_declared_or_lost_later_takes_nothing_back(clock):
    readiness = Readiness(60, clock)
    readiness.declare(["acme:v1"])
    assert readiness.waits_for(resident("acme:v1")) is None
    assert readiness.waits_for(resident()) is None
    readiness.declare(["acme:v1", "acme:v2"])
    assert readiness.waits_for(resident("acme:v1")) is None
    assert readiness.missing({"acme:v1"}) == ["acme:v2"]


@pytest.mark.parametrize("declared", [None, ["acme:v1"]])
def test_the_wait_has_an_end_with_one_warning(clock, caplog, declared):
    readiness = Readiness(60, clock)
    if declared is not None:
        readiness.declare(declared)
    clock.now += 59.9
    assert readiness.waits_for(resident()) is not None
    clock.now += 0.1
    for _ in range(3):
        assert readiness.waits_for(resident()) is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "ready after 60 s all the same" in warnings[0].message
