"""The chart on a real API server, whose pods turn Ready without running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import yaml

from mural_operator.crds import apply_definitions, read_definitions
from mural_operator.uninstall import release_adapters
from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.config import cluster_config
from tests.charts.chart import CHART, PRESETS, VARIANTS, Object, Rendered

pytestmark = pytest.mark.cluster

CRDS = CHART / "crds"
# Of other people's software, which is not installed here.
FOREIGN = {"PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "InferencePool"}
Helm = Callable[..., Awaitable[str]]


@pytest.fixture
async def helm_there(cluster: Any) -> Helm:
    """Run ``helm`` in the test's namespace with values as JSON."""
    await cluster.apply(CRDS)

    async def run(*args: str, values: dict[str, Any] | None = None) -> str:
        given = ("--values", "-") if values is not None else ()
        status, output, errors = await cluster.run(
            *("helm", *args, "--namespace", cluster.namespace, *given),
            told=json.dumps(values or {}).encode(),
        )
        assert status == 0, errors
        return str(output)

    return run


async def as_account(cluster: Any, name: str) -> KubeClient:
    """A client with the rights of a ServiceAccount of the test's namespace."""
    from lightkube.config.models import User

    token = (await cluster.kubectl("create", "token", name)).strip()
    config = cluster_config()
    context = config.context
    assert context is not None
    return KubeClient(
        config._replace(
            user=User(token=token),
            context=type(context)(
                cluster=context.cluster, user=context.user, namespace=cluster.namespace
            ),
        )
    )


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(90):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.2)


# -- schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*(f"preset {name}" for name in PRESETS), *VARIANTS])
async def test_the_api_server_takes_every_object_as_it_stands(
    cluster: Any, render: Callable[..., Rendered], case: str
) -> None:
    await cluster.apply(CRDS)
    preset = case.removeprefix("preset ") if case.startswith("preset ") else None
    rendered = render(preset=preset, values={} if preset else VARIANTS[case])
    own = [placed(each, cluster.namespace) for each in rendered.objects if is_known(each)]
    assert len(own) > 20
    await cluster.kubectl(
        *("apply", "--dry-run=server", "--validate=strict", "-f", "-"),
        told={"apiVersion": "v1", "kind": "List", "items": own},
    )


def is_known(each: Object) -> bool:
    return each["kind"] not in FOREIGN


def placed(each: Object, namespace: str) -> Object:
    """The object in a namespace that is there: a dry run makes none."""
    if "namespace" in each["metadata"]:
        each = each | {"metadata": each["metadata"] | {"namespace": namespace}}
    return each


# -- rights ---------------------------------------------------------------------------------------

ALLOWED = {
    "mural-server": (),
    "mural-router": (
        ("list", "endpointslices.discovery.k8s.io"),
        ("watch", "endpointslices.discovery.k8s.io"),
        *(
            (verb, f"{kind}.mural.dev")
            for verb in ("list", "watch")
            for kind in ("tenants", "adapters", "adapteraliases")
        ),
        ("list", "secrets/mural-router-keys"),
        ("watch", "secrets/mural-router-keys"),
    ),
    "mural-operator": (
        *(
            (verb, f"{kind}.mural.dev")
            for verb in ("get", "list", "watch")
            for kind in ("tenants", "adapters", "adapteraliases", "servingpools")
        ),
        ("patch", "adapters.mural.dev"),
        *(
            ("patch", f"{kind}.mural.dev/status")
            for kind in ("tenants", "adapters", "adapteraliases", "servingpools")
        ),
        ("list", "pods"),
        ("watch", "pods"),
        ("get", "secrets"),
        ("patch", "secrets/mural-router-keys"),
        ("update", "leases.coordination.k8s.io/mural-operator"),
        ("create", "events.events.k8s.io"),
    ),
}
REFUSED = {
    "mural-server": (("get", "secrets"), ("list", "pods"), ("list", "adapters.mural.dev")),
    "mural-router": (
        ("get", "secrets"),
        ("list", "secrets"),
        ("get", "secrets/mural-control-token"),
        ("list", "pods"),
        ("patch", "adapters.mural.dev"),
        ("patch", "adapters.mural.dev/status"),
        ("list", "servingpools.mural.dev"),
    ),
    "mural-operator": (
        ("list", "secrets"),
        ("watch", "secrets"),
        ("create", "secrets"),
        ("patch", "secrets/mural-control-token"),
        ("delete", "secrets/mural-router-keys"),
        ("create", "pods"),
        ("delete", "pods"),
        ("create", "pods/exec"),
        ("patch", "pods"),
        ("create", "adapters.mural.dev"),
        ("delete", "adapters.mural.dev"),
        ("patch", "servingpools.mural.dev"),
        ("patch", "tenants.mural.dev"),
        ("update", "leases.coordination.k8s.io/another"),
        ("create", "leases.coordination.k8s.io"),
        ("patch", "statefulsets.apps"),
        ("list", "nodes"),
        ("list", "customresourcedefinitions.apiextensions.k8s.io"),
        ("create", "rolebindings.rbac.authorization.k8s.io"),
        ("escalate", "roles.rbac.authorization.k8s.io"),
    ),
}


