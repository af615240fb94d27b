"""The real openai client against the server."""

from __future__ import annotations

import asyncio

import openai
import pytest


async def test_completion_has_text_usage_and_model(server):
    answer = await server.client().completions.create(model="tiny", prompt="Hi")
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 12  # with the end of the sequence
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_chat_has_a_message_of_the_assistant(server):
    answer = await server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}]
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "hello world"
    prompt = server.engine.requests[0].prompt_token_ids
    text = await server.state.texts.decode(prompt)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_synchronous_client_streams_too(server_in_thread):
    client = openai.OpenAI(base_url=server_in_thread, api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"
    assert client.completions.create(model="tiny", prompt="Hi").choices[0].text == "hello world"


async def test_stream_begins_with_the_role_and_ends_with_usage(server):
    stream = await server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "hello world"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_several_prompts_and_n_are_indexed_prompt_first(server):
    server.engine.script = lambda request: [bytes([request.prompt_token_ids[0] + 30]), b"."]
    answer = await server.client().completions.create(model="tiny", prompt=[[40, 41], [50]], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts == ["F.", "F.", "P.", "P."]
    assert answer.usage.prompt_tokens == 3


async def test_a_streamed_request_of_several_prompts_gives_each_its_text(server):
    server.engine.script = lambda request: [bytes([request.prompt_token_ids[0] + 30]), b"."]
    stream = await server.client().completions.create(
        model="tiny", prompt=[[40, 41], [50]], n=2, stream=True
    )
    texts = ["", "", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["F.", "F.", "P.", "P."]


async def test_echo_with_logprobs_covers_prompt_and_answer(server):
    answer = await server.client().completions.create(
        model="tiny", prompt="Hi", echo=True, logprobs=2, max_tokens=4
    )
    choice = answer.choices[0]
    assert choice.text == "Hihello world"
    assert choice.logprobs.tokens[:3] == ["H", "i", "h"]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1] == -0.5
    assert choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert len(choice.logprobs.top_logprobs[2]) == 2


async def test_scoring_a_prompt_alone_gives_nothing_generated(server):
    answer = await server.client().completions.create(
        model="tiny", prompt="Hi", echo=True, logprobs=1, max_tokens=0
    )
    assert answer.choices[0].text == "Hi"
    assert answer.choices[0].logprobs.tokens == ["H", "i"]
    assert answer.usage.completion_tokens == 0


async def test_chat_logprobs_carry_the_bytes_of_half_characters(server):
    server.engine.script = lambda request: ["é".encode()]
    answer = await server.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=1,
    )
    content = answer.choices[0].logprobs.content
    assert answer.choices[0].message.content == "é"
    assert [entry.bytes for entry in content[:2]] == [[0xC3], [0xA9]]
    assert content[0].top_logprobs[0].logprob == -0.5


async def test_prompt_logprobs_are_by_position(server):
    answer = await server.client().completions.create(
        model="tiny", prompt="Hi", extra_body={"prompt_logprobs": 1}
    )
    found = answer.choices[0].prompt_logprobs
    assert found[0] is None
    assert [entry["decoded_token"] for entry in found[1].values()] == ["i"]


async def test_vllms_sampling_parameters_reach_the_engine(server):
    await server.client().completions.create(
        model="tiny",
        prompt="Hi",
        temperature=0.5,
        seed=7,
        stop=["END"],
        logit_bias={"5": 2},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "skip_special_tokens": False,
        },
    )
    sampling = server.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 3, 0.1)
    assert (sampling.repetition_penalty, sampling.min_tokens) == (1.2, 2)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (9,))
    assert (sampling.logit_bias, sampling.seed) == ({5: 2.0}, 7)
    assert sampling.max_tokens == 16


async def test_a_client_that_leaves_in_mid_stream_aborts_its_sequence(server):
    server.engine.gate = asyncio.Event()
    server.engine.script = lambda request: [b"x"] * 50
    stream = await server.client().completions.create(model="tiny", prompt="Hi", stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(server.engine.aborts.wait(), 10)
    assert server.engine.aborted == [server.engine.requests[0].request_id]


async def test_a_client_that_leaves_before_its_whole_answer_aborts_it(server):
    server.engine.gate = asyncio.Event()
    server.engine.script = lambda request: [b"x"] * 50
    asking = asyncio.create_task(server.client().completions.create(model="tiny", prompt="Hi", n=3))
    await asyncio.wait_for(server.engine.stepped.wait(), 10)
    asking.cancel()
    await asyncio.wait_for(server.engine.aborts.wait(), 10)
    await server.state.admission.wait_idle()
    assert len(server.engine.aborted) == 3


async def test_adapters_answer_under_their_exact_name(server):
    client = server.client()
    answer = await client.completions.create(model="acme/default:v1", prompt="Hi")
    assert answer.model == "acme:v1"
    latest = await client.completions.create(model="acme", prompt="Hi")
    assert latest.model == "acme:v2"
    first, second = (request.lora for request in server.engine.requests)
    assert first.lora_int_id != second.lora_int_id
    models = {model.id: model for model in (await client.models.list()).data}
    assert models["acme:v1"].parent == "tiny"
    assert models["acme:v1"].digest == first.digest
    assert models["acme:v1"].rank == 4
    assert models["acme:v1"].state == "host"
    assert (await client.models.retrieve("acme:v1")).id == "acme:v1"


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("acme:v9", openai.NotFoundError),
        ("a:b:c", openai.BadRequestError),
        ("..", openai.BadRequestError),
        ("acme:v1\n", openai.BadRequestError),
        ("x" * 10_000, openai.BadRequestError),
        ("аcme:v1", openai.BadRequestError),  # a Cyrillic look-alike
    ],
)
async def test_names_that_are_no_adapter_are_refused(server, model, error):
    with pytest.raises(error) as caught:
        await server.client().completions.create(model=model, prompt="Hi")
    assert caught.value.body["message"]
    assert server.engine.requests == []


async def test_an_error_after_the_first_token_ends_the_stream_with_its_reason(server):
    server.engine.gate = asyncio.Event()
    stream = await server.client().completions.create(model="tiny", prompt="Hi", stream=True)
    chunks = aiter(stream)
    await anext(chunks)
    server.engine.die()
    with pytest.raises(openai.APIError, match="killed"):
        async for _ in chunks:
            pass
