"""What objects say together: who may speak for a tenant, and which of two objects counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mural_resolvers.errors import Unauthorized
from mural_resolvers.kubernetes.objects import (
    Adapter,
    AdapterAlias,
    Tenant,
    read_adapter,
    read_alias,
    read_tenant,
)
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import KeyRecord, mint_key
from mural_resolvers.versions import AliasTarget
from mural_router.objects import Declared

NOW = datetime(2027, 1, 1, tzinfo=UTC)
KEY = mint_key()
KEYS = {"acme": [KeyRecord(KEY.key_id, KEY.sha256)]}
V1 = "acme/default:v1"


def metadata(name: str, namespace: str, age: int, deleted: bool) -> dict[str, Any]:
    created = (NOW - timedelta(seconds=age)).isoformat()
    gone = {"deletionTimestamp": NOW.isoformat()} if deleted else {}
    return {"name": name, "namespace": namespace, "creationTimestamp": created} | gone


def tenant(
    name: str = "acme", *namespaces: str, age: int = 0, deleted: bool = False, **spec: Any
) -> Tenant:
    fields = {"namespaces": namespaces} | spec
    return read_tenant({"metadata": metadata(name, "mural", age, deleted), "spec": fields})


def adapter(
    name: str = "a",
    namespace: str = "team",
    *,
    age: int = 0,
    deleted: bool = False,
    published: int | None = None,
    of: str = "acme",
    **placement: Any,
) -> Adapter:
    spec = {"pool": "main", "tenant": of, "version": "v1", "placement": placement}
    status = {} if published is None else {"desiredReplicas": published}
    meta = metadata(name, namespace, age, deleted)
    return read_adapter({"metadata": meta, "spec": spec, "status": status})


def alias(
    name: str = "a", namespace: str = "team", *versions: str, age: int = 0, deleted: bool = False
) -> AdapterAlias:
    targets = [{"version": version} for version in versions]
    spec = {"tenant": "acme", "alias": "stable", "versions": targets}
    return read_alias({"metadata": metadata(name, namespace, age, deleted), "spec": spec})


def by_key(*objects: Any) -> dict[str, Any]:
    return {each.metadata.key: each for each in objects}


def declared(*adapters: Adapter) -> Declared:
    made = Declared()
    made.tell_tenants([tenant("acme", "team", "other")], KEYS)
    made.tell_adapters(by_key(*adapters))
    return made


def test_a_key_is_of_its_tenant_until_the_tenant_goes():
    made = Declared()
    made.tell_tenants([tenant(weight=2.0)], KEYS)
    principal = made.ring.authenticate(f"Bearer {KEY.key}", NOW)
    assert (principal.tenant, principal.weight) == ("acme", 2.0)
    before = made.ring
    made.tell_tenants([tenant(deleted=True)], KEYS)
    assert made.ring is not before
    with pytest.raises(Unauthorized):
        made.ring.authenticate(f"Bearer {KEY.key}", NOW)


def test_k_is_what_the_operator_published_else_what_the_object_asks_for():
    assert declared(adapter(replicas=2)).replicas(V1) == 2
    assert declared(adapter(replicas=2, published=3)).replicas(V1) == 3
    assert declared(adapter(minReplicas=1, maxReplicas=4)).replicas(V1) is None
    assert declared(adapter(minReplicas=1, maxReplicas=4, published=2)).replicas(V1) == 2
    assert declared(adapter()).replicas(V1) is None
    assert (declared(adapter(replicas="All")).replicas(V1) or 0) > 10_000
    assert declared().replicas(V1) is None


def test_of_two_objects_for_one_version_the_oldest_counts_however_they_come():
    old, young = adapter("z", replicas=2, age=60), adapter("a", replicas=9)
    for objects in ((old, young), (young, old)):
        assert declared(*objects).replicas(V1) == 2
    made = declared(old, young)
    assert set(made.refused_adapters()) == {"team/a"}
    made.tell_adapter("team/z", None)
    assert made.replicas(V1) == 9
    made.tell_adapter("team/z", old)
    assert (made.replicas(V1), made.num_adapters) == (2, 1)


def test_an_object_that_the_operator_does_not_act_upon_gives_way():
    assert declared(adapter("z", age=60, published=0), adapter("a", published=2)).replicas(V1) == 2
    assert declared(adapter("z", age=60, replicas=2, published=0)).replicas(V1) is None


def test_an_adapter_that_is_being_deleted_has_no_k():
    assert declared(adapter(replicas=2, deleted=True)).replicas(V1) is None


@pytest.mark.parametrize("hostile", [("a", "evil"), ("a", "mural")])
def test_a_namespace_that_the_tenant_does_not_list_says_nothing_for_it(hostile):
    made = declared(adapter(*hostile, age=900, replicas=9), adapter("mine", replicas=1))
    assert made.replicas(V1) == 1
    assert "lists the namespace" in made.refused_adapters()["/".join(reversed(hostile))]
    made.tell_aliases(by_key(alias("b", "evil", "v9", age=900)))
    assert made.targets(parse_name("acme:stable")) is None
    assert set(made.refused_aliases) == {"evil/b"}


def test_another_tenants_namespaces_are_not_ones_own():
    made = Declared()
    made.tell_tenants([tenant("acme", "team"), tenant("globex", "theirs")], KEYS)
    made.tell_adapters(by_key(adapter("a", "theirs", replicas=3)))
    assert made.replicas(V1) is None
    made.tell_adapters(by_key(adapter("a", "theirs", of="globex", replicas=3)))
    assert made.replicas("globex/default:v1") == 3


def test_a_younger_tenant_of_the_same_id_has_no_say():
    made = Declared()
    older = tenant("acme", "team", age=60)
    made.tell_tenants([tenant("copy", "evil", tenant="acme", grants=["globex"]), older], KEYS)
    assert made.ring.authenticate(f"Bearer {KEY.key}", NOW).grants == ()
    assert set(made.refused_tenants) == {"mural/copy"}
    made.tell_adapters(by_key(adapter("a", "evil", replicas=3)))
    assert made.replicas(V1) is None


def test_a_namespace_that_is_taken_away_takes_its_objects_along_and_back():
    made = declared(adapter(replicas=2))
    made.tell_aliases(by_key(alias("a", "team", "v2")))
    made.tell_tenants([tenant("acme", "other")], KEYS)
    assert made.replicas(V1) is None
    assert made.targets(parse_name("acme:stable")) is None
    made.tell_tenants([tenant("acme", "team")], KEYS)
    assert made.replicas(V1) == 2
    assert made.targets(parse_name("acme:stable")) == (AliasTarget("v2", 1),)


def test_of_two_objects_for_one_alias_the_oldest_counts():
    made = declared()
    old, young = alias("z", "team", "v1", age=60), alias("a", "other", "v2")
    made.tell_aliases(by_key(young, old))
    assert made.targets(parse_name("acme/default:stable")) == (AliasTarget("v1", 1),)
    made.tell_aliases(by_key(young, alias("z", "team", "v1", age=60, deleted=True)))
    assert made.targets(parse_name("acme:stable")) == (AliasTarget("v2", 1),)
    assert made.num_aliases == 1
