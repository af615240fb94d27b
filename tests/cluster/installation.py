"""Mural as people install it: values, tenants' clients, and what is looked at when it is wrong."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any

import openai

from tests.cluster.dockerfile import ROOT
from tests.cluster.kubectl import Kubectl

CHART = ROOT / "charts" / "mural"
RELEASE = "mural"
NAMESPACE, TEAM = "mural-test", "mural-test-team"
BUCKET = "adapters"
VERSIONS = ("acme:v1", "acme:v2", "globex:v1", "globex:v2")
# What the stand-in for S3 takes, whatever this machine's own credentials are.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
INSTALL_S = 900


@dataclass
class Store:
    """An S3 that pods reach, with the examples' adapters."""

    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}?endpoint_url={self.endpoint}&region=us-east-1"

    @property
    def source(self) -> dict[str, str]:
        return {
            "type": "s3",
            "name": "store",
            "bucket": BUCKET,
            "endpoint_url": self.endpoint,
            "region": "us-east-1",
        }


def values_for(store: Store) -> dict[str, Any]:
    """Two of everything, small enough for two cores."""
    return {
        "model": {"servedNames": ["smollm2"]},
        "sources": {"resolvers": [store.source], "credentialsSecret": "store-credentials"},
        "server": {
            "lora": {"maxLoras": 4, "maxCpuLoras": 8, "maxLoraRank": 16},
            "maxNumSeqs": 8,
            "maxModelLen": 1024,
            "kvCacheMemoryBytes": "64Mi",
            "cpuThreads": 1,
            "shutdownGraceSeconds": 30,
            "cache": {"size": "1Gi", "quota": "500Mi"},
            "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "resources": {
                "requests": {"cpu": "200m", "memory": "512Mi"},
                "limits": {"memory": "3Gi"},
            },
        },
        "router": {
            "store": store.url,
            "service": {"type": "NodePort"},
            "shutdownGraceSeconds": 30,
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        },
        "operator": {
            "watchNamespaces": [TEAM],
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        },
        "networkPolicy": {"sources": {"ports": [int(store.endpoint.rpartition(":")[2])]}},
    }


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """As helm merges two files of values."""
    both = {
        name: merged(first[name], value)
        if isinstance(value, dict) and isinstance(first.get(name), dict)
        else value
        for name, value in second.items()
    }
    return first | both


@dataclass
class Mural:
    """The installation that all tests share, each leaving it as it should be."""

    kubectl: Kubectl
    team: Kubectl
    """The same for the namespace of a team."""
    values: dict[str, Any]
    keys: dict[str, str] = field(default_factory=dict)
    installed_s: float = 0.0

    @property
    def url(self) -> str:
        """Of the routers' Service, on the first node."""
        service = self.kubectl.get("service", f"{RELEASE}-router")
        (port,) = (each["nodePort"] for each in service["spec"]["ports"] if each["name"] == "http")
        addresses = self.kubectl.get("nodes")["items"][0]["status"]["addresses"]
        host = next(each["address"] for each in addresses if each["type"] == "InternalIP")
        return f"http://{host}:{port}"

    def client(self, tenant: str) -> openai.OpenAI:
        """Of a tenant; a request that fails is not sent again."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=120
        )

    def helm(self, action: str) -> None:
        """``helm install`` or ``helm upgrade`` with the values as they are now."""
        self.kubectl.helm(
            *(action, RELEASE, str(CHART), "--wait", "--timeout", f"{INSTALL_S}s"),
            values=self.values,
            timeout_s=INSTALL_S + 60,
        )

    def uninstall(self) -> None:
        self.kubectl.helm("uninstall", RELEASE, "--ignore-not-found", "--wait", "--timeout", "180s")


def secret(name: str, entries: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name},
        "stringData": entries,
    }


def describe(there: Kubectl) -> str:
    """What somebody would look at first, when something is wrong."""
    parts = []
    for args in (
        ("get", "pods,adapters.mural.dev,adapteraliases.mural.dev,tenants.mural.dev", "-o", "wide"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("describe", "adapters.mural.dev,servingpools.mural.dev"),
        *(
            ("logs", "-l", f"app.kubernetes.io/component={each}", "--tail=60", "--prefix")
            for each in ("server", "router", "operator")
        ),
    ):
        done = subprocess.run(
            ["kubectl", "--namespace", there.namespace, *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        parts += [f"$ kubectl {' '.join(args)}", done.stdout + done.stderr]
    return "\n".join(parts)


def expected() -> dict[str, list[dict[str, str]]]:
    """Prompts of the examples' adapters with the answers that each learned."""
    text = (ROOT / "examples" / "prompts.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def minted(printed: str) -> str:
    """The key in what `mural tenants create-key` prints."""
    found = re.search(r"^key.*\s(mural_\S+)$", printed, re.MULTILINE)
    assert found is not None, printed
    return found[1]
