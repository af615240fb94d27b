"""What is rendered fits the programs that it starts, and is confined as promised."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mural_operator.chart_hooks import chart as chart_command
from mural_operator.commands import operate
from mural_resolvers.cli import Command
from mural_resolvers.kubernetes.objects import (
    read_adapter,
    read_alias,
    read_pool,
    read_tenant,
)
from mural_resolvers.sources import read_sources
from mural_router.commands import route
from mural_router.config import Config
from mural_router.settings import RouterSettings, Secrets
from mural_server.commands import serve
from tests.charts.chart import PRESETS, VARIANTS, Object, Rendered

CASES = [*(f"preset {name}" for name in PRESETS), *VARIANTS]
READERS = {
    "Tenant": read_tenant,
    "Adapter": read_adapter,
    "AdapterAlias": read_alias,
    "ServingPool": read_pool,
}
PARSERS: dict[str, Command] = {
    "serve": serve,
    "route": route,
    "operate": operate,
    "chart": chart_command,
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, render: Callable[..., Rendered]) -> Rendered:
    name = str(request.param)
    if name.startswith("preset "):
        return render(preset=name.removeprefix("preset "))
    return render(values=VARIANTS[name])


def containers(rendered: Rendered) -> Iterator[tuple[str, Object]]:
    for name, pod in rendered.pods():
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            yield f"{name}/{container['name']}", container


def commands(rendered: Rendered) -> Iterator[tuple[str, list[str]]]:
    """Arguments of each container that runs ``mural``."""
    for name, container in containers(rendered):
        if "command" not in container:
            yield name, [str(each) for each in container["args"]]


# -- programs -------------------------------------------------------------------------------------


def test_every_command_line_is_one_that_its_program_takes(case: Rendered) -> None:
    found = list(commands(case))
    assert found
    for name, (command, *args) in found:
        parser = argparse.ArgumentParser(prog=name, allow_abbrev=False, exit_on_error=False)
        PARSERS[command].add_arguments(parser)
        parser.parse_args(args)


def test_the_file_of_sources_is_one_that_servers_take(case: Rendered, tmp_path: Path) -> None:
    path = tmp_path / "sources.yaml"
    path.write_text(case.one("ConfigMap", "mural-sources")["data"]["sources.yaml"])
    assert read_sources(path).cache.path == "/var/cache/mural/adapters"


@pytest.fixture(autouse=True)
def some_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration of one, since a router refuses to look for pods without any."""
    config = {
        "clusters": [{"name": "test", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "namespace": "mural"}}],
        "current-context": "test",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(path))


def router_settings(case: Rendered, folder: Path) -> RouterSettings:
    """As the router reads its file."""
    path = folder / "router.yaml"
    path.write_text(case.one("ConfigMap", "mural-router")["data"]["router.yaml"])
    return Config(path, {"objects": "kubernetes"}, Secrets()).settings


def test_the_routers_settings_are_ones_that_it_takes(case: Rendered, tmp_path: Path) -> None:
    settings = router_settings(case, tmp_path)
    engine = case.of("ServingPool")[0]["spec"]["engine"]
    suffix = ",engine=vllm" if engine == "vllm" else ""
    if "controlTls" in case.of("ServingPool")[0]["spec"]:
        suffix = ",tls=on"
        assert settings.http.tls.replica_ca_file == "/run/secrets/mural-servers/ca.crt"
    assert settings.replicas == (f"kubernetes://mural-server{suffix}",)
    assert settings.http.host == settings.admin_host == "0.0.0.0"


