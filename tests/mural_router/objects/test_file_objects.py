"""Objects from a file that changes."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mural_resolvers.errors import MuralError, Unauthorized
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import mint_key
from mural_router.objects import FileObjects

NOW = datetime(2027, 1, 1, tzinfo=UTC)
KEY = mint_key()
STABLE = parse_name("acme:stable")
CONTENT = f"""\
apiVersion: mural.dev/v1alpha1
kind: Tenant
metadata: {{name: acme}}
spec:
  namespaces: [team]
  keys: [{{id: {KEY.key_id}, sha256: {KEY.sha256}}}]
---
apiVersion: mural.dev/v1alpha1
kind: Adapter
metadata: {{name: v1}}
spec: {{pool: main, tenant: acme, version: v1, placement: {{replicas: 2}}}}
---
apiVersion: mural.dev/v1alpha1
kind: Adapter
metadata: {{name: v2, namespace: team}}
spec: {{pool: main, tenant: acme, version: v2, placement: {{replicas: All}}}}
---
apiVersion: mural.dev/v1alpha1
kind: Adapter
metadata: {{name: v3, namespace: elsewhere}}
spec: {{pool: main, tenant: acme, version: v3, placement: {{replicas: 2}}}}
---
apiVersion: mural.dev/v1alpha1
kind: AdapterAlias
metadata: {{name: stable}}
spec: {{tenant: acme, alias: stable, versions: [{{version: v1, weight: 9}}, {{version: v2}}]}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "objects.yaml"
    path.write_text(CONTENT)
    return path


async def change(path: Path, objects: FileObjects, text: str) -> None:
    """A content is taken when it was seen twice."""
    await asyncio.to_thread(path.write_text, text)
    await objects.look()
    await objects.look()


def test_all_three_kinds_are_in_force_from_the_start(path: Path) -> None:
    objects = FileObjects(path)
    assert objects.not_ready() is None
    assert objects.ring.authenticate(f"Bearer {KEY.key}", NOW).tenant == "acme"
    targets = objects.declared.targets(STABLE)
    assert targets is not None
    assert [(each.version, each.weight) for each in targets] == [("v1", 9), ("v2", 1)]
    assert objects.declared.replicas("acme/default:v1") == 2
    assert (objects.declared.replicas("acme/default:v2") or 0) > 1_000
    assert objects.declared.replicas("acme/default:v3") is None, "its namespace is not listed"
    states = {state.kind: (state.in_force, set(state.refused)) for state in objects.states()}
    assert states == {
        "tenants": (1, set()),
        "keys": (1, set()),
        "adapters": (2, {"elsewhere/v3"}),
        "aliases": (1, set()),
    }


async def test_a_change_is_taken_as_a_whole_and_a_bad_one_leaves_the_last_good_one(
    path: Path,
) -> None:
    objects = FileObjects(path)
    text = CONTENT.replace("{version: v1, weight: 9}, ", "").replace("replicas: 2", "")
    await change(path, objects, text)
    targets = objects.declared.targets(STABLE)
    assert targets is not None
    assert [each.version for each in targets] == ["v2"]
    assert objects.declared.replicas("acme/default:v1") is None
    await change(path, objects, CONTENT.replace("kind: Tenant", "kind: Tenent"))
    assert objects.ring.authenticate(f"Bearer {KEY.key}", NOW).tenant == "acme"
    assert all(state.stale for state in objects.states())
    assert objects.numbers.stale
    await change(path, objects, CONTENT.replace(KEY.key_id, "0" * 16))
    assert not any(state.stale for state in objects.states())
    with pytest.raises(Unauthorized):
        objects.ring.authenticate(f"Bearer {KEY.key}", NOW)


def test_a_router_does_not_start_with_a_file_that_is_absent_or_wrong(path: Path) -> None:
    path.write_text(CONTENT.replace("sha256", "sha512"))
    with pytest.raises(MuralError, match="Document 1"):
        FileObjects(path)
    path.unlink()
    with pytest.raises(MuralError, match="cannot be read"):
        FileObjects(path)
