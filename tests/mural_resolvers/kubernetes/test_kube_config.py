"""Where the API server is looked for."""

from __future__ import annotations

import pytest

from mural_resolvers.kubernetes.config import cluster_config

GOOD = """
current-context: x
clusters: [{name: x, cluster: {server: "https://10.0.0.1:6443"}}]
users: [{name: x, user: {token: t}}]
contexts: [{name: x, context: {cluster: x, user: x, namespace: prod}}]
"""


@pytest.fixture
def written(tmp_path, monkeypatch):
    def write(text: str) -> None:
        path = tmp_path / "kubeconfig"
        path.write_text(text)
        monkeypatch.setenv("KUBECONFIG", str(path))

    return write


def test_outside_a_pod_it_is_the_kubeconfigs(written):
    written(GOOD)
    config = cluster_config()
    assert config.cluster.server == "https://10.0.0.1:6443"
    assert config.namespace == "prod"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "clusters: 7",
        GOOD.replace("current-context: x", "current-context: y"),
        GOOD.replace("cluster: x, user: x", "cluster: y, user: x"),
        GOOD.replace("cluster: x, user: x", "cluster: x, user: y"),
        GOOD.replace("current-context: x", ""),
        GOOD.replace("token: t", "token: 7"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_said(written, text):
    written(text)
    with pytest.raises(ValueError, match="no Kubernetes to ask") as caught:
        cluster_config()
    assert "\n" not in str(caught.value)