def test_values_for_the_router_hold_over_the_charts_own(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    settings = router_settings(render(values=VARIANTS["gateway"]), tmp_path)
    assert settings.queue.wait_s == 5
    assert settings.placement.fill == 0.8
    assert settings.http.tls.certfile == "/run/secrets/mural-tls/tls.crt"


def test_custom_resources_are_ones_that_their_readers_take(case: Rendered) -> None:
    for kind, read in READERS.items():
        for each in case.of(kind):
            read(each)


def test_files_that_arguments_name_are_mounted(case: Rendered) -> None:
    for name, container in containers(case):
        mounted = [each["mountPath"] for each in container.get("volumeMounts", ())]
        for arg in container.get("args", ()):
            _, _, path = str(arg).partition("=/")
            if path and not path.startswith("opt/mural/"):
                assert any(f"/{path}".startswith(f"{at}/") for at in mounted), f"{name}: {arg}"


def test_volumes_are_those_that_are_mounted(case: Rendered) -> None:
    claims = {
        claim["metadata"]["name"]
        for each in case.of("StatefulSet")
        for claim in each["spec"].get("volumeClaimTemplates", ())
    }
    for name, pod in case.pods():
        volumes = {each["name"] for each in pod.get("volumes", ())}
        mounts = {
            mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", ())
        }
        assert volumes <= mounts <= volumes | claims, name


def test_vllm_pods_have_the_plug_in_by_their_environment(render: Callable[..., Rendered]) -> None:
    stateful = render(preset="rag").one("StatefulSet", "mural-server")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert environment["MURAL_SOURCES"] == "/etc/mural/sources/sources.yaml"
    assert environment["MURAL_VLLM_GRANTS"] == "*"
    assert "VLLM_API_KEY" in environment
    assert container["command"] == ["vllm"]
    for flag in ("--quantization=gptq", "--max-loras=16", "--max-cpu-loras=64"):
        assert flag in container["args"]
    assert "--max-lora-rank=64" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


@pytest.mark.parametrize(
    ("preset", "capacity"),
    [("rag", (16, 64, 64)), ("multi-domain", (4, 8, 16)), ("playground", (2, 16, 128))],
)
def test_a_preset_has_the_capacity_of_its_scenario(
    render: Callable[..., Rendered], preset: str, capacity: tuple[int, int, int]
) -> None:
    args = render(preset=preset).args("StatefulSet", "mural-server")
    flags = ("--max-loras", "--max-cpu-loras", "--max-lora-rank")
    for flag, value in zip(flags, capacity, strict=True):
        assert f"{flag}={value}" in args


# -- confinement ----------------------------------------------------------------------------------


def test_no_container_runs_as_root_writes_its_image_or_keeps_a_capability(case: Rendered) -> None:
    for name, pod in case.pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] == 65532, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            inner = container["securityContext"]
            assert inner["readOnlyRootFilesystem"] is True, name
            assert inner["allowPrivilegeEscalation"] is False, name
            assert inner["capabilities"] == {"drop": ["ALL"]}, name


def test_only_who_asks_the_api_server_has_a_token_for_it(case: Rendered) -> None:
    asking = {"mural-router", "mural-operator", "mural-crds", "mural-uninstall"}
    for name, pod in case.pods():
        wanted = name.split()[1] in asking
        assert pod["automountServiceAccountToken"] is wanted, name


def test_no_secret_stands_in_an_argument_a_variable_or_a_config_map(case: Rendered) -> None:
    secrets = [
        value
        for each in case.of("Secret")
        for value in (each.get("data") or {}).values()
        if len(value) > 40
    ]
    elsewhere = json.dumps([each for each in case.objects if each["kind"] != "Secret"])
    assert not [value for value in secrets if value in elsewhere]


def test_rights_have_no_wildcard_and_secrets_are_never_listed_but_by_name(case: Rendered) -> None:
    for each in case.of("Role", "ClusterRole"):
        for rule in each["rules"]:
            name = each["metadata"]["name"]
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"]), name
            assert not {"create", "delete", "deletecollection", "escalate", "bind"} & {
                *(rule["verbs"] if rule["resources"] != ["events"] else ())
            }, name
            if "secrets" in rule["resources"] and "resourceNames" not in rule:
                assert rule["verbs"] == ["get"], name


def test_rights_over_the_cluster_are_asked_for_only_where_values_ask_for_them(
    render: Callable[..., Rendered],
) -> None:
    for values, more in ((VARIANTS["namespaces"], 0), (VARIANTS["gateway"], 3)):
        found = render(values=values)
        roles = [
            each
            for each in found.of("ClusterRole")
            # The hook for definitions, which have no namespace.
            if each["metadata"]["name"] != "mural-mural-crds"
        ]
        assert len(roles) == more
        assert len(found.of("ClusterRoleBinding")) == more + 1


def test_watched_namespaces_have_a_role_each(render: Callable[..., Rendered]) -> None:
    rendered = render(values=VARIANTS["namespaces"])
    for component in ("router", "operator"):
        places = {
            each["metadata"]["namespace"]
            for each in rendered.of("RoleBinding")
            if each["subjects"][0]["name"] == f"mural-{component}"
        }
        assert places == {"mural", "team-a", "team-b"}
        args = rendered.args("Deployment", f"mural-{component}")
        watched = [arg.partition("=")[2] for arg in args if arg.startswith("--watch-namespace")]
        assert watched == ["mural", "team-a", "team-b"]


def test_secrets_that_the_operator_may_read_can_be_named(
    render: Callable[..., Rendered],
) -> None:
    rules = render(values=VARIANTS["namespaces"]).one("Role", "mural-operator")["rules"]
    readable = [
        rule.get("resourceNames")
        for rule in rules
        if rule["resources"] == ["secrets"] and "get" in rule["verbs"]
    ]
    assert readable == [["acme-key", "mural-router-keys", "mural-control-token"]]


