"""Who may use what: keys, namespaces, one 403, and the admin's endpoints."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
import pytest

from mural_resolvers.tenants import Principal, mint_key
from mural_server.api.state import TenantSalts
from mural_server.settings import ServerSettings, SettingsError

ADMIN_KEY = "the-admins-own-key"


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """A key each for acme and globex; ``file`` is where their hashes are."""
    minted = {tenant: mint_key() for tenant in ("acme", "globex")}
    tenants = [
        {"id": tenant, "weight": 2.0, "keys": [{"id": key.key_id, "sha256": key.sha256}]}
        for tenant, key in minted.items()
    ]
    file = tmp_path / "tenants.yaml"
    # JSON is YAML.
    file.write_bytes(msgspec.json.encode({"tenants": tenants}))
    return {tenant: key.key for tenant, key in minted.items()} | {"file": str(file)}


@pytest.fixture
async def keyed(start_server, adapter_dir, keys):
    return await start_server(
        adapter_dir=str(adapter_dir),
        allow_runtime_lora_updating=True,
        tenants_file=keys["file"],
        api_key=(ADMIN_KEY,),
    )


async def test_without_a_valid_key_all_is_401(keyed):
    for headers in (
        [],
        [("authorization", "Bearer nonsense")],
        [("authorization", "Basic dTpw")],
        [("authorization", "Bearer " + "x" * 1000)],
        [("authorization", f"Bearer {ADMIN_KEY}"), ("authorization", "Bearer nonsense")],
        [("x-mural-tenant", "acme")],
    ):
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
        ):
            response = await keyed.http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


async def test_a_foreign_name_is_one_403_whether_or_not_it_exists(keyed, keys):
    bodies = set()
    for model in ("globex:v1", "globex:v9", "nobody:v1", "some-registered-name", "Upper"):
        response = await keyed.post(
            "/v1/completions", {"model": model, "prompt": "x"}, keys["acme"]
        )
        assert response.status_code == 403
        bodies.add(response.text)
    assert len(bodies) == 1
    assert keyed.engine.loads == []


async def test_a_loaded_foreign_adapter_is_403_too(keyed, keys):
    own = await keyed.post("/v1/completions", {"model": "globex:v1", "prompt": "x"}, keys["globex"])
    assert own.status_code == 200
    foreign = await keyed.post(
        "/v1/completions", {"model": "globex:v1", "prompt": "x"}, keys["acme"]
    )
    assert foreign.status_code == 403


async def test_an_unknown_name_in_ones_own_namespace_is_404(keyed, keys):
    response = await keyed.post(
        "/v1/completions", {"model": "acme:v9", "prompt": "x"}, keys["acme"]
    )
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_models_lists_only_what_the_caller_may_use(keyed, keys):
    for tenant in ("acme", "globex"):
        await keyed.post("/v1/completions", {"model": f"{tenant}:v1", "prompt": "x"}, keys[tenant])

    async def listed(key: str) -> list[dict]:
        headers = {"authorization": f"Bearer {key}"}
        return (await keyed.http.get("/v1/models", headers=headers)).json()["data"]

    assert [card["id"] for card in await listed(keys["acme"])] == ["tiny", "tiny-alias", "acme:v1"]
    everything = await listed(ADMIN_KEY)
    assert [card["id"] for card in everything][2:] == ["acme:v1", "globex:v1"]
    assert everything[2]["root"].endswith("acme/default/v1")
    # Where things lie on the server is not a tenant's business.
    assert (await listed(keys["acme"]))[2]["root"] == "acme:v1"


async def test_tenant_weight_and_salt_travel_into_the_engine(keyed, keys):
    for tenant, salt in (("acme", None), ("globex", None), ("acme", "more")):
        body = {"model": "tiny", "prompt": "x"} | ({"cache_salt": salt} if salt else {})
        assert (await keyed.post("/v1/completions", body, keys[tenant])).status_code == 200
    first, second, third = keyed.engine.requests
    assert (first.tenant, first.weight) == ("acme", 2.0)
    assert len({first.salt, second.salt, third.salt}) == 3


async def test_router_headers_are_not_believed(keyed, keys):
    response = await keyed.http.post(
        "/v1/completions",
        json={"model": "globex:v1", "prompt": "x"},
        headers={"authorization": f"Bearer {keys['acme']}", "x-mural-tenant": "globex"},
    )
    assert response.status_code == 403


@pytest.mark.parametrize("endpoint", ["load", "unload", "pin", "unpin"])
async def test_loading_asks_for_an_admin_key(keyed, keys, endpoint, adapter_dir):
    path = f"/v1/{endpoint}_lora_adapter"
    body = {"lora_name": "sql"}
    if endpoint == "load":
        body["lora_path"] = str(adapter_dir / "acme/default/v1")
    assert (await keyed.post(path, body)).status_code == 401
    assert (await keyed.post(path, body, keys["acme"])).status_code == 403
    if endpoint == "load":
        assert (await keyed.post(path, body, ADMIN_KEY)).status_code == 200


async def test_a_registered_name_is_its_owners_until_it_is_shared(keyed, keys, adapter_dir):
    body = {"lora_name": "sql", "lora_path": str(adapter_dir / "acme/default/v1")}
    await keyed.post("/v1/load_lora_adapter", body, ADMIN_KEY)
    asked = {"model": "sql", "prompt": "x"}
    assert (await keyed.post("/v1/completions", asked, keys["acme"])).status_code == 403
    shared = body | {"shared": True, "load_inplace": True}
    await keyed.post("/v1/load_lora_adapter", shared, ADMIN_KEY)
    assert (await keyed.post("/v1/completions", asked, keys["acme"])).status_code == 200


async def test_probes_need_no_key(keyed):
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert (await keyed.http.get(path)).status_code == 200


async def test_loading_is_off_by_default(start_server):
    server = await start_server()
    response = await server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"})
    assert response.status_code == 404
    assert "--allow-runtime-lora-updating" in response.json()["error"]["message"]


def test_a_salt_is_of_its_tenant_and_of_this_process():
    acme, globex = Principal(tenant="acme"), Principal(tenant="globex")
    salts = TenantSalts(b"secret")
    assert salts.salt(acme, None) == TenantSalts(b"secret").salt(acme, None)
    assert salts.salt(acme, None) != salts.salt(globex, None)
    assert salts.salt(acme, None) != TenantSalts(b"other").salt(acme, None)
    assert salts.salt(acme, "a") != salts.salt(acme, "b")


def test_open_auth_listens_on_loopback_unless_told_otherwise():
    assert ServerSettings().resolved_host == "127.0.0.1"
    assert ServerSettings(host="0.0.0.0").resolved_host == "0.0.0.0"
    assert ServerSettings(api_key=("12345678",)).resolved_host == "0.0.0.0"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"auth": "keys"}, "--tenants-file"),
        ({"auth": "open", "api_key": ("12345678",)}, "--auth open"),
        ({"control_host": "0.0.0.0"}, "token"),
        ({"port": 8001}, "--control-port"),
        ({"ssl_certfile": "/x"}, "--ssl-keyfile"),
        ({"adapter_dir": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_settings_that_cannot_work_say_what_to_change(settings, word):
    with pytest.raises(SettingsError, match=word):
        ServerSettings(**settings).validate()


async def test_secrets_are_in_no_metric(keyed, keys):
    await keyed.post("/v1/completions", {"model": "acme:v1", "prompt": "x"}, keys["acme"])
    text = (await httpx.AsyncClient().get(f"{keyed.url}/metrics")).text
    assert keys["acme"] not in text
    assert ADMIN_KEY not in text
