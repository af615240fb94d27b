"""The tenants file in a running server: rights, revocation, expiry, limits."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.tenants import MintedKey, TenantsFile, mint_key
from mural_server.api.auth import Authenticator

ADMIN_KEY = "the-admins-own-key"
NAMES = ("acme", "globex", "limited", "admin", "expired")
KEYS = {name: mint_key() for name in NAMES}
SENT = {name: key.key for name, key in KEYS.items()} | {
    "none": None,
    "unknown": "mural_00000000_" + "A" * 43,
    "wrong": KEYS["acme"].key[:-1] + ("A" if KEYS["acme"].key[-1] != "A" else "B"),
    "flag": ADMIN_KEY,
}


def tenant(name: str, **fields: object) -> dict[str, object]:
    return {"id": name, "keys": [record(KEYS[name])], **fields}


def record(key: MintedKey, **fields: object) -> dict[str, object]:
    return {"id": key.key_id, "sha256": key.sha256, **fields}


def write_tenants(path: Path, *tenants: dict[str, object], **more: object) -> None:
    # JSON is YAML.
    path.write_text(json.dumps({"tenants": tenants, **more}))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    expired = record(KEYS["expired"], expires="2020-01-01")
    write_tenants(
        path,
        {"id": "acme", "keys": [record(KEYS["acme"]), expired]},
        tenant("globex"),
        admin_keys=[record(KEYS["admin"])],
    )
    return path


@pytest.fixture
async def keyed(start_server, adapter_dir, file):
    return await start_server(
        adapter_dir=str(adapter_dir),
        tenants_file=str(file),
        allow_runtime_lora_updating=True,
        api_key=(ADMIN_KEY,),
    )


@pytest.fixture
async def serve(start_server, adapter_dir, file):
    """``await serve(*tenants)``: a server with that tenants file."""

    async def start(*tenants, **settings):
        write_tenants(file, *tenants)
        return await start_server(adapter_dir=str(adapter_dir), tenants_file=str(file), **settings)

    return start


async def ask(server, tenant_name: str, model: str = "tiny", **body) -> httpx.Response:
    body = {"model": model, "prompt": "x"} | body
    return await server.post("/v1/completions", body, KEYS[tenant_name].key)


class Gated:
    """Stands in front of the directory: counts what is asked, and lets nothing by at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        resolve = DirectoryResolver.resolve

        async def gated(resolver, principal, name, base):
            self.asked.append(name.short)
            self.arrived.set()
            await self.gate.wait()
            return await resolve(resolver, principal, name, base)

        monkeypatch.setattr(DirectoryResolver, "resolve", gated)


@pytest.mark.parametrize(
    ("who", "model", "status"),
    [
        ("none", "tiny", 401),
        ("none", "acme:v1", 401),
        ("unknown", "acme:v1", 401),
        ("wrong", "acme:v1", 401),
        ("expired", "acme:v1", 401),
        ("acme", "tiny", 200),
        ("acme", "acme:v1", 200),
        ("acme", "acme:v9", 404),
        ("acme", "acme/other:v1", 404),
        ("acme", "globex:v1", 403),
        ("acme", "globex:v9", 403),
        ("acme", "nobody:v1", 403),
        ("acme", "registered", 403),
        ("acme", "acme:..", 400),
        ("globex", "globex:v1", 200),
        ("globex", "acme:v1", 403),
        ("admin", "globex:v1", 200),
        ("admin", "nobody:v1", 404),
        ("flag", "acme:v1", 200),
    ],
)
async def test_who_gets_what(keyed, who, model, status):
    response = await keyed.post("/v1/completions", {"model": model, "prompt": "x"}, SENT[who])

    assert response.status_code == status


