"""The loader process: what it costs when it hangs, dies or is asked too much."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from mural_resolvers.errors import ManifestMismatch, Unavailable, UnusableAdapter
from mural_resolvers.request import LoRARequest
from mural_server.lora.base_copies import BaseDigests
from mural_server.lora.checkpoint import LoadOptions
from mural_server.lora.loader import AdapterLoader, LoaderLimits
from mural_server.lora.loader_protocol import Channel, Load, PhaseBegins, Start

HOSTILE = r"(([a-z_.0-9]+)+)+!"
"""Takes exponential time on every module's name."""

WAIT_S = 120


@pytest.fixture(scope="module")
def folders(lab, tmp_path_factory):
    """A good adapter, one with a copy of the base's table, and one with a hostile expression."""
    root = tmp_path_factory.mktemp("loader")
    good = lab.write(3).path
    hostile = root / "hostile"
    shutil.copytree(good, hostile)
    config = hostile / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": HOSTILE}))
    with_copy = lab.write(4, target_modules=["embed_tokens"]).path
    return {"good": good, "hostile": hostile, "with copy": with_copy, "missing": root / "none"}


@pytest.fixture
def start(lab, request):
    """Start a loader that is closed at the end."""

    def started(**settings):
        loader = AdapterLoader(lab.spec, lab.options, **settings)
        request.addfinalizer(loader.close)
        return loader

    return started


def wanted(path: Path, lora_id: int = 1, digest: str = "") -> LoRARequest:
    return LoRARequest(f"adapter-{lora_id}", lora_id, str(path), digest)


def test_a_load_gives_what_reading_in_this_process_gives(lab, folders, start):
    loader = start(base_digest=BaseDigests(lab.model().base_weight))
    for lora_id, name in enumerate(("good", "with copy"), start=5):
        model = loader.submit(wanted(folders[name], lora_id)).result(WAIT_S)
        here = lab.load(folders[name], lora_id, base_digest=BaseDigests(lab.model().base_weight))
        assert (model.id, model.rank, model.nbytes) == (lora_id, here.rank, here.nbytes)
        assert model.digest == here.digest
        assert model.loras.keys() == here.loras.keys()
        for module, weights in model.loras.items():
            assert torch.equal(weights.lora_a, here.loras[module].lora_a)
            assert torch.equal(weights.lora_b, here.loras[module].lora_b)
            assert weights.scaling == here.loras[module].scaling


