"""Many clients that drip their requests at once (slow loris): the others are answered meanwhile."""

from __future__ import annotations

import asyncio
import gc
import sys
from itertools import pairwise

import pytest

from mural_router.http.client import ClientConnection
from mural_router.http.exchange import Exchange
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from tests.mural_router.proxy.express_stage import Here, Setting, request
from tests.mural_router.proxy.scripted_replica import BOUND_S

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
BEGINNINGS = (HEAD + b"x-more: ", HEAD + b"content-length: 100000\r\n\r\n", HEAD[:3])


async def drip(here: Here, clients: int) -> tuple[list[bytes], int]:
    """What the drippers are answered, and how often another was answered meanwhile."""
    drippers = [await here.client() for _ in range(clients)]
    for number, each in enumerate(drippers):
        each.send(BEGINNINGS[number % len(BEGINNINGS)])
    answers = [asyncio.create_task(each.rest()) for each in drippers]
    other, answered = await here.client(), 0
    async with asyncio.timeout(BOUND_S):
        while not all(answer.done() for answer in answers):
            for each, answer in zip(drippers, answers, strict=True):
                if not answer.done():
                    each.send(b"P")
            other.send(request())
            assert (await other.answer()).startswith(b"HTTP/1.1 200")
            answered += not all(answer.done() for answer in answers)
            await asyncio.sleep(0.01)
    here.send_clients_away()
    await here.until(lambda: here.proxy.state().connections == 0)
    return [await answer for answer in answers], answered


def nothing_is_left() -> bool:
    gc.collect()
    # No `isinstance`: abstract classes remember each kind that they were asked about, and what is
    # imported when it is first used would be.
    kinds = {base for kind in set(map(type, gc.get_objects())) for base in kind.__mro__}
    return not kinds & {ClientConnection, Exchange}


@pytest.mark.parametrize(
    ("clients", "timeout_s"), [(300, 0.4), pytest.param(2_000, 5.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("express", [True, False])
async def test_others_are_answered_while_many_drip_their_requests(
    authorities: str, clients: int, timeout_s: float, express: bool
) -> None:
    if express and plain_request is None:
        pytest.skip("nothing native is built")
    http = HttpSettings(port=0, head_timeout_s=timeout_s, body_timeout_s=timeout_s)
    here = Here(Setting(http=http), authorities, express=express)
    await here.begin()
    blocks = []
    try:
        for _ in range(3):
            answers, answered = await drip(here, clients)
            assert answered
            assert ("whole" in here.used) is express
            refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 408")]
            assert len(refused) == clients
            state = here.proxy.state()
            assert (state.requests, state.buffered_bytes) == (0, 0)
            here.seen.clear()
            for each in here.replicas.values():
                each.requests.clear()
            here.used.clear()
            del answers, refused
            # A connection's end is told in a turn of the loop after its last byte.
            await here.until(nothing_is_left)
            blocks.append(sys.getallocatedblocks())
    finally:
        await here.close()
    # What stays of each that was there stays each time; a cache that fills does not.
    assert min(after - before for before, after in pairwise(blocks)) < clients
