"""Quarantine: limits that hold while bytes come, and what is left when they do not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mural_resolvers.errors import (
    InvalidInput,
    MuralError,
    RateLimited,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import build_manifest
from mural_resolvers.scratch import ScratchFolder, sweep_scratch
from mural_resolvers.uploads import Intake, Quarantine

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
WriteAdapter = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "quarantine"


@pytest.fixture
def quarantine(root: Path) -> Quarantine:
    made = Quarantine(root)
    made.open()
    return made


@pytest.fixture
def intake(quarantine: Quarantine) -> Iterator[Intake]:
    made = quarantine.intake(1 << 20, TooLarge("over"))
    yield made
    made.discard()


def send(intake: Intake, name: str, data: bytes, *, piece: int = 1 << 20, size: int | None = None):
    intake.begin(name, size)
    for start in range(0, len(data), piece):
        intake.write(data[start : start + piece])
    intake.end()


def weights_of(header: object, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


GOOD = weights_of({"t": tensor([2], 0, 8)}, bytes(8))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(piece=st.integers(1, 600), told=st.booleans())
def test_what_came_is_what_a_folder_would_be(
    quarantine: Quarantine,
    write_adapter: WriteAdapter,
    tmp_path_factory: pytest.TempPathFactory,
    piece: int,
    told: bool,
) -> None:
    folder = write_adapter(tmp_path_factory.mktemp("trained"))
    intake = quarantine.intake(1 << 20, TooLarge("over"))

    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        send(intake, path.name, data, piece=piece, size=len(data) if told else None)

    assert intake.finish() == build_manifest(folder) == build_manifest(intake.folder)
    intake.discard()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", UnusableAdapter),
        (b"\x08\0\0", UnusableAdapter),
        (GOOD[:20], UnusableAdapter),
        (GOOD[:-1], UnusableAdapter),
        (GOOD + b"\0", UnusableAdapter),
        (weights_of([1]), UnusableAdapter),
        (weights_of({"t": 1}), UnusableAdapter),
        (weights_of({"t": tensor([2], 0, 4)}, bytes(4)), UnusableAdapter),
        (weights_of({"t": tensor([2], 4, 12)}, bytes(12)), UnusableAdapter),
        (weights_of({"t": tensor([2], 0, 1 << 62)}, bytes(8)), UnusableAdapter),
        (weights_of({"t": tensor([1 << 60], 0, 1 << 62)}, bytes(8)), TooLarge),
        (weights_of({"t": tensor([2], 0, -8)}, bytes(8)), UnusableAdapter),
        (b"\xff" * 16, TooLarge),
        ((5 << 20).to_bytes(8, "little") + b"{", TooLarge),
    ],
)
@pytest.mark.parametrize("told", [False, True])
def test_a_weights_file_that_is_none_is_refused(
    intake: Intake, data: bytes, error: type[MuralError], told: bool
) -> None:
    with pytest.raises(error):
        send(intake, WEIGHTS, data, size=len(data) if told else None)


def test_nothing_of_a_weights_file_is_kept_before_its_header_is_known(intake: Intake) -> None:
    intake.begin(WEIGHTS)
    intake.write(GOOD[:30])
    intake._open._file.flush()  # type: ignore[union-attr]  # it is open
    assert (intake.folder / WEIGHTS).stat().st_size == 0

    intake.write(GOOD[30:])
    intake.end()
    assert (intake.folder / WEIGHTS).read_bytes() == GOOD


def test_a_header_is_refused_when_it_has_come_whatever_follows(intake: Intake) -> None:
    bad = weights_of({"t": tensor([2], 0, 4)})
    intake.begin(WEIGHTS)

    with pytest.raises(UnusableAdapter):
        intake.write(bad)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, "chat_template.jinja"])
def test_each_file_has_a_limit_of_its_own(root: Path, name: str) -> None:
    limits = AdapterLimits(max_config_bytes=64, max_weights_bytes=64, max_template_bytes=64)
    quarantine = Quarantine(root, limits)
    quarantine.open()
    data = weights_of({"t": tensor([32], 0, 128)}, bytes(128)) if name == WEIGHTS else b"x" * 65
    for size in (len(data), None):
        intake = quarantine.intake(1 << 20, RateLimited("over"))
        with pytest.raises(TooLarge):
            send(intake, name, data, size=size)
        intake.discard()


@pytest.mark.parametrize("told", [False, True])
def test_all_files_together_have_a_limit(quarantine: Quarantine, told: bool) -> None:
    intake = quarantine.intake(100, RateLimited("over"))
    send(intake, CONFIG, b"x" * 60)

    with pytest.raises(RateLimited, match="over"):
        send(intake, "chat_template.jinja", b"x" * 41, size=41 if told else None)
    intake.discard()


@pytest.mark.parametrize("name", ["adapter_model.bin", "README.md", "", "../x", "manifest.json"])
def test_only_an_adapters_files_are_taken(intake: Intake, name: str) -> None:
    with pytest.raises(UnusableAdapter):
        intake.begin(name)
    assert os.listdir(intake.folder) == []


def test_what_is_discarded_is_gone_and_takes_no_more(root: Path, quarantine: Quarantine) -> None:
    intake = quarantine.intake(1 << 20, TooLarge("over"))
    intake.begin(CONFIG)
    intake.write(b"{")

    intake.discard()
    intake.discard()

    assert os.listdir(root) == []
    for call in (lambda: intake.write(b"}"), intake.end, intake.finish):
        with pytest.raises(Unavailable):
            call()


def test_what_a_dead_process_left_is_swept_and_what_lives_is_not(root: Path) -> None:
    root.mkdir(mode=0o700)
    (root / "dead").mkdir()
    (root / "dead" / WEIGHTS).touch()
    (root / "dead.lock").touch()
    alive = ScratchFolder(root)

    Quarantine(root).open()

    assert sorted(os.listdir(root)) == sorted([alive.path.name, f"{alive.path.name}.lock"])
    alive.close()
    assert sweep_scratch(root) == 0


def test_the_folder_is_for_nobody_else(root: Path, quarantine: Quarantine) -> None:
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("fault", ["others write", "a link", "a file", "cannot be made"])
def test_a_folder_that_others_may_change_is_refused(root: Path, tmp_path: Path, fault: str) -> None:
    if fault == "others write":
        root.mkdir()
        root.chmod(0o777)
    elif fault == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    elif fault == "a file":
        root.touch()
    else:
        root.touch()
        root = root / "below a file"

    with pytest.raises(InvalidInput):
        Quarantine(root).open()
