"""Mural as people install it, once for all tests of this folder, on the cluster of KUBECONFIG.

On the test cluster of MURAL_CLUSTER_DIR the images are made here. On any other cluster they are
those that a file of values names: MURAL_CLUSTER_VALUES.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer

from tests.cluster import dockerfile, images, installation, kubectl

REGISTRY = "mural.local"
FIGURES: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in FIGURES:
        terminalreporter.write_line(f"figure: {line}")


@pytest.fixture
def figure() -> Callable[[str, str], None]:
    """Tell a figure, when the run ends."""

    def tell(what: str, value: str) -> None:
        FIGURES.append(f"{what}: {value}")

    return tell


# -- what there must be ---------------------------------------------------------------------------


def _not_run(why: str) -> None:
    if os.environ.get("MURAL_CI_FULL") == "1":
        pytest.fail(f"NOT RUN: {why}")
    pytest.skip(f"NOT RUN: {why}")


@pytest.fixture(scope="session")
def host_ip() -> str:
    """This machine, as pods see it."""
    if not os.environ.get("KUBECONFIG"):
        _not_run("KUBECONFIG names no cluster; `make cluster-test` says how to get one")
    if missing := kubectl.missing_programs():
        _not_run(f"{' and '.join(missing)} are not on the PATH")
    address = os.environ.get("MURAL_CLUSTER_HOST_IP", "")
    if not address:
        _not_run("MURAL_CLUSTER_HOST_IP does not say at which address pods reach this machine")
    return address


@pytest.fixture(scope="session")
def store(host_ip: str) -> Iterator[installation.Store]:
    """The adapters are published by the command that tenants use."""
    server = ThreadedMotoServer(ip_address=host_ip, port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = installation.Store(f"http://{host}:{port}")
        boto3.client(
            "s3",
            endpoint_url=found.endpoint,
            region_name=installation.CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=installation.CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=installation.CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        ).create_bucket(Bucket=installation.BUCKET)
        for name in installation.VERSIONS:
            tenant, _, version = name.partition(":")
            folder = dockerfile.ROOT / "examples" / "adapters" / tenant / "default" / version
            subprocess.run(
                [
                    *(sys.executable, "-m", "mural_resolvers.cli", "adapters", "push"),
                    *(str(folder), name, "--store", found.url),
                ],
                env=os.environ | installation.CREDENTIALS,
                check=True,
                timeout=120,
            )
        yield found
    finally:
        server.stop()


# -- the installation -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def placed_images(
    host_ip: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Values that say which images there are and where their packages come from."""
    given = os.environ.get("MURAL_CLUSTER_VALUES")
    if given:
        return dict(yaml.safe_load(Path(given).read_text(encoding="utf-8")))
    folder = Path(os.environ.get("MURAL_CLUSTER_DIR", ""))
    if not (folder / "image").is_file():
        _not_run("MURAL_CLUSTER_VALUES names no file with the images of this cluster")
    began = time.monotonic()
    chart = yaml.safe_load((installation.CHART / "Chart.yaml").read_text(encoding="utf-8"))
    images.make_images(folder, REGISTRY, chart["appVersion"], tmp_path_factory.mktemp("images"))
    FIGURES.append(f"images made: {time.monotonic() - began:.0f} s")
    # PyTorch is gigabytes: pods mount the environment of the tests.
    packages = Path(yaml.__file__).parent.parent
    brought = {
        "extraVolumes": [{"name": "packages", "hostPath": {"path": str(packages)}}],
        "extraVolumeMounts": [
            {"name": "packages", "mountPath": images.PACKAGES_PATH, "readOnly": True}
        ],
    }
    return {
        "image": {"registry": REGISTRY},
        "server": brought,
        "router": brought,
        "operator": brought,
        "redis": {"image": {"repository": f"{REGISTRY}/valkey", "tag": "1"}},
    }


@pytest.fixture(scope="session")
def mural(
    store: installation.Store,
    placed_images: dict[str, dict[str, Any]],
    request: pytest.FixtureRequest,
) -> Iterator[installation.Mural]:
    """Installed by helm; taken away at the end, where the last test has not done so."""
    there, team = kubectl.Kubectl(installation.NAMESPACE), kubectl.Kubectl(installation.TEAM)
    made = installation.Mural(
        there, team, installation.merged(installation.values_for(store), placed_images)
    )
    try:
        for name in (installation.NAMESPACE, installation.TEAM):
            there("create", "namespace", name)
        there.apply(installation.secret("store-credentials", installation.CREDENTIALS))
        began = time.monotonic()
        made.helm("install")
        made.installed_s = time.monotonic() - began
        yield made
    finally:
        if request.session.testsfailed or not made.installed_s:
            print(installation.describe(there), flush=True)
        made.uninstall()
        for name in (installation.NAMESPACE, installation.TEAM):
            there("delete", "namespace", name, "--ignore-not-found", "--timeout=90s")
