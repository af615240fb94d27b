"""Serve SmolLM2 with two tenants' adapters, ask all of them at once, and show what happened.

Publishes one adapter to an S3 server (moto's, on this machine), starts `mural serve` as anyone
would, talks to it with the openai client, and leaves nothing running.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import openai
from demo_services import BUCKET, Server, mural, new_key, push_refused, s3_server, serve
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

HERE = Path(__file__).parent
ADAPTERS = ("acme:v1", "acme:v2", "globex:v1", "globex:v2")
IN_STORE = "globex:v1"
BASE = "smollm2"
REQUEST_TIMEOUT_S = 300.0
MAX_TOKENS = 48

Clients = dict[str, openai.AsyncOpenAI]
"""A client of each tenant, with its key."""


class Answer(NamedTuple):
    prompt: str
    model: str
    text: str
    tokens: int


class Watch(NamedTuple):
    """What /metrics said while the requests ran."""

    most_running: int
    adapters_together: tuple[str, ...]


def main() -> int:
    console = Console(width=110)
    console.print("[bold]Mural[/]: one frozen base model, two tenants, two versions each\n")
    with tempfile.TemporaryDirectory() as folder, s3_server() as endpoint:
        work = Path(folder)
        lay_out(work)
        store = f"s3://{BUCKET}?endpoint_url={endpoint}"
        source = HERE / "adapters" / "globex" / "default" / "v1"
        shown = f"mural adapters push examples/adapters/globex/default/v1 {IN_STORE} --to s3://…"
        mural(console, "adapters", "push", str(source), IN_STORE, "--to", store, shown=shown)
        keys = {tenant: new_key(work / "tenants.yaml", tenant) for tenant in ("acme", "globex")}
        flags = ["--served-model-name", BASE, "--max-loras", "4"]
        flags += ["--adapter-dir", str(work / "adapters"), "--adapter-source", store]
        flags += ["--adapter-cache-dir", str(work / "cache")]
        flags += ["--tenants-file", str(work / "tenants.yaml")]
        flags += ["--upload-store", str(work / "uploads")]
        shown = f"mural serve --served-model-name {BASE} --max-loras 4 --adapter-dir adapters "
        shown += "--adapter-source s3://… --tenants-file tenants.yaml --upload-store uploads"
        console.print(f"$ {shown}", style="cyan", highlight=False)
        with serve(flags) as server:
            asyncio.run(show(server, keys, console))
            show_upload(server, keys["acme"], work, console)
    console.print("\nThe servers have ended. Next: docs/tutorial/first-ten-minutes.md")
    return 0


def lay_out(work: Path) -> None:
    """A folder with all adapters but the one that the store has."""
    for name in ADAPTERS:
        tenant, version = name.split(":")
        place = Path(tenant) / "default" / version
        if name != IN_STORE:
            shutil.copytree(HERE / "adapters" / place, work / "adapters" / place)
    (work / "uploads").mkdir()


async def show(server: Server, keys: dict[str, str], console: Console) -> None:
    clients: Clients = {
        tenant: openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=key, timeout=REQUEST_TIMEOUT_S, max_retries=0
        )
        for tenant, key in keys.items()
    }
    async with httpx.AsyncClient(base_url=server.url) as plain:
        await show_store(clients, plain, console)
        await show_batch(clients, plain, console)
        await show_refusals(clients, console)
    for client in clients.values():
        await client.close()


async def show_store(clients: Clients, plain: httpx.AsyncClient, console: Console) -> None:
    """The first request fetches the adapter from the store, the second finds it here."""
    prompt = json.loads((HERE / "prompts.json").read_text())[IN_STORE][0]["prompt"]
    took = []
    for _ in range(2):
        started = time.monotonic()
        await ask(clients["globex"], IN_STORE, prompt)
        took.append(time.monotonic() - started)
    text = (await plain.get("/metrics")).text
    fetched = _value(text, "mural:adapter_fetches_total", 'result="downloaded"')
    kept = _value(text, "mural:adapter_cache_bytes")
    console.print(
        f"{IN_STORE}, which the server had never heard of: first request [bold]{took[0]:.2f} s[/] "
        f"(found in S3, fetched, checked, loaded), second [bold]{took[1]:.2f} s[/]; "
        f"{fetched:.0f} download, {kept / 1e3:.0f} kB in the disk cache.\n"
    )


async def show_batch(clients: Clients, plain: httpx.AsyncClient, console: Console) -> None:
    questions = read_questions()
    before = await metrics(plain)
    console.print(f"{len(questions)} requests at once, under the base and four adapters …")
    started = time.monotonic()
    watching = asyncio.create_task(watch(plain))
    answers = await ask_all(clients, questions)
    seconds = time.monotonic() - started
    watching.cancel()
    seen = await watching  # it answers to the cancellation with what it saw
    print_answers(console, answers)
    tokens = sum(answer.tokens for answer in answers)
    console.print(
        f"{len(answers)} requests at once, {tokens} tokens in {seconds:.1f} s: "
        f"[bold]{tokens / seconds:.0f} tokens/s[/], cold loads of the other adapters included."
    )
    console.print(
        f"Up to {seen.most_running} of them ran in one batch, under the base and "
        f"[bold]{', '.join(seen.adapters_together) or 'no adapter'}[/]."
    )
    await ask_all(clients, questions)
    after = await metrics(plain)
    hits, queries = (
        after[name] - before[name]
        for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    )
    console.print(
        f"Asked once more, each found its own prefix blocks: [bold]{hits:.0f}[/] of "
        f"{queries:.0f} prompt tokens of both rounds came from the cache."
    )


def read_questions() -> list[tuple[str, str, str]]:
    """(tenant, model, prompt): one prompt of a tenant to the base and to the tenant's versions."""
    prompts = json.loads((HERE / "prompts.json").read_text())
    questions = []
    for tenant in ("acme", "globex"):
        versions = [name for name in ADAPTERS if name.startswith(f"{tenant}:")]
        for entry in prompts[versions[0]][:2]:
            questions += [(tenant, model, entry["prompt"]) for model in (BASE, *versions)]
    return questions


