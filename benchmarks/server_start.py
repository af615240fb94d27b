"""What a start of `mural serve` costs: CPU seconds until it is ready, and memory then.

Of the API process and of all processes; beside them, in the same run, what reading the same model's
tokenizer costs a process that does it with transformers and torch, as the API process once did.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

READ = """
from mural_server.models.location import default_model_path
from mural_server.models.source import load_tokenizer
load_tokenizer(default_model_path())
"""
TICKS = os.sysconf("SC_CLK_TCK")
START_S = 180.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def tree(pid: int) -> list[int]:
    """A process and those that it started, itself first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in tree(int(child)))]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def main() -> None:
    """Start one, look, end it; then the peer."""
    port, control = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("mural")), "serve", "--port", str(port)]
    command += ["--control-port", str(control)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    break
            except (URLError, OSError):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.2)
        everybody = tree(server.pid)
        print(f"API process: {cpu_s(server.pid):.1f} CPU s, {memory_mb(server.pid):.0f} MB")
        print(f"all processes: {sum(map(cpu_s, everybody)):.1f} CPU s")
    finally:
        server.terminate()
        server.wait(60)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", READ], check=True, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"the tokenizer read with transformers and torch: {spent:.1f} CPU s")


if __name__ == "__main__":
    main()
