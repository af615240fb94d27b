"""Objects from a file that changes."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mural_resolvers.errors import MuralError, Unauthorized
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import mint_key
from mural_router.objects import FileObjects
from mural_router.objects.source import Objects

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


def unready(objects: Objects) -> str | None:
    return objects.not_ready()


def test_all_three_kinds_are_in_force_from_the_start(path: Path) -> None:
    objects = FileObjects(path)
    assert unready(objects) is None
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


def fifo(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def replace(path: Path, lay: Callable[[Path], object]) -> None:
    path.unlink()
    lay(path)


def mend(path: Path, text: str) -> None:
    """As an editor, a mount or a deployment does: in one step."""
    other = path.with_name("next")
    other.write_text(text)
    if path.is_dir():
        path.rmdir()
    other.replace(path)


def nothing(path: Path) -> None:
    """It is gone."""


def content(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.write(CONTENT.encode())
        file.truncate(100 << 20)


BOMB = "apiVersion: &a0 [lol, lol, lol, lol, lol, lol, lol, lol]\n" + "".join(
    f"{name}: &a{at} [{', '.join([f'*a{at - 1}'] * 8)}]\n"
    for at, name in enumerate((*"abcdefgh", "kind"), 1)
)
GARBAGE = [
    pytest.param(fifo, "not a regular file", id="fifo"),
    pytest.param(directory, "not a regular file", id="directory"),
    pytest.param(link_to_itself, "cannot be read", id="symlink loop"),
    pytest.param(nothing, "cannot be read", id="gone"),
    pytest.param(content(b""), "no object", id="empty"),
    pytest.param(content(b"# all of it is gone\n---\n---\n"), "no object", id="comments alone"),
    pytest.param(content(CONTENT[:100].encode()), "Line", id="truncated"),
    pytest.param(content(CONTENT[:-80].encode()), "Line 27", id="truncated in the last object"),
    pytest.param(content(bytes(range(256))), "not UTF-8", id="binary"),
    pytest.param(content(b"\0" * 4096), "not YAML", id="zeros"),
    pytest.param(content(b"kind: List\nitems: []\n"), "Document 1", id="a kind that is none"),
    pytest.param(content(b"- a\n- b\n"), "Document 1", id="no mapping"),
    pytest.param(content(f"{CONTENT}---\n{CONTENT}".encode()), "Document 6.*stands", id="twice"),
    pytest.param(content(BOMB.encode()), "aliases that stand for more", id="bomb"),
    pytest.param(content(b"[" + b"a," * 300_000 + b"]"), "more values", id="many values"),
    pytest.param(content(b"[" * 100_000), "Line 1", id="deep"),
    pytest.param(sparse, "larger than", id="100 MB"),
]


@pytest.mark.parametrize(("lay", "told"), GARBAGE)
def test_garbage_is_told_at_the_start_and_waited_for_in_no_case(
    tmp_path: Path, lay: Callable[[Path], object], told: str
) -> None:
    lay(tmp_path / "objects.yaml")
    with pytest.raises(MuralError, match=told):
        FileObjects(tmp_path / "objects.yaml")


@pytest.mark.parametrize(("lay", "told"), GARBAGE)
async def test_garbage_in_its_place_changes_nothing_until_a_good_file_lies_there(
    path: Path, lay: Callable[[Path], object], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    objects = FileObjects(path)
    before = objects.states()
    await asyncio.to_thread(replace, path, lay)
    async with asyncio.timeout(60):
        for _ in range(4):
            await objects.look()
    assert [each.in_force for each in objects.states()] == [each.in_force for each in before]
    assert all(state.stale for state in objects.states())
    assert objects.ring.authenticate(f"Bearer {KEY.key}", NOW).tenant == "acme"
    said = [each for each in caplog.messages if "stays in force" in each]
    assert len(said) == 1, "once"
    assert re.search(told, said[0])
    assert objects.numbers.refused == 1
    await asyncio.to_thread(mend, path, CONTENT.replace("{version: v1, weight: 9}, ", ""))
    for _ in range(2):
        await objects.look()
    targets = objects.declared.targets(STABLE)
    assert targets is not None
    assert [each.version for each in targets] == ["v2"]
    assert not any(state.stale for state in objects.states())


async def test_a_file_that_is_written_piece_by_piece_is_taken_when_it_is_whole(path: Path) -> None:
    """No state between the old content and the new one is ever in force."""
    objects = FileObjects(path)
    new = CONTENT.replace("acme", "globex").encode()
    with path.open("wb") as file:
        for start in range(0, len(new), 97):
            file.write(new[start : start + 97])
            file.flush()
            await objects.look()
            assert [each.id for each in objects.declared.config.tenants] == ["acme"]
    for _ in range(2):
        await objects.look()
    assert [each.id for each in objects.declared.config.tenants] == ["globex"]
