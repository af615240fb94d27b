"""Opening files of a folder that somebody else filled."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mural_resolvers.errors import TooLarge, UnusableAdapter
from mural_resolvers.files import contained, is_folder, open_regular, read_bounded


def test_a_link_is_judged_by_where_it_ends(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "file").touch()
    (outside / "file").touch()
    (inside / "good").symlink_to(inside / "file")
    (inside / "bad").symlink_to("../out/file")
    (inside / "bad_folder").symlink_to("../out")
    (inside / "chain").symlink_to("bad")

    assert contained(inside / "good", inside) == (inside / "file").resolve()
    for name in ("bad", "bad_folder", "bad_folder/file", "chain", "..", "../in2", "/etc/passwd"):
        with pytest.raises(UnusableAdapter, match="leads out"):
            contained(inside / name, inside)


def test_a_sibling_whose_name_begins_alike_is_outside(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()

    with pytest.raises(UnusableAdapter):
        contained(tmp_path / "acme-evil", tmp_path / "acme")


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)]
)
def test_only_regular_files_are_opened(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "it")

    with pytest.raises(UnusableAdapter):
        open_regular(tmp_path / "it")


def test_a_device_is_not_read() -> None:
    with pytest.raises(UnusableAdapter, match="not a regular file"):
        read_bounded(Path("/dev/zero"), 10)


def test_a_file_above_its_limit_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")

    assert read_bounded(tmp_path / "f", 5) == b"12345"
    with pytest.raises(TooLarge):
        read_bounded(tmp_path / "f", 4)


@pytest.mark.parametrize("target", ["nowhere", "link", "x" * 4000, "file/below"])
def test_a_link_that_leads_nowhere_is_no_folder(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(target)

    assert is_folder(tmp_path)
    assert not is_folder(tmp_path / "link")
    assert not is_folder(tmp_path / "file")
    assert not is_folder(tmp_path / ("x" * 300))


def test_a_disk_that_fails_is_not_taken_for_an_absent_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path) -> os.stat_result:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "stat", fail)
    with pytest.raises(OSError, match="Input/output"):
        is_folder(tmp_path)
