"""The generator over an engine that plays back a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mural_resolvers.errors import Unavailable, UnusableAdapter
from mural_resolvers.request import LoRARequest
from mural_server.engine.client import EngineClient, EngineDead
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FinishReason,
    FreedBytes,
    RequestDelta,
    TokenLogprobs,
)
from mural_server.generation import GenerateRequest, Generator, RequestUpdate
from mural_server.sampling_params import SamplingParams

END = 256
Script = Sequence[RequestDelta | Exception]


def tokenizer() -> Tokenizer:
    """One token a byte, and one that ends."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


TOKENIZER = tokenizer()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def deltas(
    text: str, *last: RequestDelta | Exception, step: int = 1
) -> list[RequestDelta | Exception]:
    """One delta a token, then ``last``."""
    spoken = [
        RequestDelta(request_id="", token_ids=[token], step=step + i)
        for i, token in enumerate(ids_of(text))
    ]
    return [*spoken, *last]


def end(reason: FinishReason = "stop", *tokens: int, **rest: Any) -> RequestDelta:
    return RequestDelta(request_id="", token_ids=[*tokens], finish_reason=reason, **rest)


class ScriptedClient(EngineClient):
    """Answers by request id; after its script a stream waits for ever, as a running one does."""

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        self._scripts = scripts
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.played_out = asyncio.Semaphore(0)
        """Released by each stream that has nothing more to say."""
        self.gate: Callable[[str], asyncio.Future[None] | None] = lambda _: None

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        self.requests[request.request_id] = request
        finished = False
        try:
            for delta in self._scripts[request.request_id]:
                gate = self.gate(request.request_id)
                if gate is not None:
                    await gate
                await asyncio.sleep(0)
                if isinstance(delta, Exception):
                    finished = True
                    raise delta
                finished = delta.finish_reason is not None
                yield delta
            if not finished:
                self.played_out.release()
                await asyncio.Event().wait()
        finally:
            if not finished:
                self.aborted.append(request.request_id)

    async def add_lora(
        self, lora: LoRARequest, *, level: AdapterLevel = "host", pinned: bool = False
    ) -> AdapterInfo:
        raise NotImplementedError

    async def remove_lora(self, lora_int_id: int, *, drain_timeout_s: float = 60.0) -> FreedBytes:
        raise NotImplementedError

    async def pin_lora(self, lora_int_id: int, *, pinned: bool) -> AdapterInfo:
        raise NotImplementedError

    async def check_lora(self, lora: LoRARequest) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats()

    @property
    def alive(self) -> bool:
        return True

    async def wait_dead(self) -> str:
        raise NotImplementedError

    async def drain(self, grace_s: float) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        return


def request(**params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", prompt_token_ids=ids_of("ask"), sampling=SamplingParams(**params)
    )


async def run(client: EngineClient, wanted: GenerateRequest) -> list[RequestUpdate]:
    return [update async for update in Generator(client, TOKENIZER).stream(wanted)]


def text_of(updates: Sequence[RequestUpdate], index: int = 0) -> str:
    return "".join(s.text for u in updates for s in u.sequences if s.index == index)


def last_of(
    updates: Sequence[RequestUpdate], index: int = 0
) -> tuple[str | None, str | int | None]:
    last = [s for u in updates for s in u.sequences if s.index == index][-1]
    return last.finish_reason, last.stop_reason


async def test_text_comes_token_by_token_and_the_ending_token_stays_out_of_it() -> None:
    client = ScriptedClient({"r": deltas("hé", end("stop", END))})
    updates = await run(client, request())
    assert [u.sequences[0].text for u in updates] == ["h", "", "é", ""]
    assert [u.sequences[0].token_ids for u in updates] == [[t] for t in [*ids_of("hé"), END]]
    assert last_of(updates) == ("stop", None)
    assert [(u.prompt_tokens, u.completion_tokens) for u in updates] == [
        (3, i) for i in (1, 2, 3, 4)
    ]
    assert [u.step for u in updates] == [1, 2, 3, 0]
    assert client.aborted == []


