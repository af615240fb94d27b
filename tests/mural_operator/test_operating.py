"""The life of an operator, as far as it needs no cluster."""

from __future__ import annotations

import asyncio
import os

import pytest

from mural_operator.election import WorkGoesOn
from mural_operator.operating import Operator
from mural_operator.settings import OperatorSettings
from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.config import cluster_config


class _Ended(BaseException):
    """What stands in for the end of the process."""


@pytest.fixture
def operator(monkeypatch, tmp_path):
    """One whose API server never answers, and whose end ends the test alone."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, current-context: a, clusters: [{name: a, cluster: "
        "{server: 'http://127.0.0.1:9'}}], users: [{name: a, user: {}}], contexts: [{name: a, "
        "context: {cluster: a, user: a, namespace: mural}}]}"
    )
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    def end(status: int) -> None:
        raise _Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    return Operator(OperatorSettings(), KubeClient(cluster_config()))


async def test_work_that_does_not_stop_when_leadership_is_lost_ends_the_process_at_once(
    operator, monkeypatch, caplog
):
    async def lead(work: object) -> None:
        raise WorkGoesOn("the work has not ended")

    monkeypatch.setattr(operator._election, "lead", lead)
    async with operator.client:
        with pytest.raises(_Ended, match="1"):
            await operator.run(asyncio.Event())
    assert "the work has not ended" in caplog.text


async def test_any_other_part_that_ends_ends_the_operator_with_what_happened(operator, monkeypatch):
    async def run() -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(operator._cluster, "run", run)
    async with operator.client:
        with pytest.raises(InvalidInput, match="watching the cluster has ended: no more"):
            await operator.run(asyncio.Event())


async def test_a_signal_ends_it_though_the_api_server_never_answered(operator):
    stop = asyncio.Event()
    stop.set()
    async with operator.client, asyncio.timeout(20):
        await operator.run(stop)
    assert operator._not_ready() == "shutting down"
