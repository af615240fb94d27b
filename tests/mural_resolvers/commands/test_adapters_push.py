"""What ``mural adapters push`` takes, leaves out and refuses, and what a break leaves behind."""

from __future__ import annotations

import io
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.commands.adapters_output import ProgressBar
from mural_resolvers.digest import BIN_WEIGHTS_FILE, CONFIG_FILE, WEIGHTS_FILE
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest

WriteAdapter = Callable[..., Path]


@pytest.fixture(autouse=True)
def store(directory_store: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MURAL_STORE", directory_store)
    return Path(directory_store)


def test_what_training_leaves_beside_the_adapter_is_left_out_and_told(
    mural, adapter: Path, store: Path
) -> None:
    for name in ("README.md", "optimizer.pt", "trainer_state.json", "tokenizer.json"):
        (adapter / name).write_text("x")
    (adapter / "checkpoint-500").mkdir()

    pushed = mural("push", adapter, "acme:v1")

    assert "left out  README.md, checkpoint-500/, optimizer.pt" in pushed.out
    published = store / "acme" / "default" / "v1"
    assert sorted(os.listdir(published)) == sorted([CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE])


def test_many_files_are_left_out_in_one_line(mural, adapter: Path) -> None:
    for number in range(20):
        (adapter / f"events.{number:02}").touch()

    told = mural("push", adapter, "acme:v1")

    assert "events.05 and 14 more" in told.out
    assert len(mural("push", adapter, "acme:v1", "--json").json["left_out"]) == 20


def test_a_folder_of_links_into_a_cache_is_pushed(mural, adapter: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "w"
    blob.parent.mkdir()
    (adapter / WEIGHTS_FILE).rename(blob)
    (adapter / WEIGHTS_FILE).symlink_to(blob)

    pushed = mural("push", adapter, "acme:v1")
    mural("pull", "acme:v1", tmp_path / "pulled")

    assert pushed.status == 0, pushed.err
    assert (tmp_path / "pulled" / WEIGHTS_FILE).read_bytes() == blob.read_bytes()


def test_an_output_folder_that_has_only_checkpoints_names_them(
    mural, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "output").mkdir()
    shutil.copytree(adapter, tmp_path / "output" / "checkpoint-500")

    refused = mural("push", tmp_path / "output", "acme:v1")

    assert refused.status == 1
    assert "checkpoint-500" in refused.err


def test_a_pickle_is_refused_with_a_conversion_that_works(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder = write_adapter(tmp_path / "a")
    weights = load_file(folder / WEIGHTS_FILE)
    torch.save(weights, folder / BIN_WEIGHTS_FILE)
    (folder / WEIGHTS_FILE).unlink()

    refused = mural("push", folder, "acme:v1")

    assert refused.status == 1
    assert "pickle" in refused.err
    conversion = refused.err[refused.err.index("python -c") :].strip()
    here = f"PATH={Path(sys.executable).parent}:$PATH; {conversion}"
    subprocess.run(["bash", "-c", here], cwd=folder, check=True, timeout=100)
    converted = load_file(folder / WEIGHTS_FILE)
    assert all(torch.equal(converted[name], tensor) for name, tensor in weights.items())
    assert mural("push", folder, "acme:v1").status == 0


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"r": 8}, "shape"),
        ({"target_modules": ["v_proj"]}, "target_modules leaves out"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"bias": "all"}, "bias"),
        ({"target_modules": "(q_proj"}, "expression"),
    ],
)
def test_what_no_base_could_serve_is_refused_before_the_upload(
    mural, tmp_path: Path, store: Path, write_adapter: WriteAdapter, config: dict, reason: str
) -> None:
    refused = mural("push", write_adapter(tmp_path / "a", config=config), "acme:v1")

    assert refused.status == 1
    assert reason in refused.err
    assert os.listdir(store) == []


def test_a_tensor_without_its_other_half_is_refused(
    mural, tmp_path: Path, write_adapter: WriteAdapter
) -> None:
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [4, 8])}

    refused = mural("push", write_adapter(tmp_path / "a", tensors=tensors), "acme:v1")

    assert refused.status == 1
    assert "other half" in refused.err


def test_a_file_cut_short_is_refused(mural, adapter: Path) -> None:
    whole = (adapter / WEIGHTS_FILE).read_bytes()
    (adapter / WEIGHTS_FILE).write_bytes(whole[:-1])

    refused = mural("push", adapter, "acme:v1")

    assert refused.status == 1
    assert "safetensors" in refused.err