async def test_what_the_request_says_reaches_the_engine() -> None:
    client = ScriptedClient({"r": [end("length")]})
    lora = LoRARequest("acme:v1", 3, "/adapters/acme", "d")
    wanted = GenerateRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(seed=5, temperature=0.5, stop=("x",)),
        lora=lora,
        tenant="acme",
        weight=2.0,
        salt="s",
    )
    await run(client, wanted)
    assert client.requests["r"] == EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(seed=5, temperature=0.5),
        lora=lora,
        tenant="acme",
        weight=2.0,
        salt="s",
    )


async def test_a_stop_token_that_is_text_is_left_out_unless_it_is_asked_for() -> None:
    [dot] = ids_of(".")
    script = {"r": deltas("ok", end("stop", dot, stop_token_id=dot))}
    updates = await run(ScriptedClient(script), request(stop_token_ids=(dot,)))
    assert (text_of(updates), last_of(updates)) == ("ok", ("stop", dot))
    updates = await run(
        ScriptedClient(script), request(stop_token_ids=(dot,), include_stop_str_in_output=True)
    )
    assert text_of(updates) == "ok."


async def test_special_tokens_are_shown_where_they_are_asked_for() -> None:
    script = {"r": [*deltas("a"), RequestDelta(request_id="", token_ids=[END]), end("length")]}
    assert text_of(await run(ScriptedClient(script), request())) == "a"
    shown = await run(ScriptedClient(script), request(skip_special_tokens=False))
    assert text_of(shown) == "a<|end|>"


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one STOP")])
async def test_a_stop_string_cuts_the_text_and_aborts_the_sequence(
    include: bool, text: str
) -> None:
    client = ScriptedClient({"r": deltas("one STOP two", end("length"))})
    updates = await run(client, request(stop=("STOP",), include_stop_str_in_output=include))
    assert (text_of(updates), last_of(updates)) == (text, ("stop", "STOP"))
    assert client.aborted == ["r"]
    assert updates[-1].completion_tokens == len("one STOP")


async def test_tokens_behind_a_stop_string_in_the_same_delta_do_not_count() -> None:
    ids = ids_of("a!bc")
    marks = [TokenLogprobs(token, -1.0, 1, []) for token in ids]
    delta = RequestDelta(request_id="", token_ids=ids, logprobs=marks)
    updates = await run(ScriptedClient({"r": [delta]}), request(stop=("!",), logprobs=0))
    [sequence] = updates[0].sequences
    assert (sequence.text, sequence.token_ids, sequence.logprobs) == ("a", ids[:2], marks[:2])


async def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    client = ScriptedClient({"r": deltas("a", end("length", *ids_of("!")))})
    updates = await run(client, request(stop=("!",)))
    assert (text_of(updates), last_of(updates)) == ("a", ("stop", "!"))
    assert client.aborted == []


async def test_text_held_for_a_stop_string_comes_with_the_end() -> None:
    client = ScriptedClient({"r": deltas("a##", end("stop", END))})
    updates = await run(client, request(stop=("###",)))
    assert [u.sequences[0].text for u in updates] == ["a", "", "", "##"]
    assert last_of(updates) == ("stop", None)


async def test_min_tokens_delays_stop_strings_too() -> None:
    client = ScriptedClient({"r": deltas("a!b!c")})
    updates = await run(client, request(stop=("!",), min_tokens=2))
    assert text_of(updates) == "a!b"


async def test_n_sequences_have_ids_and_seeds_of_their_own_and_share_a_prompt_score() -> None:
    client = ScriptedClient({f"r-{i}": [end("length")] for i in range(3)})
    await run(client, request(n=3, seed=2**63 - 2, prompt_logprobs=1))
    params = [client.requests[f"r-{i}"].sampling for i in range(3)]
    assert [p.seed for p in params] == [2**63 - 2, 2**63 - 1, 0]
    assert [p.prompt_logprobs for p in params] == [1, None, None]
    assert {p.n for p in params} == {1}


async def test_sequences_without_a_seed_are_left_without_one() -> None:
    client = ScriptedClient({f"r-{i}": [end("length")] for i in range(2)})
    await run(client, request(n=2))
    assert [client.requests[f"r-{i}"].sampling.seed for i in range(2)] == [None, None]


