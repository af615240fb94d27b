"""`mural route` before two real servers, asked by the openai client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

PROMPT = "The quick brown fox"


@pytest.fixture
def routed(running, tenants, fleet_store, start_router, tmp_path):
    return start_router(
        *(flag for replica in running for flag in ("--replica", replica.flag)),
        *("--tenants-file", str(tenants.path), "--store", str(fleet_store)),
        *("--access-log", str(tmp_path / "access.log")),
    )


async def complete(client: openai.AsyncOpenAI, model: str, **more: Any) -> Any:
    return await client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, **more
    )


async def test_every_adapter_is_answered_by_its_own_weights_at_one_home(routed, tenants, oracle):
    ids = None
    async with httpx.AsyncClient(base_url=routed.url, timeout=60) as plain:
        for tenant, key in tenants.keys.items():
            for seed in (1, 2):
                name, homes = f"{tenant}:v{seed}", set()
                for _ in range(3):
                    answer = await plain.post(
                        "/v1/completions",
                        headers={"authorization": f"Bearer {key}"},
                        json={
                            "model": name,
                            "prompt": PROMPT,
                            "max_tokens": 6,
                            "temperature": 0,
                            "logprobs": 0,
                        },
                    )
                    assert answer.status_code == 200, answer.text
                    body = answer.json()
                    assert body["model"] == name
                    assert answer.headers["x-mural-adapter"] == name
                    homes.add(answer.headers["x-mural-replica"])
                assert len(homes) == 1
                assert len(answer.headers["x-mural-digest"]) == 64
                if ids is None:
                    tokens = await plain.post(
                        "/tokenize",
                        headers={"authorization": f"Bearer {key}"},
                        json={"model": "tiny", "prompt": PROMPT},
                    )
                    ids = tokens.json()["tokens"]
                found = body["choices"][0]["logprobs"]["token_logprobs"]
                assert found == pytest.approx(oracle.logprobs(seed, ids, len(found)), abs=1e-3)


async def test_streams_come_through_and_tell_the_usage_only_where_asked(routed, tenants):
    async with routed.client(tenants.keys["acme"]) as client:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            stream = await complete(client, "acme:v1", stream=True, **options)
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            told = [chunk for chunk in chunks if chunk.usage is not None]
            assert bool(told) is bool(options)
            assert all(chunk.choices for chunk in chunks if chunk not in told)
    assert routed.count("mural_router_tokens_total", kind="prompt") > 0


async def test_names_outside_are_forbidden_unknown_ones_not_found_and_no_key_unauthorised(
    routed, tenants
):
    async with routed.client(tenants.keys["acme"]) as client:
        for model, status in (
            ("globex:v1", 403),
            ("globex:nothing", 403),
            ("acme:v77", 404),
            ("acme/none", 404),
            ("No Name!", 400),
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                await complete(client, model)
            assert refused.value.status_code == status, model
            assert isinstance(refused.value.body, dict)
            assert refused.value.body["code"]
    async with routed.client("mural_nobody") as client:
        with pytest.raises(openai.AuthenticationError):
            await complete(client, "tiny")


async def test_models_are_what_the_caller_may_use(routed, tenants):
    async with routed.client(tenants.keys["globex"]) as client:
        await complete(client, "globex:v2")
        names = {model.id async for model in client.models.list()}
        assert "tiny" in names
        assert not any(name.startswith("acme") for name in names)
        assert (await client.models.retrieve("globex:v2")).id == "globex:v2"
        with pytest.raises(openai.PermissionDeniedError):
            await client.models.retrieve("acme:v1")


async def test_the_access_log_tells_who_what_where_and_holds_neither_prompt_nor_key(
    routed, tenants, tmp_path
):
    async with routed.client(tenants.keys["acme"]) as client:
        await complete(client, "acme")
        with pytest.raises(openai.PermissionDeniedError):
            await complete(client, "globex:v1")
    assert routed.process.end() == 0
    text = (tmp_path / "access.log").read_text()
    assert PROMPT not in text
    assert tenants.keys["acme"].rpartition("_")[2] not in text
    lines = [json.loads(line) for line in text.splitlines()]
    answered = next(line for line in lines if line["status"] == 200)
    assert answered["tenant"] == "acme"
    assert (answered["asked"], answered["adapter"]) == ("acme:latest", "acme:v3")
    assert answered["replica"].startswith("127.0.0.1:")
    assert answered["completion_tokens"] == 8
    assert next(line for line in lines if line["status"] == 403)["error"] == "forbidden"


async def test_the_debug_pages_explain_fleet_and_placement(routed, tenants):
    async with routed.client(tenants.keys["acme"]) as client:
        await complete(client, "acme:v1")
    assert routed.get("/ready").status_code == 200
    fleet = routed.get("/debug/fleet").json()
    assert fleet["base"]["model_names"] == ["tiny"]
    assert [replica["ready"] for replica in fleet["replicas"]] == [True, True]
    explained = routed.get("/debug/placement?model=acme:v1").json()
    assert explained["adapter"] == "acme/default:v1"
    assert explained["choice"] in {replica["name"] for replica in fleet["replicas"]}
    assert len(explained["rows"]) == 2
    assert routed.get("/debug/placement?model=%20").status_code == 400
    assert routed.get("/debug/limits").status_code == 200


async def test_control_metrics_and_load_endpoints_are_out_of_reach(routed, tenants):
    headers = {"authorization": f"Bearer {tenants.keys['acme']}"}
    async with httpx.AsyncClient(base_url=routed.url, timeout=10, headers=headers) as plain:
        for method, path in (
            ("GET", "/metrics"),
            ("GET", "/mural/v1/state"),
            ("POST", "/mural/v1/drain"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/v1/unload_lora_adapter"),
            ("GET", "/debug/fleet"),
        ):
            assert (await plain.request(method, path)).status_code == 404