async def test_another_s_adapter_is_one_403_in_every_state_and_asks_no_source(keyed, monkeypatch):
    sources, bodies = Gated(monkeypatch), set()

    async def refused() -> None:
        response = await ask(keyed, "acme", "globex:v1")
        assert response.status_code == 403
        bodies.add(response.text)

    await refused()  # never heard of
    assert sources.asked == []
    owner = asyncio.create_task(ask(keyed, "globex", "globex:v1"))
    await sources.arrived.wait()
    await refused()  # being looked up
    keyed.engine.load_gate = asyncio.Event()
    sources.gate.set()
    await keyed.engine.loading.wait()
    await refused()  # being loaded
    keyed.engine.load_gate.set()
    assert (await owner).status_code == 200
    await refused()  # resident
    assert (await ask(keyed, "globex", "globex:v9")).status_code == 404
    response = await ask(keyed, "acme", "globex:v9")  # known to be absent
    assert response.status_code == 403
    bodies.add(response.text)

    assert len(bodies) == 1
    assert sources.asked == ["globex:v1", "globex:v9"]


async def test_a_grant_and_a_public_adapter_open_what_they_name(serve):
    server = await serve(
        tenant("acme", grants=["globex:v1"], public=["default:v2"]), tenant("globex")
    )

    assert (await ask(server, "acme", "globex:v1")).status_code == 200
    assert (await ask(server, "globex", "acme:v2")).status_code == 200
    assert (await ask(server, "globex", "acme:v1")).status_code == 403
    headers = {"authorization": f"Bearer {KEYS['globex'].key}"}
    listed = (await server.http.get("/v1/models", headers=headers)).json()["data"]
    assert [card["id"] for card in listed] == [*("tiny", "tiny-alias", "globex:v1", "acme:v2")]


async def test_a_tenant_without_the_base_does_not_see_or_get_it(serve):
    server = await serve(tenant("acme", base=False), tenant("globex"))
    foreign = await ask(server, "acme", "globex:v1")
    headers = {"authorization": f"Bearer {KEYS['acme'].key}"}

    for model in ("tiny", "tiny-alias"):
        response = await ask(server, "acme", model)
        assert (response.status_code, response.text) == (403, foreign.text)
        one = await server.http.get(f"/v1/models/{model}", headers=headers)
        assert one.status_code == 403
        tokens = await server.post("/tokenize", {"model": model, "prompt": "x"}, KEYS["acme"].key)
        assert tokens.status_code == 403
    assert (await ask(server, "acme", "acme:v1")).status_code == 200
    listed = (await server.http.get("/v1/models", headers=headers)).json()["data"]
    assert [card["id"] for card in listed] == ["acme:v1"]
    assert (await ask(server, "globex", "tiny")).status_code == 200


async def test_a_revoked_key_ends_on_an_open_connection(keyed, file):
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    async with httpx.AsyncClient(base_url=keyed.url, limits=limits, timeout=30) as client:
        headers = {"authorization": f"Bearer {KEYS['acme'].key}"}
        first = await client.get("/v1/models", headers=headers)
        assert first.status_code == 200
        changed = asyncio.create_task(keyed.state.auth.tenants.wait_change())
        await asyncio.sleep(0)
        write_tenants(file, tenant("globex"))
        # The server watches by itself; nobody tells it.
        await asyncio.wait_for(changed, timeout=30)

        after = await client.get("/v1/models", headers=headers)

        assert after.status_code == 401
        streams = [r.extensions["network_stream"] for r in (first, after)]
        assert len({stream.get_extra_info("client_addr") for stream in streams}) == 1


async def test_a_stream_that_runs_outlives_its_key(keyed, file):
    keyed.engine.gate = asyncio.Event()
    asked = asyncio.create_task(ask(keyed, "acme", stream=True))
    await keyed.engine.stepped.wait()
    write_tenants(file, tenant("globex"))
    for _ in range(2):
        await keyed.state.auth.tenants.poll()

    keyed.engine.gate.set()

    assert (await asked).text.endswith("data: [DONE]\n\n")
    assert (await ask(keyed, "acme")).status_code == 401


