"""Small random models of every family, and a Kubernetes control plane, for all the tests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import kubernetes_api

if TYPE_CHECKING:
    import psutil
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

# An assertion that fails says as much in a module that tests share as in a test.
pytest.register_assert_rewrite(*(f"tests.{room.name}" for room in Path(__file__).parent.iterdir()))

TinyModel = Callable[[str], Path]
END_TO_END = "tests/e2e/"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """``--dist loadfile``, but that files that share a fleet of servers run in one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFleet(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return END_TO_END if nodeid.startswith(END_TO_END) else super()._split_scope(nodeid)

    return ByFleet(config, log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """``tiny_model(name)``: the directory of one of `tiny_models`, made once a session.

    Names: the families ("llama", "mistral", "qwen2", "qwen3", "gemma3") and their variants.
    """
    from tests import tiny_models as tiny

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = tiny.save_tiny_model(folder, tiny.TINY_CONFIGS[name]())
        return made[name]

    return make


@pytest.fixture(scope="session")
def tiny_save() -> Callable[..., Path]:
    """``tiny_save(name, folder, **changes)``: save a variant of a tiny model's configuration."""

    from tests import tiny_models as tiny

    def save(name: str, folder: Path, **changes: object) -> Path:
        config = tiny.TINY_CONFIGS[name]()
        stated = {key: value for key, value in config.to_diff_dict().items() if key != "model_type"}
        return tiny.save_tiny_model(folder, type(config)(**(stated | changes)))

    return save


# -- Kubernetes -----------------------------------------------------------------------------------

kube_api = kubernetes_api.kube_api

CLUSTER_WAIT_S = 90.0
API_SERVER = "kube-apiserver"


def running(file: Path) -> psutil.Process | None:
    """The program whose process id the file holds; None where it has ended."""
    # Not there in every environment that loads this file, such as one made for vLLM.
    import psutil

    try:
        process = psutil.Process(int(file.read_text().split()[0]))
        # Its first thread may be one before the others have let go of its ports.
        ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return None if ended else process
    except (psutil.NoSuchProcess, IndexError):
        return None


@dataclass(frozen=True)
class Cluster:
    """A control plane whose pods turn Ready without running; ``up`` and ``down`` do the work."""

    folder: Path
    state: Path
    environment: dict[str, str]
    """For programs that are to speak with it: KUBECONFIG, and a PATH with kubectl and helm."""
    namespace: str = "default"

    @property
    def kubeconfig(self) -> Path:
        """An administrator's."""
        return Path(self.environment["KUBECONFIG"])

    def start(self) -> None:
        """Start what does not run, on the data that is there.

        Controllers that have lost their API server are started anew with it: left alone they look
        for it again after a minute or two (client-go's backoff grows with each loss), and may end.
        """
        dead = self._dead()
        if any(file.name == API_SERVER for file in dead):
            dead = self._end(self._programs())
        for each in dead:
            # Where nobody waits for it, a program that has ended looks as if it ran.
            each.unlink()
        subprocess.run(
            [self.folder / "up", "control-plane", "1"],
            env=self.environment,
            check=True,
            timeout=300,
        )

    def mend(self) -> None:
        """Start again what has ended."""
        if self._dead():
            self.start()

    def _programs(self) -> list[Path]:
        """The files that name the running API server and its controllers, but not etcd."""
        folder = self.state / "run"
        return list(folder.glob("k*")) if folder.is_dir() else []

    def _end(self, files: list[Path]) -> list[Path]:
        """SIGKILL each of these programs that runs, and wait for its end; the files."""
        for process in filter(None, map(running, files)):
            process.kill()
        ends = time.monotonic() + 30
        while any(map(running, files)):
            assert time.monotonic() < ends, f"still there after SIGKILL: {files}"
            time.sleep(0.05)
        return files

    def _dead(self) -> list[Path]:
        """The files of the programs that have ended."""
        return [file for file in self._programs() if running(file) is None]

    def kill_api_server(self) -> None:
        """SIGKILL, and wait for its end. `start` brings it back."""
        self._end([self.state / "run" / API_SERVER])

    def stop(self) -> None:
        """End all of it, and remove its data."""
        subprocess.run([self.folder / "down"], env=self.environment, check=True, timeout=120)

    async def run(self, *command: str, told: bytes = b"") -> tuple[int, str, str]:
        """The command's status, output and errors; ``told`` is its input."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        async with asyncio.timeout(CLUSTER_WAIT_S):
            output, errors = await process.communicate(told)
        assert process.returncode is not None
        return process.returncode, output.decode(), errors.decode()

    async def kubectl(self, *args: str, told: object = None) -> str:
        """Its output; ``told`` is sent as JSON. Where it fails, so does the test, with why."""
        sent = b"" if told is None else json.dumps(told).encode()
        status, output, errors = await self.run("kubectl", "-n", self.namespace, *args, told=sent)
        assert status == 0, f"kubectl {' '.join(args)}: {errors}"
        return output

    async def refusal(self, *args: str, told: object = None) -> str:
        """What ``kubectl`` says when it fails, as it must."""
        sent = b"" if told is None else json.dumps(told).encode()
        status, output, errors = await self.run("kubectl", "-n", self.namespace, *args, told=sent)
        assert status != 0, f"kubectl {' '.join(args)} went through: {output}"
        return errors

    async def apply(self, *objects: object) -> None:
        """Objects as Python's data, or paths of files and folders of them."""
        for each in objects:
            if isinstance(each, Path):
                await self.kubectl("apply", "-f", str(each))
            else:
                await self.kubectl("apply", "-f", "-", told=each)

    async def get(self, *args: str) -> dict[str, object]:
        """``kubectl get``, parsed."""
        found: dict[str, object] = json.loads(await self.kubectl("get", *args, "-o", "json"))
        return found


def five_free_ports() -> int:
    """The first of five in a row, below those that the kernel gives to connections."""
    while True:
        first = random.randrange(20000, 32000)
        with ExitStack() as taken:
            try:
                for port in range(first, first + 5):
                    taken.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of this session alone. Without a folder to build it from the test is NOT RUN."""
    folder = Path(os.environ.get("MURAL_CLUSTER_DIR", ""))
    if not (folder / "up").is_file():
        missing = "NOT RUN: MURAL_CLUSTER_DIR does not say where the test cluster is built from"
        if os.environ.get("MURAL_CI_FULL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    state = tmp_path_factory.mktemp("cluster")
    environment = os.environ | {
        "MURAL_CLUSTER_STATE": str(state),
        "MURAL_CLUSTER_PORT": str(five_free_ports()),
    }
    cluster = Cluster(folder, state, environment)
    try:
        cluster.start()
        exported = subprocess.run(
            ["bash", "-c", 'eval "$("$0"/env)" && echo "$KUBECONFIG" && echo "$PATH"', folder],
            env=environment,
            check=True,
            timeout=30,
            capture_output=True,
            text=True,
        )
        environment["KUBECONFIG"], environment["PATH"] = exported.stdout.splitlines()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def cluster(
    control_plane: Cluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """The control plane, with a namespace of the test's own, and KUBECONFIG set."""
    monkeypatch.setenv("KUBECONFIG", control_plane.environment["KUBECONFIG"])
    await asyncio.to_thread(control_plane.mend)
    name = f"test-{abs(hash(request.node.nodeid)) % 10**9}"
    await control_plane.kubectl("create", "namespace", name)
    # Pods wait for it; after a test that killed the API server it takes a while.
    account = ("--for=create", "serviceaccount/default", "--timeout=60s")
    await control_plane.kubectl("--namespace", name, "wait", *account)
    return replace(control_plane, namespace=name)
