"""Values are held to their schema, and what cannot work is refused in a sentence."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec
import pytest
import yaml

from mural_resolvers.hub.settings import HubSettings
from mural_resolvers.s3.settings import S3Settings
from mural_resolvers.sources import FetchConfig
from mural_router.settings import RouterSettings
from tests.charts.chart import CHART, PRESETS, ROOT

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
RefusalOf = Callable[..., str]
PARTS = 6


def _table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("values_table", ROOT / "charts/values_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    return schema


def schema_at(*path: str) -> dict[str, Any]:
    found = SCHEMA
    for step in path:
        found = resolved(resolved(found)["properties"][step])
    return found


def defaults(values: object, schema: dict[str, Any], *path: str) -> Iterator[str]:
    """Paths of values that the schema does not know."""
    schema = resolved(schema)
    if not isinstance(values, dict) or "properties" not in schema:
        return
    for name, value in values.items():
        if name not in schema["properties"]:
            yield ".".join((*path, name))
        else:
            yield from defaults(value, schema["properties"][name], *path, name)


def objects(schema: object, *path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield "/".join(path), schema
        for name, inner in schema.items():
            yield from objects(inner, *path, name)
    elif isinstance(schema, list):
        for place, inner in enumerate(schema):
            yield from objects(inner, *path, str(place))


# -- the files agree ------------------------------------------------------------------------------


def test_the_tables_of_values_are_made_of_the_present_file() -> None:
    for path, text in _table().pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run charts/values_table.py"


def test_the_chart_installs_the_version_that_it_lies_beside() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["appVersion"] == project["version"]
    assert "dependencies" not in chart


def test_every_value_is_explained_above_it() -> None:
    for value in _table().read_values():
        assert value.text.endswith((".", "?")), value.name


def test_the_schema_knows_every_value_and_no_other() -> None:
    assert not list(defaults(VALUES, SCHEMA))

    def unsaid(schema: dict[str, Any], values: object, *path: str) -> Iterator[str]:
        for name, inner in resolved(schema).get("properties", {}).items():
            if not isinstance(values, dict) or name not in values:
                yield ".".join((*path, name))
            elif isinstance(values[name], dict) and values[name]:
                yield from unsaid(inner, values[name], *path, name)

    free = {"global", "server.resources.claims", "router.resources.claims"}
    free |= {"operator.resources.claims", "redis.resources.claims"}
    assert set(unsaid(SCHEMA, VALUES)) == free


def test_no_object_of_the_schema_takes_names_that_it_does_not_list() -> None:
    # Two that only tell the kinds of sources apart, each of which has a strict schema of its own.
    telling = ("sources/properties/resolvers/items", "if")
    for path, schema in objects(SCHEMA):
        if not path.endswith(telling):
            assert schema.get("additionalProperties") is False, path


def test_settings_of_sources_and_router_are_those_of_the_code() -> None:
    def fields(kind: type) -> set[str]:
        if dataclasses.is_dataclass(kind):
            return {field.name for field in dataclasses.fields(kind)}
        return {field.encode_name for field in msgspec.structs.fields(kind)}

    definitions = SCHEMA["definitions"]
    assert set(definitions["s3Source"]["properties"]) == fields(S3Settings) | {
        "type",
        "name",
        "url",
    }
    assert set(definitions["hubSource"]["properties"]) == fields(HubSettings) | {"type", "name"}
    assert set(schema_at("sources", "fetch")["properties"]) == fields(FetchConfig)
    settings = definitions["routerSettings"]["properties"]
    assert set(settings) <= fields(RouterSettings)
    kinds = {field.name: field.type for field in msgspec.structs.fields(RouterSettings)}
    for name in ("queue", "retry", "breaker", "placement", "versions", "fleet"):
        assert set(settings[name]["properties"]) == fields(kinds[name]), name


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_helm_lint_has_nothing_to_say(
    helm: Callable[..., subprocess.CompletedProcess[str]], preset: str | None
) -> None:
    flags = [] if preset is None else ["--values", str(CHART / f"values-{preset}.yaml")]
    done = helm("lint", "--strict", str(CHART), *flags)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"sever": {}}, "sever"),
        ({"server": {"replcas": 2}}, "replcas"),
        ({"server": {"lora": {"maxLora": 2}}}, "maxLora"),
        ({"server": {"image": {"digset": ""}}}, "digset"),
        ({"router": {"settings": {"queue": {"wait": 3}}}}, "wait"),
        ({"operator": {"watchNamespace": []}}, "watchNamespace"),
        ({"sources": {"resolvers": [{"type": "s3", "bukket": "a"}]}}, "bukket"),
        ({"sources": {"resolvers": [{"type": "hub", "repository": "a"}]}}, "repository"),
        ({"networkPolicy": {"apiServer": {"cidr": []}}}, "cidr"),
        ({"gateway": {"parentRef": []}}, "parentRef"),
    ],
)
def test_a_typo_is_refused_with_its_name(
    refusal: RefusalOf, values: dict[str, Any], named: str
) -> None:
    assert f"additional properties '{named}' not allowed" in refusal(values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model": {"quantization": "gptq"}}, "reads no quantised safetensors: set engine: vllm"),
        ({"server": {"gpu": {"count": 1}}}, "computes on CPUs: set engine: vllm"),
        ({"server": {"gpu": {"memoryUtilization": 0.9}}}, "computes on CPUs: set engine: vllm"),
        ({"engine": "vllm"}, "engine: vllm needs model.path"),
        (
            {"engine": "vllm", "model": {"path": "a/b"}},
            "engine: vllm needs sources.resolvers",
        ),
        ({"uploads": {"enabled": True}}, "uploads.enabled needs uploads.store"),
        ({"server": {"lora": {"maxLoras": 65}}}, "server.lora.maxLoras is above"),
        ({"server": {"cache": {"type": "hostPath"}}}, "say which folder of the nodes"),
        ({"redis": {"mode": "external"}}, "name the Secret with its URL"),
        ({"redis": {"external": {"existingSecret": "a"}}}, "set redis.mode: external"),
        ({"gateway": {"enabled": True}}, "gateway.enabled needs gateway.parentRefs"),
        (
            {"router": {"auth": "open", "adminKey": {"existingSecret": "a"}}},
            "leave one of them out",
        ),
        (
            {
                "router": {"auth": "open"},
                "gateway": {"enabled": True, "via": "picker", "parentRefs": [{"name": "a"}]},
            },
            "set router.auth: keys",
        ),
        (
            {
                "server": {"tls": {"existingSecret": "a"}},
                "gateway": {"enabled": True, "via": "picker", "parentRefs": [{"name": "a"}]},
            },
            "or set gateway.via: router",
        ),
        ({"operator": {"enabled": False}}, "router.keysSecret"),
        ({"router": {"keysSecret": "a"}}, "leave router.keysSecret empty"),
        ({"server": {"serviceAccount": {"create": False}}}, "server.serviceAccount.name"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence_that_says_what_to_change(
    refusal: RefusalOf, values: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"uploads": {"enabled": True, "store": "s3://a"}}, "vLLM takes no uploads"),
        ({"server": {"tls": {"existingSecret": "a"}}}, "server.tls is of Mural's engine"),
        ({"server": {"kvCacheMemoryBytes": "4Gi"}}, "server.kvCacheMemoryBytes is of Mural's"),
        ({"server": {"cpuThreads": 4}}, "server.cpuThreads is of Mural's engine"),
        ({"server": {"lora": {"targetModules": ["q_proj"]}}}, "targetModules is of Mural's"),
        ({"server": {"lora": {"maxCpuLoraBytes": "4Gi"}}}, "maxCpuLoraBytes is of Mural's"),
        ({"server": {"lora": {"maxLoraRank": 48}}}, "vLLM takes 1, 8, 16"),
    ],
)
def test_settings_of_the_own_engine_are_refused_for_vllm(
    refusal: RefusalOf, values: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(values, preset="rag")


def with_each(values: object, text: str) -> Iterator[object]:
    """Values of which one that is a text or a list holds this text; the others are left out."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from ({name: each} for each in with_each(value, text))
    elif isinstance(values, str | list):
        yield text if isinstance(values, str) else [text]


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.full] if part else []) for part in range(PARTS)]
)
def test_no_text_breaks_out_of_its_place(
    helm: Callable[..., subprocess.CompletedProcess[str]], part: int
) -> None:
    """Each part has every so many of the values, of all of the chart's sections."""
    hostile = 'a"b\'\n- x: {{ y }}\nz: "'

    def kinds(values: object) -> list[tuple[str, str]] | None:
        """None: refused by the schema or in a sentence."""
        done = helm("template", "a", str(CHART), "--values", "-", told=json.dumps(values))
        assert "YAML parse error" not in done.stderr, (values, done.stderr)
        if done.returncode != 0:
            return None
        found = (each for each in yaml.safe_load_all(done.stdout) if each)
        return [(each["kind"], each["metadata"]["name"]) for each in found]

    usual = kinds({})
    for values in itertools.islice(with_each(VALUES, hostile), part, None, PARTS):
        assert kinds(values) in (None, usual), values
