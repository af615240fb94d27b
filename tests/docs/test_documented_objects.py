"""Every object that a page prints is one that the API server takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import yaml

from mural_resolvers.kubernetes.objects import read_adapter, read_alias, read_pool, read_tenant

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "charts/mural/crds"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "charts/mural/README.md"]
READERS = {
    "Adapter": read_adapter,
    "AdapterAlias": read_alias,
    "ServingPool": read_pool,
    "Tenant": read_tenant,
}
_BLOCK = re.compile(r"^( *)```ya?ml[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)

Json = dict[str, Any]


class Printed(NamedTuple):
    """A YAML document of a page."""

    where: str
    value: object


def printed() -> Iterator[Printed]:
    """Those of all pages; fails where one is no YAML."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            for value in yaml.safe_load_all(block[2]):
                yield Printed(f"{page.relative_to(ROOT)}:{line}", value)


def objects() -> list[tuple[str, Json]]:
    """Mural's own objects, with where they stand."""
    return [
        (where, cast(Json, value))
        for where, value in printed()
        if isinstance(value, dict) and str(value.get("apiVersion", "")).startswith("mural.dev/")
    ]


OBJECTS = objects()
each_object = pytest.mark.parametrize(("where", "body"), OBJECTS, ids=[o[0] for o in OBJECTS])


@cache
def schemas() -> dict[str, Json]:
    """By kind."""
    found = {}
    for path in CRDS.glob("*.yaml"):
        spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        (version,) = spec["versions"]
        found[spec["names"]["kind"]] = version["schema"]["openAPIV3Schema"]
    return found


TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def faults(value: Any, schema: Json, path: str) -> Iterator[str]:
    """What a structural schema says against a value; rules in CEL are the API server's to judge."""
    if not schema.get("x-kubernetes-int-or-string"):
        wanted = schema["type"]
        # YAML reads a time as one, JSON has it as a text.
        is_text = wanted == "string" and schema.get("format") == "date-time"
        if not is_text and not isinstance(value, TYPES[wanted]):
            yield f"{path}: {value!r} is no {wanted}"
            return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(re.sub(r"\$$", r"\\Z", schema["pattern"]), value):
            yield f"{path}: {value!r} does not match {schema['pattern']}"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"{path}: too long"
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(value, int | float) and not (low or value) <= value <= (high or value):
        yield f"{path}: {value} is out of bounds"
    if isinstance(value, list):
        for at, item in enumerate(value):
            yield from faults(item, schema["items"], f"{path}[{at}]")
    if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                yield f"{path}.{name} is missing"
        for name, below in value.items():
            found = properties.get(name, schema.get("additionalProperties"))
            if found is None:
                yield f"{path}.{name}: unknown field"
            else:
                yield from faults(below, found, f"{path}.{name}")


def test_what_pages_print_as_yaml_is_yaml() -> None:
    assert len(list(printed())) > 20
    assert {body["kind"] for _, body in OBJECTS} >= {"Adapter", "AdapterAlias", "Tenant"}


@each_object
def test_a_printed_object_is_of_its_schema(where: str, body: Json) -> None:
    assert list(faults(body, schemas()[body["kind"]], body["kind"])) == []
    assert "status" not in body
    # A page shows where an object belongs, or nothing of it.
    assert body["metadata"].keys() <= {"name", "namespace", "labels", "annotations"}


@each_object
def test_a_printed_object_is_read_by_operator_and_router(where: str, body: Json) -> None:
    READERS[body["kind"]](body | {"metadata": body["metadata"] | {"namespace": "mural"}})


def test_a_fault_in_an_object_would_be_found() -> None:
    def said(kind: str, **spec: object) -> str:
        return " ".join(faults({"spec": spec}, schemas()[kind], kind))

    right = {"pool": "default", "tenant": "acme", "version": "v1"}
    assert said("Adapter", **right) == ""
    assert "spec.tennant: unknown field" in said("Adapter", **right, tennant="acme")
    assert "spec.version is missing" in said("Adapter", pool="default", tenant="acme")
    assert "does not match" in said("Adapter", **(right | {"tenant": "Acme"}))
    assert "is none of" in said("Adapter", **right, prewarm="Host")
    assert "out of bounds" in said("Adapter", **right, placement={"priority": 1001})
    assert "is no array" in said("Tenant", namespaces="mural")


@pytest.mark.cluster
async def test_the_api_server_takes_every_printed_object(cluster: Any) -> None:
    await cluster.apply(CRDS)
    names = [f"crd/{path.stem}.mural.dev" for path in CRDS.glob("*.yaml")]
    await cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    refused = []
    for where, body in OBJECTS:
        metadata = body["metadata"] | {"namespace": cluster.namespace}
        told = yaml.safe_dump(body | {"metadata": metadata}).encode()
        status, _, errors = await cluster.run(
            *("kubectl", "apply", "--dry-run=server", "-f", "-"), told=told
        )
        if status:
            refused.append(f"{where}: {errors}")
    assert not refused
