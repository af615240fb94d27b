"""Tenant objects become what a tenants file says, each for itself."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.objects import Tenant, read_tenant
from mural_resolvers.kubernetes.tenants import (
    inline_keys,
    keys_json,
    namespaces_of,
    read_keys_json,
    tenants_config,
)
from mural_resolvers.tenants import KeyRecord, parse_tenants

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
KEY = KeyRecord("somekeyid", "a" * 64)


def make_tenant(name: str, created_s: float = 0, **spec: object) -> Tenant:
    read = read_tenant({"metadata": {"name": name, "namespace": "mural"}, "spec": spec})
    created = EPOCH + timedelta(seconds=created_s)
    return msgspec.structs.replace(
        read, metadata=msgspec.structs.replace(read.metadata, creation_timestamp=created)
    )


def test_an_object_says_the_same_as_the_file():
    file = b"""
tenants:
  - id: acme
    weight: 2
    grants: [globex/sql]
    public: ["chat:v1"]
    base: false
    sources: [s3]
    limits: {requests_per_minute: 60, tokens_per_minute: 1000, concurrency: 4,
             queue_length: 0, adapters: 3, bytes: 2Gi}
    keys:
      - {id: somekeyid, sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}
"""
    limits = {"requestsPerMinute": 60, "tokensPerMinute": 1000, "concurrency": 4}
    limits |= {"queueLength": 0, "adapters": 3}
    tenant = make_tenant(
        "acme",
        weight=2,
        grants=["globex/sql"],
        public=["chat:v1"],
        base=False,
        sources=["s3"],
        limits={**limits, "bytes": "2Gi"},
    )
    assert tenants_config([tenant], {"acme": [KEY]}) == (parse_tenants(file), {})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"tenant": "No!"}, "spec.id"),
        ({"weight": 0}, "spec.weight"),
        ({"grants": ["a b"]}, "spec.grants[0]"),
        ({"limits": {"concurrency": 0}}, "spec.limits.concurrency"),
        ({"limits": {"queueLength": -1}}, "spec.limits.queue_length"),
        ({"limits": {"bytes": "much"}}, "spec.limits.bytes"),
    ],
)
def test_a_bad_object_is_refused_by_its_place_and_takes_no_other_with_it(spec, words):
    config, refused = tenants_config([make_tenant("bad", **spec), make_tenant("good")], {})
    assert [tenant.id for tenant in config.tenants] == ["good"]
    assert words in refused["mural/bad"]


def test_of_two_objects_for_one_id_the_oldest_counts():
    old, young = make_tenant("b", 1, tenant="acme", weight=2), make_tenant("acme", 2)
    config, refused = tenants_config([young, old], {})
    assert [tenant.weight for tenant in config.tenants] == [2.0]
    assert "mural/b" in refused["mural/acme"]
    assert namespaces_of([young, old]) == {"acme": frozenset()}


def test_a_key_id_is_of_the_older_tenant_alone():
    config, _ = tenants_config(
        [make_tenant("young", 2), make_tenant("old", 1)], {"young": [KEY], "old": [KEY]}
    )
    assert {tenant.id: tenant.keys for tenant in config.tenants} == {"old": (KEY,), "young": ()}


def test_keys_survive_the_way_to_the_routers():
    expiring = KeyRecord("otherkeyid", "b" * 64, expires=datetime(2027, 1, 31, 12, tzinfo=UTC))
    assert read_keys_json(keys_json({"acme": [expiring, KEY]})) == ({"acme": (expiring, KEY)}, {})


@pytest.mark.parametrize("entry", [b'[{"id":"hunter2"}]', b"1", b'["hunter2"]', b'"\xff"'])
def test_what_is_wrong_with_one_tenants_keys_is_that_tenants_alone(entry):
    found = read_keys_json(keys_json({"acme": [KEY]})[:-1] + b',"globex":' + entry + b"}")
    assert found.keys == {"acme": (KEY,)}
    assert set(found.unreadable) == {"globex"}
    assert "hunter2" not in str(found.unreadable)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"a":'])
def test_other_content_is_refused_without_being_told(data):
    with pytest.raises(InvalidInput) as refused:
        read_keys_json(data)
    assert "hunter2" not in refused.value.message


def test_inline_keys_are_checked():
    good = {"id": "somekeyid", "sha256": "a" * 64}
    ref = {"secretRef": {"name": "s", "key": "k"}}
    assert inline_keys(make_tenant("acme", keys=[good, ref])) == (KEY,)
    with pytest.raises(InvalidInput, match=r"keys\[0\]\.sha256"):
        inline_keys(make_tenant("acme", keys=[{**good, "sha256": "no"}]))
