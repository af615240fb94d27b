"""Rendering the chart and looking into what comes out; imported by the tests of this folder."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "mural"
PRESETS = ("rag", "multi-domain", "playground")
GATEWAY = {"enabled": True, "parentRefs": [{"name": "edge"}]}
MONITORING = {
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}
# What the presets leave off, so that every template is rendered by one of these.
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "picker": {
        "gateway": GATEWAY | {"via": "picker", "hostnames": ["api.example.com"]},
        "server": {
            "autoscaling": {"kind": "hpa"},
            "cache": {"type": "hostPath", "hostPath": "/var/lib/mural"},
        },
        "monitoring": MONITORING,
        "networkPolicy": {
            "clients": [{"podSelector": {"matchLabels": {"app": "client"}}}],
            "gateway": [{"namespaceSelector": {"matchLabels": {"name": "gateways"}}}],
        },
    },
    "gateway": {
        "gateway": GATEWAY,
        "router": {
            "autoscaling": {"enabled": True},
            "tls": {"existingSecret": "edge-certificate"},
            "adminKey": {"existingSecret": "admin"},
            "settings": {"queue": {"wait_s": 5}, "placement": {"fill": 0.8}},
        },
        "operator": {"allNamespaces": True},
        "redis": {"mode": "external", "external": {"existingSecret": "redis"}},
        "server": {
            "autoscaling": {"kind": "keda"},
            "cache": {"type": "pvc"},
            "tls": {"existingSecret": "servers-certificate"},
        },
        "monitoring": MONITORING,
    },
    "namespaces": {
        "operator": {"watchNamespaces": ["team-a", "team-b"], "secretNames": ["acme-key"]},
        "tenants": {"acme": {"namespaces": ["team-a"]}},
        "adapters": {"acme-v1": {"tenant": "acme", "version": "v1"}},
        "redis": {"mode": "none"},
    },
    "second-pool": {
        "operator": {"enabled": False},
        "router": {"keysSecret": "mural-router-keys", "auth": "keys"},
        "pool": {"name": "large"},
        "networkPolicy": {"enabled": False},
        "image": {"registry": "registry.example.com/mural", "pullSecrets": ["pull"]},
        "server": {"image": {"digest": "sha256:" + "0" * 64}},
    },
}

Helm = Callable[..., "subprocess.CompletedProcess[str]"]
Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects of a release."""

    text: str
    objects: tuple[Object, ...]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (
            each
            for each in self.objects
            if each["kind"] == kind and each["metadata"]["name"] == name
        )
        return found

    def of(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def pods(self) -> Iterator[tuple[str, Object]]:
        """The spec of each pod that may come of it, by what makes it."""
        for each in self.of("StatefulSet", "Deployment", "Job"):
            yield f"{each['kind']} {each['metadata']['name']}", each["spec"]["template"]["spec"]
        for each in self.of("Pod"):
            yield f"Pod {each['metadata']['name']}", each["spec"]

    def args(self, kind: str, name: str) -> list[str]:
        """The arguments of the only container."""
        (container,) = self.one(kind, name)["spec"]["template"]["spec"]["containers"]
        return [str(each) for each in container["args"]]


def template(
    helm: Helm,
    *,
    preset: str | None = None,
    values: dict[str, Any] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``helm template``; values are given as a file is."""
    flags = [] if preset is None else ["--values", str(CHART / f"values-{preset}.yaml")]
    return helm(
        *("template", "mural", str(CHART), "--namespace", "mural"),
        *("--kube-version", "1.34.0"),
        *(*flags, "--values", "-"),
        told=json.dumps(values or {}),
    )


def render(
    helm: Helm, *, preset: str | None = None, values: dict[str, Any] | None = None
) -> Rendered:
    """Render it, or fail with what ``helm`` says."""
    done = template(helm, preset=preset, values=values)
    assert done.returncode == 0, done.stderr
    objects = tuple(each for each in yaml.safe_load_all(done.stdout) if each)
    return Rendered(done.stdout, objects)
