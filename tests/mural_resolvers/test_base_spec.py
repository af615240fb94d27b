"""The JSON of what fits a base."""

from __future__ import annotations

import json

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import InvalidInput


def test_a_spec_survives_its_json(base_spec: BaseSpec) -> None:
    assert BaseSpec.from_json(base_spec.to_json()) == base_spec


def test_the_hash_does_not_depend_on_the_order_of_modules(base_spec: BaseSpec) -> None:
    raw = json.loads(base_spec.to_json())
    raw["modules"] = dict(reversed(raw["modules"].items()))

    assert BaseSpec.from_json(json.dumps(raw).encode()).hash == base_spec.hash


def test_the_hash_changes_with_a_shape(base_spec: BaseSpec) -> None:
    raw = json.loads(base_spec.to_json())
    raw["modules"]["lm_head"]["in_features"] = 9

    assert BaseSpec.from_json(json.dumps(raw).encode()).hash != base_spec.hash


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"modules": {"a": {"kind": "conv"}}}'],
    ids=lambda data: ascii(data[:20]),
)
def test_what_is_no_spec_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="base spec"):
        BaseSpec.from_json(data)


def test_a_shape_is_positive(base_spec: BaseSpec) -> None:
    raw = json.loads(base_spec.to_json())
    raw["modules"]["lm_head"]["in_features"] = 0

    with pytest.raises(InvalidInput, match="positive"):
        BaseSpec.from_json(json.dumps(raw).encode())
