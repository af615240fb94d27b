"""What a hub's answers mean."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import httpx2
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import hf_raise_for_status, parse_ratelimit_headers

from mural_resolvers.errors import Forbidden, Unavailable, UnusableAdapter
from mural_resolvers.hub.answers import (
    Unreadable,
    content_range,
    parse_revision,
    parse_tree,
    refusal,
    source_file,
    unique_paths,
)
from mural_resolvers.resolver import SourceFile

SHA1 = "0123456789abcdef0123456789abcdef01234567"
SHA256 = SHA1 + "0123456789abcdef01234567"
NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "headers", "meaning"),
    [
        (401, {"x-error-message": "Invalid username or password."}, Forbidden),
        (401, {"x-error-message": "Invalid credentials in Authorization header"}, Forbidden),
        (401, {"x-error-code": "GatedRepo"}, Forbidden),
        (401, {"x-error-code": "RepoNotFound"}, None),
        (403, {"x-error-code": "GatedRepo"}, Forbidden),
        (403, {}, Forbidden),
        (451, {}, Forbidden),
        (404, {"x-error-code": "RepoNotFound"}, None),
        (404, {"x-error-code": "RevisionNotFound"}, None),
        (404, {"x-error-code": "EntryNotFound"}, None),
        (404, {}, None),
        (410, {}, None),
        (400, {}, Unavailable),
        (405, {}, Unavailable),
        (408, {}, Unavailable),
        (429, {}, Unavailable),
        (500, {}, Unavailable),
        (502, {}, Unavailable),
        (503, {}, Unavailable),
        (204, {}, Unavailable),
        (304, {}, Unavailable),
    ],
)
def test_each_status_has_its_meaning(
    status: int, headers: dict[str, str], meaning: type[Exception] | None
) -> None:
    error = refusal(status, headers, hidden_is_absent=False)

    assert (None if error is None else type(error)) is meaning


@pytest.mark.parametrize(
    ("status", "code", "theirs", "ours"),
    [
        (404, "RepoNotFound", RepositoryNotFoundError, None),
        (404, "RevisionNotFound", RevisionNotFoundError, None),
        (403, "GatedRepo", GatedRepoError, Forbidden),
    ],
)
def test_the_codes_are_those_that_the_hubs_client_reads(
    status: int, code: str, theirs: type[Exception], ours: type[Exception] | None
) -> None:
    request = httpx2.Request("GET", "https://hub.example/api/models/acme/sql")
    with pytest.raises(theirs):
        hf_raise_for_status(
            httpx2.Response(status, headers={"X-Error-Code": code}, request=request)
        )

    error = refusal(status, {"x-error-code": code}, hidden_is_absent=False)
    assert (None if error is None else type(error)) is ours


def test_what_is_hidden_from_nobody_in_particular_may_count_as_absent() -> None:
    assert refusal(401, {}, hidden_is_absent=True) is None
    assert isinstance(refusal(401, {"x-error-code": "GatedRepo"}, hidden_is_absent=True), Forbidden)
    assert isinstance(refusal(403, {}, hidden_is_absent=True), Forbidden)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 2.0),
        ({"retry-after": "17"}, 17.0),
        ({"retry-after": "0"}, 1.0),
        ({"retry-after": "99999999999999999999"}, 3600.0),
        ({"retry-after": "Sun, 29 Nov 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Sun, 29 Nov 2026 11:00:00 GMT"}, 1.0),
        ({"retry-after": "Sun, 29 Nov 2026 12:00:30 -0000"}, 30.0),
        ({"retry-after": "soon"}, 2.0),
        ({"retry-after": "-5"}, 2.0),
        ({"retry-after": "²"}, 2.0),
        ({"ratelimit": '"api";r=0;t=55'}, 55.0),
        ({"ratelimit": "nonsense"}, 2.0),
    ],
)
def test_the_hub_says_when_to_come_back(headers: dict[str, str], seconds: float) -> None:
    error = refusal(429, headers, hidden_is_absent=False, now=NOW)

    assert error is not None
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    "text", ['"api";r=0;t=55', '"api" ; r=12 ; t=7', '"resolvers";r=1;t=300, "api";r=0;t=55']
)
def test_the_rate_limit_is_read_as_the_hubs_client_reads_it(text: str) -> None:
    theirs = parse_ratelimit_headers({"ratelimit": text})
    ours = refusal(429, {"ratelimit": text}, hidden_is_absent=False)

    assert theirs is not None
    assert ours is not None
    assert ours.retry_after_s == theirs.reset_in_seconds


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


def test_a_description_needs_its_repository_and_commit() -> None:
    assert parse_revision(as_json({"id": "a/b", "sha": SHA1, "more": [{}]})).sha == SHA1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        b"[]",
        b'{"id": "a/b"}',
        as_json({"id": "a/b", "sha": "main"}),
        as_json({"id": "a/b", "sha": SHA1.upper()}),
        as_json({"id": 1, "sha": SHA1}),
        as_json({"sha": SHA1}),
        b'{"id": "\xff", "sha": "' + SHA1.encode() + b'"}',
        b'{"x": ' + b"[" * 100_000,
    ],
)
def test_a_description_that_is_none_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse_revision(data)


def one_file(**changes: object) -> SourceFile:
    entry = {"type": "file", "path": "f", "oid": SHA1, "size": 5} | changes
    return source_file(parse_tree(as_json([entry]))[0])


def test_a_small_file_is_known_by_gits_sha1() -> None:
    assert one_file() == SourceFile("f", 5, None, SHA1)


def test_an_lfs_file_is_known_by_its_sha256() -> None:
    lfs = {"oid": SHA256, "size": 7, "pointerSize": 3}

    assert one_file(lfs=lfs, xetHash="x") == SourceFile("f", 7, SHA256, SHA256)


@pytest.mark.parametrize(
    "changes",
    [
        {"oid": ""},
        {"oid": "x" * 40},
        {"size": -1},
        {"lfs": {"oid": SHA1, "size": 7}},
        {"lfs": {"oid": SHA256, "size": -7}},
    ],
)
def test_a_file_without_hash_or_size_is_unreadable(changes: dict[str, object]) -> None:
    with pytest.raises(Unreadable):
        one_file(**changes)


@pytest.mark.parametrize("wrong", [{"path": 1}, {"size": "5"}, {"lfs": "x"}, {"type": None}])
def test_a_listing_of_another_form_is_unreadable(wrong: dict[str, object]) -> None:
    with pytest.raises(Unreadable):
        one_file(**wrong)


def test_a_large_file_without_lfs_is_refused() -> None:
    with pytest.raises(UnusableAdapter, match="LFS"):
        one_file(size=17 << 20)


def test_a_file_that_is_listed_twice_is_unreadable() -> None:
    entries = parse_tree(as_json([{"type": "file", "path": "f"}, {"type": "file", "path": "f"}]))

    with pytest.raises(Unreadable):
        unique_paths(entries)


def test_a_content_range_is_half_open_here() -> None:
    assert content_range("bytes 5-9/20") == (5, 10, 20)
    assert content_range(" bytes 5-9/* ") == (5, 10, None)


@pytest.mark.parametrize("text", ["", "bytes */20", "items 5-9/20", "bytes 5-/20", "bytes 5-9"])
def test_a_range_that_does_not_say_which_is_unreadable(text: str) -> None:
    with pytest.raises(Unreadable):
        content_range(text)