def test_a_loaded_adapter_keeps_no_descriptor_and_goes_with_its_last_tensor(folders, start):
    def mapped() -> set[str]:
        """The address and the file of each block, of this process's other adapters too."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line for line in lines if "mural-adapter" in line}

    loader = start()
    first = loader.submit(wanted(folders["good"])).result(WAIT_S)
    before, with_first = len(os.listdir("/proc/self/fd")), mapped()
    more = [loader.submit(wanted(folders["good"], i)).result(WAIT_S) for i in range(2, 6)]
    assert len(os.listdir("/proc/self/fd")) <= before
    added = mapped() - with_first
    assert added
    weights = next(iter(first.loras.values()))
    kept = weights.lora_a[0].clone()
    weights.lora_a.zero_()
    assert torch.equal(next(iter(more[0].loras.values())).lora_a[0], kept)
    del more
    # The loader's thread lets go of the last one a moment after it has handed it over.
    deadline = time.monotonic() + WAIT_S
    while mapped() & added:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_refusals_keep_their_class_and_reason(folders, start):
    loader = start()
    with pytest.raises(UnusableAdapter, match="has no adapter_config"):
        loader.submit(wanted(folders["missing"])).result(WAIT_S)
    with pytest.raises(ManifestMismatch):
        loader.submit(wanted(folders["good"], digest="0" * 64)).result(WAIT_S)
    with pytest.raises(UnusableAdapter, match="replaces a weight"):
        loader.submit(wanted(folders["with copy"])).result(WAIT_S)
    assert loader.submit(wanted(folders["good"])).result(WAIT_S).rank == 4


def test_a_check_judges_as_a_load_does_and_hands_nothing_over(lab, folders, start):
    loader = start(eager=False, limits=LoaderLimits(judge_cpu_s=0.5))
    assert loader.pid is None
    here = lab.load(folders["good"], 1)
    header = loader.check(wanted(folders["good"])).result(WAIT_S)
    assert (header.digest, header.num_bytes) == (here.digest, here.nbytes)
    for name, reason in (("with copy", "replaces a weight"), ("hostile", "to match")):
        with pytest.raises(UnusableAdapter, match=reason):
            loader.check(wanted(folders[name])).result(WAIT_S)
    # What a check left unread would be taken for the next load's answer.
    loader.check(wanted(folders["good"])).result(WAIT_S)
    assert loader.submit(wanted(folders["good"])).result(WAIT_S).rank == 4


def test_a_hostile_expression_costs_its_own_load_only(folders, start):
    loader = start(limits=LoaderLimits(judge_cpu_s=0.5))
    futures = [loader.submit(wanted(folders[name])) for name in ("good", "hostile", "good")]
    with pytest.raises(UnusableAdapter, match=r"took more than 0\.5 s to match"):
        futures[1].result(WAIT_S)
    for future in (futures[0], futures[2]):
        assert future.result(WAIT_S).rank == 4


def test_a_child_killed_in_the_middle_of_a_load_fails_that_load_only(folders, start):
    def kill(module: str) -> None:
        assert loader.pid is not None
        os.kill(loader.pid, signal.SIGKILL)

    loader: AdapterLoader = start(base_digest=kill)
    killed = loader.submit(wanted(folders["with copy"]))
    after = loader.submit(wanted(folders["good"]))
    with pytest.raises(Unavailable, match="died") as failed:
        killed.result(WAIT_S)
    assert failed.value.retry_after_s
    assert after.result(WAIT_S).rank == 4


def test_a_child_killed_while_idle_fails_no_load(folders, start):
    loader = start()
    loader.submit(wanted(folders["good"])).result(WAIT_S)
    first = loader.pid
    os.kill(first, signal.SIGKILL)
    assert loader.submit(wanted(folders["good"])).result(WAIT_S).rank == 4
    assert loader.pid != first


def test_a_load_that_takes_too_long_is_unavailable(folders, start):
    def stop_child(module):
        os.kill(loader.pid, signal.SIGSTOP)

    loader = start(base_digest=stop_child, limits=LoaderLimits(load_timeout_s=5.0))
    with pytest.raises(Unavailable, match="not loaded within 5 s"):
        loader.submit(wanted(folders["with copy"])).result(WAIT_S)
    assert loader.submit(wanted(folders["good"])).result(WAIT_S).rank == 4


def test_the_caller_goes_on_while_a_load_is_under_way(lab, folders, start):
    asked, release = threading.Event(), threading.Event()

    def wait(module):
        asked.set()
        release.wait()

    loader = start(base_digest=wait)
    slow = loader.submit(wanted(folders["with copy"], 1))
    queued = loader.submit(wanted(folders["good"], 2))
    assert asked.wait(WAIT_S)
    manager = lab.manager()
    manager.add_adapter(lab.load(folders["good"], 7))
    assert manager.activate_adapter(7)
    assert not slow.done()
    assert not queued.done()
    release.set()
    with pytest.raises(UnusableAdapter):
        slow.result(WAIT_S)
    assert queued.result(WAIT_S).id == 2


def test_the_queue_is_bounded_and_closing_leaves_nobody_waiting(lab, folders):
    asked, release = threading.Event(), threading.Event()

    def wait(module):
        asked.set()
        release.wait()

    loader = AdapterLoader(
        lab.spec, lab.options, base_digest=wait, limits=LoaderLimits(max_queued=2)
    )
    futures = [loader.submit(wanted(folders["with copy"]))]
    assert asked.wait(WAIT_S)
    futures += [loader.submit(wanted(folders["good"])) for _ in range(3)]
    with pytest.raises(Unavailable, match="2 adapters wait"):
        futures[3].result(0)
    cancelled = futures[2]
    assert cancelled.cancel()
    pid = loader.pid
    assert pid is not None
    release.set()
    loader.close()
    for future in futures[:2]:
        with pytest.raises(Unavailable):
            future.result(WAIT_S)
    with pytest.raises(Unavailable, match="shutting down"):
        loader.submit(wanted(folders["good"])).result(0)
    assert loader.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_child_holds_no_secret_and_gives_way_to_the_step(folders, start, monkeypatch):
    monkeypatch.setenv("MURAL_API_KEY", "mural_secret")
    loader = start(nice=7)
    loader.submit(wanted(folders["good"])).result(WAIT_S)
    process = Path("/proc") / str(loader.pid)
    assert b"mural_secret" not in (process / "environ").read_bytes()
    assert os.getpriority(os.PRIO_PROCESS, loader.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
    assert len(list((process / "task").iterdir())) == 1
    assert "libtorch" not in (process / "maps").read_text()


def orphan(lab, load: Load) -> tuple[subprocess.Popen[bytes], Channel]:
    """A child whose parent we are, and then are not."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "mural_server.lora.loader_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
    channel = Channel(ours)
    channel.send(Start(lab.spec, LoadOptions(dtype="float32"), 0))
    channel.send(load)
    return process, channel


def test_an_orphaned_child_ends_itself_even_inside_a_match(lab, folders):
    process, channel = orphan(lab, Load(str(folders["hostile"]), "", 3.0, 60.0))
    for phase in ("read", "judge"):
        begins = channel.from_child()
        assert isinstance(begins, PhaseBegins)
        assert begins.phase == phase
    channel.close()
    assert process.wait(WAIT_S) == -signal.SIGALRM


def test_a_child_whose_parent_is_gone_ends(lab, folders):
    process, channel = orphan(lab, Load(str(folders["missing"]), "", 60.0, 60.0))
    assert channel.from_child() == PhaseBegins("read")
    channel.close()
    assert process.wait(WAIT_S) == 0
