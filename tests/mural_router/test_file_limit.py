"""How many files a router may have open."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from mural_router.process import raise_file_limit


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_is_raised_to_what_connections_need(
    limits: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    raise_file_limit(300)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, limits[1])
    raise_file_limit(200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, limits[1])
    assert caplog.messages == []


def test_a_limit_that_cannot_be_raised_so_far_is_told(
    limits: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 128))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: made.append(pair))
    raise_file_limit(300)
    assert made == [(128, 128)]
    assert "128 files may be open, and 300 are needed" in caplog.text
