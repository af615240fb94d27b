"""Where adapters are and what their going frees: the real engine and the simulated server alike."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mural_server.protocol import AdapterStatus, ControlClient, ControlError, Snapshot
from tests.mural_operator.simulated_server import SimulatedServer

START_S = 240.0
WAIT_S = 60.0
SLOTS = 2
CAPACITY = 4
CONTROL = re.compile(r"control API on http://127\.0\.0\.1:(\d+)")


def write_adapter(model: Path, folder: Path, seed: int) -> None:
    """A small PEFT folder for a tiny model; another seed is other content."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    folder.mkdir(parents=True)
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    random = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (4, hidden), "lora_B": (hidden, 4)}
    tensors = {
        f"{prefix}.{part}.weight": random.standard_normal(shape, dtype=np.float32)
        for part, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def real_port(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[int]:
    """The control port of a `mural serve` with acme:v1 to acme:v6."""
    model = tiny_model("llama")
    root = tmp_path_factory.mktemp("contract")
    for seed in range(1, 7):
        write_adapter(model, root / "acme" / "default" / f"v{seed}", seed)
    flags = f"--port 0 --control-port 0 --dtype float32 --cpu-threads 1 --max-loras {SLOTS}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mural_server.commands", str(model), *flags.split()),
            *("--max-cpu-loras", str(CAPACITY), "--kv-cache-memory-bytes", "4Mi"),
            *("--served-model-name", "tiny", "--adapter-dir", str(root)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    late = threading.Timer(START_S, process.kill)
    late.start()
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := CONTROL.search(line):
                break
        else:
            pytest.fail(f"it ended while starting: {lines}")
        late.cancel()
        yield int(found[1])
    finally:
        late.cancel()
        process.kill()
        process.communicate()


@pytest.fixture(params=["simulated", "real"])
async def control(request: pytest.FixtureRequest) -> AsyncIterator[ControlClient]:
    """Of a server that holds nothing, with two slots and room for four."""
    if request.param == "simulated":
        async with SimulatedServer(slots=SLOTS, capacity=CAPACITY) as server:
            yield ControlClient("127.0.0.1", server.control_port)
        return
    client = ControlClient("127.0.0.1", request.getfixturevalue("real_port"))
    yield client
    for name in (await state_of(client)).adapters:
        await client.remove(name)


async def state_of(control: ControlClient) -> Snapshot:
    async with aclosing(control.states()) as states:
        return await anext(states)


async def until(control: ControlClient, holds: Callable[[dict[str, str]], object]) -> None:
    """Return once the levels told are as wanted: the engine's news may come after an answer."""
    told: dict[str, str] = {}
    try:
        async with asyncio.timeout(WAIT_S), aclosing(control.states()) as states:
            async for state in states:
                told = {name: status.level for name, status in state.adapters.items()}
                if holds(told):
                    return
    except TimeoutError:
        pytest.fail(f"at last it told of {told}")


async def test_the_limits_are_those_it_was_started_with(control):
    limits = (await state_of(control)).limits
    assert (limits.slots, limits.max_cpu_loras) == (SLOTS, CAPACITY)
    assert limits.host_bytes > 0


async def test_an_adapter_climbs_and_what_it_takes_is_freed(control):
    host = await control.set_resident("acme:v1")
    slot = await control.set_resident("acme:v1", level="slot")
    assert (host.level, slot.level) == ("host", "slot")
    await until(control, lambda levels: levels == {"acme:v1": "slot"})
    assert slot.bytes > 0
    assert slot.rank > 0
    freed = (await control.remove("acme:v1")).freed
    assert freed.slot > 0
    assert freed.host == slot.bytes
    await until(control, lambda levels: levels == {})


async def test_what_is_in_host_memory_alone_frees_no_slot(control):
    await control.set_resident("acme:v1")
    freed = (await control.remove("acme:v1")).freed
    assert freed.slot == 0
    assert freed.host > 0


async def test_beyond_the_capacity_the_oldest_goes_to_disk_and_its_name_stays(control):
    for version in range(1, CAPACITY + 2):
        await control.set_resident(f"acme:v{version}")
    expected = dict.fromkeys([f"acme:v{version}" for version in range(1, 6)], "host")
    await until(control, lambda levels: levels == expected | {"acme:v1": "disk"})
    assert (await control.set_resident("acme:v1")).level == "host"
    await until(control, lambda levels: levels == expected | {"acme:v2": "disk"})


async def test_what_is_pinned_stays(control):
    await control.set_resident("acme:v1", pinned=True)
    for version in range(2, CAPACITY + 2):
        await control.set_resident(f"acme:v{version}")
    expected = dict.fromkeys([f"acme:v{version}" for version in range(1, 6)], "host")
    await until(control, lambda levels: levels == expected | {"acme:v2": "disk"})


async def test_a_pin_keeps_it_in_a_slot_and_leaves_one_slot_to_the_others(control):
    first = await control.set_resident("acme:v1", level="slot", pinned=True)
    assert (first.level, first.pinned) == ("slot", True)
    with pytest.raises(ControlError, match="1 of 2 slots are pinned already") as caught:
        await control.set_resident("acme:v2", level="slot", pinned=True)
    assert caught.value.status == 503
    await until(control, lambda levels: levels == {"acme:v1": "slot", "acme:v2": "disk"})
    assert not (await control.set_resident("acme:v1", level="slot", pinned=False)).pinned
    assert (await control.set_resident("acme:v2", level="slot", pinned=True)).pinned


async def test_pins_in_host_memory_take_no_slot_and_leave_one_place_to_the_others(control):
    for version in range(1, CAPACITY):
        status = await control.set_resident(f"acme:v{version}", level="host", pinned=True)
        assert (status.level, status.pinned) == ("host", True)
    with pytest.raises(ControlError, match=f"{CAPACITY - 1} of {CAPACITY} adapters") as caught:
        await control.set_resident(f"acme:v{CAPACITY}", level="host", pinned=True)
    assert caught.value.status == 503


async def test_more_than_the_slots_leaves_one_in_host_memory(control):
    statuses: list[AdapterStatus] = [
        await control.set_resident(f"acme:v{version}", level="slot") for version in (1, 2, 3)
    ]
    assert [status.level for status in statuses] == ["slot"] * 3
    await until(control, lambda levels: sorted(levels.values()) == ["host", "slot", "slot"])
