"""Tampered adapter folders: a typed refusal or an adapter that fits, nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import MuralError
from mural_resolvers.manifest import build_manifest
from mural_resolvers.peft import PeftConfig, check_adapter, read_safetensors_header

WriteAdapter = Callable[..., Path]

ODD_VALUES: list[object] = [
    None, True, False, 0, -1, 2**40, 1e308, -0.0, "", "x", "..", "\x00", "é", "(", ".*", [], [[]],
    {}, {"": None}, ["q_proj"], [None], [-1], {"a": {"b": []}}, "a" * 5000, list(range(3000)),
]  # fmt: skip


def change_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 5)):
        action, at = rng.randrange(4), rng.randrange(len(data) or 1)
        if action == 0 and data:
            data[at] = rng.randrange(256)
        elif action == 1:
            del data[at : at + rng.randint(1, 40)]
        elif action == 2:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 40)))
        else:
            data[at:at] = data[: rng.randint(1, 100)]
    path.write_bytes(data)


def change_json(value: object, rng: random.Random) -> object:
    """Replace, remove or add one thing somewhere in a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        action = rng.randrange(4)
        if action == 0:
            return {k: v for k, v in value.items() if k != key}
        if action == 1:
            return {**value, rng.choice(["x", "", "\x00", key + ".lora_A.weight"]): value[key]}
        return {**value, key: change_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return [*value[:at], change_json(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD_VALUES)


def change_config(folder: Path, rng: random.Random) -> None:
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for _ in range(rng.randint(1, 3)):
        config = change_json(config, rng)
    path.write_text(json.dumps(config))


def change_header(folder: Path, rng: random.Random) -> None:
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change_json(json.loads(data[8 : 8 + length]), rng)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def change_either_file(folder: Path, rng: random.Random) -> None:
    change_bytes(folder / rng.choice(["adapter_config.json", "adapter_model.safetensors"]), rng)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", [change_either_file, change_config, change_header])
def test_a_changed_folder_is_refused_with_a_reason_or_still_fits(
    tmp_path: Path,
    write_adapter: WriteAdapter,
    base_spec: BaseSpec,
    change: Callable[[Path, random.Random], None],
    seed: int,
) -> None:
    refused = 0
    for n in range(60):
        folder = write_adapter(tmp_path / str(n), config={"rank_pattern": {"layers.0": 4}})
        change(folder, random.Random(seed * 1000 + n))
        try:
            build_manifest(folder).to_json()
            config = PeftConfig.from_json((folder / "adapter_config.json").read_bytes())
            header = read_safetensors_header(folder / "adapter_model.safetensors")
            plan = check_adapter(config, header, base_spec)
        except MuralError as error:
            refused += 1
            assert error.status in {413, 422}  # noqa: PT017 -- either outcome is right
            assert 0 < len(error.message.encode()) < 2000  # noqa: PT017
        else:
            assert len(header) == 2 * len(plan.modules) + len(plan.base_copies)
    assert refused > 10