def test_every_pod_of_the_release_is_under_the_policy_that_allows_nothing(case: Rendered) -> None:
    if not case.of("NetworkPolicy"):
        # Values turn them off.
        assert case.one("ServingPool", "large")
        return
    wanted = case.one("NetworkPolicy", "mural-default")["spec"]["podSelector"]["matchLabels"]
    for each in case.of("StatefulSet", "Deployment", "Job"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert wanted.items() <= labels.items(), each["metadata"]["name"]
    for each in case.of("Pod"):
        assert wanted.items() <= each["metadata"]["labels"].items()


def test_ports_that_policies_name_are_ports_of_the_pods_that_they_select(case: Rendered) -> None:
    pods = {
        json.dumps(each["spec"]["selector"]["matchLabels"], sort_keys=True): {
            port["name"]
            for container in each["spec"]["template"]["spec"]["containers"]
            for port in container["ports"]
        }
        for each in case.of("StatefulSet", "Deployment")
    }
    for policy in case.of("NetworkPolicy"):
        selected = json.dumps(policy["spec"]["podSelector"]["matchLabels"], sort_keys=True)
        for rule in policy["spec"].get("ingress", ()):
            for port in rule["ports"]:
                assert port["port"] in pods[selected], policy["metadata"]["name"]


# -- life and death -------------------------------------------------------------------------------


def test_a_pod_is_killed_only_after_notice_and_grace(case: Rendered) -> None:
    for each in case.of("StatefulSet", "Deployment"):
        pod = each["spec"]["template"]["spec"]
        for container in pod["containers"]:
            notice = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
            grace = [
                float(str(arg).partition("=")[2])
                for arg in container.get("args", ())
                if str(arg).startswith(("--shutdown-grace-s=", "--shutdown-timeout="))
            ]
            needed = notice.get("seconds", 0) + sum(grace)
            assert pod.get("terminationGracePeriodSeconds", 30) > needed, each["metadata"]["name"]


def test_the_router_has_longer_than_its_own_grace(case: Rendered, tmp_path: Path) -> None:
    pod = case.one("Deployment", "mural-router")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    notice = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = router_settings(case, tmp_path).shutdown_grace_s
    assert pod["terminationGracePeriodSeconds"] > notice + grace


def test_probes_ask_ports_that_are_open(case: Rendered) -> None:
    for name, container in containers(case):
        ports = {port["name"] for port in container.get("ports", ())}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                action = container[probe].get("httpGet") or container[probe]["tcpSocket"]
                assert action["port"] in ports, f"{name}: {probe}"


def test_what_scales_by_itself_is_not_held_to_a_number(render: Callable[..., Rendered]) -> None:
    scaled = render(values=VARIANTS["gateway"])
    assert "replicas" not in scaled.one("StatefulSet", "mural-server")["spec"]
    assert "replicas" not in scaled.one("Deployment", "mural-router")["spec"]
    plain = render()
    assert plain.one("StatefulSet", "mural-server")["spec"]["replicas"] == 2
    assert plain.one("Deployment", "mural-router")["spec"]["replicas"] == 2


def test_the_pool_selects_the_servers_and_nothing_else(case: Rendered) -> None:
    (pool,) = case.of("ServingPool")
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    selected = [
        each["metadata"]["name"]
        for each in case.of("StatefulSet", "Deployment")
        if wanted <= each["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert selected == ["mural-server"]


def test_services_select_the_pods_that_have_their_ports(case: Rendered) -> None:
    for service in case.of("Service"):
        wanted = service["spec"]["selector"].items()
        (target,) = (
            each
            for each in case.of("StatefulSet", "Deployment")
            if wanted <= each["spec"]["template"]["metadata"]["labels"].items()
        )
        (container,) = target["spec"]["template"]["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports, service["metadata"]["name"]


def test_changed_sources_start_the_servers_anew(render: Callable[..., Rendered]) -> None:
    def mark(values: dict[str, Any]) -> str:
        stateful = render(values=values).one("StatefulSet", "mural-server")
        return str(
            stateful["spec"]["template"]["metadata"]["annotations"]["mural.dev/sources-sha256"]
        )

    source = {"resolvers": [{"type": "s3", "bucket": "adapters"}]}
    assert mark({}) == mark({"router": {"replicas": 3}})
    assert mark({}) != mark({"sources": source})


def test_tls_between_components_is_one_name_and_one_authority_everywhere(
    render: Callable[..., Rendered], tmp_path: Path
) -> None:
    rendered = render(values=VARIANTS["gateway"])
    args = rendered.args("StatefulSet", "mural-server")
    assert "--ssl-certfile=/run/secrets/mural-tls/tls.crt" in args
    (pool,) = rendered.of("ServingPool")
    name = pool["spec"]["controlTls"]["serverName"]
    assert name == "mural-server.mural.svc"
    assert router_settings(rendered, tmp_path).http.tls.replica_server_name == name
    stateful = rendered.one("StatefulSet", "mural-server")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    router = rendered.one("Deployment", "mural-router")["spec"]["template"]["spec"]
    (mounted,) = (each for each in router["volumes"] if each["name"] == "servers")
    # The servers' key is theirs alone.
    assert [each["key"] for each in mounted["secret"]["items"]] == ["ca.crt"]


def test_a_digest_pins_an_image_behind_a_registry(render: Callable[..., Rendered]) -> None:
    rendered = render(values=VARIANTS["second-pool"])
    found = dict(containers(rendered))["StatefulSet mural-server/server"]["image"]
    assert found == "registry.example.com/mural/mural-server:0.1.0@sha256:" + "0" * 64
