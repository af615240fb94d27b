"""Adapters in a local directory."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from mural_resolvers import directory
from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    MalformedName,
    ManifestMismatch,
    MuralError,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import MANIFEST_FILE, Manifest, build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import AdapterDescription
from mural_resolvers.store import ALIASES_FILE
from mural_resolvers.tenants import Principal

WriteAdapter = Callable[..., Path]
Find = Callable[[str], AdapterDescription | None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "adapters"
    folder.mkdir()
    return folder


@pytest.fixture
async def resolver(root: Path) -> AsyncIterator[DirectoryResolver]:
    made = DirectoryResolver(root, draw=lambda: 0.0)
    yield made
    await made.close()


@pytest.fixture
def find(resolver: DirectoryResolver) -> Find:
    return lambda text: resolver.find(parse_name(text))


def versions_of(found: AdapterDescription | None) -> str:
    assert found is not None
    return str(found.name)


async def test_a_name_is_a_folder(
    root: Path, resolver: DirectoryResolver, write_adapter: WriteAdapter, base_spec: BaseSpec
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")

    found = await resolver.resolve(Principal("acme"), parse_name("acme:v1"), base_spec)

    assert found == AdapterDescription.of_folder(
        parse_name("acme:v1"), folder, build_manifest(folder)
    )


async def test_it_stands_behind_a_registry(
    root: Path, resolver: DirectoryResolver, write_adapter: WriteAdapter, base_spec: BaseSpec
) -> None:
    write_adapter(root / "acme" / "sql" / "v1")
    registry = LoRAResolverRegistry([resolver], base_spec, LoRAIdAllocator())

    request = await registry.get(Principal("acme"), parse_name("acme/sql"))

    assert request.lora_name == "acme/sql:v1"
    async with registry.lease(Principal("acme"), request) as path:
        assert (path / "adapter_config.json").exists()
    with pytest.raises(AdapterNotFound):
        await registry.get(Principal("acme"), parse_name("acme:v1"))


@pytest.mark.parametrize("name", ["acme:v2", "acme/sql:v1", "globex:v1", "acme:latest", "acme:V1"])
def test_what_is_not_there_is_not_found(
    root: Path, find: Find, write_adapter: WriteAdapter, name: str
) -> None:
    if name != "acme:latest":
        write_adapter(root / "acme" / "default" / "v1")

    assert find(name) is None


def test_a_root_that_is_gone_is_a_source_that_is_down(root: Path, find: Find) -> None:
    root.rmdir()

    with pytest.raises(Unavailable):
        find("acme:v1")


async def test_a_root_that_cannot_be_read_is_a_source_that_is_down(
    root: Path,
    resolver: DirectoryResolver,
    base_spec: BaseSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(folder: Path) -> set[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    (root / "acme" / "default").mkdir(parents=True)
    monkeypatch.setattr(directory, "version_names", refuse)

    with pytest.raises(Unavailable) as caught:
        await resolver.resolve(Principal("acme"), parse_name("acme:v1"), base_spec)

    assert str(root) not in caught.value.message


def test_latest_is_the_highest_version(root: Path, find: Find, write_adapter: WriteAdapter) -> None:
    for version in ("v2", "v10", "v9", "draft", "_tmp", ".v99"):
        write_adapter(root / "acme" / "default" / version)
    (root / "acme" / "default" / "v11").touch()

    assert versions_of(find("acme")) == "acme:v10"
    assert versions_of(find("acme:latest")) == "acme:v10"


def test_an_alias_names_a_version(root: Path, find: Find, write_adapter: WriteAdapter) -> None:
    for version in ("v1", "v2"):
        write_adapter(root / "acme" / "default" / version)
    aliases = {"stable": [{"version": "v1"}], "latest": [{"version": "v1"}]}
    (root / "acme" / "default" / ALIASES_FILE).write_text(json.dumps(aliases))

    assert versions_of(find("acme:stable")) == "acme:v1"
    assert versions_of(find("acme")) == "acme:v1"
    assert versions_of(find("acme:v2")) == "acme:v2"
    assert find("acme:canary") is None


def test_an_alias_with_weights_follows_the_draw(root: Path, write_adapter: WriteAdapter) -> None:
    for version in ("v1", "v2"):
        write_adapter(root / "acme" / "default" / version)
    aliases = {"canary": [{"version": "v1", "weight": 9}, {"version": "v2", "weight": 1}]}
    (root / "acme" / "default" / ALIASES_FILE).write_text(json.dumps(aliases))
    draws = iter([0.0, 0.89, 0.9, 0.99])
    resolver = DirectoryResolver(root, draw=lambda: next(draws))

    picked = [versions_of(resolver.find(parse_name("acme:canary"))) for _ in range(4)]

    assert picked == ["acme:v1", "acme:v1", "acme:v2", "acme:v2"]


@pytest.mark.parametrize("alias", ["v1", "latest"])
def test_an_alias_and_a_version_of_one_name_conflict(
    root: Path, find: Find, write_adapter: WriteAdapter, alias: str
) -> None:
    write_adapter(root / "acme" / "default" / "v2")
    write_adapter(root / "acme" / "default" / alias)
    (root / "acme" / "default" / ALIASES_FILE).write_text('{"v1": [{"version": "v2"}]}')

    with pytest.raises(Conflict):
        find(f"acme:{alias}")


def test_an_alias_of_an_absent_version_is_not_found(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (root / "acme" / "default" / ALIASES_FILE).write_text('{"stable": [{"version": "v9"}]}')

    with pytest.raises(AdapterNotFound, match="v9"):
        find("acme:stable")


@pytest.mark.parametrize("record", [b"", b"{", b"[" * 9999, b'{"a": 1}', b"x" * (2 << 20)])
def test_a_wrong_record_of_aliases_is_a_typed_error(
    root: Path, find: Find, write_adapter: WriteAdapter, record: bytes
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (root / "acme" / "default" / ALIASES_FILE).write_bytes(record)

    with pytest.raises((UnusableAdapter, TooLarge)):
        find("acme:stable")


# Links


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("acme", "globex"),
        ("acme", "../outside"),
        ("acme/default", "../globex/default"),
        ("acme/default", "../../outside/default"),
        ("acme/default/v1", "../../globex/default/v1"),
        ("acme/default/v1", "../../../outside/default/v1"),
        ("acme/default/v1", "/etc"),
        ("acme/default/v1", ".."),
    ],
)
def test_no_link_leads_out_of_a_tenant_s_folder(
    root: Path, find: Find, write_adapter: WriteAdapter, link: str, target: str
) -> None:
    write_adapter(root / "globex" / "default" / "v1")
    write_adapter(root.parent / "outside" / "default" / "v1")
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(target)

    with pytest.raises(UnusableAdapter) as caught:
        find("acme:v1")

    assert str(root) not in caught.value.message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_no_file_links_to_another_tenant_s(
    root: Path, find: Find, write_adapter: WriteAdapter, name: str
) -> None:
    other = write_adapter(root / "globex" / "default" / "v1")
    folder = write_adapter(root / "acme" / "default" / "v1")
    (folder / name).unlink()
    (folder / name).symlink_to(other / name)

    with pytest.raises(UnusableAdapter, match="leads out"):
        find("acme:v1")


def test_aliases_do_not_link_to_another_tenant_s(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (root / "secret.json").write_text("{}")
    (root / "acme" / "default" / ALIASES_FILE).symlink_to("../../secret.json")

    with pytest.raises(UnusableAdapter, match="leads out"):
        find("acme:v1")


def test_a_link_within_the_tenant_s_folder_is_followed(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")
    (root / "acme" / "default" / "v2").symlink_to("v1")

    found = find("acme:v2")

    assert found is not None
    assert (str(found.name), found.folder) == ("acme:v2", folder)


def test_a_root_that_is_a_link_is_followed(
    root: Path, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (tmp_path / "link").symlink_to(root)

    assert DirectoryResolver(tmp_path / "link").find(parse_name("acme:v1")) is not None


@pytest.mark.parametrize("loop", ["acme", "acme/default", "acme/default/v1"])
def test_a_circular_link_is_a_typed_error_or_nothing(
    root: Path, find: Find, write_adapter: WriteAdapter, loop: str
) -> None:
    (root / loop).parent.mkdir(parents=True, exist_ok=True)
    (root / loop).symlink_to(Path(loop).name)
    write_adapter(root / "globex" / "default" / "v1")

    assert find("globex:v1") is not None
    try:
        assert find("acme:v1") is None
    except MuralError as error:
        assert str(root) not in error.message  # noqa: PT017 -- either outcome is right


def test_a_circular_link_does_not_hide_the_versions_beside_it(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (root / "acme" / "default" / "v2").symlink_to("v2")

    assert versions_of(find("acme")) == "acme:v1"


@pytest.mark.parametrize("target", ["x" * 4000, "v1/adapter_config.json/below", "nowhere"])
def test_a_link_that_leads_nowhere_does_not_hide_the_versions_beside_it(
    root: Path, find: Find, write_adapter: WriteAdapter, target: str
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (root / "acme" / "default" / "v2").symlink_to(target)
    (root / "acme" / "other").symlink_to(target)

    assert versions_of(find("acme")) == "acme:v1"
    assert find("acme:v2") is None
    assert find("acme/other:v1") is None


@pytest.mark.parametrize("target", ["it", "x" * 4000, "adapter_config.json/below"])
@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "chat_template.jinja", MANIFEST_FILE]
)
def test_a_file_that_is_a_link_to_nowhere_makes_the_adapter_unusable(
    root: Path, find: Find, write_adapter: WriteAdapter, name: str, target: str
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name if target == "it" else target)

    with pytest.raises(UnusableAdapter, match=name):
        find("acme:v1")


@pytest.mark.parametrize("target", ["_aliases.json", "x" * 4000, "nowhere"])
def test_aliases_that_cannot_be_read_are_not_passed_over(
    root: Path, find: Find, write_adapter: WriteAdapter, target: str
) -> None:
    write_adapter(root / "acme" / "default" / "v1")
    (root / "acme" / "default" / "_aliases.json").symlink_to(target)

    with pytest.raises(UnusableAdapter, match="cannot be read"):
        find("acme:stable")


# Content


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were hashed."""
    folders: list[Path] = []

    def spy(folder: Path, limits: AdapterLimits) -> Manifest:
        folders.append(folder)
        return build_manifest(folder, limits)

    monkeypatch.setattr(directory, "checked_manifest", spy)
    return folders