async def test_a_bad_file_changes_nothing_and_shows_in_the_metrics(keyed, file):
    async def stale() -> str:
        text = (await keyed.http.get("/metrics")).text
        (line,) = [x for x in text.splitlines() if x.startswith("mural:tenants_file_stale")]
        return line.split()[-1]

    assert await stale() == "0.0"
    file.write_text("tenants: [{id: Acme}]")
    for _ in range(2):
        await keyed.state.auth.tenants.poll()

    assert (await ask(keyed, "acme")).status_code == 200
    assert await stale() == "1.0"


async def test_a_key_ends_at_its_time_whatever_is_open(keyed, file):
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    expiring = record(KEYS["acme"], expires="2026-01-02T00:00:00Z")
    write_tenants(file, {"id": "acme", "keys": [expiring]})
    keyed.state.auth = Authenticator("keys", tenants=TenantsFile(file), clock=lambda: now[0])

    assert (await ask(keyed, "acme")).status_code == 200
    now[0] = datetime(2026, 1, 2, tzinfo=UTC)
    assert (await ask(keyed, "acme")).status_code == 401


# -- limits ---------------------------------------------------------------------------------------


def assert_limited(response: httpx.Response, word: str, most_s: int) -> None:
    assert response.status_code == 429
    error = response.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert error["type"] == "rate_limit_error"
    assert word in error["message"]
    assert 1 <= int(response.headers["retry-after"]) <= most_s


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_a_minute_are_bounded_for_the_tenant_and_for_nobody_else(serve, stream):
    server = await serve(tenant("limited", limits={"requests_per_minute": 2}), tenant("globex"))
    for _ in range(2):
        assert (await ask(server, "limited", stream=stream)).status_code == 200

    assert_limited(await ask(server, "limited", stream=stream), "2 requests a minute", 61)
    tokenized = await server.post(
        "/tokenize", {"model": "tiny", "prompt": "x"}, KEYS["limited"].key
    )
    assert_limited(tokenized, "2 requests a minute", 61)
    one = await server.http.get(
        "/v1/models/tiny", headers={"authorization": f"Bearer {KEYS['limited'].key}"}
    )
    assert_limited(one, "2 requests a minute", 61)
    assert (await ask(server, "globex", stream=stream)).status_code == 200
    text = (await server.http.get("/metrics")).text
    assert 'mural:rate_limited_total{limit="requests"} 3.0' in text


async def test_tokens_a_minute_are_what_was_really_used(serve):
    server = await serve(tenant("limited", limits={"tokens_per_minute": 20}))
    # One token a byte: 1 of the prompt, 11 of the answer and its end. max_tokens is not charged.
    first = await ask(server, "limited", max_tokens=200)
    assert first.json()["usage"]["total_tokens"] == 13
    assert (await ask(server, "limited")).status_code == 200

    assert_limited(await ask(server, "limited"), "20 tokens a minute", 61)


async def test_tokens_count_while_an_answer_still_runs(serve, engine):
    server = await serve(tenant("limited", limits={"tokens_per_minute": 5}))
    engine.gate = asyncio.Event()
    running = asyncio.create_task(ask(server, "limited", stream=True))
    await engine.stepped.wait()
    # The first step's five tokens are there, the rest of the answer is not.
    await asyncio.sleep(0)

    response = await ask(server, "limited")

    assert_limited(response, "5 tokens a minute", 61)
    engine.gate.set()
    assert (await running).status_code == 200


async def test_sequences_at_one_time_are_bounded(serve, engine):
    server = await serve(tenant("limited", limits={"concurrency": 2}))
    engine.gate = asyncio.Event()
    running = asyncio.create_task(ask(server, "limited", n=2))
    await engine.stepped.wait()

    assert_limited(await ask(server, "limited"), "2 sequences at one time", 1)
    assert (await ask(server, "limited", n=3)).status_code == 400
    engine.gate.set()
    assert (await running).status_code == 200
    assert (await ask(server, "limited", n=2)).status_code == 200


