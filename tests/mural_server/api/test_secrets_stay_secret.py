"""A key is sent to every place that takes anything, and then looked for in all that was written."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mural_resolvers.tenants import mint_key

ACME, ADMIN, WRONG = (mint_key() for _ in range(3))
# Right id, another secret: what is sent by mistake or to guess is nobody else's business either.
GUESS = f"mural_{ACME.key_id}_{WRONG.key[-43:]}"
CANARIES = (ACME.key, ADMIN.key, GUESS)
ADMIN_BY_FLAG = "an-admin-s-key-on-the-command-line"
CONTROL_TOKEN = "the-token-of-the-control-api"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Everything that any logger of the server says at debug, before it is redacted."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    # This test's own client tells what it sends.
    handler.addFilter(lambda record: not record.name.startswith(("httpx", "httpcore")))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(before)


@pytest.fixture
async def server(start_server, adapter_dir, tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text(
        json.dumps(
            {
                "tenants": [
                    {"id": "acme", "keys": [{"id": ACME.key_id, "sha256": ACME.sha256}]},
                ],
                "admin_keys": [{"id": ADMIN.key_id, "sha256": ADMIN.sha256}],
            }
        )
    )
    return await start_server(
        adapter_dir=str(adapter_dir),
        tenants_file=str(file),
        allow_runtime_lora_updating=True,
        api_key=(ADMIN_BY_FLAG,),
        control_token=CONTROL_TOKEN,
        audit_log=str(tmp_path / "audit.jsonl"),
    )


def bodies(key: str, folder: Path) -> Iterator[tuple[str, object]]:
    """A path, and a body that has the key somewhere in it."""
    prompt = {"model": "tiny", "prompt": "x"}
    for model in (key, f"acme:{key}", f"{key}:v1", f"acme/{key}:v1", f"x {key}", "/" * 60 + key):
        yield "/v1/completions", {"model": model, "prompt": "x"}
        yield "/tokenize", {"model": model, "prompt": "x"}
        yield "/detokenize", {"model": model, "tokens": [5]}
    for extra in (
        {key: 1},
        {"stream": key},
        {"user": key},
        {"cache_salt": key},
        {"stop": key},
        {"logit_bias": {key: 1}},
        {"stream_options": {key: key}},
        {"n": key},
    ):
        yield "/v1/completions", prompt | extra
    yield "/v1/completions", {"model": "tiny", "prompt": key * 20}
    yield "/v1/completions", key
    yield "/v1/chat/completions", {"model": "tiny", "messages": [{"role": key, "content": "x"}]}
    yield "/v1/chat/completions", {"model": "acme:v1", "messages": key}
    for name, path in (
        (key, str(folder)),
        ("sql", f"{folder}/{key}"),
        ("sql", f"/{key}"),
        (f"a/{key}", str(folder)),
        (key * 4, str(folder)),
    ):
        yield "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}
        yield "/v1/unload_lora_adapter", {"lora_name": name}
        yield "/v1/pin_lora_adapter", {"lora_name": name}
    yield f"/{key}", {}
    yield f"/v1/completions?api_key={key}", prompt


def heads(key: str) -> Iterator[dict[str, str]]:
    """Headers that have the key in them, rightly or not."""
    yield {"authorization": f"Bearer {key}"}
    for scheme in ("Basic", "Token", "", "Bearer Bearer"):
        yield {"authorization": f"{scheme} {key}".strip()}
    yield {"x-api-key": key, "x-mural-tenant": key, "x-request-id": key, key: "1"}
    yield {"authorization": f"Bearer {key}", "content-type": key}
    yield {"authorization": f"Bearer {key}", "content-encoding": key}


async def send_all(server, key: str, folder: Path) -> list[str]:
    """Send the key everywhere; give the text of every answer that is an error or a list."""
    told: list[str] = []

    def note(response: httpx.Response) -> None:
        if response.status_code >= 400:
            told.extend((response.text, str(response.headers)))

    for path, body in bodies(key, folder):
        for used in {key, ADMIN.key}:
            note(await server.post(path, body, used))
    for headers in heads(key):
        for path in ("/v1/models", f"/v1/models/{key}", f"/v1/models/acme:{key}?key={key}"):
            note(await server.http.get(path, headers=headers))
        note(
            await server.http.post("/v1/completions", content=b"{" + key.encode(), headers=headers)
        )
    told.append(await raw(server.port, f"GET / HTTP/1.1\r\n{key}\r\n\r\n"))
    told.append(await raw(server.port, f"{key} /{key} HTTP/9\r\n\r\n"))
    async with httpx.AsyncClient(base_url=server.control_url, timeout=30) as control:
        for token in (key, CONTROL_TOKEN):
            head = {"authorization": f"Bearer {token}"}
            for name in (key, f"acme:{key}"):
                wanted = {"name": name, "level": "host", "pinned": False}
                note(await control.put("/mural/v1/resident", json=wanted, headers=head))
                note(await control.put("/mural/v1/resident", json={"name": name}, headers=head))
                note(await control.delete(f"/mural/v1/resident/{name}", headers=head))
                note(await control.put("/mural/v1/declared", json={"names": [name]}, headers=head))
            note(await control.get("/mural/v1/state", params={"since": key}, headers=head))
    return told


async def raw(port: int, text: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.encode())
    answer = await reader.read()
    writer.close()
    return answer.decode("latin-1")


async def test_no_secret_is_in_anything_that_was_written(server, adapter_dir, tmp_path, log, capfd):
    # It is a key that works, and the server has something to say.
    asked = {"model": "acme:v1", "prompt": "x"}
    assert (await server.post("/v1/completions", asked, ACME.key)).status_code == 200
    folder = adapter_dir / "acme/default/v1"
    told = [text for key in CANARIES for text in await send_all(server, key, folder)]

    metrics = (await server.http.get("/metrics")).text
    models = (
        await server.http.get("/v1/models", headers={"authorization": f"Bearer {ADMIN.key}"})
    ).text
    await asyncio.to_thread(server.state.audit.flush)
    out, err = capfd.readouterr()
    written = {
        "error bodies": "\n".join(told),
        "log": log.getvalue(),
        "metrics": metrics,
        "models": models,
        "audit": (tmp_path / "audit.jsonl").read_text(),
        "stdout": out,
        "stderr": err,
        "state": repr(server.state.auth) + repr(server.state.auth.tenants.config),
    }

    assert all(written[name] for name in ("error bodies", "log", "metrics", "models", "audit"))
    secrets = [key[-43:] for key in CANARIES]
    # What is left of a key that was cut off would still be most of it.
    found = {
        (name, place)
        for name, text in written.items()
        for place in (*secrets, *(secret[:20] for secret in secrets), ADMIN_BY_FLAG, CONTROL_TOKEN)
        if place in text
    }
    assert not found
