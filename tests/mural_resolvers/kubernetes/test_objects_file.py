"""Objects from a file; that the schemas refuse the same is tried on a real API server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.files import parse_objects

CRDS = Path(__file__).parents[3] / "charts" / "mural" / "crds"

TENANT = """
apiVersion: mural.dev/v1alpha1
kind: Tenant
metadata: {name: acme, annotations: {why: a test}}
spec:
  weight: 2.5
  base: false
  keys: [{id: 123e4567, sha256: "%s", expires: 2030-01-31T12:00:00Z}]
  grants: [globex/sql]
  limits: {requestsPerMinute: 60, bytes: 2Gi}
""" % ("0" * 64)
ADAPTER = """
apiVersion: mural.dev/v1alpha1
kind: Adapter
metadata: {name: acme-v1, namespace: prod, labels: {app: x}}
spec:
  pool: main
  tenant: acme
  version: 1e3
  placement: {replicas: 3, pinned: false, podSelector: {matchLabels: {zone: a}}}
"""
ALIAS = """
apiVersion: mural.dev/v1alpha1
kind: AdapterAlias
metadata: {name: acme-stable, namespace: prod}
spec:
  tenant: acme
  alias: stable
  versions: [{version: "1", weight: 9}, {version: "2"}]
"""


def test_documents_of_every_kind_are_read_with_their_types() -> None:
    found = parse_objects(f"{TENANT}---\n# nothing\n---{ADAPTER}---{ALIAS}".encode())
    (tenant,), (adapter,), (alias,) = found
    assert tenant.id == "acme"
    assert (tenant.spec.weight, tenant.spec.base) == (2.5, False)
    assert tenant.spec.keys[0].id == "123e4567"
    assert tenant.spec.keys[0].expires == datetime(2030, 1, 31, 12, tzinfo=UTC)
    assert tenant.spec.limits.requests_per_minute == 60
    assert tenant.spec.limits.bytes == "2Gi"
    assert adapter.metadata.key == "prod/acme-v1"
    # A version is text, whatever YAML would make of it.
    assert adapter.exact == "acme/default:1e3"
    assert adapter.spec.placement.replicas == 3
    assert adapter.spec.placement.pod_selector.match_labels == {"zone": "a"}
    assert [(each.version, each.weight) for each in alias.spec.versions] == [("1", 9), ("2", 1)]


def test_all_replicas_are_a_word() -> None:
    found = parse_objects(ADAPTER.replace("replicas: 3", "replicas: All").encode())
    assert found.adapters[0].spec.placement.replicas == "All"


def test_a_file_without_objects_is_empty() -> None:
    assert parse_objects(b"") == ((), (), ())
    assert parse_objects(b"---\n---\n# nothing\n") == ((), (), ())


BAD = [
    (ADAPTER, "pool: main", "", "pool"),
    (ADAPTER, "pool: main", "pool: A_b", "spec.pool"),
    (ADAPTER, "tenant: acme", "tenant: Acme", "not a tenant name"),
    (ADAPTER, "version: 1e3", "version: latest", "latest is an alias"),
    (ADAPTER, "version: 1e3", "version: a..b", "not a version"),
    (ADAPTER, "version: 1e3", "version: v1\n  digest: abc", "spec.digest"),
    (ADAPTER, "version: 1e3", "version: v1\n  source: -x", "spec.source"),
    (ADAPTER, "version: 1e3", "version: v1\n  base: ''", "spec.base"),
    (ADAPTER, "version: 1e3", "version: v1\n  prewarm: Sometimes", "prewarm"),
    (ADAPTER, "version: 1e3", "version: v1\n  verison: v1", "spec.verison: there is no such field"),
    (ADAPTER, "replicas: 3", "replicas: 1001", "spec.placement.replicas"),
    (ADAPTER, "replicas: 3", "replicas: -1", "spec.placement.replicas"),
    (ADAPTER, "replicas: 3", "replicas: some", "replicas"),
    (ADAPTER, "replicas: 3", "replicas: 3, minReplicas: 1, maxReplicas: 2", "not both"),
    (ADAPTER, "replicas: 3", "minReplicas: 1", "come together"),
    (ADAPTER, "replicas: 3", "minReplicas: 3, maxReplicas: 2", "more than maxReplicas"),
    (ADAPTER, "replicas: 3", "minReplicas: 0, maxReplicas: 0", "maxReplicas"),
    (ADAPTER, "replicas: 3", "priority: 1001", "priority"),
    (ADAPTER, "replicas: 3", "level: disk", "level"),
    (ADAPTER, "pinned: false", "pinned: maybe", "pinned"),
    (ADAPTER, "matchLabels", "matchExpressions", "spec.placement.podSelector.matchExpressions"),
    (ADAPTER, "name: acme-v1", "name: Acme_v1", "metadata.name"),
    (ALIAS, '"1", weight: 9', 'stable, weight: 9', "stand for itself"),
    (ALIAS, '"1", weight: 9', 'latest', "latest is an alias"),
    (ALIAS, '"1", weight: 9', '"2"', "twice"),
    (ALIAS, "weight: 9", "weight: -1", "weight"),
    (ALIAS, "weight: 9", "weight: 1.5", "weight"),
    (ALIAS, "weight: 9", "wieght: 9", "spec.versions[0].wieght: there is no such field"),
    (ALIAS, '"1", weight: 9}, {version: "2"', '"1", weight: 0', "weight above 0"),
    (ALIAS, '[{version: "1", weight: 9}, {version: "2"}]', "[]", "weight above 0"),
    (ALIAS, "alias: stable", "alias: sta/ble", "not a version"),
    (TENANT, "weight: 2.5", "weight: 0", "weight"),
    (TENANT, "weight: 2.5", "tenant: Acme", "tenant name"),
    (TENANT, "weight: 2.5", "namespaces: [A_b]", "spec.namespaces[0]"),
    (TENANT, "123e4567", "short", "keys[0].id"),
    (TENANT, "0" * 64, "0" * 63, "keys[0].sha256"),
    (TENANT, "id: 123e4567, ", "", "keys[0]"),
    (TENANT, "2030-01-31T12:00:00Z", "soon", "expires"),
    (TENANT, "globex/sql", "a/b/c", "grants[0]"),
    (TENANT, "requestsPerMinute: 60", "requestsPerMinute: 0", "requests_per_minute"),
    (TENANT, "requestsPerMinute", "requests_per_minute", "spec.limits.requests_per_minute"),
    (TENANT, "2Gi", "2Ga", "bytes"),
]  # fmt: skip
ONLY_IN_FILES = [
    (ADAPTER, "kind: Adapter", "kind: ServingPool", "kind"),
    (ADAPTER, "v1alpha1", "v1", "kind"),
    (ADAPTER, "kind: Adapter", "", "kind"),
    (ADAPTER, ADAPTER, "\n[a, b]\n", "is wanted"),
    (ADAPTER, "spec:", "status: {desiredReplicas: 9}\nspec:", "status: there is no such field"),
    (ADAPTER, "namespace: prod", "finalizers: [x]", "metadata.finalizers"),
    (ADAPTER, "namespace: prod", "namespace: a.b", "metadata.namespace"),
    (ADAPTER, "version: 1e3", "version: v1\n  version: v2", "stands twice"),
    (TENANT, "id: 123e4567", "secretRef: {name: a, key: b}, id: 123e4567", "no Secrets"),
]


@pytest.mark.parametrize(("text", "old", "new", "said"), [*BAD, *ONLY_IN_FILES])
def test_what_is_wrong_is_said_with_its_document_and_place(
    text: str, old: str, new: str, said: str
) -> None:
    assert old in text
    other = ALIAS if text is not ALIAS else TENANT
    with pytest.raises(InvalidInput) as caught:
        parse_objects(f"{other}---{text.replace(old, new, 1)}".encode())
    assert said in caught.value.message
    if "stands twice" not in said:
        line = other.count("\n") + 2
        assert caught.value.message.startswith(f"Document 2 (line {line}): ")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (ADAPTER, "Adapter prod/acme-v1 stands in document 1"),
        (ADAPTER.replace("acme-v1", "other"), "The version acme/default:1e3 stands in document 1"),
    ],
)
def test_one_thing_is_said_once(second: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=r"Document 2 ") as caught:
        parse_objects(f"{ADAPTER}---{second}".encode())
    assert said in caught.value.message


def test_two_aliases_tenants_or_keys_are_not_both_in_force() -> None:
    other = ALIAS.replace("acme-stable", "other")
    with pytest.raises(InvalidInput, match=r"The alias acme/default:stable stands in document 1"):
        parse_objects(f"{ALIAS}---{other}".encode())
    same = TENANT.replace("name: acme,", "name: other,").replace("weight", "tenant: acme\n  weight")
    with pytest.raises(InvalidInput, match="The tenant acme stands in document 1"):
        parse_objects(f"{TENANT}---{same}".encode())
    with pytest.raises(InvalidInput, match="The key id 123e4567 stands in document 1"):
        parse_objects(f"{TENANT}---{TENANT.replace('acme', 'globex')}".encode())


def test_a_whole_key_is_refused_and_not_repeated() -> None:
    key = "mural_12345678_" + "k" * 43
    with pytest.raises(InvalidInput) as caught:
        parse_objects(TENANT.replace("a test", key).encode())
    assert "kkk" not in caught.value.message


def test_a_file_that_is_no_yaml_or_too_large_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Line "):
        parse_objects(b"a: [")
    with pytest.raises(InvalidInput, match="larger"):
        parse_objects(b"#" * (16 * 2**20 + 1))


@pytest.mark.cluster
async def test_the_api_server_refuses_what_files_refuse(cluster: Any) -> None:
    await cluster.apply(CRDS)
    await cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    ask = ("apply", "--dry-run=server", "--validate=strict", "-f", "-")
    for text in (TENANT, ADAPTER, ALIAS):
        await cluster.kubectl(*ask, told=_as_kubectl_reads(text, cluster.namespace))
    for text, old, new, _ in BAD:
        bad = text.replace(old, new, 1)
        await cluster.refusal(*ask, told=_as_kubectl_reads(bad, cluster.namespace))


def _as_kubectl_reads(text: str, namespace: str) -> Any:
    # YAML's own guesses would make a number of the version and a time of the text.
    fields = yaml.safe_load(
        text.replace("1e3", '"1e3"')
        .replace("123e4567", '"123e4567"')
        .replace("2030-01-31T12:00:00Z", '"2030-01-31T12:00:00Z"')
    )
    return fields | {"metadata": fields["metadata"] | {"namespace": namespace}}
