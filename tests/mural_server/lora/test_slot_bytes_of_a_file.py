"""What ``mural adapters`` says of a slot's memory is what the manager then takes."""

from __future__ import annotations

import json
import warnings

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.cli import main
from mural_server.lora.base_copies import BaseDigests


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"], "r": 3},
        {"target_modules": ["up_proj", "o_proj"]},
        {"rank_pattern": {"down_proj": 7, "q_proj": 2}},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
        {"layers_to_transform": [1]},
    ],
)
def test_the_stated_memory_is_the_slot_s(lab, config, tmp_path, capsys) -> None:
    path = lab.write(**config).path
    spec: BaseSpec = lab.spec
    (tmp_path / "base.json").write_bytes(spec.to_json())
    manager = lab.manager()
    digests = BaseDigests(manager.model.base_weight)
    manager.add_adapter(lab.load(path, 1, base_digest=digests))
    manager.activate_adapter(1)
    capsys.readouterr()

    argv = ["adapters", "verify", str(path), "--base", str(tmp_path / "base.json"), "--json"]
    assert main(argv) == 0

    assert json.loads(capsys.readouterr().out)["slot_bytes"]["float32"] == manager.slot_bytes


def test_a_model_folder_is_read_without_its_weights(lab, capsys) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = lab.write().path

    assert main(["adapters", "verify", str(path), "--base", str(lab.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base"] == lab.path.name