async def answers(
    cluster: Any, account: str, asked: tuple[tuple[str, str], ...], namespace: str | None = None
) -> dict[tuple[str, str], str]:
    """``kubectl auth can-i`` for each verb and kind. ``kind/name`` is one object, except status."""

    async def ask(verb: str, what: str) -> str:
        kind, slash, name = what.partition("/")
        target = (kind, f"--subresource={name}") if name in ("status", "exec") else (what,)
        _, output, errors = await cluster.run(
            *("kubectl", "auth", "can-i", verb, *(target if slash else (kind,))),
            *("-n", namespace or cluster.namespace),
            f"--as=system:serviceaccount:{cluster.namespace}:{account}",
        )
        assert output.strip() in ("yes", "no"), errors
        return str(output).strip()

    found: dict[tuple[str, str], str] = {}
    for verb, what in asked:
        found[verb, what] = await ask(verb, what)
    return found


async def test_accounts_may_do_what_their_components_need_and_nothing_beside_it(
    cluster: Any, helm_there: Helm
) -> None:
    await helm_there("install", "mural", str(CHART))
    for account, asked in ALLOWED.items():
        found = await answers(cluster, account, asked)
        assert not [key for key, answer in found.items() if answer != "yes"], account
    for account, asked in REFUSED.items():
        found = await answers(cluster, account, asked)
        assert not [key for key, answer in found.items() if answer != "no"], account
    for account in ALLOWED:
        elsewhere = await answers(
            cluster, account, (("list", "adapters.mural.dev"), ("get", "secrets")), "default"
        )
        assert set(elsewhere.values()) == {"no"}, account


# -- a release's life -----------------------------------------------------------------------------


async def test_a_second_release_in_a_namespace_brings_no_second_operator(
    cluster: Any, helm_there: Helm
) -> None:
    await helm_there("install", "mural", str(CHART))
    beside = {"pool": {"name": "other"}}
    refused = ("install", "two", str(CHART), "--namespace", cluster.namespace, "--values", "-")
    status, _, errors = await cluster.run("helm", *refused, told=json.dumps(beside).encode())
    assert status != 0
    assert "the release mural has an operator" in errors
    assert "router.keysSecret: mural-router-keys" in errors
    follows = {"operator": {"enabled": False}, "router": {"keysSecret": "mural-router-keys"}}
    await helm_there("install", "two", str(CHART), values=beside | follows)
    # Nor is the first one kept from its next revision.
    await helm_there("upgrade", "mural", str(CHART))
    names = [each["metadata"]["name"] for each in (await cluster.get("lease"))["items"]]
    assert names == ["mural-operator"]


async def test_an_upgrade_keeps_tokens_objects_and_what_the_operator_wrote(
    cluster: Any, helm_there: Helm
) -> None:
    notes = await helm_there("install", "mural", str(CHART), "--wait", "--timeout", "60s")
    assert "rollout status statefulset/mural-server" in notes
    block = notes.partition("<<EOF\n")[2].partition("\nEOF\n")[0]
    assert yaml.safe_load(block)["kind"] == "Tenant"
    adapter = {
        "apiVersion": "mural.dev/v1alpha1",
        "kind": "Adapter",
        "metadata": {"name": "acme-v1"},
        "spec": {"pool": "default", "tenant": "acme", "version": "v1"},
    }
    await cluster.apply(adapter)
    # As the operator does.
    written = {"data": {"keys.json": "e30="}}
    await cluster.kubectl("patch", "secret", "mural-router-keys", "-p", json.dumps(written))
    held = {"spec": {"holderIdentity": "somebody", "leaseDurationSeconds": 6}}
    await cluster.kubectl(
        *("patch", "lease", "mural-operator", "--type=merge", "-p", json.dumps(held))
    )
    before = await state(cluster)

    changed = {"router": {"replicas": 3}, "server": {"maxNumSeqs": 8, "replicas": 3}}
    await helm_there("upgrade", "mural", str(CHART), "--timeout", "90s", values=changed)

    assert await state(cluster) == before
    stateful = await cluster.get("statefulset", "mural-server")
    assert stateful["spec"]["replicas"] == 3
    keys = await cluster.get("secret", "mural-router-keys")
    assert keys["data"] == written["data"]
    lease = await cluster.get("lease", "mural-operator")
    assert lease["spec"]["holderIdentity"] == "somebody"


async def state(cluster: Any) -> dict[str, object]:
    """What must outlive an upgrade, by its name."""
    found: dict[str, object] = {}
    for kind in ("secrets", "adapters.mural.dev", "servingpools.mural.dev"):
        for each in (await cluster.get(kind))["items"]:
            if each.get("type") != "helm.sh/release.v1":
                key = f"{kind}/{each['metadata']['name']}"
                found[key] = (each["metadata"]["uid"], each.get("data"), each.get("spec"))
    return found


