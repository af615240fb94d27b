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


async def test_what_a_server_does_not_do_is_said_with_a_way_out(
    mural: Mural, adapter: Path, tmp_path: Path
) -> None:
    await mural("push", adapter, "acme:v1")

    for argv in (
        ("pull", "acme:v1", tmp_path / "out"),
        ("inspect", "acme:v1"),
        ("alias", "acme", "stable", "--version", "v1"),
    ):
        refused = await mural(*argv)
        assert refused.status == 1
        assert "store behind it" in refused.err
