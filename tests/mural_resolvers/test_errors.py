"""Typed errors and their bodies."""

from __future__ import annotations

import json

import pytest

from mural_resolvers import errors
from mural_resolvers.errors import MuralError, error_body, quoted

STATUSES: dict[type[MuralError], int] = {
    errors.MalformedName: 400,
    errors.InvalidInput: 400,
    errors.Unauthorized: 401,
    errors.Forbidden: 403,
    errors.AdapterNotFound: 404,
    errors.Conflict: 409,
    errors.TooLarge: 413,
    errors.UnusableAdapter: 422,
    errors.ManifestMismatch: 422,
    errors.RateLimited: 429,
    errors.Unavailable: 503,
}


@pytest.mark.parametrize(("kind", "status"), STATUSES.items())
def test_each_error_has_its_status_and_an_openai_body(kind: type[MuralError], status: int) -> None:
    error = kind("reason")

    assert error.status == status == errors.STATUS_BY_CODE[error.code]
    assert error_body(error) == {
        "error": {"message": "reason", "type": error.type, "param": error.param, "code": error.code}
    }


def test_no_error_is_left_out_of_the_table() -> None:
    assert set(errors.STATUS_BY_CODE) == {kind.code for kind in STATUSES}


def test_forbidden_says_the_same_whatever_is_there() -> None:
    assert error_body(errors.Forbidden()) == error_body(errors.Forbidden())


@pytest.mark.parametrize("kind", [errors.RateLimited, errors.Unavailable])
def test_what_asks_to_come_back_says_when(kind: type[MuralError]) -> None:
    assert kind("busy").retry_after_s is not None


@pytest.mark.parametrize("text", ["\ud800", "\x1b[2J", "é" * 1000, "a\nb", "\u202e"])
def test_quoted_text_can_go_anywhere(text: str) -> None:
    told = quoted(text)

    assert told.isprintable()
    assert len(told) < 800
    json.dumps(told).encode()


@pytest.mark.parametrize("status", sorted(set(STATUSES.values())))
def test_a_status_that_crossed_a_border_is_an_error_again(status: int) -> None:
    error = errors.error_from_status(status, "reason", 3.0)

    assert (error.status, error.message, error.retry_after_s) == (status, "reason", 3.0)


def test_a_code_that_came_along_tells_two_errors_of_one_status_apart() -> None:
    error = errors.error_from_status(422, "other files", code="manifest_mismatch")

    assert type(error) is errors.ManifestMismatch
    assert type(errors.error_from_status(422, "r", code="forbidden")) is errors.UnusableAdapter


def test_an_unknown_status_is_a_fault_of_the_server() -> None:
    assert errors.error_from_status(418, "teapot").status == 500
