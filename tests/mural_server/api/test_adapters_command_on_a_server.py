"""``mural adapters`` against a running server: what a tenant can do with its own key."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mural_resolvers.manifest import build_manifest
from mural_resolvers.tenants import mint_key

KEYS = {name: mint_key() for name in ("acme", "globex")}
PROGRAM = Path(sys.executable).with_name("mural")


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Mural = Callable[..., Awaitable[Ran]]


@pytest.fixture
async def server(start_server, tmp_path: Path):
    (tmp_path / "store").mkdir()
    tenants = [
        {"id": name, "keys": [{"id": key.key_id, "sha256": key.sha256}]}
        for name, key in KEYS.items()
    ]
    # JSON is YAML.
    (tmp_path / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
    return await start_server(
        tenants_file=str(tmp_path / "tenants.yaml"),
        upload_store=str(tmp_path / "store"),
        upload_dir=str(tmp_path / "quarantine"),
    )


@pytest.fixture
def mural(server) -> Mural:
    """Run the installed ``mural adapters …`` with a tenant's key in its environment."""

    async def run(*argv: object, key: str | None = KEYS["acme"].key) -> Ran:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MURAL_")}
        environment["MURAL_STORE"] = server.url
        if key is not None:
            environment["MURAL_API_KEY"] = key
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            "adapters",
            *map(str, argv),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 100)
        return Ran(process.returncode or 0, out.decode(), err.decode())

    return run


@pytest.fixture
def adapter(make_adapter, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "trained", 1)


async def test_a_pushed_adapter_answers(mural: Mural, server, adapter: Path) -> None:
    (adapter / "optimizer.pt").write_text("x")

    pushed = await mural("push", adapter, "acme:v1", "--json")
    answer = await server.post(
        "/v1/completions", {"model": "acme:v1", "prompt": "Hi"}, KEYS["acme"].key
    )

    assert pushed.status == 0, pushed.err
    assert pushed.json["created"] is True
    assert pushed.json["digest"] == build_manifest(adapter).digest
    assert pushed.json["store"] == server.url
    assert pushed.json["left_out"] == ["optimizer.pt"]
    assert answer.status_code == 200
    assert answer.json()["model"] == "acme:v1"


async def test_the_same_content_is_there_already_and_other_content_is_refused(
    mural: Mural, adapter: Path, make_adapter, tmp_path: Path
) -> None:
    await mural("push", adapter, "acme/sql:v1")

    again = await mural("push", adapter, "acme/sql:v1", "--json")
    other = await mural("push", make_adapter(tmp_path / "other", 2), "acme/sql:v1", "--json")

    assert (again.status, again.json["created"]) == (0, False)
    assert (other.status, other.json["error"]["code"]) == (1, "conflict")


async def test_a_tenant_lists_and_deletes_its_own(mural: Mural, adapter: Path) -> None:
    for name in ("acme:v1", "acme:v2"):
        assert (await mural("push", adapter, name)).status == 0
    assert (await mural("push", adapter, "globex:v1", key=KEYS["globex"].key)).status == 0

    listed = (await mural("ls", "--json")).json["versions"]
    deleted = await mural("rm", "acme:v1", "--yes")
    again = await mural("rm", "acme:v1", "--yes", "--json")

    assert [item["name"] for item in listed] == ["acme:v1", "acme:v2"]
    assert listed[0]["digest"] == build_manifest(adapter).digest
    assert deleted.status == 0, deleted.err
    assert (again.status, again.json["error"]["code"]) == (1, "model_not_found")
    assert "acme:v2" in (await mural("ls", "acme")).out
    assert (await mural("push", adapter, "acme:v1")).status == 1


async def test_another_s_namespace_is_forbidden(mural: Mural, adapter: Path) -> None:
    for argv in (("push", adapter, "globex:v1"), ("rm", "globex:v1", "--yes"), ("ls", "globex")):
        refused = await mural(*argv, "--json")
        assert (refused.status, refused.json["error"]["code"]) == (1, "forbidden")


