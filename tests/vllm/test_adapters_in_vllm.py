"""Adapters by name inside real vLLM, against what Mural's own engine answers.

Requests go one after another: vLLM for CPUs answers the base's requests with an adapter's weights
where both are in one batch, which is its own fault and nothing to be compared with.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vllm

SERVED = ("acme:v1", "globex:v1")


def test_greedy_texts_under_each_adapter_are_murals(vllm, reference) -> None:
    # In turns, so that vLLM drops one adapter for the other and reads its files anew each time.
    for place, prompt in enumerate(reference.prompts):
        for model in SERVED:
            assert vllm.text(model, prompt) == reference.texts[model][place]


def test_the_base_alone_answers_as_murals_and_otherwise_than_its_adapters(vllm, reference) -> None:
    texts = [vllm.text("smollm2", prompt) for prompt in reference.prompts]
    assert texts == reference.texts["smollm2"]
    assert all(texts != reference.texts[model] for model in SERVED)


def test_the_full_form_of_a_name_is_served_as_it_was_asked(vllm, reference) -> None:
    response = vllm.ask("acme/default:v1", reference.prompts[0])
    assert response.json()["model"] == "acme/default:v1"
    assert response.json()["choices"][0]["text"] == reference.texts["acme:v1"][0]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("acme:v9", "The adapter acme:v9 does not exist."),
        ("acme/sql:v1", "The adapter acme/sql:v1 does not exist."),
        ("acme", "acme:latest is an alias."),
        ("acme:stable", "acme:stable is an alias."),
        ("../../etc", "is not a tenant name."),
    ],
)
def test_what_is_not_served_is_404_and_the_log_says_why(vllm, reference, model, reason) -> None:
    response = vllm.ask(model, reference.prompts[0])
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "NotFoundError"
    assert vllm.warned(f"'{model}' is not served: ", reason)


@pytest.mark.parametrize("model", ["globex:v2", "initech:v1"])
def test_a_foreign_tenants_adapter_is_refused_whether_or_not_it_exists(
    vllm, reference, model
) -> None:
    assert vllm.ask(model, reference.prompts[0]).status_code == 404
    assert vllm.warned(f"'{model}' is not served: This key may not use the requested model.")
    assert model not in {card["id"] for card in vllm.client.get("/v1/models").json()["data"]}


def test_what_vllm_may_read_again_is_not_evicted_for_another_adapter(vllm, reference) -> None:
    for model in SERVED:
        vllm.text(model, reference.prompts[0])
    # It does not fit beside those two, which are leased.
    assert vllm.ask("acme:v2", reference.prompts[0]).status_code == 404
    assert vllm.warned("'acme:v2' is not served: ")
    for model in SERVED:
        assert vllm.text(model, reference.prompts[0]) == reference.texts[model][0]


def test_what_is_cached_is_served_while_s3_is_down(vllm, reference, s3) -> None:
    for model in SERVED:
        vllm.text(model, reference.prompts[0])
        vllm.forget(model)
    with s3.down():
        for model in SERVED:
            assert vllm.text(model, reference.prompts[0]) == reference.texts[model][0]
        assert vllm.ask("acme:v9", reference.prompts[0]).status_code == 404
    assert vllm.warned("acme:v1 is served from the cache")
    assert vllm.warned("'acme:v9' is not served: A source of adapters cannot be reached.")
