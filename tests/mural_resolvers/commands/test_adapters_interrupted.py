"""A push that is interrupted leaves nothing that anybody could be served."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

WriteAdapter = Callable[..., Path]

_RANK, _WIDTH = 64, 4096


@dataclass
class HeldConnection:
    """``holding`` is set once the relay at ``url`` lets nothing more through."""

    url: str
    holding: threading.Event = field(default_factory=threading.Event)


@contextmanager
def held_connection(upstream: str, after_bytes: int) -> Iterator[HeldConnection]:
    """Relay to ``upstream`` until ``after_bytes`` went up, over all connections together."""
    target = urlsplit(upstream)
    listener = socket.create_server(("127.0.0.1", 0))
    relay = HeldConnection(f"http://127.0.0.1:{listener.getsockname()[1]}")
    ended = threading.Event()
    left = [after_bytes]

    def up(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError), client, server:
            while left[0] > 0 and (data := client.recv(16384)):
                left[0] -= len(data)
                server.sendall(data)
            if left[0] <= 0:
                relay.holding.set()
                ended.wait()

    def down(client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(16384):
                client.sendall(data)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((target.hostname, target.port))
                for work in (up, down):
                    threading.Thread(target=work, args=(client, server), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield relay
    finally:
        ended.set()
        listener.close()


@pytest.fixture
def adapter(tmp_path: Path, write_adapter: WriteAdapter) -> Path:
    """Two megabytes, so that it goes in many pieces."""
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": ("F32", [_RANK, _WIDTH]),
        f"{module}.lora_B.weight": ("F32", [_WIDTH, _RANK]),
    }
    return write_adapter(tmp_path / "a", config={"r": _RANK}, tensors=tensors)


def interruptible(argv: list[Path | str]) -> subprocess.Popen[str]:
    """A command that Ctrl-C reaches, even where this run itself was started in the background."""
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_push_to_s3_publishes_nothing(
    program: Path, mural, adapter: Path, s3_store: str, moto_endpoint: str, stop: signal.Signals
) -> None:
    with held_connection(moto_endpoint, after_bytes=500_000) as relay:
        through_relay = s3_store.replace(moto_endpoint, relay.url)
        argv: list[Path | str] = [
            program,
            "adapters",
            "push",
            adapter,
            "acme:v1",
            "--to",
            through_relay,
        ]
        push = interruptible(argv)
        assert relay.holding.wait(60)
        push.send_signal(stop)
        out, err = push.communicate(timeout=60)

    assert push.returncode == (130 if stop is signal.SIGINT else -stop)
    assert (out, err) == ("", "")
    assert mural("ls", "--store", s3_store, "--json").json["versions"] == []
    assert mural("push", adapter, "acme:v1", "--to", s3_store, "--json").json["created"] is True


def test_a_push_to_a_silent_server_ends_with_ctrl_c(program: Path, adapter: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        argv: list[Path | str] = [program, "adapters", "push", adapter, "acme:v1", "--to", url]
        push = interruptible(argv)
        client, _ = silent.accept()
        with client:
            assert client.recv(1024).startswith(b"POST /v1/adapters/acme/default:v1 HTTP/1.1")
            push.send_signal(signal.SIGINT)
            out, err = push.communicate(timeout=60)

    assert (push.returncode, out, err) == (130, "", "")