@pytest.mark.parametrize("key", [None, "mural_0123456789abcdef_" + "A" * 43, "wrong"])
async def test_without_a_valid_key_nothing_is_taken(
    mural: Mural, adapter: Path, key: str | None
) -> None:
    refused = await mural("push", adapter, "acme:v1", "--json", key=key)

    assert (refused.status, refused.json["error"]["code"]) == (1, "invalid_api_key")
    assert key is None or key not in refused.out + refused.err


async def test_a_key_may_lie_in_a_file(mural: Mural, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEYS['globex'].key}\n")

    pushed = await mural("push", adapter, "globex:v1", "--api-key-file", tmp_path / "key")

    assert pushed.status == 0, pushed.err


async def test_what_only_the_server_can_tell_is_its_refusal(
    mural: Mural, make_adapter, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "a", 1)
    config = json.loads((folder / "adapter_config.json").read_text())
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["k_proj"]}))
    (folder / "adapter_model.safetensors").write_bytes(weights.replace(b"q_proj", b"k_proj"))

    refused = await mural("push", folder, "acme:v1", "--json")

    assert (refused.status, refused.json["error"]["code"]) == (1, "unusable_adapter")
    assert "k_proj" in refused.err
    assert (await mural("ls", "--json")).json["versions"] == []


async def test_what_was_pushed_is_pulled_by_version_alias_and_latest(
    mural: Mural, adapter: Path, make_adapter, tmp_path: Path
) -> None:
    await mural("push", adapter, "acme:v1", "--alias", "stable")
    newer = make_adapter(tmp_path / "newer", 2)
    await mural("push", newer, "acme:v2")

    for name, source in (("acme:v1", adapter), ("acme:stable", adapter), ("acme", newer)):
        target = tmp_path / f"pulled {name}"
        pulled = await mural("pull", name, target, "--json")
        assert pulled.status == 0, pulled.err
        assert build_manifest(target) == build_manifest(source)
    missing = await mural("pull", "acme:v9", tmp_path / "none", "--json")
    foreign = await mural("pull", "acme:v1", tmp_path / "none", "--json", key=KEYS["globex"].key)

    assert (missing.status, missing.json["error"]["code"]) == (1, "model_not_found")
    assert (foreign.status, foreign.json["error"]["code"]) == (1, "forbidden")
    assert not (tmp_path / "none").exists()


async def test_a_name_on_the_server_is_inspected_and_verified(
    mural: Mural, server, adapter: Path, tmp_path: Path
) -> None:
    await mural("push", adapter, "acme:v1")
    base = tmp_path / "base.json"
    base.write_bytes(server.engine.info.base_spec.to_json())

    inspected = await mural("inspect", "acme:v1", "--json")
    verified = await mural("verify", "acme:v1", "--base", base, "--json")

    assert (inspected.status, inspected.json["name"]) == (0, "acme:v1"), inspected.err
    assert inspected.json["digest"] == build_manifest(adapter).digest
    assert (verified.status, verified.json["fits"]) == (0, True), verified.err


async def test_aliases_are_set_listed_and_removed(
    mural: Mural, server, adapter: Path, make_adapter, tmp_path: Path
) -> None:
    pushed = await mural("push", adapter, "acme/sql:v1", "--alias", "stable", "--json")
    await mural("push", make_adapter(tmp_path / "newer", 2), "acme/sql:v2")

    shares = ("--version", "v1=9", "--version", "v2=1")
    pointed = await mural("alias", "acme/sql", "canary", *shares, "--json")
    listed = (await mural("ls", "--json")).json["versions"]
    answer = await server.post(
        "/v1/completions", {"model": "acme/sql:stable", "prompt": "Hi"}, KEYS["acme"].key
    )
    kept = await mural("rm", "acme/sql:v2", "--yes", "--json")
    removed = await mural("alias", "acme/sql", "canary", "--remove", "--json")

    assert pushed.json["aliases"] == ["acme/sql:stable"], pushed.err
    assert pointed.json["aliases"]["canary"] == [
        {"version": "v1", "weight": 9.0},
        {"version": "v2", "weight": 1.0},
    ]
    assert [item["aliases"] for item in listed] == [["canary", "stable"], ["canary"]]
    assert answer.json()["model"] == "acme/sql:v1"
    assert (kept.status, kept.json["error"]["code"]) == (1, "conflict")
    assert list(removed.json["aliases"]) == ["stable"]
