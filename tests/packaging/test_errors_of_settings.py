"""Whatever file of settings it is: what is wrong is told with the file, the field's place, what is
wanted there and what was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.objects import read_adapter
from mural_resolvers.sources import build_resolvers, read_sources
from mural_resolvers.tenants import TenantsFile, read_tenants
from mural_router.config import Config
from mural_router.objects import FileObjects
from mural_router.routing.aliases_file import AliasesFile
from mural_router.settings import Secrets

TENANT = """apiVersion: mural.dev/v1alpha1
kind: Tenant
metadata: {name: acme}
spec: {weight: .nan}
"""


def router(path: Path) -> object:
    return Config(path, {}, Secrets())


@pytest.mark.parametrize(
    ("read", "text", "told"),
    [
        (router, "queue: {wait_s: .nan}", "queue.wait_s: a number is wanted, not '.nan'."),
        (router, "queue: {wait_s: -1}", "queue.wait_s: a number above 0 is wanted, not -1."),
        (router, "trace_sample_ratio: 2", "trace_sample_ratio: 0 to 1 is wanted, not 2."),
        (
            TenantsFile,
            "tenants: [{id: acme, weight: .nan}]",
            "tenants[0].weight: a number is wanted, not '.nan'.",
        ),
        (
            read_tenants,
            "tenants: [{id: acme, limits: {concurrency: 0}}]",
            "tenants[0].limits.concurrency: a whole number from 1 on is wanted, not 0.",
        ),
        (
            AliasesFile,
            "acme: {stable: [{version: v1, weight: .nan}]}",
            "acme.stable[0].weight: a number is wanted, not '.nan'.",
        ),
        (
            FileObjects,
            TENANT,
            "Document 1 (line 1): spec.weight: a number is wanted, not '.nan'.",
        ),
        (
            read_sources,
            "{resolvers: [], fetch: {deadline_s: .nan}}",
            "fetch.deadline_s: a number is wanted, not '.nan'.",
        ),
        (
            read_sources,
            "{resolvers: [], cache: {quota: much}}",
            "cache.quota: 'much' is no size",
        ),
    ],
)
def test_a_value_that_is_none_is_told_with_its_file_and_place(
    tmp_path: Path, read: Callable[[Path], object], text: str, told: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}: {told}")


@pytest.mark.parametrize(
    "kind", ["s3, bucket: abc", "hub, endpoint: 'https://h', organisations: a"]
)
def test_an_option_of_a_source_is_told_with_its_place(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sources.yaml"
    path.write_text(f"resolvers: [{{type: {kind}, read_timeout_s: soon}}]")
    with pytest.raises(InvalidInput, match="read_timeout_s: a number is wanted, not 'soon'"):
        build_resolvers(read_sources(path).resolvers)


def test_an_object_on_kubernetes_is_told_as_one_in_a_file() -> None:
    spec = {"pool": "p", "tenant": "acme", "version": "v1", "placement": {"replicas": "x"}}
    with pytest.raises(InvalidInput) as caught:
        read_adapter({"metadata": {"name": "a"}, "spec": spec})
    assert caught.value.message == (
        "spec.placement.replicas: All or a whole number is wanted, not 'x'."
    )
