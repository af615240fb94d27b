"""Digests and manifests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.digest import FileEntry, compute_digest
from mural_resolvers.errors import ManifestMismatch, MuralError, TooLarge, UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import (
    MANIFEST_FILE,
    Manifest,
    PeftFacts,
    build_manifest,
    read_manifest,
    verify_folder,
)

WriteAdapter = Callable[..., Path]

entries = st.builds(
    FileEntry,
    path=st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]),
    size=st.integers(0, 2**40),
    sha256=st.binary().map(lambda data: hashlib.sha256(data).hexdigest()),
)


@given(st.lists(entries, unique_by=lambda entry: entry.path), st.randoms())
def test_the_digest_is_the_hash_of_the_sorted_lines_in_any_order(files, rng) -> None:
    shuffled = list(files)
    rng.shuffle(shuffled)

    lines = sorted(f"{f.sha256} {f.size} {f.path}\n" for f in files)
    assert compute_digest(shuffled) == hashlib.sha256("".join(lines).encode()).hexdigest()


@given(
    st.lists(entries, unique_by=lambda entry: entry.path),
    st.integers(1, 100),
    st.floats(-1e6, 1e6),
    st.lists(st.text(st.characters(codec="utf-8"))),
)
def test_a_manifest_survives_its_json(
    files: list[FileEntry], rank: int, alpha: float, targets: list[str]
) -> None:
    manifest = Manifest(
        files=tuple(files),
        facts=PeftFacts(rank=rank, alpha=alpha, targets=tuple(targets), base_model_name="x"),
        digest=compute_digest(files),
    )

    assert Manifest.from_json(manifest.to_json()) == manifest


def test_a_plain_folder_gets_a_manifest(tmp_path: Path, write_adapter: WriteAdapter) -> None:
    folder = write_adapter(tmp_path / "a", config={"rank_pattern": {"x": 6}, "use_rslora": True})
    weights = (folder / "adapter_model.safetensors").read_bytes()

    manifest = build_manifest(folder)

    assert manifest.files[1] == FileEntry(
        "adapter_model.safetensors", len(weights), hashlib.sha256(weights).hexdigest()
    )
    assert manifest.facts == PeftFacts(
        rank=6, alpha=8.0, targets=("q_proj",), base_model_name="tiny", use_rslora=True
    )
    assert manifest.num_bytes == sum(file.size for file in manifest.files)


def test_files_that_the_engine_does_not_read_are_outside_the_digest(
    tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "a")
    plain = build_manifest(folder).digest
    for name in ("README.md", "tokenizer.json", "adapter_model.bin", "manifest.json~"):
        (folder / name).write_text("x")

    assert build_manifest(folder).digest == plain


def test_the_chat_template_is_inside_the_digest(
    tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "a")
    plain = build_manifest(folder).digest
    (folder / "chat_template.jinja").write_text("{{ messages }}")

    assert build_manifest(folder).digest != plain


def test_the_digest_does_not_depend_on_folder_or_time(
    tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    assert (
        build_manifest(write_adapter(tmp_path / "a")).digest
        == build_manifest(write_adapter(tmp_path / "b" / "c")).digest
    )


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, write_adapter: WriteAdapter, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).unlink()

    with pytest.raises(UnusableAdapter, match=name):
        build_manifest(folder)


def test_a_pickle_is_read_only_where_admitted(tmp_path: Path, write_adapter: WriteAdapter) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")

    with pytest.raises(UnusableAdapter, match="pickle"):
        build_manifest(folder)
    admitted = build_manifest(folder, AdapterLimits(admit_bin=True))
    assert [file.path for file in admitted.files] == ["adapter_config.json", "adapter_model.bin"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(
    tmp_path: Path, write_adapter: WriteAdapter, name: str
) -> None:
    secret = write_adapter(tmp_path / "globex") / name
    folder = write_adapter(tmp_path / "acme")
    (folder / name).unlink()
    (folder / name).symlink_to(secret)

    with pytest.raises(UnusableAdapter, match="leads out"):
        build_manifest(folder)
    # An admin may allow a wider place, such as a hub's cache of links.
    assert build_manifest(folder, within=tmp_path).digest


def test_a_link_within_the_folder_is_followed(tmp_path: Path, write_adapter: WriteAdapter) -> None:
    folder = write_adapter(tmp_path / "a")
    plain = build_manifest(folder).digest
    (folder / "adapter_config.json").rename(folder / "config.v2")
    (folder / "adapter_config.json").symlink_to("config.v2")

    assert build_manifest(folder).digest == plain


@pytest.mark.parametrize("target", ["nowhere", "adapter_config.json", "."])
def test_a_dangling_a_circular_and_a_folder_link_are_refused(
    tmp_path: Path, write_adapter: WriteAdapter, target: str
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").symlink_to(target)

    with pytest.raises(UnusableAdapter):
        build_manifest(folder)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (AdapterLimits(max_config_bytes=10), "adapter_config.json"),
        (AdapterLimits(max_weights_bytes=10), "adapter_model.safetensors"),
        (AdapterLimits(max_template_bytes=1), "chat_template.jinja"),
    ],
)
def test_each_file_has_its_limit(
    tmp_path: Path, write_adapter: WriteAdapter, limits: AdapterLimits, name: str
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "chat_template.jinja").write_text("{{ x }}")

    with pytest.raises(TooLarge, match=name):
        build_manifest(folder, limits)


def test_half_a_file_gets_no_digest(tmp_path: Path, write_adapter: WriteAdapter) -> None:
    weights = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    with pytest.raises(UnusableAdapter, match="safetensors"):
        build_manifest(tmp_path / "a")


def test_a_folder_is_verified_against_its_manifest(
    tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "a")
    manifest = build_manifest(folder)
    (folder / MANIFEST_FILE).write_bytes(manifest.to_json())

    assert read_manifest(folder) == manifest
    verify_folder(folder, manifest)

    write_adapter(folder, fill=b"\x02")
    with pytest.raises(ManifestMismatch, match=r"adapter_model\.safetensors"):
        verify_folder(folder, manifest)


def test_a_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


FACTS = {"rank": 1, "alpha": 1, "targets": ["q"]}
ENTRY = {"path": "adapter_config.json", "size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"{}",
        json.dumps({"files": [ENTRY], "facts": FACTS, "digest": "0" * 64}).encode(),
        json.dumps({"files": [{**ENTRY, "path": "../x"}], "facts": FACTS, "digest": ""}).encode(),
        json.dumps({"files": [ENTRY, ENTRY], "facts": FACTS, "digest": ""}).encode(),
        json.dumps({"files": [{**ENTRY, "size": -1}], "facts": FACTS, "digest": ""}).encode(),
        json.dumps({"files": [{**ENTRY, "sha256": "x"}], "facts": FACTS, "digest": ""}).encode(),
        json.dumps({"files": [{**ENTRY, "size": "1"}], "facts": FACTS, "digest": ""}).encode(),
    ],
    ids=lambda body: ascii(body[:30]),
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / MANIFEST_FILE).write_bytes(body)

    with pytest.raises(UnusableAdapter, match="manifest"):
        read_manifest(tmp_path)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(MuralError):
        Manifest.from_json(data)