async def test_the_news_of_one_step_comes_in_one_update() -> None:
    scripts = {f"r-{i}": deltas(text, end("length")) for i, text in enumerate(("ab", "cd", "ef"))}
    updates = await run(ScriptedClient(scripts), request(n=3))
    assert [text_of(updates, i) for i in range(3)] == ["ab", "cd", "ef"]
    assert [[s.index for s in u.sequences] for u in updates] == [[0, 1, 2]] * 3
    assert [u.completion_tokens for u in updates] == [3, 6, 6]


async def test_a_slow_sequence_holds_up_no_other_and_a_stopped_one_is_aborted_at_once() -> None:
    scripts = {
        "r-0": deltas("slow", end("length")),
        "r-1": deltas("x!yz"),
        "r-2": deltas("longer text", end("stop", END)),
    }
    client = ScriptedClient(scripts)
    opened = asyncio.get_running_loop().create_future()
    client.gate = lambda request_id: opened if request_id == "r-0" else None
    updates = []
    async for update in Generator(client, TOKENIZER).stream(request(n=3, stop=("!",))):
        updates.append(update)
        if last_of(updates, update.sequences[0].index)[1] == "!":
            assert client.aborted == ["r-1"]
        if any(s.index == 2 and s.finish_reason for s in update.sequences):
            opened.set_result(None)
    assert [text_of(updates, i) for i in range(3)] == ["slow", "x", "longer text"]
    assert [last_of(updates, i)[0] for i in range(3)] == ["length", "stop", "stop"]
    assert client.aborted == ["r-1"]


@pytest.mark.parametrize("n", [1, 2, 3])
async def test_closing_the_stream_aborts_every_sequence(n: int) -> None:
    names = ["r"] if n == 1 else [f"r-{i}" for i in range(n)]
    client = ScriptedClient({name: deltas("abc") for name in names})
    async with aclosing(Generator(client, TOKENIZER).stream(request(n=n))) as stream:
        await anext(stream)
    assert sorted(client.aborted) == names


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_the_reader_aborts_every_sequence(n: int) -> None:
    names = ["r"] if n == 1 else [f"r-{i}" for i in range(n)]
    client = ScriptedClient({name: deltas("a") for name in names})
    reader = asyncio.create_task(run(client, request(n=n)))
    for _ in names:
        await client.played_out.acquire()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert sorted(client.aborted) == names


@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_of_the_engine_is_raised_by_its_status_and_ends_all(n: int) -> None:
    broken = end("error", error="rank 128 is above 64", error_status=422)
    name = "r" if n == 1 else "r-1"
    client = ScriptedClient({name: deltas("a", broken), "r-0": deltas("abcdef")})
    with pytest.raises(UnusableAdapter, match="rank 128"):
        await run(client, request(n=n))
    assert client.aborted == ([] if n == 1 else ["r-0"])


@pytest.mark.parametrize("n", [1, 2])
async def test_a_dead_engine_is_told_as_it_is(n: int) -> None:
    name = "r" if n == 1 else "r-0"
    client = ScriptedClient({name: deltas("a", EngineDead("gone")), "r-1": deltas("abcdef")})
    with pytest.raises(EngineDead, match="gone"):
        await run(client, request(n=n))


async def test_a_stream_that_ends_without_a_reason_is_an_error_and_no_answer() -> None:
    class Ending(ScriptedClient):
        async def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
            yield RequestDelta(request_id="", token_ids=ids_of("a"))

    with pytest.raises(Unavailable, match="without a reason"):
        await run(Ending({}), request())


async def test_an_abort_is_passed_on_as_the_reason() -> None:
    updates = await run(ScriptedClient({"r": deltas("a", end("abort"))}), request())
    assert (text_of(updates), last_of(updates)) == ("a", ("abort", None))


async def test_prompt_scores_and_cached_tokens_are_passed_on() -> None:
    score = TokenLogprobs(5, -2.0, 3, [])
    first = RequestDelta(
        request_id="", token_ids=ids_of("a"), prompt_logprobs=[None, score], cached_tokens=2
    )
    other = RequestDelta(request_id="", token_ids=ids_of("b"), cached_tokens=16)
    client = ScriptedClient({"r-0": [first, end("length")], "r-1": [other, end("length")]})
    updates = await run(client, request(n=2, prompt_logprobs=0))
    assert [u.prompt_logprobs for u in updates] == [[None, score], []]
    assert [u.cached_tokens for u in updates] == [16, 16]
