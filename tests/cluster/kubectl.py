"""A cluster as its administrator has it: ``kubectl``, ``helm``, and what a pod's end looks like."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Object = dict[str, Any]
COMMAND_S = 120.0


def within(limit_s: float, what: str, holds: Callable[[], object]) -> float:
    """Ask again and again until it holds; the seconds that took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began


@dataclass(frozen=True)
class Kubectl:
    """One namespace of the cluster of KUBECONFIG."""

    namespace: str

    def __call__(self, *args: str, told: object = None, timeout_s: float = COMMAND_S) -> str:
        """Its output; ``told`` is sent as JSON. Where it fails, so does the test, with why."""
        return run(
            *("kubectl", "--namespace", self.namespace, *args), told=told, timeout_s=timeout_s
        )

    def helm(self, *args: str, values: Object | None = None, timeout_s: float = 900.0) -> str:
        """``helm`` in this namespace, with values as a file has them."""
        flags = () if values is None else ("--values", "-")
        return run(
            *("helm", *args, "--namespace", self.namespace, *flags),
            told=values,
            timeout_s=timeout_s,
        )

    def apply(self, *objects: Object) -> None:
        self("apply", "-f", "-", told={"apiVersion": "v1", "kind": "List", "items": list(objects)})

    def get(self, *args: str) -> Object:
        """``kubectl get``, parsed."""
        found: Object = json.loads(self("get", *args, "-o", "json"))
        return found

    def pods(self, component: str) -> list[Object]:
        """Pods of a component of the release that are not on their way out."""
        found = self.get("pods", "-l", f"app.kubernetes.io/component={component}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready_pods(self, component: str) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(component) if holds(pod, "Ready")]

    def kill(self, pod: str) -> None:
        """SIGKILL to all processes of its container, as when memory is short: nothing is told.

        The processes are sought on this machine. Where they are elsewhere the pod is deleted with
        a second's notice.
        """
        uid = self.get("pod", pod)["metadata"]["uid"]
        # The pause process, which holds the pod's namespaces, is left: its end is the pod's.
        found = [each for each in processes(uid) if b"pause" not in _command(each)]
        if not found:
            self("delete", "pod", pod, "--grace-period=1", "--wait=false")
        for each in found:
            os.kill(each, signal.SIGKILL)

    @contextmanager
    def watched(self, kind: str, name: str) -> Iterator[Watched]:
        """Record the states of one object while the block runs."""
        process = subprocess.Popen(
            [
                *("kubectl", "--namespace", self.namespace, "get", kind),
                *(f"--field-selector=metadata.name={name}", "--watch", "-o", "json"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        seen = Watched()
        assert process.stdout is not None
        thread = threading.Thread(target=seen.read, args=(process.stdout,), daemon=True)
        thread.start()
        try:
            within(30, f"{kind} {name} is watched", lambda: seen.states)
            yield seen
        finally:
            process.terminate()
            process.wait(30)
            thread.join(30)


@dataclass
class Watched:
    """What a watch has said, with the moments it said it."""

    states: list[tuple[float, Object]] = field(default_factory=list)

    def read(self, stream: Iterator[str]) -> None:
        text = ""
        for line in stream:
            text += line
            # kubectl closes each object with a brace of its own.
            if line.rstrip("\n") == "}":
                self.states.append((time.monotonic(), json.loads(text)))
                text = ""

    def since(self, moment: float) -> list[Object]:
        return [state for at, state in self.states if at >= moment]


def holds(thing: Object, condition: str) -> bool:
    """Whether a condition of an object is true."""
    found = thing.get("status", {}).get("conditions", [])
    return any(each["type"] == condition and each["status"] == "True" for each in found)


def processes(uid: str) -> list[int]:
    """Processes of a pod that this machine can see, by the names of their control groups."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                groups = (entry / "cgroup").read_text()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if uid in groups or uid.replace("-", "_") in groups:
                found.append(int(entry.name))
    return found


def _command(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().partition(b"\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return b""


def run(*command: str, told: object = None, timeout_s: float = COMMAND_S) -> str:
    done = subprocess.run(
        command,
        input=None if told is None else json.dumps(told),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def missing_programs() -> list[str]:
    return [name for name in ("kubectl", "helm") if shutil.which(name) is None]
