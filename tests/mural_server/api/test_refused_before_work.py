"""Which refusals tell a router that another replica may be asked at once."""

from __future__ import annotations

from mural_resolvers.errors import Unavailable

BODY = {"model": "tiny", "prompt": "x"}


async def test_a_server_that_takes_no_more_says_that_another_may_be_asked(start_server):
    server = await start_server()
    server.state.admission.close("The server is shutting down.")
    answer = await server.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503
    assert answer.headers["x-mural-retry"] == "elsewhere"
    assert answer.json()["error"]["code"] == "unavailable"


async def test_an_adapter_that_could_not_be_loaded_would_be_as_cold_elsewhere(
    start_server, engine, adapter_dir
):
    engine.refusals["acme:v1"] = Unavailable("The adapter could not be loaded in time.")
    server = await start_server(adapter_dir=str(adapter_dir))
    answer = await server.http.post("/v1/completions", json=BODY | {"model": "acme:v1"})
    assert answer.status_code == 503
    assert "x-mural-retry" not in answer.headers
