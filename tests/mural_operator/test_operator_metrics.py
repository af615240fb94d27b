"""What a scrape of the operator holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from mural_operator.metrics import Metrics


@dataclass
class Watched:
    synced: bool = True
    fresh: bool = True
    trouble: str = ""


class Told:
    """What is asked for at a scrape."""

    def __init__(self) -> None:
        self.watches = {"adapters": Watched(), "tenants": Watched(fresh=False)}
        self.leading = False
        self.metrics = Metrics(
            watches=lambda: self.watches,
            calls=lambda: {"list": 4, "patch": 2},
            leading=lambda: self.leading,
            adapters=lambda: {("Ready", "True"): 7},
        )

    def scrape(self) -> Mapping[str, float]:
        families = text_string_to_metric_families(self.metrics.exposition().decode())
        return {
            f"{sample.name}{sorted(sample.labels.values())}": sample.value
            for family in families
            for sample in family.samples
        }


def test_states_are_asked_for_at_each_scrape() -> None:
    told = Told()
    first = told.scrape()
    assert first["mural_operator_leading[]"] == 0
    assert first["mural_operator_watch_fresh['adapters']"] == 1
    assert first["mural_operator_watch_fresh['tenants']"] == 0
    assert first["mural_operator_api_calls_total['patch']"] == 2
    assert first["mural_operator_adapters['Ready', 'True']"] == 7
    told.leading = True
    assert told.scrape()["mural_operator_leading[]"] == 1


def test_actions_are_counted_by_what_came_of_them() -> None:
    told = Told()
    told.metrics.acted("Load", 0.02)
    told.metrics.acted("Load", 0.02, refused=0)
    told.metrics.acted("Load", 0.02, refused=404)
    scrape = told.scrape()
    for outcome in ("ok", "no_answer", "refused"):
        assert scrape[f"mural_operator_action_seconds_count['Load', '{outcome}']"] == 1
    assert scrape["mural_operator_refusals_total['0', 'Load']"] == 1
    assert scrape["mural_operator_refusals_total['404', 'Load']"] == 1


def test_a_replica_that_invents_statuses_makes_no_new_series() -> None:
    told = Told()
    for status in range(600, 700):
        told.metrics.acted("Load", 0.02, refused=status)
    series = [name for name in told.scrape() if name.startswith("mural_operator_refusals_total")]
    assert series == ["mural_operator_refusals_total['Load', 'other']"]


def test_the_series_of_a_pool_go_with_it() -> None:
    told = Told()
    told.metrics.reconciled("smol", 0.01)
    told.metrics.reconciled("other", 0.01, ok=False)
    assert told.scrape()["mural_operator_reconciles_total['ok', 'smol']"] == 1
    told.metrics.forget("smol")
    told.metrics.forget("never seen")
    left = [name for name in told.scrape() if "reconcile" in name]
    assert left
    assert not [name for name in left if "smol" in name]


def test_status_writes_and_events_are_counted() -> None:
    told = Told()
    told.metrics.wrote_status("Adapter", "ok")
    told.metrics.recorded("Warning")
    told.metrics.events_dropped = 3
    scrape = told.scrape()
    assert scrape["mural_operator_status_writes_total['Adapter', 'ok']"] == 1
    assert scrape["mural_operator_events_total['Warning']"] == 1
    assert scrape["mural_operator_events_dropped_total[]"] == 3
