"""Requests and ids."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.request import LoRAIdAllocator, LoRARequest


def test_requests_are_equal_by_name_and_digest() -> None:
    one = LoRARequest("acme:v1", 1, "/a", "d1")

    assert one == LoRARequest("acme:v1", 1, "/elsewhere", "d1")
    assert hash(one) == hash(LoRARequest("acme:v1", 1, "/elsewhere", "d1"))
    assert one != LoRARequest("acme:v1", 2, "/a", "d2")
    assert one != LoRARequest("acme:v2", 1, "/a", "d1")
    assert one != "acme:v1"


def test_requests_without_a_digest_are_equal_by_all_else() -> None:
    assert LoRARequest("x", 1, "/a") == LoRARequest("x", 1, "/a")
    assert LoRARequest("x", 1, "/a") != LoRARequest("x", 1, "/b")
    assert LoRARequest("x", 1, "/a") != LoRARequest("x", 2, "/a")


@pytest.mark.parametrize("lora_int_id", [0, -1])
def test_an_id_is_above_zero(lora_int_id: int) -> None:
    with pytest.raises(ValueError, match="above 0"):
        LoRARequest("x", lora_int_id, "/a")


@given(st.lists(st.text(min_size=1, max_size=3)))
def test_each_digest_has_one_id_and_each_id_one_digest(digests: list[str]) -> None:
    ids = LoRAIdAllocator()
    given_ids = [(digest, ids.id_for(digest)) for digest in digests]

    assert len(set(given_ids)) == len(set(digests)) == len({i for _, i in given_ids})
    assert all(i > 0 for _, i in given_ids)


def test_threads_that_ask_at_once_agree() -> None:
    ids, barrier = LoRAIdAllocator(), threading.Barrier(8)
    answers: list[list[int]] = []

    def ask() -> None:
        barrier.wait()
        answers.append([ids.id_for(f"d{n}") for n in range(500)])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert len(set(answers[0])) == 500
