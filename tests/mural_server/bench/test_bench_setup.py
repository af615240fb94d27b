"""What each group asks for."""

from __future__ import annotations

import pytest

from mural_server.bench.setup import GROUPS, Group, Setup, group_jobs, settling_jobs

SETUP = Setup(model="unused", vocab_size=1000, adapter_dir="unused")


def prompts(turns: int) -> list[tuple[int, ...]]:
    return [
        tuple(job.prompt)
        for turn in range(turns)
        for group in GROUPS
        for jobs in [group_jobs(SETUP, group, turn)]
        for job in [*jobs, *settling_jobs(SETUP, jobs, turn)]
    ]


def test_no_block_of_a_prompt_comes_twice_under_any_group_or_round() -> None:
    beginnings = [prompt[:16] for prompt in prompts(3)]
    assert len(set(beginnings)) == len(beginnings)


def test_prompts_are_the_same_at_every_run() -> None:
    assert prompts(1) == prompts(1)


@pytest.mark.parametrize(("group", "adapters"), [("base", 0), ("one", 1), ("mixed", 8)])
def test_a_group_has_its_number_of_adapters(group: Group, adapters: int) -> None:
    jobs = group_jobs(SETUP, group, 0)
    assert len(jobs) == SETUP.sizes.concurrency
    assert len({job.adapter for job in jobs if job.adapter}) == adapters


def test_churn_takes_the_adapter_that_was_used_longest_ago() -> None:
    used = [job.adapter for turn in range(3) for job in group_jobs(SETUP, "churn", turn)]
    cycle = SETUP.sizes.churn_adapters
    assert len(set(used)) == cycle
    assert used[cycle:] == used[: len(used) - cycle]
    assert cycle > SETUP.sizes.host_adapters >= SETUP.sizes.slots


def test_churn_and_the_other_groups_share_no_adapter() -> None:
    mixed = {job.adapter for job in group_jobs(SETUP, "mixed", 0)}
    assert not mixed & set(SETUP.churning)
