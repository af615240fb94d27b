"""What the demo starts and ends: an S3 server, `mural up`, and short commands."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import boto3
import httpx
from rich.console import Console

__all__ = ["BUCKET", "Fleet", "mural", "new_key", "push_refused", "s3_server", "start_up"]

BUCKET = "adapters"
START_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 120.0
# What the S3 server of the demo takes, whatever this machine's own credentials are.
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "demo",
    "AWS_SECRET_ACCESS_KEY": "demo-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}
MURAL = (sys.executable, "-m", "mural_resolvers.cli")


class Fleet(NamedTuple):
    """A running router, its admin pages, and the servers behind it by name."""

    url: str
    admin: str
    servers: dict[str, str]
    token: str
    """Of the router, by which the servers believe who is asking."""


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server with one bucket; gives its endpoint."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, os.environ) as process:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=1),
            ):
                break
            time.sleep(0.1)
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket=BUCKET)
        yield endpoint


@contextlib.contextmanager
def start_up(flags: list[str]) -> Iterator[Fleet]:
    """`mural up` on free ports, ended on the way out whatever happens; its log on failure."""
    port, admin_port, token = free_port(), free_port(), secrets.token_urlsafe(32)
    command = [*MURAL, "up", *flags, "--port", str(port), "--admin-port", str(admin_port)]
    environment = os.environ | CREDENTIALS | {"MURAL_ROUTER_TOKEN": token}
    with tempfile.NamedTemporaryFile() as log:
        try:
            with running(command, environment, log.fileno()) as process:
                admin = f"http://127.0.0.1:{admin_port}"
                await_ready(process, f"{admin}/ready", time.monotonic() + START_TIMEOUT_S)
                replicas = httpx.get(f"{admin}/debug/fleet").json()["replicas"]
                servers = {each["name"]: f"http://{each['address']}" for each in replicas}
                yield Fleet(f"http://127.0.0.1:{port}", admin, servers, token)
        except BaseException:
            sys.stderr.write(Path(log.name).read_text(errors="replace")[-4000:])
            raise


def mural(console: Console, *arguments: str, shown: str) -> None:
    """Run a `mural` command, print what it was (``shown``) and what it said."""
    console.print(f"$ {shown}", style="cyan", highlight=False)
    done = subprocess.run(
        [*MURAL, *arguments],
        env=os.environ | CREDENTIALS,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}")
    console.print(done.stdout.rstrip(), markup=False, highlight=False)


def new_key(tenants: Path, tenant: str) -> str:
    """Make a tenant's key, which is kept nowhere but here."""
    done = subprocess.run(
        [*MURAL, "tenants", "create-key", tenant, "--new-tenant", "--file", str(tenants)],
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    found = re.search(r"mural_[a-z0-9]+_[A-Za-z0-9_-]{43}", done.stdout)
    if found is None:
        raise SystemExit(f"no key was made: {done.stdout}{done.stderr}")
    return found[0]


def push_refused(folder: Path, name: str, url: str, key: str) -> str:
    """Upload a folder that the server refuses; gives the reason that the command tells."""
    done = subprocess.run(
        [*MURAL, "adapters", "push", str(folder), name, "--to", url],
        env=os.environ | {"MURAL_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 1:
        raise SystemExit(f"the upload was not refused: {done.stdout}{done.stderr}")
    return done.stderr.strip()


@contextlib.contextmanager
def running(
    command: list[str], environment: Mapping[str, str], log: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=dict(environment), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"mural up ended with status {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"mural up was not ready within {START_TIMEOUT_S:.0f} s")