def age(folder: Path) -> Callable[[], int]:
    """A clock that reads an hour after the last change in the folder."""
    youngest = max(path.stat().st_ctime_ns for path in folder.iterdir())
    return lambda: youngest + 3_600_000_000_000


def test_what_did_not_change_is_hashed_once(
    root: Path, write_adapter: WriteAdapter, hashed: list[Path]
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")
    resolver = DirectoryResolver(root, now_ns=age(folder))

    answers = [resolver.find(parse_name("acme:v1")) for _ in range(3)]

    assert answers[0] == answers[1] == answers[2]
    assert hashed == [folder]


def test_what_may_still_change_within_a_tick_is_hashed_again(
    root: Path, write_adapter: WriteAdapter, hashed: list[Path]
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")
    resolver = DirectoryResolver(
        root, now_ns=lambda: (folder / "adapter_config.json").stat().st_mtime_ns
    )

    for _ in range(2):
        resolver.find(parse_name("acme:v1"))

    assert len(hashed) == 2


def test_other_content_of_the_same_size_and_time_is_seen(
    root: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")
    weights = folder / "adapter_model.safetensors"
    resolver = DirectoryResolver(root, now_ns=age(folder))
    resolver.find(parse_name("acme:v1"))
    times = weights.stat()

    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))

    with pytest.raises(Conflict):
        resolver.find(parse_name("acme:v1"))


def test_other_content_under_a_name_is_a_conflict_until_it_is_put_back(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    folder = root / "acme" / "default" / "v1"
    write_adapter(folder)
    first = find("acme:v1")

    write_adapter(folder, fill=b"\x02")
    for name in ("acme:v1", "acme:latest"):
        with pytest.raises(Conflict, match="immutable"):
            find(name)

    write_adapter(folder)
    assert find("acme:v1") == first


def test_half_a_version_is_refused_and_leaves_no_memory(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    """A folder that is still being copied must not be taken for the version's content."""
    folder = write_adapter(root / "acme" / "default" / "v1")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for part in (b"", whole[:4], whole[: len(whole) // 2], whole[:-1]):
        weights.write_bytes(part)
        with pytest.raises(UnusableAdapter):
            find("acme:v1")

    weights.write_bytes(whole)
    assert find("acme:v1") is not None


def test_a_manifest_that_lies_beside_the_files_is_held_to(
    root: Path, find: Find, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(root / "acme" / "default" / "v1")
    (folder / MANIFEST_FILE).write_bytes(build_manifest(folder).to_json())
    assert find("acme:v1") is not None

    write_adapter(folder, fill=b"\x02")

    with pytest.raises(ManifestMismatch):
        find("acme:v1")


def test_an_empty_version_is_unusable(root: Path, find: Find) -> None:
    (root / "acme" / "default" / "v1").mkdir(parents=True)

    with pytest.raises(UnusableAdapter, match=r"adapter_config\.json"):
        find("acme:v1")


# Lists


async def test_a_tenant_s_versions_are_listed(
    root: Path, resolver: DirectoryResolver, write_adapter: WriteAdapter
) -> None:
    for path in ("acme/sql/v1", "acme/default/v2", "acme/default/_tmp", "globex/default/v1",
                 "acme/_trash/v1", "acme/UPPER/v1", "Acme/default/v1"):  # fmt: skip
        write_adapter(root / path)

    listed = await resolver.list("acme")

    assert [str(item.name) for item in listed] == ["acme:v2", "acme/sql:v1"]
    assert resolver.tenants() == ("acme", "globex")
    assert await resolver.list("nobody") == ()


def test_a_link_out_does_not_hide_the_rest_of_a_list(
    root: Path, resolver: DirectoryResolver, write_adapter: WriteAdapter
) -> None:
    write_adapter(root / "acme" / "sql" / "v1")
    write_adapter(root / "globex" / "secret" / "v1")
    (root / "acme" / "stolen").symlink_to("../globex/secret")

    assert [str(item.name) for item in resolver.find_all("acme")] == ["acme/sql:v1"]


async def test_what_is_known_waits_for_nobody_s_cold_files(
    root: Path,
    write_adapter: WriteAdapter,
    base_spec: BaseSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = write_adapter(root / "acme" / "default" / "v1")
    for version in range(4):
        write_adapter(root / "globex" / "default" / f"v{version}")
    resolver = DirectoryResolver(root, now_ns=age(known))
    resolver.find(parse_name("acme:v1"))
    release = threading.Event()

    def slow(folder: Path, limits: AdapterLimits) -> Manifest:
        release.wait()
        return build_manifest(folder, limits)

    monkeypatch.setattr(directory, "checked_manifest", slow)
    cold = [
        asyncio.create_task(
            resolver.resolve(Principal("globex"), parse_name(f"globex:v{n}"), base_spec)
        )
        for n in range(4)
    ]

    assert await resolver.resolve(Principal("acme"), parse_name("acme:v1"), base_spec)

    release.set()
    assert all(await asyncio.gather(*cold))
    await resolver.close()


async def test_only_a_tenant_s_name_is_listed(resolver: DirectoryResolver) -> None:
    with pytest.raises(MalformedName):
        await resolver.list("..")
