"""Both metric families, read with Prometheus' own parser; labels are bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mural_server.api.traffic import OTHER, LabelledTokens, Traffic


async def scraped(server) -> dict[str, list[tuple[dict[str, str], float]]]:
    response = await server.http.get("/metrics")
    assert response.status_code == 200
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_gauges_that_gateways_read_are_there(server):
    server.engine.numbers.running = 3
    server.engine.numbers.waiting = 2
    server.engine.numbers.kv_usage = 0.5
    server.engine.numbers.prefix_queries = 10
    server.engine.numbers.prefix_hits = 4
    found = await scraped(server)
    assert found["vllm:num_requests_running"] == [({"model_name": "tiny"}, 3)]
    assert found["vllm:num_requests_waiting"][0][1] == 2
    assert found["vllm:kv_cache_usage_perc"][0][1] == 0.5
    assert found["vllm:cache_config_info"] == [({"block_size": "16", "num_gpu_blocks": "64"}, 1)]
    assert found["vllm:prefix_cache_queries_total"][0][1] == 10
    assert found["vllm:prefix_cache_hits_total"][0][1] == 4


async def test_activity_is_absent_until_there_is_an_adapter(server):
    assert "vllm:lora_requests_info" not in await scraped(server)
    await server.complete(model="acme:v1")
    server.engine.numbers.running_adapters = ["acme:v2", "acme:v1"]
    labels, value = (await scraped(server))["vllm:lora_requests_info"][0]
    assert labels == {
        "max_lora": "4",
        "running_lora_adapters": "acme:v1,acme:v2",
        "waiting_lora_adapters": "",
    }
    assert value > 1e9


async def test_residency_is_told_in_the_proposed_family(server):
    await server.complete(model="acme:v1")
    await server.state.catalog.admin.make_resident(
        "acme:v2", digest=None, level="slot", pinned=True
    )
    found = await scraped(server)
    rows = {labels["adapter_name"]: labels for labels, _ in found["vllm:lora_adapter_loaded"]}
    assert rows["acme:v1"] | {} == {
        "adapter_name": "acme:v1",
        "level": "cpu",
        "pinned": "false",
        "rank": "4",
    }
    assert (rows["acme:v2"]["level"], rows["acme:v2"]["pinned"]) == ("gpu", "true")
    assert found["vllm:num_gpu_loaded_lora_adapters"][0][1] == 1
    assert found["vllm:max_gpu_lora_adapters"][0][1] == 4


async def test_latencies_tokens_and_errors_are_counted(server):
    await server.complete(model="acme:v1", prompt="four")
    await server.complete(temperature=-1)
    found = await scraped(server)
    assert found["vllm:time_to_first_token_seconds_count"][0][1] == 1
    assert found["vllm:inter_token_latency_seconds_count"][0][1] == 2
    assert found["vllm:e2e_request_latency_seconds_count"][0][1] == 1
    assert found["mural:adapter_prompt_tokens_total"] == [({"adapter_name": "acme:v1"}, 4)]
    assert found["mural:adapter_generation_tokens_total"] == [({"adapter_name": "acme:v1"}, 12)]
    assert ({"model_name": "tiny", "finished_reason": "stop"}, 1) in found[
        "vllm:request_success_total"
    ]
    assert found["mural:http_errors_total"] == [({"status": "400"}, 1)]
    assert found["mural:open_sequences"][0][1] == 0


names = st.integers(0, 30).map(str)


@given(st.lists(st.tuples(names, st.integers(0, 50), st.floats(0, 100)), max_size=60))
def test_labels_are_bounded_and_no_series_of_other_falls(arrivals):
    now = 0.0
    traffic = Traffic(max_names=16, clock=lambda: now)
    tokens = LabelledTokens(traffic, 4)
    total = other = 0
    for name, count, pause in arrivals:
        now += pause
        traffic.add(name, count)
        tokens.add(name, 1, count)
        total += count
        rows = {row[0]: row for row in tokens.totals()}
        assert len(rows) <= 5
        assert sum(row[2] for row in rows.values()) == total
        now_other = rows.get(OTHER, (OTHER, 0, 0))[2]
        assert now_other >= other
        other = now_other


def test_the_busiest_take_the_labels_over_time():
    now = 0.0
    traffic = Traffic(clock=lambda: now)
    tokens = LabelledTokens(traffic, 1)
    for name, times in (("early", 1), ("busy", 10)):
        for _ in range(times):
            now += 10
            traffic.add(name, 100)
            tokens.add(name, 0, 100)
    rows = tokens.totals()
    assert rows[0][0] == "busy"
    assert sum(row[2] for row in rows) == 1100


def test_a_rate_fades():
    now = 0.0
    traffic = Traffic(window_s=10, clock=lambda: now)
    traffic.add("a", 100)
    assert traffic.rate("a") == 10
    now = 10.0
    assert 3 < traffic.rate("a") < 4
    assert traffic.rate("b") == 0
