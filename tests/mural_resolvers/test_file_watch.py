"""Files that are renewed under a running process."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.file_watch import FileWatch


@pytest.fixture
def pair(tmp_path):
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    cert.write_text("old")
    key.write_text("old")
    return cert, key


def test_a_renewed_pair_is_read_once_it_has_settled(pair):
    cert, key = pair
    loaded: list[tuple[str, str]] = []
    watch = FileWatch(
        [str(cert), key, None],
        lambda: loaded.append((cert.read_text(), key.read_text())),
        what="certificates",
    )
    watch.poll()
    cert.write_text("renewed")
    watch.poll()
    key.write_text("renewed")
    watch.poll()
    assert loaded == []
    watch.poll()
    watch.poll()
    assert loaded == [("renewed", "renewed")]


@pytest.mark.parametrize("kind", [ValueError, InvalidInput])
def test_files_that_do_not_fit_leave_the_old_ones_until_they_do(pair, caplog, kind):
    cert, _ = pair
    calls: list[str] = []

    def reload() -> None:
        calls.append(cert.read_text())
        if calls[-1] == "broken":
            raise kind("the key is another's")

    watch = FileWatch(pair, reload, what="certificates")
    cert.write_text("broken")
    for _ in range(4):
        watch.poll()
    assert calls == ["broken"] * 3, "it may be the disk that was at fault"
    numbers = watch.numbers
    assert (numbers.reloads, numbers.refused, numbers.stale) == (0, 1, True)
    said = "the certificates cannot be used, the old ones hold: the key is another's"
    assert caplog.messages.count(said) == 1
    cert.write_text("renewed")
    for _ in range(3):
        watch.poll()
    assert calls[3:] == ["renewed"]
    numbers = watch.numbers
    assert (numbers.reloads, numbers.refused, numbers.stale) == (1, 1, False)


def test_a_mounted_secret_is_swapped_by_its_links(tmp_path):
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "token").write_text(version)
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "token").symlink_to("data/token")
    read: list[str] = []
    path = tmp_path / "token"
    watch = FileWatch([path], lambda: read.append(path.read_text()), what="token")
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(tmp_path / "data")
    for _ in range(3):
        watch.poll()
    assert read == ["two"]


def test_without_files_there_is_nothing_to_watch():
    assert not FileWatch([None], lambda: None, what="certificates").needed