async def ask_all(clients: Clients, questions: list[tuple[str, str, str]]) -> list[Answer]:
    return await asyncio.gather(
        *(ask(clients[tenant], model, prompt) for tenant, model, prompt in questions)
    )


async def ask(client: openai.AsyncOpenAI, model: str, prompt: str) -> Answer:
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
    )
    usage = completion.usage
    assert usage is not None
    text = completion.choices[0].message.content or ""
    return Answer(prompt, completion.model, text, usage.completion_tokens)


async def watch(plain: httpx.AsyncClient) -> Watch:
    """Read /metrics until cancelled; the step with most adapters is the one to tell of."""
    seen = Watch(0, ())
    try:
        while True:
            text = (await plain.get("/metrics")).text
            running = int(_value(text, "vllm:num_requests_running"))
            names = re.search(r'running_lora_adapters="([^"]+)"', text)
            together = tuple(names[1].split(",")) if names else ()
            best = max(seen.adapters_together, together, key=len)
            seen = Watch(max(seen.most_running, running), best)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return seen


async def metrics(plain: httpx.AsyncClient) -> dict[str, float]:
    text = (await plain.get("/metrics")).text
    return {
        name: _value(text, name)
        for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    }


def _value(text: str, name: str, label: str = "") -> float:
    labels = rf"\{{[^}}]*{re.escape(label)}[^}}]*\}}"
    found = re.search(
        rf"^{re.escape(name)}{labels if label else f'(?:{labels})?'} ([0-9.e+]+)$",
        text,
        re.MULTILINE,
    )
    return float(found[1]) if found else 0.0


def print_answers(console: Console, answers: list[Answer]) -> None:
    table = Table("model", "answer", show_lines=False, expand=True)
    table.columns[0].no_wrap = True
    previous = ""
    for answer in answers:
        if answer.prompt != previous:
            table.add_section()
            table.add_row("", f"[italic]{answer.prompt}[/]")
            previous = answer.prompt
        style = "dim" if answer.model == BASE else "green"
        text = " ".join(answer.text.split())
        table.add_row(answer.model, f"[{style}]{shortened(text)}[/]")
    console.print(table)


def shortened(text: str, limit: int = 120) -> str:
    return (text if len(text) <= limit else text[: limit - 1] + "…").replace("[", "\\[")


async def show_refusals(clients: Clients, console: Console) -> None:
    """A version that nobody uploaded, and another tenant's: never answered by the base."""
    for tenant, model, status in (("acme", "acme:v9", 404), ("acme", IN_STORE, 403)):
        try:
            await ask(clients[tenant], model, "Hello")
        except openai.APIStatusError as error:
            if error.status_code != status:
                raise
            message = error.body["message"]  # type: ignore[index]  # the client types it as object
            console.print(f"{model} with {tenant}'s key → [bold]{status}[/] {message}")
        else:
            raise SystemExit(f"{model} was answered with {tenant}'s key")


def show_upload(server: Server, key: str, work: Path, console: Console) -> None:
    """An adapter of another base is refused with the reason, and nothing of it is kept."""
    folder = work / "of-another-base"
    folder.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (8, 512), "lora_B": (512, 8)}
    tensors = {f"{module}.{part}.weight": np.ones(s, np.float32) for part, s in shapes.items()}
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    console.print("$ mural adapters push of-another-base acme:lab --to http://…", style="cyan")
    console.print(push_refused(folder, "acme:lab", server.url, key), markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
