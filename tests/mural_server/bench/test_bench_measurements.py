"""Every measurement on a tiny model: what is reported and counted, never how fast it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mural_server.bench import report as tables
from mural_server.bench.adapters import adapter_folder, make_adapters
from mural_server.bench.contender import Contender, Remote
from mural_server.bench.four_groups import FourGroupsReport, Where, measure_four_groups
from mural_server.bench.in_process import InProcess
from mural_server.bench.loads import measure_loads
from mural_server.bench.peft_baseline import PeftBaseline
from mural_server.bench.profile import measure_profile
from mural_server.bench.setup import BenchError, Job, Setup, group_jobs
from mural_server.bench.slots import measure_slots

MAKERS: dict[Where, Callable[[Setup], Contender]] = {"in-process": InProcess, "peft": PeftBaseline}


@pytest.fixture(scope="module")
def four_groups(bench_setup: Setup) -> FourGroupsReport:
    setup = msgspec.structs.replace(
        bench_setup, sizes=msgspec.structs.replace(bench_setup.sizes, rounds=2)
    )
    return measure_four_groups(
        setup,
        ["in-process", "peft"],
        lambda line: None,
        start=lambda where, setup: MAKERS[where](setup),
    )


def test_every_group_is_measured_and_peft_has_no_churn(four_groups: FourGroupsReport) -> None:
    assert [(f.group, f.where) for f in four_groups.figures] == [
        ("base", "in-process"),
        ("base", "peft"),
        ("one", "in-process"),
        ("one", "peft"),
        ("mixed", "in-process"),
        ("mixed", "peft"),
        ("churn", "in-process"),
    ]


def test_every_token_of_every_round_is_counted(four_groups: FourGroupsReport) -> None:
    sizes = four_groups.setup.sizes
    requests = sizes.rounds * sizes.concurrency
    for figures in four_groups.figures:
        assert figures.requests == requests
        assert figures.output_tokens == requests * sizes.output_tokens
        assert figures.first_token.count == requests
        assert figures.inter_token.count == requests * (sizes.output_tokens - 1)
        assert len(figures.tokens_per_s_by_round) == sizes.rounds


def test_ratios_are_to_the_same_groups_peft(four_groups: FourGroupsReport) -> None:
    ratios = {(f.group, f.where): f.ratio_to_peft for f in four_groups.figures}
    assert ratios["mixed", "peft"] == 1.0
    assert ratios["churn", "in-process"] is None
    assert all(ratios[group, "in-process"] for group in ("base", "one", "mixed"))


def test_no_prompt_comes_from_the_prefix_cache(four_groups: FourGroupsReport) -> None:
    assert {f.prefix_hits for f in four_groups.figures if f.where == "in-process"} == {0}
    assert any("prefix cache cannot help" in line for line in four_groups.conditions)


def test_only_churn_loads_adapters(four_groups: FourGroupsReport) -> None:
    cold = {f.group: f.cold_adapters for f in four_groups.figures if f.where == "in-process"}
    sizes = four_groups.setup.sizes
    assert cold["base"] == cold["one"] == cold["mixed"] == 0
    # All of the first round's, and what the cycle brings anew in the second.
    assert cold["churn"] is not None
    assert cold["churn"] >= sizes.concurrency + sizes.concurrency - sizes.host_adapters


def test_a_report_is_json_and_a_table(
    four_groups: FourGroupsReport, capsys: pytest.CaptureFixture[str]
) -> None:
    read = msgspec.json.decode(msgspec.json.encode(four_groups), type=FourGroupsReport)
    assert read == four_groups
    tables.show_four_groups(four_groups)
    assert "churn" in capsys.readouterr().out


def test_peft_and_the_engine_do_the_same_work(bench_setup: Setup) -> None:
    jobs = [*group_jobs(bench_setup, "mixed", 0)[:2], *group_jobs(bench_setup, "base", 0)[:2]]
    same_prompt = [job._replace(prompt=jobs[0].prompt) for job in jobs]
    engine = InProcess(bench_setup)
    try:
        for asked in (jobs, same_prompt):
            found = engine.run(asked).token_ids
            assert found == PeftBaseline(bench_setup).run(asked).token_ids
    finally:
        engine.close()
    assert len({tuple(answer) for answer in found}) == 3, "an adapter's answer is the base's"


def test_adapters_are_the_same_at_every_run(bench_setup: Setup, tmp_path: Path) -> None:
    again = msgspec.structs.replace(bench_setup, adapter_dir=str(tmp_path))
    make_adapters(again)
    digests = [
        [
            hashlib.sha256(
                (adapter_folder(setup, name) / "adapter_model.safetensors").read_bytes()
            ).hexdigest()
            for name in setup.adapters
        ]
        for setup in (bench_setup, again)
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == len(bench_setup.adapters)


def test_decode_steps_are_timed_with_and_without_loads(
    bench_setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure_loads(bench_setup)
    steps = bench_setup.sizes.windows * bench_setup.sizes.window_steps
    assert [batch.batch for batch in report.batches] == ["base", "one"]
    for batch in report.batches:
        assert batch.quiet.count == batch.loading.count == steps
        assert batch.loads >= bench_setup.sizes.windows
        assert batch.loading.max_ms >= batch.loading.p99_ms
    tables.show_loads(report)
    assert "max" in capsys.readouterr().out


def test_slots_are_measured_at_as_many_adapters_and_at_twice_as_many(
    bench_setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure_slots(bench_setup)
    sizes = bench_setup.sizes
    assert [(case.arrival, case.adapters) for case in report.cases] == [
        ("burst", sizes.slots),
        ("burst", 2 * sizes.slots),
        ("steady", sizes.slots),
        ("steady", 2 * sizes.slots),
    ]
    for case in report.cases:
        turns = 1 if case.arrival == "burst" else sizes.turns
        assert case.first_token.count == sizes.rounds * report.clients * turns
    tables.show_slots(report)
    assert "ratio" in capsys.readouterr().out


def test_a_profile_names_the_engines_parts_and_leaves_nothing_out(
    bench_setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    report = measure_profile(bench_setup)
    assert [step.batch for step in report.steps] == ["base", "one", "mixed"]
    for step in report.steps:
        spent = {part.function: part.ms for part in step.parts}
        modules = {function.rpartition(".")[0] for function in spent}
        assert {"engine.scheduler", "engine.runner", "engine.sampler"} <= modules
        assert spent.get("(elsewhere)", 0.0) < 0.1 * step.profiled_ms
    tables.show_profile(report)
    assert "engine.runner" in capsys.readouterr().out


class Failing(Contender):
    """Fails in its child in one way or another."""

    def __init__(self, setup: Setup) -> None:
        if setup.seed:
            raise ValueError("no place to start")

    def settle(self, jobs: list[Job]) -> None:
        raise ValueError("cannot settle")

    def close(self) -> None:
        """It holds nothing."""


@pytest.mark.slow
def test_a_failure_in_a_childs_start_or_work_is_told_here(bench_setup: Setup) -> None:
    with pytest.raises(BenchError, match="no place to start"):
        Remote(Failing, msgspec.structs.replace(bench_setup, seed=1))
    remote = Remote(Failing, bench_setup)
    try:
        with pytest.raises(BenchError, match="cannot settle"):
            remote.settle([])
    finally:
        remote.close()
