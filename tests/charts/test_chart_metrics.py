"""Rules and dashboard name metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.charts.chart import MONITORING, ROOT, VARIANTS, Rendered

_CODE = ("server/mural_server", "router/mural_router", "operator/mural_operator")
_FAMILY = re.compile(r'"((?:vllm|mural):[a-z_]+|mural_(?:router|operator)_[a-z_]+)"')
_NAMED = re.compile(r"\b((?:vllm|mural):[a-z_]+|mural_(?:router|operator)_[a-z_]+)")
_DOCUMENTED = re.compile(r"\| `((?:vllm|mural):[a-z_]+|mural_router_[a-z_]+)` \|")
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")


def known() -> set[str]:
    """Families by the code and by the reference, without what their kind adds to a name."""
    found: set[str] = set()
    for folder in _CODE:
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(_FAMILY.findall(path.read_text(encoding="utf-8")))
    for page in ("metrics.md", "router.md"):
        text = (ROOT / "docs/reference" / page).read_text(encoding="utf-8")
        found |= {_SUFFIX.sub("", name) for name in _DOCUMENTED.findall(text)}
    return found


def queries(rendered: Rendered) -> Iterator[tuple[str, str]]:
    """Every PromQL expression with what it stands in."""
    for each in rendered.of("PrometheusRule"):
        for group in each["spec"]["groups"]:
            for rule in group["rules"]:
                yield rule.get("alert") or rule["record"], rule["expr"]
    for each in rendered.of("ScaledObject"):
        for trigger in each["spec"]["triggers"]:
            yield each["metadata"]["name"], trigger["metadata"]["query"]
    for each in rendered.of("ConfigMap"):
        if "mural.json" in each["data"]:
            for panel in json.loads(each["data"]["mural.json"])["panels"]:
                for target in panel.get("targets", ()):
                    yield panel["title"], target["expr"]


@pytest.fixture(scope="module")
def every_query(render: Callable[..., Rendered]) -> list[tuple[str, str]]:
    scaling = {"server": {"autoscaling": {"kind": "keda"}}}
    found: list[tuple[str, str]] = []
    for values in (VARIANTS["picker"], {"monitoring": MONITORING} | scaling):
        found += queries(render(values=values))
    assert len(found) > 50
    return found


def test_every_metric_that_is_asked_for_is_one_that_is_served(
    every_query: list[tuple[str, str]],
) -> None:
    families = known()
    for where, query in every_query:
        for name in _NAMED.findall(query):
            assert name in families or _SUFFIX.sub("", name) in families, f"{where}: {name}"


def test_every_query_names_its_namespace(every_query: list[tuple[str, str]]) -> None:
    for where, query in every_query:
        selectors = re.findall(r"\{([^}]*)\}", query)
        assert len(selectors) == len(_NAMED.findall(query)), where
        assert all("namespace=" in each for each in selectors), where


def test_brackets_of_every_query_are_closed(every_query: list[tuple[str, str]]) -> None:
    for where, query in every_query:
        for first, second in ("()", "{}", "[]"):
            assert query.count(first) == query.count(second), where


def test_the_autoscaler_reads_what_the_recording_rules_write(
    render: Callable[..., Rendered],
) -> None:
    rendered = render(values=VARIANTS["picker"])
    rules = rendered.one("PrometheusRule", "mural-server-autoscaling")
    (group,) = rules["spec"]["groups"]
    written = {rule["record"] for rule in group["rules"]}
    scaler: dict[str, Any] = rendered.one("HorizontalPodAutoscaler", "mural-server")
    read = {each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]}
    assert read == written
    # A series of the adapter's needs both labels to belong to a pod.
    assert all("by (namespace, pod" in rule["expr"] for rule in group["rules"])
