"""What the reader of vLLM's text makes of Mural's own: it has both metric families of adapters.

So both ends of the second family, which no released vLLM has, are held to one another, and a Mural
server that is listed as a pod is known as well as by its state stream.
"""

from __future__ import annotations

from dataclasses import replace

from mural_router.fleet.vllm_metrics import read_metrics
from mural_router.placement import Residency


async def test_a_servers_load_and_residency_are_read(start_server, adapter_dir, engine):
    server = await start_server(adapter_dir=str(adapter_dir))
    engine.numbers.running, engine.numbers.waiting = 3, 2
    engine.numbers.kv_usage, engine.numbers.generation_tokens = 0.5, 40
    await server.complete(model="acme:v1")
    admin = server.state.catalog.admin
    await admin.make_resident("acme:v2", digest=None, level="slot", pinned=True)
    # Activity is told, too; what is resident counts.
    engine.numbers.running_adapters = ["globex:v1"]
    found = read_metrics((await server.http.get("/metrics")).content)
    assert (found.model_name, found.running, found.waiting) == ("tiny", 3, 2)
    assert (found.kv_usage, found.generated, found.slots) == (0.5, 40, 4)
    assert found.reports
    assert found.adapters == {
        "acme/default:v1": Residency(level="host", rank=4),
        "acme/default:v2": Residency(level="slot", pinned=True, rank=4),
    }
    assert found.dropped == 0


async def test_where_nothing_is_resident_that_is_told(start_server, adapter_dir):
    server = await start_server(adapter_dir=str(adapter_dir))
    found = read_metrics((await server.http.get("/metrics")).content)
    assert found.reports
    assert (found.adapters, found.slots) == ({}, 4)


async def test_a_server_listed_as_a_pod_is_seen_as_by_its_state_stream(
    watch, start_server, adapter_dir, endpoint_of
):
    server = await start_server(adapter_dir=str(adapter_dir))
    await server.complete(model="acme:v1")
    endpoint = endpoint_of(server, "m")
    pod = replace(endpoint, name="p", engine="vllm", control_port=None)
    watched = await watch(endpoint, pod, scrape_interval_s=0.01)
    told = await watched.replica("m", lambda one: one.adapters)
    read = await watched.replica("p", lambda one: one.adapters)
    assert (read.ready, read.reports, read.slots) == (True, True, told.slots)
    assert {name: (at.level, at.rank) for name, at in read.adapters.items()} == {
        name: (at.level, at.rank) for name, at in told.adapters.items()
    }