async def test_a_client_that_leaves_gives_its_place_back(serve, engine):
    server = await serve(tenant("limited", limits={"concurrency": 1}))
    engine.gate = asyncio.Event()
    running = asyncio.create_task(ask(server, "limited", stream=True))
    await engine.stepped.wait()
    running.cancel()
    await engine.aborts.wait()
    engine.gate.set()
    await server.state.admission.wait_idle()

    assert (await ask(server, "limited")).status_code == 200


# -- audit ----------------------------------------------------------------------------------------


@pytest.fixture
async def audited(start_server, adapter_dir, file, tmp_path):
    server = await start_server(
        adapter_dir=str(adapter_dir),
        tenants_file=str(file),
        allow_runtime_lora_updating=True,
        audit_log=str(tmp_path / "audit.jsonl"),
    )

    async def lines() -> list[tuple[str, str | None, str | None, bool, str]]:
        await asyncio.to_thread(server.state.audit.flush)
        found = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
        return [
            (x["action"], x["name"], x["key_id"], x["digest"] is not None, x["result"])
            for x in found
        ]

    return server, lines


async def test_what_admins_do_is_noted_with_its_result(audited, adapter_dir):
    server, lines = audited
    key, who = KEYS["admin"].key, KEYS["admin"].key_id
    load = {"lora_name": "sql", "lora_path": str(adapter_dir / "acme/default/v1")}
    for path, body in (
        ("load", load),
        ("load", load),
        ("pin", {"lora_name": "sql"}),
        ("unpin", {"lora_name": "sql"}),
        ("unload", {"lora_name": "sql"}),
        ("unload", {"lora_name": "sql"}),
    ):
        await server.post(f"/v1/{path}_lora_adapter", body, key)
    async with httpx.AsyncClient(base_url=server.control_url) as control:
        wanted = {"name": "acme:v1", "level": "host", "pinned": False}
        await control.put("/mural/v1/resident", json=wanted)
        await control.put("/mural/v1/resident", json=wanted | {"name": "acme:v9"})
        await control.put("/mural/v1/declared", json={"names": ["acme:v1"]})
        await control.delete("/mural/v1/resident/acme:v1")
        await control.post("/mural/v1/drain")

    assert await lines() == [
        ("load", "sql", who, True, "ok"),
        ("load", "sql", who, False, "already_loaded"),
        ("pin", "sql", who, True, "ok"),
        ("unpin", "sql", who, True, "ok"),
        ("unload", "sql", who, True, "ok"),
        ("unload", "sql", who, False, "model_not_found"),
        ("make_resident", "acme:v1", "operator", True, "ok"),
        ("make_resident", "acme:v9", "operator", False, "model_not_found"),
        ("declare", "1 names", "operator", False, "ok"),
        ("remove_resident", "acme:v1", "operator", True, "ok"),
        ("drain", None, "operator", False, "ok"),
    ]


async def test_an_audit_log_that_cannot_be_written_fails_no_request(audited, adapter_dir, tmp_path):
    server, _ = audited
    (tmp_path / "audit.jsonl").mkdir()
    body = {"lora_name": "sql", "lora_path": str(adapter_dir / "acme/default/v1")}

    response = await server.post("/v1/load_lora_adapter", body, KEYS["admin"].key)

    assert response.status_code == 200
    await asyncio.to_thread(server.state.audit.flush)
    text = (await server.http.get("/metrics")).text
    assert 'mural:audit_records_total{result="failed"} 1.0' in text


async def test_a_grant_of_an_alias_shows_the_model_that_it_means(serve, adapter_dir):
    aliases = {"stable": [{"version": "v1"}]}
    (adapter_dir / "globex/default/_aliases.json").write_text(json.dumps(aliases))
    server = await serve(tenant("acme", grants=["globex:stable"]), tenant("globex"))
    headers = {"authorization": f"Bearer {SENT['acme']}"}
    shown = await server.http.get("/v1/models/globex:stable", headers=headers)
    exact = await server.http.get("/v1/models/globex:v1", headers=headers)
    assert (shown.status_code, shown.json()["id"]) == (200, "globex:v1")
    assert exact.status_code == 403
