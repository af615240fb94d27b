"""The demo adapters in examples/: their data, their files, and that they do what is claimed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from mural_resolvers.manifest import build_manifest
from mural_resolvers.peft import PeftConfig

if TYPE_CHECKING:
    from types import ModuleType

    from tasks import Task
    from train_adapters import Base

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = ("acme:v1", "acme:v2", "globex:v1", "globex:v2")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The training script, which finds its neighbours as it does when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("train_adapters")


@pytest.fixture(scope="module")
def tasks(script: ModuleType) -> dict[str, Task]:
    return {task.name: task for task in script.demo_tasks(seed=0)}


@pytest.fixture(scope="module")
def base(script: ModuleType) -> Base:
    return script.load_base(script.bundled_base())


@pytest.fixture(scope="module")
def demo_prompts() -> dict[str, list[dict[str, str]]]:
    return json.loads((EXAMPLES / "prompts.json").read_text(encoding="utf-8"))


def directory(name: str) -> Path:
    tenant, version = name.split(":")
    return EXAMPLES / "adapters" / tenant / "default" / version


def test_two_tenants_have_two_versions_each(tasks: dict[str, Task]) -> None:
    assert tuple(tasks) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_examples(
    name: str, script: ModuleType, tasks: dict[str, Task]
) -> None:
    again = next(task for task in script.demo_tasks(seed=0) if task.name == name)
    other = next(task for task in script.demo_tasks(seed=1) if task.name == name)
    assert (again.train, again.held_out) == (tasks[name].train, tasks[name].held_out)
    assert other.train != again.train


@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_valid_and_no_held_out_prompt_is_trained(
    name: str, tasks: dict[str, Task]
) -> None:
    task = tasks[name]
    assert all(task.is_valid(example.answer) for example in task.train + task.held_out)
    held_out = {example.prompt for example in task.held_out}
    assert len(held_out) == len(task.held_out)
    assert held_out.isdisjoint(example.prompt for example in task.train)


def test_held_out_tickets_name_products_that_no_trained_ticket_names(
    tasks: dict[str, Task],
) -> None:
    products = [
        {json.loads(example.answer)["product"] for example in examples}
        for examples in (tasks["acme:v1"].train, tasks["acme:v1"].held_out)
    ]
    assert products[0].isdisjoint(products[1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("acme:v1", '{"product": "lamp"}'),
        ("acme:v1", '{"product": "lamp", "severity": "low", "team": "hardware"}'),
        ("acme:v1", '{"product": "lamp", "severity": 3}'),
        ("acme:v1", '["product", "severity"]'),
        ("acme:v2", '{"product": "lamp", "severity": "low"}'),
        ("acme:v2", 'Sure: {"product": "lamp", "severity": "low", "team": "hardware"}'),
        ("globex:v1", "SELECT name FROM customer WHERE city = 'Oslo';"),
        ("globex:v1", "SELECT name FROM customers WHERE city = ?;"),
        ("globex:v1", "SELECT name FROM customers WHERE city = 'Oslo'"),
        ("globex:v2", "SELECT name FROM customers WHERE city = 'Oslo';"),
        ("globex:v2", 'SELECT name FROM customers WHERE city = ?; -- ["Oslo", 2]'),
        ("globex:v2", "SELECT name FROM customers WHERE city = ?; -- Oslo"),
    ],
)
def test_an_answer_of_another_form_is_not_valid(
    name: str, text: str, tasks: dict[str, Task]
) -> None:
    assert not tasks[name].is_valid(text)


@pytest.mark.parametrize("name", NAMES)
def test_the_demos_prompts_are_in_no_training_set(
    name: str, tasks: dict[str, Task], demo_prompts: dict[str, list[dict[str, str]]]
) -> None:
    trained = {example.prompt for example in tasks[name].train}
    assert 2 <= len(demo_prompts[name]) <= 3
    for entry in demo_prompts[name]:
        assert entry["prompt"] not in trained
        assert tasks[name].is_valid(entry["expected"])


def test_a_batch_computes_the_loss_that_its_examples_have_alone(script: ModuleType) -> None:
    rows = [
        ([5, 6, 7, 8, 1], [-100, -100, -100, 8, 1]),
        ([5, 6, 9, 3, 4, 1], [-100, -100, -100, -100, 4, 1]),
    ]
    batch = script.pack(rows)
    assert batch.ids.tolist() == [[5, 6, 7, 8, 1, 9, 3, 4, 1]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [-100, -100, -100, 8, 1, -100, -100, 4, 1]

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    alone = [
        torch.nn.functional.cross_entropy(
            model(torch.tensor([ids])).logits[0, :-1], torch.tensor(labels[1:]), reduction="sum"
        )
        for ids, labels in rows
    ]
    torch.testing.assert_close(script.answer_loss(model, batch), sum(alone) / 4)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_two_files_below_a_megabyte(name: str) -> None:
    files = sorted(directory(name).iterdir())
    assert [file.name for file in files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sum(file.stat().st_size for file in files) < 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_names_the_base_and_no_path_of_a_machine(
    name: str, tasks: dict[str, Task]
) -> None:
    text = (directory(name) / "adapter_config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert text.count("/") == 1
    shape = tasks[name].shape
    assert 4 <= config["r"] == shape.rank <= 8
    assert config["lora_alpha"] == shape.alpha
    assert config["target_modules"] == sorted(shape.target_modules)


@pytest.mark.parametrize("name", NAMES)
def test_the_resolver_finds_nothing_that_cannot_be_served(name: str) -> None:
    data = (directory(name) / "adapter_config.json").read_bytes()
    PeftConfig.from_json(data).refuse_unsupported()
    assert build_manifest(directory(name)).files


def test_each_version_has_weights_of_its_own() -> None:
    weights = {(directory(name) / "adapter_model.safetensors").read_bytes() for name in NAMES}
    assert len(weights) == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_peft_finds_every_tensor_in_the_base_and_lacks_none(name: str, base: Base) -> None:
    model = get_peft_model(base.model, LoraConfig.from_pretrained(str(directory(name))))
    try:
        tensors = load_file(directory(name) / "adapter_model.safetensors")
        assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
        outcome = set_peft_model_state_dict(model, tensors)
        assert outcome.unexpected_keys == []
        assert [key for key in outcome.missing_keys if "lora_" in key] == []
        wanted = [key for key, _ in model.named_parameters() if "lora_" in key]
        assert len(wanted) == len(tensors)
    finally:
        model.unload()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_answers_the_demos_prompts_and_the_base_does_not(
    name: str,
    script: ModuleType,
    base: Base,
    demo_prompts: dict[str, list[dict[str, str]]],
) -> None:
    prompts = [entry["prompt"] for entry in demo_prompts[name]]
    expected = [entry["expected"] for entry in demo_prompts[name]]
    unadapted = script.answers(base.model, base.tokenizer, prompts)
    assert not set(unadapted) & set(expected)
    model = PeftModel.from_pretrained(base.model, directory(name)).eval()
    try:
        assert script.answers(model, base.tokenizer, prompts) == expected
    finally:
        model.unload()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_right_on_most_of_a_sample_of_held_out_prompts(
    name: str, script: ModuleType, base: Base, tasks: dict[str, Task]
) -> None:
    sample = random.Random(0).sample(tasks[name].held_out, 24)
    task = dataclasses.replace(tasks[name], held_out=tuple(sample))
    model = PeftModel.from_pretrained(base.model, directory(name)).eval()
    try:
        prompts = [example.prompt for example in sample]
        rates = script.rate(task, script.answers(model, base.tokenizer, prompts))
    finally:
        model.unload()
    assert rates.valid >= 0.95
    # In full 70 % (acme, whose product names are unseen) to 99 % of 96 prompts are exact.
    assert rates.exact > 0.5


@pytest.mark.slow
def test_only_the_answer_and_its_end_token_are_learnt(
    script: ModuleType, base: Base, tasks: dict[str, Task]
) -> None:
    example = tasks["acme:v1"].train[0]
    ids, labels = script.encode_example(base.tokenizer, example)
    learnt = [label for label in labels if label != -100]
    assert ids[-len(learnt) :] == labels[-len(learnt) :] == learnt
    assert base.tokenizer.decode(learnt) == example.answer + "<|im_end|>"


@pytest.mark.slow
def test_training_writes_the_directory_resolvers_layout_without_a_readme(
    script: ModuleType, base: Base, tasks: dict[str, Task], tmp_path: Path
) -> None:
    settings = script.Settings(tmp_path, tmp_path, NAMES, steps=1, learning_rate=1e-3, seed=0)
    task = tasks["globex:v1"]
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        model = script.train(base, task, settings)
        script.save_adapter(model, script.adapter_directory(folder, task))
        model.unload()
    first, second = (
        {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.*"))}
        for folder in folders
    )
    assert list(first) == [
        "globex/default/v1/adapter_config.json",
        "globex/default/v1/adapter_model.safetensors",
    ]
    assert first == second