def test_a_stale_manifest_is_refused(mural, adapter: Path, write_adapter: WriteAdapter) -> None:
    (adapter / MANIFEST_FILE).write_bytes(build_manifest(adapter).to_json())
    write_adapter(adapter, fill=b"\x09")

    refused = mural("push", adapter, "acme:v1")

    assert refused.status == 1
    assert MANIFEST_FILE in refused.err


def test_push_holds_the_adapter_against_a_base_that_is_named(
    mural, adapter: Path, spec_file: Path, store: Path
) -> None:
    refused = mural("push", adapter, "acme:v1", "--base", spec_file, "--max-lora-rank", "2")

    assert refused.status == 1
    assert "rank 4" in refused.err
    assert os.listdir(store) == []
    assert mural("push", adapter, "acme:v1", "--base", spec_file).status == 0


@pytest.mark.parametrize(
    "argv",
    [
        ("acme",),
        ("acme:latest",),
        ("acme:v1", "--alias", "v1"),
        ("acme:v1", "--alias", "../x"),
        ("Acme:v1",),
        ("acme:v1", "--sto", "x"),
        (),
    ],
)
def test_arguments_that_mean_nothing_are_wrong_usage(mural, adapter: Path, argv: tuple) -> None:
    wrong = mural("push", adapter, *argv)

    assert wrong.status == 2
    assert "mural adapters" in wrong.err
    assert wrong.out == ""


