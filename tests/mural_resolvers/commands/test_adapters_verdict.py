"""``mural adapters inspect`` and ``verify``: facts, refusals, memory, and the base's spec."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.commands import adapters_judgement
from mural_resolvers.commands.adapters_base import read_base
from mural_resolvers.digest import WEIGHTS_FILE
from mural_resolvers.errors import InvalidInput
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest

WriteAdapter = Callable[..., Path]


def test_inspect_tells_digest_facts_and_verdict(
    mural, tmp_path: Path, write_adapter: WriteAdapter, spec_file: Path
) -> None:
    folder = write_adapter(tmp_path / "a")

    seen = mural("inspect", folder, "--base", spec_file)

    assert seen.status == 0
    assert build_manifest(folder).digest in seen.out
    assert "rank      4" in seen.out
    assert "verdict   fits 'tiny': 2 modules, rank 4" in seen.out


def test_inspect_without_a_base_says_what_it_did_not_check(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    seen = mural("inspect", write_adapter(tmp_path / "a"))

    assert seen.status == 0
    assert "--base" in seen.out


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"use_dora": True}, "DoRA"), ({"r": 8}, "shape"), ({"target_modules": ["v_proj"]}, "leaves")],
)
@pytest.mark.parametrize("action", ["inspect", "verify"])
def test_a_misfit_gets_the_reason_and_status_one(
    mural,
    tmp_path: Path,
    write_adapter: WriteAdapter,
    spec_file: Path,
    action: str,
    config: dict[str, object],
    reason: str,
) -> None:
    folder = write_adapter(tmp_path / "a", config=config)

    seen = mural(action, folder, "--base", spec_file)
    told = mural(action, folder, "--base", spec_file, "--json")

    assert (seen.status, told.status) == (1, 1)
    assert "digest" in seen.out
    assert reason in seen.out.split("verdict")[1]
    assert reason in " ".join(told.json["refusals"])


def test_inspect_follows_links_inside_the_folder(
    mural, tmp_path: Path, write_adapter: WriteAdapter, spec_file: Path
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS_FILE).rename(folder / "blob")
    (folder / WEIGHTS_FILE).symlink_to("blob")

    assert mural("inspect", folder, "--base", spec_file).status == 0


def test_inspect_holds_a_folder_to_its_manifest(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / MANIFEST_FILE).write_bytes(build_manifest(folder).to_json())
    write_adapter(folder, fill=b"\x09")

    seen = mural("inspect", folder)

    assert seen.status == 1
    assert MANIFEST_FILE in seen.out


def test_inspect_tells_every_reason_at_once(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / MANIFEST_FILE).write_bytes(build_manifest(folder).to_json())
    write_adapter(folder, config={"use_dora": True, "bias": "all"})

    reasons = mural("inspect", folder, "--json").json["refusals"]

    assert [MANIFEST_FILE in reasons[0], "DoRA" in reasons[1], "bias" in reasons[1]] == [True] * 3


def test_inspect_lets_no_file_steer_the_terminal(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    config = {"target_modules": ["\x1b[2J"], "base_model_name_or_path": "\u202e\x07"}

    seen = mural("inspect", write_adapter(tmp_path / "a", config=config))

    assert seen.status == 1
    assert all(line.isprintable() for line in (seen.out + seen.err).splitlines())


def test_a_pickle_is_inspected_only_where_it_is_admitted(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")

    assert mural("inspect", folder).status == 1
    admitted = mural("inspect", folder, "--admit-bin", "--json")
    assert (admitted.status, admitted.json["modules"]) == (0, None)


def test_an_absent_folder_is_said_to_be_none(mural, tmp_path: Path) -> None:
    missing = mural("inspect", tmp_path / "absent")

    assert missing.status == 1
    assert "is not a folder" in missing.err


def test_a_name_without_a_store_is_wrong_usage(mural) -> None:
    wrong = mural("inspect", "acme:v1")

    assert wrong.status == 2
    assert "MURAL_STORE" in wrong.err


def test_the_slot_takes_the_rank_in_every_layer_that_is_fused_with_a_target(
    mural, tmp_path: Path, write_adapter: WriteAdapter, spec_file: Path
) -> None:
    folder = write_adapter(tmp_path / "a")

    alone = mural("inspect", folder, "--json").json["slot_bytes"]
    on_base = mural("verify", folder, "--base", spec_file, "--json").json["slot_bytes"]

    # Rank 4, two layers: q_proj 8 to 8, and with it v_proj 8 to 4.
    assert alone == {"bfloat16": 2 * 4 * 2 * 16, "float32": 4 * 4 * 2 * 16}
    assert on_base == {"bfloat16": 2 * 4 * 2 * 28, "float32": 4 * 4 * 2 * 28}
    assert "at least 256 B in bfloat16" in mural("inspect", folder).out


def test_verify_needs_a_base(mural, tmp_path: Path, write_adapter: WriteAdapter) -> None:
    wrong = mural("verify", write_adapter(tmp_path / "a"))

    assert wrong.status == 2
    assert "--base" in wrong.err


def test_verify_tells_what_fits(
    mural, tmp_path: Path, write_adapter: WriteAdapter, spec_file: Path
) -> None:
    folder = write_adapter(tmp_path / "a")

    told = mural("verify", folder, "--base", spec_file, "--json")

    assert told.status == 0
    assert told.json == {
        "name": None,
        "path": str(folder),
        "digest": build_manifest(folder).digest,
        "base": "tiny",
        "fits": True,
        "modules": 2,
        "rank": 4,
        "slot_bytes": {"bfloat16": 448, "float32": 896},
        "refusals": [],
    }


def test_a_rank_above_what_is_served_does_not_fit(
    mural, tmp_path: Path, write_adapter: WriteAdapter, spec_file: Path
) -> None:
    folder = write_adapter(tmp_path / "a")

    refused = mural("verify", folder, "--base", spec_file, "--max-lora-rank", "2")

    assert refused.status == 1
    assert "rank 4" in refused.out


@pytest.mark.parametrize("rank", ["0", "-1", "x", "1e3", "99999999"])
def test_a_rank_that_is_none_is_wrong_usage(mural, tmp_path: Path, rank: str) -> None:
    assert mural("verify", tmp_path, "--base", "x.json", "--max-lora-rank", rank).status == 2


@pytest.mark.parametrize(
    ("base", "reason"),
    [("absent.json", "No such file"), ("absent", "is no base"), ("bad.json", "not a base spec")],
)
def test_a_base_that_cannot_be_read_is_told(
    mural, tmp_path: Path, write_adapter: WriteAdapter, base: str, reason: str
) -> None:
    (tmp_path / "bad.json").write_text("{}")

    refused = mural("verify", write_adapter(tmp_path / "a"), "--base", tmp_path / base)

    assert refused.status == 1
    assert reason in refused.err


class _Reader:
    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self._loaded = loaded

    def load(self) -> object:
        if isinstance(self._loaded, ImportError):
            raise self._loaded
        return self._loaded


def test_a_model_s_own_files_are_read_by_whoever_can(tmp_path: Path, base_spec: BaseSpec) -> None:
    asked: list[tuple[str, int]] = []

    def read(path: str, max_lora_rank: int) -> BaseSpec:
        asked.append((path, max_lora_rank))
        return base_spec

    readers = [_Reader("a", ImportError("no torch")), _Reader("b", read)]

    assert read_base(str(tmp_path), None, readers) is base_spec
    assert read_base(str(tmp_path), 8, readers) is base_spec
    assert asked == [(str(tmp_path), 64), (str(tmp_path), 8)]


@pytest.mark.parametrize("readers", [[], [_Reader("a", ImportError("no torch"))]])
def test_without_the_server_s_package_a_model_needs_its_spec(
    tmp_path: Path, readers: list[_Reader]
) -> None:
    with pytest.raises(InvalidInput, match=r"mural\[server\]"):
        read_base(str(tmp_path), None, readers)


def test_an_expression_that_never_ends_is_refused(
    mural, tmp_path: Path, write_adapter: WriteAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_judgement, "_MATCHING_S", 0.05)
    handler = signal.getsignal(signal.SIGALRM)
    module = "base_model.model." + "a" * 60
    tensors = {f"{module}.lora_{half}.weight": ("F32", [4, 4]) for half in ("A", "B")}
    config = {"target_modules": "(a+)+b"}

    seen = mural("inspect", write_adapter(tmp_path / "a", config=config, tensors=tensors))

    assert seen.status == 1
    assert "to match" in seen.out
    assert signal.getsignal(signal.SIGALRM) is handler
