"""``mural adapters`` over every kind of store: publish, list, point, fetch, judge, delete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from mural_resolvers.digest import CONFIG_FILE, WEIGHTS_FILE
from mural_resolvers.manifest import build_manifest

WriteAdapter = Callable[..., Path]


def test_what_is_pushed_can_be_pulled_byte_for_byte(
    mural, store: str, adapter: Path, tmp_path: Path
) -> None:
    pushed = mural("push", adapter, "acme:v1")
    pulled = mural("pull", "acme:v1", tmp_path / "pulled")

    assert (pushed.status, pulled.status) == (0, 0), pushed.err + pulled.err
    digest = build_manifest(adapter).digest
    assert digest in pushed.out
    assert digest in pulled.out
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        assert (tmp_path / "pulled" / name).read_bytes() == (adapter / name).read_bytes()


def test_push_and_pull_tell_programs_the_same(
    mural, store: str, adapter: Path, tmp_path: Path
) -> None:
    pushed = mural("push", adapter, "acme/sql:v1", "--json").json
    pulled = mural("pull", "acme/sql:v1", tmp_path / "pulled", "--json").json

    manifest = build_manifest(adapter)
    files = [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in manifest.files]
    shared = {
        "name": "acme/sql:v1",
        "digest": manifest.digest,
        "bytes": manifest.num_bytes,
        "files": files,
        "store": pushed["store"],
    }
    assert pushed == shared | {"created": True, "aliases": [], "left_out": []}
    assert pulled == shared | {"folder": str(tmp_path / "pulled")}


def test_the_same_content_is_there_already(mural, store: str, adapter: Path) -> None:
    mural("push", adapter, "acme:v1")

    again = mural("push", adapter, "acme:v1")

    assert again.status == 0
    assert "already there" in again.out
    assert mural("push", adapter, "acme:v1", "--json").json["created"] is False


def test_other_content_under_a_taken_name_is_refused(
    mural, store: str, adapter: Path, other: Path
) -> None:
    mural("push", adapter, "acme:v1")

    refused = mural("push", other, "acme:v1", "--json")

    assert refused.status == 1
    assert refused.json["error"]["code"] == "conflict"
    assert "acme:v1" in refused.err
    (listed,) = mural("ls", "--json").json["versions"]
    assert listed["digest"] == build_manifest(adapter).digest


def test_ls_has_every_version_of_every_tenant_in_their_order(
    mural, store: str, adapter: Path
) -> None:
    for name in ("acme:v10", "acme:v9", "acme/sql:v1", "globex:v1"):
        assert mural("push", adapter, name).status == 0

    rows = mural("ls").out.splitlines()

    assert rows[0].split() == ["NAME", "SIZE", "DIGEST", "ALIASES"]
    assert [row.split()[0] for row in rows[1:]] == [
        "acme:v9",
        "acme:v10",
        "acme/sql:v1",
        "globex:v1",
    ]
    assert build_manifest(adapter).digest[:12] in rows[1]
    assert [v["name"] for v in mural("ls", "globex", "--json").json["versions"]] == ["globex:v1"]


def test_an_empty_store_lists_nothing(mural, one_store: str) -> None:
    listing = mural("ls")

    assert (listing.status, listing.out) == (0, "")
    assert "no versions" in listing.err
    assert mural("ls", "--json").json["versions"] == []


def test_an_alias_points_where_it_is_told(mural, store: str, adapter: Path, other: Path) -> None:
    mural("push", adapter, "acme:v1", "--alias", "stable")
    mural("push", other, "acme:v2")

    told = mural("alias", "acme", "canary", "--version", "v1=9", "--version", "v2=1")

    assert told.out.splitlines()[1:] == ["acme:canary  v1 90%, v2 10%", "acme:stable  v1"]
    by_name = {item["name"]: item["aliases"] for item in mural("ls", "--json").json["versions"]}
    assert by_name == {"acme:v1": ["canary", "stable"], "acme:v2": ["canary"]}
    record = mural("alias", "acme", "canary", "--remove", "--json").json
    assert record == {"adapter": "acme", "aliases": {"stable": [{"version": "v1", "weight": 1.0}]}}


def test_pull_follows_an_alias_to_its_heaviest_version(
    mural, store: str, adapter: Path, other: Path, tmp_path: Path
) -> None:
    mural("push", adapter, "acme:v1")
    mural("push", other, "acme:v2")
    mural("alias", "acme", "canary", "--version", "v1=9", "--version", "v2=1")

    assert mural("pull", "acme:canary", tmp_path / "a", "--json").json["name"] == "acme:v1"
    assert mural("pull", "acme", tmp_path / "b", "--json").json["name"] == "acme:v2"


def test_an_alias_on_nothing_is_refused(mural, one_store: str, adapter: Path) -> None:
    mural("push", adapter, "acme:v1")

    refused = mural("alias", "acme", "stable", "--version", "v2", "--json")

    assert refused.status == 1
    assert refused.json["error"]["code"] == "model_not_found"


def test_an_alias_that_fails_after_the_push_says_what_holds(
    mural, one_store: str, adapter: Path, other: Path
) -> None:
    mural("push", adapter, "acme:v1")

    refused = mural("push", other, "acme:v2", "--alias", "v1")

    assert refused.status == 1
    assert "acme:v2 is published, but the alias v1" in refused.err


def test_what_is_deleted_is_gone_and_its_name_stays_taken(
    mural, store: str, adapter: Path, tmp_path: Path
) -> None:
    mural("push", adapter, "acme:v1")

    assert mural("rm", "acme:v1", "--yes", "--json").json["removed"] is True

    assert mural("ls", "--json").json["versions"] == []
    assert mural("pull", "acme:v1", tmp_path / "a").status == 1
    assert mural("push", adapter, "acme:v1").status == 1


def test_what_an_alias_points_at_is_not_deleted(mural, one_store: str, adapter: Path) -> None:
    mural("push", adapter, "acme:v1", "--alias", "stable")

    refused = mural("rm", "acme:v1", "--yes")

    assert refused.status == 1
    assert "stable" in refused.err


def test_an_unknown_version_is_not_found(
    mural, store: str, tmp_path: Path, spec_file: Path
) -> None:
    for argv in (
        ("pull", "acme:v1", tmp_path / "a"),
        ("inspect", "acme:v1"),
        ("verify", "acme:v1", "--base", spec_file),
        ("rm", "acme:v1", "--yes"),
    ):
        missing = mural(*argv, "--json")
        assert missing.status == 1
        assert missing.json["error"]["code"] == "model_not_found"
        assert "acme:v1" in missing.err
    assert not (tmp_path / "a").exists()


def test_a_version_of_the_store_is_inspected_and_verified(
    mural, store: str, adapter: Path, spec_file: Path
) -> None:
    mural("push", adapter, "acme:v1", "--alias", "stable")

    seen = mural("inspect", "acme:stable", "--json").json
    verdict = mural("verify", "acme:v1", "--base", spec_file, "--json").json

    assert (seen["name"], seen["path"], seen["servable"]) == ("acme:v1", None, True)
    assert (verdict["name"], verdict["fits"], verdict["modules"]) == ("acme:v1", True, 2)
    assert seen["digest"] == verdict["digest"] == build_manifest(adapter).digest


def test_the_installed_program_publishes_and_lists(
    mural_program, store: str, adapter: Path
) -> None:
    pushed = mural_program("push", adapter, "acme:v1", "--json")
    listed = mural_program("ls")

    assert (pushed.status, pushed.err) == (0, "")
    assert pushed.json["digest"] == build_manifest(adapter).digest
    assert listed.out.splitlines()[1].startswith("acme:v1")


def test_a_refused_folder_leaves_the_store_untouched(
    mural, one_store: str, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "dora", config={"use_dora": True})

    refused = mural("push", folder, "acme:v1", "--json")

    assert (refused.status, refused.json["error"]["code"]) == (1, "unusable_adapter")
    assert "DoRA" in refused.err
    assert mural("ls", "--json").json["versions"] == []


def test_json_is_ascii_whatever_a_file_holds(
    mural, one_store: str, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    name = "\u202ebase\x1b[2J\U0001f3a8"
    folder = write_adapter(tmp_path / "a", config={"base_model_name_or_path": name})
    (folder / "\x1b[2J").touch()

    pushed = mural("push", folder, "acme:v1", "--json")
    seen = mural("inspect", folder, "--json")
    plain = mural("push", folder, "acme:v1").out

    assert pushed.json["left_out"] == ["\x1b[2J"]
    assert json.loads(seen.out)["base_model"] == name
    for text in (pushed.out, seen.out, plain):
        assert all(line.isascii() and line.isprintable() for line in text.splitlines())