def test_a_push_without_a_store_is_wrong_usage(
    mural, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MURAL_STORE")

    wrong = mural("push", adapter, "acme:v1")

    assert wrong.status == 2
    assert "--store" in wrong.err
    assert "MURAL_STORE" in wrong.err


def test_a_folder_that_is_none_is_said_to_be_none(mural, tmp_path: Path) -> None:
    refused = mural("push", tmp_path / "absent", "acme:v1")

    assert refused.status == 1
    assert "is not a folder" in refused.err


def test_a_folder_that_cannot_be_read_is_told_without_a_traceback(
    mural, adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(adapter, tmp_path / "in")
    (tmp_path / "file").touch()

    refused = mural("pull", "acme:v1", tmp_path / "file" / "out", "--json")

    assert refused.status == 1
    assert refused.json["error"]["code"] == "invalid_input"


@pytest.mark.parametrize("filled", ["file", "folder"])
def test_pull_writes_over_nothing(mural, adapter: Path, tmp_path: Path, filled: str) -> None:
    mural("push", adapter, "acme:v1")
    target = tmp_path / "target"
    if filled == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").touch()

    refused = mural("pull", "acme:v1", target)

    assert refused.status == 1
    assert "is not an empty folder" in refused.err
    assert target.read_text() == "mine" if filled == "file" else os.listdir(target) == ["mine"]


def test_pull_fills_an_empty_folder_and_leaves_nothing_beside_it(
    mural, adapter: Path, tmp_path: Path
) -> None:
    mural("push", adapter, "acme:v1")
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)

    assert mural("pull", "acme:v1", target).status == 0

    assert sorted(os.listdir(target)) == sorted([CONFIG_FILE, WEIGHTS_FILE])
    assert os.listdir(target.parent) == ["target"]


def test_what_a_pull_left_that_died_is_no_content(mural, adapter: Path, tmp_path: Path) -> None:
    mural("push", adapter, "acme:v1")
    target = tmp_path / "target"
    (target / ".mural-pull-x").mkdir(parents=True)
    (target / ".mural-pull-x" / WEIGHTS_FILE).touch()

    assert mural("pull", "acme:v1", target).status == 0

    assert sorted(os.listdir(target)) == sorted([CONFIG_FILE, WEIGHTS_FILE])


def test_a_failed_pull_leaves_an_empty_folder_empty(mural, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()

    assert mural("pull", "acme:v1", target).status == 1

    assert os.listdir(target) == []


def test_rot_in_the_store_is_not_pulled(mural, adapter: Path, store: Path, tmp_path: Path) -> None:
    mural("push", adapter, "acme:v1")
    rotten = store / "acme" / "default" / "v1" / WEIGHTS_FILE
    rotten.write_bytes(rotten.read_bytes()[:-1] + b"\x77")

    refused = mural("pull", "acme:v1", tmp_path / "target")

    assert refused.status == 1
    assert not (tmp_path / "target").exists()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_tells_share_and_rate_and_is_gone_in_the_end() -> None:
    terminal, clock = _Terminal(), iter(range(100))
    with ProgressBar("push", 4 << 20, terminal, now=lambda: next(clock)) as bar:
        for _ in range(4):
            bar.advance(1 << 20)
            drawn = terminal.getvalue().rpartition("\x1b[K")[2]

    assert "100%  4.0 MiB of 4.0 MiB" in drawn
    assert "/s" in drawn
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_the_bar_never_passes_the_whole() -> None:
    terminal, clock = _Terminal(), iter(range(100))
    with ProgressBar("push", 10, terminal, now=lambda: next(clock)) as bar:
        bar.advance(25)

    assert "100%  10 B of 10 B" in terminal.getvalue()
    assert "250%" not in terminal.getvalue()


def test_a_bar_is_drawn_on_a_terminal_only(program: Path, adapter: Path) -> None:
    argv: list[Path | str] = [program, "adapters", "push", adapter]
    piped = subprocess.run([*argv, "acme:v1"], capture_output=True, timeout=100, check=True)
    ours, theirs = pty.openpty()
    drawn = subprocess.run(
        [*argv, "acme:v2"], stdout=subprocess.PIPE, stderr=theirs, timeout=100, check=True
    )
    os.close(theirs)

    assert piped.stderr == b""
    assert b"push [" in os.read(ours, 65536)
    os.close(ours)
    assert b"\x1b" not in piped.stdout + drawn.stdout


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 2), ("", 2)])
def test_rm_asks_on_a_terminal(
    program: Path, mural, adapter: Path, answer: str, status: int
) -> None:
    mural("push", adapter, "acme:v1")
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())

    done = subprocess.run(
        [program, "adapters", "rm", "acme:v1"],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    os.close(ours)
    os.close(theirs)
    assert done.returncode == status
    assert "never used again" in done.stderr
    assert bool(mural("ls").out) == (status != 0)


def test_rm_does_not_ask_where_nobody_can_answer(mural_program, mural, adapter: Path) -> None:
    mural("push", adapter, "acme:v1")

    wrong = mural_program("rm", "acme:v1")

    assert wrong.status == 2
    assert "--yes" in wrong.err
    assert mural("ls").out


@pytest.mark.parametrize(
    "argv",
    [
        ("acme", "stable"),
        ("acme", "stable", "--version", "v1", "--remove"),
        ("acme", "stable", "--version", "v1=-1"),
        ("acme", "stable", "--version", "v1=nan"),
        ("acme", "stable", "--version", "v1=0"),
        ("acme", "stable", "--version", "v1", "--version", "v1=2"),
        ("acme:v1", "stable", "--version", "v1"),
        ("acme", "a/b", "--version", "v1"),
    ],
)
def test_an_alias_that_means_nothing_is_wrong_usage(mural, argv: tuple[str, ...]) -> None:
    assert mural("alias", *argv).status == 2


def test_every_action_s_help_states_its_keys_and_exit_statuses(mural) -> None:
    for action in ("push", "pull", "ls", "inspect", "verify", "alias", "rm"):
        told = mural(action, "--help")
        assert told.status == 0
        assert "Exit status: 0 done, 1 refused or failed, 2 wrong usage." in told.out
        assert "--json prints one object" in told.out
        assert "MURAL_STORE" in told.out


def test_what_json_prints_has_the_keys_of_the_help(mural, adapter: Path, tmp_path: Path) -> None:
    def keys_of(action: str) -> list[str]:
        text = " ".join(mural(action, "--help").out.split("prints one object:")[1].split())
        for nested in ("[{path, size, sha256}]", "(false: it was there already)", "(exact)"):
            text = text.replace(nested, "")
        text = text.replace("{bfloat16, float32}", "")
        return [key.strip() for key in text.partition(". What fails")[0].split(",")]

    assert list(mural("push", adapter, "acme:v1", "--json").json) == keys_of("push")
    assert list(mural("pull", "acme:v1", tmp_path / "p", "--json").json) == keys_of("pull")
    assert list(mural("inspect", adapter, "--json").json) == keys_of("inspect")
    assert list(mural("rm", "acme:v1", "--yes", "--json").json) == keys_of("rm")
