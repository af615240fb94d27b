"""How long what was refused waits, and what makes it worth asking again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_operator.refusals import LYING, Refusals, delay_s
from mural_server.protocol import ControlError

NAME = "acme/default:v1"


@pytest.fixture
def refusals():
    return Refusals(lambda: 1000.0)


def test_failures_in_a_row_wait_a_second_then_twice_as_long_up_to_a_minute():
    waits = [delay_s(500, None, tries, jitter=lambda: 1.0) for tries in range(1, 10)]
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


@pytest.mark.parametrize("status", [404, 409, 413, 422])
def test_what_time_does_not_change_waits_a_minute_at_once(status):
    assert delay_s(status, None, 1, jitter=lambda: 1.0) == 60.0


def test_a_server_that_says_when_is_never_asked_earlier():
    assert delay_s(503, 20.0, 1, jitter=lambda: 0.0) == 20.0
    assert delay_s(503, 20.0, 1, jitter=lambda: 1.0) == 25.0


@given(
    status=st.integers(0, 600),
    after=st.none() | st.floats(0, 1e9),
    tries=st.integers(1, 10_000),
    jitter=st.floats(0, 1),
)
def test_every_wait_is_bounded(status, after, tries, jitter):
    assert 0.75 <= delay_s(status, after, tries, lambda: jitter) <= 75.0


def test_refusals_are_of_a_pod_and_an_adapter_until_it_does_it(refusals):
    refusals.note("u", NAME, ControlError("rank 128", 422))
    assert refusals.of("u")[NAME].message == "rank 128"
    assert refusals.of("other") == {}
    assert refusals.next_retry_at() == refusals.of("u")[NAME].retry_at
    refusals.clear("u", NAME)
    assert refusals.of("u") == {}
    assert refusals.next_retry_at() is None


def test_another_process_has_refused_nothing(refusals):
    refusals.heard("u", "first")
    refusals.note("u", NAME, ControlError("rank 128", 422))
    refusals.heard("u", "first")
    assert refusals.of("u")
    refusals.heard("u", None)
    refusals.heard("u", "second")
    assert refusals.of("u") == {}


def test_one_that_is_heard_again_may_answer_now(refusals):
    refusals.heard("u", "boot")
    refusals.note("u", NAME, ControlError("no answer"))
    refusals.note("u", "acme/default:v2", ControlError("rank 128", 422))
    refusals.heard("u", None)
    assert set(refusals.of("u")) == {NAME, "acme/default:v2"}
    refusals.heard("u", "boot")
    assert set(refusals.of("u")) == {"acme/default:v2"}


def test_an_object_that_changed_is_another_question_everywhere(refusals):
    for uid in ("u", "v"):
        refusals.note(uid, NAME, ControlError("other content", 409))
    refusals.changed(NAME)
    assert refusals.of("u") == refusals.of("v") == {}


def test_nothing_is_kept_of_pods_and_adapters_that_are_gone(refusals):
    for uid in ("u", "v"):
        for name in (NAME, "acme/default:v2"):
            refusals.note(uid, name, ControlError("full", 503))
    refusals.keep(frozenset({"u"}), frozenset({NAME}))
    assert set(refusals.of("u")) == {NAME}
    assert refusals.of("v") == {}


def test_a_lie_is_remembered_as_one(refusals):
    refusals.note("u", NAME, ControlError("It says so.", LYING))
    assert refusals.is_lying("u", NAME)
    refusals.note("u", NAME, ControlError("full", 503))
    assert not refusals.is_lying("u", NAME)
