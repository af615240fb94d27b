"""``--auth router``: who is believed, what a router's word is good for, and who is not one."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import msgspec
import pytest
import trustme

import mural_resolvers.file_watch
from mural_resolvers.tenants import mint_key
from mural_server.commands import server_settings
from mural_server.settings import ServerSettings, SettingsError

TOKEN = "the-routers-own-token"
ROUTER = {"authorization": f"Bearer {TOKEN}"}
ACME = ROUTER | {"x-mural-tenant": "acme", "x-mural-weight": "2.5"}
BASE = {"model": "tiny", "prompt": "x"}


@pytest.fixture
async def routed(start_server, adapter_dir):
    return await start_server(
        auth="router",
        router_token=TOKEN,
        adapter_dir=str(adapter_dir),
        allow_runtime_lora_updating=True,
    )


async def ask(server, model: str, headers: dict[str, str]) -> httpx.Response:
    return await server.http.post(
        "/v1/completions", json={"model": model, "prompt": "x"}, headers=headers
    )


async def test_a_routers_word_gives_tenant_and_weight(routed):
    assert (await ask(routed, "acme:v1", ACME)).status_code == 200
    (request,) = routed.engine.requests
    assert (request.tenant, request.weight) == ("acme", 2.5)


async def test_what_the_router_has_authorised_is_not_refused_again(routed):
    for model in ("globex:v1", "tiny"):
        assert (await ask(routed, model, ACME)).status_code == 200
    assert (await ask(routed, "globex:v1", ROUTER)).status_code == 200


async def test_without_a_tenant_it_is_nobodys_request(routed):
    assert (await ask(routed, "tiny", ROUTER)).status_code == 200
    assert routed.engine.requests[0].tenant == ""


async def test_tenants_keep_salts_of_their_own(routed):
    for tenant in ("acme", "globex", "acme"):
        assert (await ask(routed, "tiny", ACME | {"x-mural-tenant": tenant})).status_code == 200
    salts = [request.salt for request in routed.engine.requests]
    assert salts[0] == salts[2] != salts[1]


@pytest.mark.parametrize(
    "headers",
    [
        [("x-mural-tenant", "acme")],
        [("x-mural-tenant", "acme"), ("authorization", "Bearer the-routers-own-toke")],
        [("x-mural-tenant", "acme"), ("authorization", f"Basic {TOKEN}")],
        [("x-mural-tenant", "acme"), ("authorization", TOKEN)],
        [("x-mural-tenant", "acme"), ("authorization", "Bearer")],
        [("x-mural-tenant", "acme"), ("authorization", "Bearer " + "x" * 5_000)],
        [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
        [("x-mural-token", TOKEN)],
        [("x-forwarded-client-cert", "URI=spiffe://router"), ("x-mural-tenant", "acme")],
        [],
    ],
)
async def test_whoever_is_not_the_router_is_401_whatever_it_says(routed, headers):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await routed.http.post(path, json=BASE, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert (await routed.http.get("/v1/models", headers=headers)).status_code == 401
    load = {"lora_name": "sql", "lora_path": "/x"}
    response = await routed.http.post("/v1/load_lora_adapter", json=load, headers=headers)
    assert response.status_code == 401
    assert routed.engine.requests == []
    assert routed.engine.loads == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-mural-tenant", "Not A Tenant"),
        ("x-mural-tenant", ""),
        ("x-mural-tenant", "acme\u00e9"),
        ("x-mural-tenant", "../acme"),
        ("x-mural-weight", "0"),
        ("x-mural-weight", "-1"),
        ("x-mural-weight", "nan"),
        ("x-mural-weight", "inf"),
        ("x-mural-weight", "1e9"),
        ("x-mural-weight", "1_0"),
        ("x-mural-weight", ""),
        ("x-mural-digest", "abc"),
        ("x-mural-digest", "G" * 64),
    ],
)
async def test_a_header_that_no_router_sends_is_400(routed, name, value):
    headers = {key: text.encode("latin-1") for key, text in (ACME | {name: value}).items()}
    response = await ask(routed, "acme:v1", headers)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_a_header_sent_twice_is_400(routed):
    headers = [*ROUTER.items(), ("x-mural-tenant", "acme"), ("x-mural-tenant", "globex")]
    response = await routed.http.post("/v1/completions", json=BASE, headers=headers)
    assert response.status_code == 400


@pytest.mark.parametrize("weight", ["1", "0.25", "2.5", "1e+06", "1e-05", "100000"])
async def test_every_weight_that_a_router_writes_is_read(routed, weight):
    assert (await ask(routed, "tiny", ACME | {"x-mural-weight": weight})).status_code == 200
    assert routed.engine.requests[0].weight == float(weight)


async def test_other_content_than_the_router_was_told_is_409(routed):
    assert (await ask(routed, "acme:v1", ACME)).status_code == 200
    digest = routed.engine.loads[0].digest
    assert (await ask(routed, "acme:v1", ACME | {"x-mural-digest": digest})).status_code == 200
    other = ACME | {"x-mural-digest": "0" * 64}
    before = len(routed.engine.requests)
    for path in ("/v1/completions", "/tokenize", "/v1/chat/completions"):
        body: dict[str, object] = {"model": "acme:v1", "prompt": "x"}
        if "chat" in path:
            body = {"model": "acme:v1", "messages": [{"role": "user", "content": "x"}]}
        response = await routed.http.post(path, json=body, headers=other)
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "conflict"
    assert len(routed.engine.requests) == before
    # The base has no content of its own to compare.
    assert (await ask(routed, "tiny", other)).status_code == 200


async def test_a_router_is_no_admin(routed, adapter_dir):
    body = {"lora_name": "sql", "lora_path": str(adapter_dir / "acme/default/v1")}
    response = await routed.http.post("/v1/load_lora_adapter", json=body, headers=ACME)
    assert response.status_code == 403


async def test_a_list_holds_the_tenants_own_names_alone(routed):
    for model in ("acme:v1", "globex:v1"):
        await ask(routed, model, ACME)
    listed = (await routed.http.get("/v1/models", headers=ACME)).json()["data"]
    assert [card["id"] for card in listed] == ["tiny", "tiny-alias", "acme:v1"]


async def test_uploads_stay_in_the_tenants_own_namespace(start_server, tmp_path):
    (tmp_path / "store").mkdir()
    server = await start_server(
        auth="router",
        router_token=TOKEN,
        upload_store=str(tmp_path / "store"),
        upload_dir=str(tmp_path / "incoming"),
    )
    own = await server.http.get("/v1/adapters/acme:v1", headers=ACME)
    foreign = await server.http.get("/v1/adapters/globex:v1", headers=ACME)
    nobody = await server.http.get("/v1/adapters/globex:v1", headers=ROUTER)
    assert [own.status_code, foreign.status_code, nobody.status_code] == [404, 403, 403]


async def test_the_tenants_file_says_which_sources_a_tenant_may_use(
    start_server, adapter_dir, tmp_path
):
    file = tmp_path / "tenants.yaml"
    key = mint_key()
    tenants = [
        {
            "id": "acme",
            "sources": ["elsewhere"],
            "limits": {"requests_per_minute": 1},
            "keys": [{"id": key.key_id, "sha256": key.sha256}],
        }
    ]
    file.write_bytes(msgspec.json.encode({"tenants": tenants}))
    server = await start_server(
        auth="router", router_token=TOKEN, adapter_dir=str(adapter_dir), tenants_file=str(file)
    )
    assert (await ask(server, "acme:v1", ACME)).status_code in (403, 404)
    globex = ACME | {"x-mural-tenant": "globex"}
    assert (await ask(server, "globex:v1", globex)).status_code == 200
    # Requests a minute are counted where the whole fleet's are seen, and keys are the router's.
    for _ in range(3):
        assert (await ask(server, "tiny", ACME)).status_code == 200
    bearer = {"authorization": f"Bearer {key.key}"}
    assert (await ask(server, "tiny", bearer)).status_code == 401


async def test_probes_and_metrics_need_no_proof(routed):
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert (await routed.http.get(path)).status_code == 200


# -- client certificates --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def mutual(start_server, authority, tmp_path):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    for place, pem in enumerate(own.cert_chain_pems):
        pem.write_to_path(tmp_path / "cert.pem", append=place > 0)
    return await start_server(
        auth="router",
        router_cert_name=("router.example", "spiffe://example/router"),
        ssl_certfile=str(tmp_path / "cert.pem"),
        ssl_keyfile=str(tmp_path / "key.pem"),
        ssl_ca_certs=str(tmp_path / "ca.pem"),
    )


def context_of(trusted: trustme.CA, issuer: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    trusted.configure_trust(context)
    if names:
        issuer.issue_cert(*names).configure_cert(context)
    return context


async def status_with(server, context: ssl.SSLContext, headers: dict[str, str]) -> int:
    url = server.url.replace("http:", "https:")
    async with httpx.AsyncClient(base_url=url, verify=context, timeout=20) as client:
        statuses = {
            (await client.post("/v1/completions", json=BASE, headers=headers)).status_code
            for _ in range(2)
        }
    (status,) = statuses
    return status


async def test_a_certificate_of_the_router_proves_it_and_no_other_does(mutual, authority):
    tenant = {"x-mural-tenant": "acme"}
    router = context_of(authority, authority, "router.example")
    assert await status_with(mutual, router, tenant) == 200
    assert mutual.engine.requests[0].tenant == "acme"
    for names in ((), ("tenant.example",), ("router.example.evil.example",), ("*.example",)):
        other = context_of(authority, authority, *names)
        assert await status_with(mutual, other, tenant) == 401
        assert await status_with(mutual, other, tenant | ROUTER) == 401


async def test_a_certificate_of_another_authority_gets_no_connection(mutual, authority):
    stranger = context_of(authority, trustme.CA(), "router.example")
    with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
        await status_with(mutual, stranger, {"x-mural-tenant": "acme"})
    assert mutual.engine.requests == []


async def test_a_running_server_takes_a_router_token_whose_file_has_changed(
    start_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(mural_resolvers.file_watch, "POLL_S", 0.01)
    file = tmp_path / "token"
    await asyncio.to_thread(file.write_text, TOKEN)
    server = await start_server(auth="router", router_token=TOKEN, router_token_file=str(file))
    renewed = {"authorization": "Bearer the-renewed-token", "x-mural-tenant": "acme"}
    assert (await ask(server, "tiny", renewed)).status_code == 401
    await asyncio.to_thread(file.write_text, "")
    await asyncio.to_thread(file.write_text, "the-renewed-token\n")
    async with asyncio.timeout(20):
        while (await ask(server, "tiny", renewed)).status_code == 401:
            pass
    assert (await ask(server, "tiny", renewed)).status_code == 200
    assert (await ask(server, "tiny", ACME)).status_code == 200, "routers learn of it later"


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"auth": "router"}, "--router-token-file"),
        ({"router_token": TOKEN}, "--auth router"),
        ({"auth": "keys", "api_key": ("12345678",), "router_token": TOKEN}, "--auth router"),
        ({"auth": "router", "router_token": TOKEN, "api_key": ("12345678",)}, "--api-key"),
        ({"auth": "router", "router_token": "short"}, "16"),
        ({"auth": "router", "router_cert_name": ("a",)}, "--ssl-ca-certs"),
        ({"ssl_ca_certs": __file__}, "--ssl-certfile"),
    ],
)
def test_router_settings_that_cannot_work_say_what_to_change(settings, word):
    with pytest.raises(SettingsError, match=word):
        ServerSettings(**settings).validate()


def test_router_auth_listens_for_other_machines():
    assert ServerSettings(auth="router", router_token=TOKEN).resolved_host == "0.0.0.0"


def test_the_token_comes_from_its_file_before_the_environment(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    environment = {"MURAL_ROUTER_TOKEN": "of-the-environment"}
    given: dict[str, object] = {"auth": "router"}
    assert server_settings(given, environment).router_token == "of-the-environment"
    given["router_token_file"] = str(file)
    assert server_settings(given, environment).router_token == TOKEN
    given["router_token_file"] = str(tmp_path / "absent")
    with pytest.raises(SettingsError, match="--router-token-file"):
        server_settings(given, {})
