"""What a router reads of a body, and that the replica will read the same model."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput
from mural_router.routing.inspect_body import MAX_KEYS, inspect_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["model", "role", "x"]) | st.text(max_size=5), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_model_is_replaced_where_it_stands_and_nothing_else_changes() -> None:
    data = b'{ "n":1 , "model" : "acme:stable","prompt":"say \\"model\\": x" }'
    body = inspect_body(data)
    assert (body.model, body.stream) == ("acme:stable", False)
    expected = b'{ "n":1 , "model" : "acme:v3","prompt":"say \\"model\\": x" }'
    assert body.for_replica("acme:v3") == expected
    assert body.for_replica("acme:stable") is data


@given(JSON, st.text(max_size=30), st.text(max_size=30))
def test_whatever_stands_beside_it_the_rewritten_body_is_the_same_but_for_the_model(
    rest: object, model: str, other: str
) -> None:
    members = {"a": rest, "model": model, "b": rest}
    written = inspect_body(encoded(members)).for_replica(other)
    assert json.loads(written) == {**members, "model": other}


@pytest.mark.parametrize(
    "data",
    [
        b'{"model":"acme:v1","model":"globex:v1"}',
        b'{"model":"acme:v1","\\u006dodel":"globex:v1"}',
        b'{"model":"acme:v1","mo\\u0064el":"globex:v1","a":{"model":2}}',
        b'{"mode\\u006C":"acme:v1","mode\\u006c":"globex:v1"}',
    ],
)
def test_of_repeated_models_the_one_that_was_read_is_the_only_one_that_is_sent(
    data: bytes,
) -> None:
    body = inspect_body(data)
    assert body.model == "globex:v1"
    pairs = json.loads(body.body, object_pairs_hook=list)
    assert [value for key, value in pairs if key == "model"] == ["globex:v1"]
    pairs = json.loads(body.for_replica("globex:v2"), object_pairs_hook=list)
    assert [value for key, value in pairs if key == "model"] == ["globex:v2"]


def test_a_model_among_the_tools_or_the_roles_is_not_the_model() -> None:
    members = {
        "tools": [{"function": {"parameters": {"properties": {"model": {"type": "string"}}}}}],
        "model": "acme:v1",
        "messages": [{"role": "model", "content": "hi"}],
    }
    body = inspect_body(encoded(members))
    assert body.model == "acme:v1"
    assert json.loads(body.for_replica("acme:v2")) == {**members, "model": "acme:v2"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"model":1}',
        b'{"model":null}',
        b'{"model":"a"',
        b'{"model":"a"} {"model":"b"}',
        b'{"model":"\\ud800"}',
        b'{"model":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"model":"a","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_object_with_a_model_is_refused_as_invalid(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        inspect_body(data)


@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\mode1 ', max_size=40).map(str.encode))
def test_no_bytes_are_ever_more_than_invalid(data: bytes) -> None:
    with suppress(InvalidInput):
        inspect_body(data)


def test_a_hint_of_a_wrong_type_is_left_to_the_replica() -> None:
    data = b'{"model":"a","user":[],"prompt":["a","b"],"temperature":"hot"}'
    body = inspect_body(data)
    assert (body.model, body.sequences, body.user) == ("a", 2, None)
    assert body.for_replica("b") == data.replace(b'"model":"a"', b'"model":"b"')


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ('"n":"50"', "n is not a whole number"),
        ('"n":1e400', "n is not a whole number"),
        ('"n":[2]', "n is not a whole number"),
        ('"max_tokens":"9000"', "max_tokens is not a whole number"),
        ('"max_completion_tokens":true', "max_completion_tokens is not a whole number"),
        ('"stream":"true"', "stream is not true or false"),
        ('"stream":1', "stream is not true or false"),
        ('"stream":true,"stream_options":"usage"', "stream_options is not an object"),
        ('"stream":true,"stream_options":{"include_usage":"no"}', "stream_options is not an obj"),
    ],
)
def test_what_limits_are_counted_by_is_refused_where_a_replica_might_read_another_number(
    member: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        inspect_body(b'{"model":"a",' + member.encode() + b"}")


def test_what_limits_are_counted_by_may_be_null() -> None:
    data = b'{"model":"a","n":null,"max_tokens":null,"stream":null,"stream_options":null,"user":1}'
    body = inspect_body(data)
    assert (body.sequences, body.max_tokens, body.stream) == (1, None, False)


@pytest.mark.parametrize("asked", [2**31, 2**31 + 1, 2**63, 10**300])
def test_a_bound_beyond_any_answer_counts_as_the_most_and_not_as_none(asked: int) -> None:
    assert inspect_body(b'{"model":"a","max_tokens":%d}' % asked).max_tokens == 2**31


@pytest.mark.parametrize(
    "data",
    [
        b'{"model":"a","\xff":1,"x":{"model":2}}',
        b'{"model":"a","\xff":1,"model":"b"}',
        b'{"model":"a","\\ud800":1,"model":"b"}',
    ],
)
def test_a_key_that_is_no_text_is_refused_where_the_body_is_written_anew(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        inspect_body(data)


def test_a_key_that_is_no_text_is_refused_where_usage_is_asked_for() -> None:
    for data in (
        b'{"model":"a","\xff":1,"stream":true,"stream_options":{}}',
        b'{"model":"a","stream":true,"stream_options":{"\xff":1}}',
    ):
        with pytest.raises(InvalidInput):
            inspect_body(data)


def test_a_list_of_prompts_counts_each_and_token_ids_count_as_one() -> None:
    assert inspect_body(b'{"model":"a","n":3,"prompt":["x","y"]}').sequences == 6
    assert inspect_body(b'{"model":"a","prompt":[[1,2],[3]]}').sequences == 2
    assert inspect_body(b'{"model":"a","prompt":[1,2,3]}').sequences == 1
    assert inspect_body(b'{"model":"a","prompt":[]}').sequences == 1


def test_a_very_long_list_of_prompts_is_never_counted_too_low() -> None:
    data = b'{"model":"a","prompt":[' + b"[]," * 400_000 + b"[]]}"
    assert inspect_body(data).sequences == 400_001


def test_prompts_that_begin_alike_have_one_prefix_and_others_do_not() -> None:
    system = {"role": "system", "content": "You answer in French. " * 20}

    def prefix(*messages: dict[str, str]) -> int | None:
        return inspect_body(encoded({"model": "a", "messages": list(messages)})).prefix

    first = prefix(system, {"role": "user", "content": "one"})
    assert first == prefix(system, {"role": "user", "content": "two"})
    assert first != prefix({"role": "user", "content": "one"})
    assert inspect_body(b'{"model":"a"}').prefix is None


def test_a_body_with_two_models_and_too_many_members_is_refused() -> None:
    members = b"".join(b',"%d":1' % at for at in range(MAX_KEYS))
    with pytest.raises(InvalidInput, match="members"):
        inspect_body(b'{"model":"a","model":"b"' + members + b"}")


def test_what_the_client_wants_of_usage_and_length_is_read() -> None:
    data = b'{"model":"a","stream":true,"stream_options":{"include_usage":true},"max_tokens":9,'
    body = inspect_body(data + b'"max_completion_tokens":5}')
    assert (body.include_usage, body.max_tokens) == (True, 5)


@pytest.mark.parametrize(
    "options",
    [
        "",
        ',"stream_options":null',
        ',"stream_options":{}',
        ',"stream_options":{"include_usage":false,"include_obfuscation":false}',
    ],
)
def test_a_stream_is_asked_for_its_usage_whatever_the_client_wants(options: str) -> None:
    data = f'{{"model":"acme:v1","stream":true{options},"prompt":"x"}}'.encode()
    body = inspect_body(data)
    assert body.hides_usage
    for model in ("acme:v1", "acme:v2"):
        sent = json.loads(body.for_replica(model))
        assert sent["model"] == model
        assert sent["stream_options"]["include_usage"] is True
        assert (sent["stream"], sent["prompt"]) == (True, "x")
    kept = json.loads(body.for_replica("acme:v1"))["stream_options"]
    assert kept.get("include_obfuscation", False) is False


def test_what_is_no_stream_or_asks_for_the_usage_itself_is_left_as_it_is() -> None:
    for data in (
        b'{"model":"a","stream":false}',
        b'{"model":"a","stream":true,"stream_options":{"include_usage":true}}',
    ):
        assert inspect_body(data).for_replica("a") is data


@pytest.mark.parametrize(
    "data",
    [
        b'{"model":"a","prompt":"x"}',
        b'{"model":"a","prompt":"x","stream":true}',
        b'{"model":"a","cache_salt":"own","prompt":"x"}',
        b'{"model":"a","cache_salt":7,"prompt":"x","stream":true}',
        b'{"prompt":"x","model":"b","model":"a","cache_salt":"own"}',
    ],
)
def test_a_salt_takes_the_place_of_the_clients(data: bytes) -> None:
    inspected = inspect_body(data)
    sent = json.loads(inspected.for_replica("a", "5a17"))
    assert sent == json.loads(inspected.for_replica("a")) | {"cache_salt": "5a17"}
    assert inspected.cache_salt == ("own" if b'"own"' in data else None)


def test_a_salt_beside_a_key_that_is_no_text_is_refused_before_the_request_has_a_place() -> None:
    with pytest.raises(InvalidInput):
        inspect_body(b'{"model":"a","cache_salt":"own","\xff":1}')
