"""An answer says by its digest which content served it."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapters_answer_tells_its_digest_and_the_bases_none(
    start_server, engine, adapter_dir, stream
):
    server = await start_server(adapter_dir=str(adapter_dir))
    body = {"model": "acme:v1", "prompt": "x", "stream": stream}
    answer = await server.http.post("/v1/completions", json=body)
    assert answer.headers["x-mural-digest"] == engine.requests[0].lora.digest
    answer = await server.http.post("/v1/completions", json=body | {"model": "tiny"})
    assert "x-mural-digest" not in answer.headers