async def test_an_uninstall_leaves_the_definitions_and_what_others_applied(
    cluster: Any, helm_there: Helm
) -> None:
    await helm_there(
        *("install", "mural", str(CHART)),
        values={
            "tenants": {"acme": {}},
            "adapters": {"acme-v1": {"tenant": "acme", "version": "v1"}},
            "operator": {"allNamespaces": True},
        },
    )
    await helm_there("uninstall", "mural", "--wait", "--timeout", "90s")
    kinds = (
        "statefulsets,deployments,jobs,services,configmaps,secrets,serviceaccounts,roles,"
        "rolebindings,leases,networkpolicies,poddisruptionbudgets,"
        "adapters.mural.dev,adapteraliases.mural.dev,tenants.mural.dev,servingpools.mural.dev"
    )

    async def only_what_every_namespace_has() -> bool:
        left = (await cluster.kubectl("get", kinds, "-o", "name")).split()
        return set(left) <= {"configmap/kube-root-ca.crt", "serviceaccount/default"}

    await until(only_what_every_namespace_has)
    cluster_wide = await cluster.kubectl(
        *("get", "clusterroles,clusterrolebindings", "-o", "name"),
        *("-l", "app.kubernetes.io/part-of=mural"),
    )
    assert cluster.namespace not in cluster_wide
    await cluster.kubectl("get", "crd", "adapters.mural.dev", "tenants.mural.dev")


# -- hooks ----------------------------------------------------------------------------------------


async def hook_account(cluster: Any, render: Callable[..., Rendered], component: str) -> KubeClient:
    """The account of a hook with its rights, which helm removes when a hook has run."""
    kinds = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    for each in render().of(*kinds):
        labels = each["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == component:
            moved = placed(each, cluster.namespace)
            for subject in moved.get("subjects", ()):
                subject["namespace"] = cluster.namespace
            await cluster.apply(moved)
    return await as_account(cluster, f"mural-{component}")


async def test_the_hook_brings_definitions_up_to_date_with_no_right_to_any_other(
    cluster: Any, render: Callable[..., Rendered]
) -> None:
    await cluster.apply(CRDS)
    older = {"metadata": {"labels": {"somebody": "elses"}}, "spec": {"names": {"shortNames": []}}}
    await cluster.kubectl(
        *("patch", "crd", "adapters.mural.dev", "--type=merge", "-p", json.dumps(older))
    )
    async with await hook_account(cluster, render, "crds") as client:
        await apply_definitions(client, read_definitions(CRDS))
        foreign = [
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": "others.mural.dev"},
            }
        ]
        with pytest.raises(InvalidInput, match=r"others\.mural\.dev cannot be applied"):
            await apply_definitions(client, foreign)
    found = await cluster.get("crd", "adapters.mural.dev")
    wanted = yaml.safe_load((CRDS / "adapters.yaml").read_text(encoding="utf-8"))
    assert found["spec"]["names"]["shortNames"] == wanted["spec"]["names"]["shortNames"]
    assert found["metadata"]["labels"]["somebody"] == "elses"


async def test_the_hook_stops_the_operator_and_lets_every_adapter_go(
    cluster: Any, helm_there: Helm, render: Callable[..., Rendered]
) -> None:
    await helm_there("install", "mural", str(CHART), "--wait", "--timeout", "60s")
    for number in range(3):
        await cluster.apply(
            {
                "apiVersion": "mural.dev/v1alpha1",
                "kind": "Adapter",
                "metadata": {
                    "name": f"acme-v{number}",
                    "finalizers": ["mural.dev/unload", *(["example.com/mine"] * (number == 2))],
                },
                "spec": {"pool": "default", "tenant": "acme", "version": f"v{number}"},
            }
        )
    async with await hook_account(cluster, render, "uninstall") as client:
        assert await release_adapters(client, "mural-operator", [cluster.namespace]) == 3
    items = (await cluster.get("adapters.mural.dev"))["items"]
    kept = [each["metadata"].get("finalizers", []) for each in items]
    assert sorted(kept) == [[], [], ["example.com/mine"]]
    operator = await cluster.get("deployment", "mural-operator")
    assert operator["spec"]["replicas"] == 0
    freed = '{"metadata": {"finalizers": []}}'
    await cluster.kubectl(*("patch", "adapter", "acme-v2", "--type=merge", "-p", freed))


async def test_nothing_is_released_twice_and_an_operator_that_is_gone_is_no_error(
    cluster: Any, render: Callable[..., Rendered]
) -> None:
    await cluster.apply(CRDS)
    async with await hook_account(cluster, render, "uninstall") as client:
        assert await release_adapters(client, "mural-operator", [cluster.namespace]) == 0
