"""Serve SmolLM2 with two tenants' adapters, ask all of them at once, and show what happened.

Publishes one adapter to an S3 server (moto's, on this machine), starts a router and two servers
with `mural up` as anyone would, talks to them with the openai client, and leaves nothing running.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import openai
from demo_services import BUCKET, Fleet, mural, new_key, push_refused, s3_server, start_up
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

HERE = Path(__file__).parent
ADAPTERS = ("acme:v1", "acme:v2", "globex:v1", "globex:v2")
IN_STORE = "globex:v1"
BASE = "smollm2"
REQUEST_TIMEOUT_S = 300.0
MAX_TOKENS = 48
ROUNDS = 4

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
        serving = f"--max-loras 4 --adapter-source {store} --adapter-cache-dir {work / 'cache'}"
        flags = ["--served-model-name", BASE, "--adapters", str(work / "adapters")]
        flags += ["--tenants-file", str(work / "tenants.yaml"), "--serve-flags", serving]
        shown = f"mural up --served-model-name {BASE} --adapters adapters "
        shown += "--tenants-file tenants.yaml --serve-flags '--max-loras 4 --adapter-source s3://…'"
        console.print(f"$ {shown}", style="cyan", highlight=False)
        with start_up(flags) as fleet:
            asyncio.run(show(fleet, keys, console))
            show_upload(fleet, keys["acme"], work, console)
    console.print("\nRouter and servers have ended. Next: docs/tutorial/first-ten-minutes.md")
    return 0


def lay_out(work: Path) -> None:
    """A folder with all adapters but the one that the store has."""
    for name in ADAPTERS:
        tenant, version = name.split(":")
        place = Path(tenant) / "default" / version
        if name != IN_STORE:
            shutil.copytree(HERE / "adapters" / place, work / "adapters" / place)


async def show(fleet: Fleet, keys: dict[str, str], console: Console) -> None:
    clients: Clients = {
        tenant: openai.AsyncOpenAI(
            base_url=f"{fleet.url}/v1", api_key=key, timeout=REQUEST_TIMEOUT_S, max_retries=0
        )
        for tenant, key in keys.items()
    }
    async with httpx.AsyncClient() as plain:
        await show_store(clients, fleet, plain, console)
        await show_batch(clients, fleet, plain, console)
        await show_placement(clients, fleet, plain, console)
        await show_refusals(clients, console)
    for client in clients.values():
        await client.close()


async def show_store(
    clients: Clients, fleet: Fleet, plain: httpx.AsyncClient, console: Console
) -> None:
    """The first request fetches the adapter from the store, the second finds it here."""
    prompt = json.loads((HERE / "prompts.json").read_text())[IN_STORE][0]["prompt"]
    took = []
    for _ in range(2):
        started = time.monotonic()
        await ask(clients["globex"], IN_STORE, prompt)
        took.append(time.monotonic() - started)
    texts = await metrics(fleet, plain)
    fetched = total(texts, "mural:adapter_fetches_total", 'result="downloaded"')
    # Both servers share the cache and tell of it.
    kept = total(texts, "mural:adapter_cache_bytes") / len(texts)
    console.print(
        f"{IN_STORE}, which no server had heard of: first request [bold]{took[0]:.2f} s[/] "
        f"(found in S3, fetched, checked, loaded), second [bold]{took[1]:.2f} s[/]; "
        f"{fetched:.0f} download, {kept / 1e3:.0f} kB in the disk cache.\n"
    )


async def show_batch(
    clients: Clients, fleet: Fleet, plain: httpx.AsyncClient, console: Console
) -> None:
    questions = read_questions()
    console.print(f"{len(questions)} requests at once, under the base and four adapters …")
    started = time.monotonic()
    watching = asyncio.create_task(watch(fleet, plain))
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
        f"Up to {seen.most_running} of them ran at one time, in one batch of a server "
        f"[bold]{', '.join(seen.adapters_together) or 'no adapter'}[/].\n"
    )


async def show_placement(
    clients: Clients, fleet: Fleet, plain: httpx.AsyncClient, console: Console
) -> None:
    """Where each adapter is at home, and what that is worth beside taking turns."""
    table = Table("adapter", "home", "why", "there it is")
    for name in ADAPTERS:
        found = (await plain.get(f"{fleet.admin}/debug/placement", params={"model": name})).json()
        row = next(row for row in found["rows"] if row["replica"] == found["choice"])
        table.add_row(name, found["choice"], found["reason"], row["residency"])
    console.print(table)
    routed = await prefix_hits(fleet, plain, "routed", lambda turn: fleet.url, clients)
    servers = list(fleet.servers.values())
    turns = await prefix_hits(
        fleet, plain, "in turns", lambda turn: servers[turn % len(servers)], clients
    )
    console.print(
        f"The same questions {ROUNDS} times: [bold]{routed:.0%}[/] of the prompt tokens came from "
        f"the prefix cache through the router, [bold]{turns:.0%}[/] where the servers took turns.\n"
    )


async def prefix_hits(
    fleet: Fleet,
    plain: httpx.AsyncClient,
    title: str,
    address: Callable[[int], str],
    clients: Clients,
) -> float:
    """The part of the prompt tokens that was found in a cache. ``title`` makes prompts new."""
    before = await metrics(fleet, plain)
    questions = [question for question in read_questions() if question[1] != BASE]
    order = random.Random(0)
    turn = 0
    for _ in range(ROUNDS):
        order.shuffle(questions)
        for tenant, model, prompt in questions:
            await ask_plainly(fleet, plain, clients, address(turn), tenant, model, title + prompt)
            turn += 1
    after = await metrics(fleet, plain)
    hits, queries = (
        total(after, name) - total(before, name)
        for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    )
    return hits / max(1.0, queries)


async def ask_plainly(
    fleet: Fleet,
    plain: httpx.AsyncClient,
    clients: Clients,
    address: str,
    tenant: str,
    model: str,
    prompt: str,
) -> None:
    """One token, from the router with the tenant's key, or from a server as the router asks."""
    if address == fleet.url:
        headers = {"authorization": f"Bearer {clients[tenant].api_key}"}
    else:
        headers = {"authorization": f"Bearer {fleet.token}", "x-mural-tenant": tenant}
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
    answer = await plain.post(
        f"{address}/v1/chat/completions", headers=headers, json=body, timeout=REQUEST_TIMEOUT_S
    )
    answer.raise_for_status()


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


async def watch(fleet: Fleet, plain: httpx.AsyncClient) -> Watch:
    """Read /metrics until cancelled; the step with most adapters is the one to tell of."""
    seen = Watch(0, ())
    try:
        while True:
            texts = await metrics(fleet, plain)
            running = int(total(texts, "vllm:num_requests_running"))
            best = seen.adapters_together
            for text in texts:
                names = re.search(r'running_lora_adapters="([^"]+)"', text)
                best = max(best, tuple(names[1].split(",")) if names else (), key=len)
            seen = Watch(max(seen.most_running, running), best)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return seen


async def metrics(fleet: Fleet, plain: httpx.AsyncClient) -> list[str]:
    """What each server says; the router passes none of it on."""
    answers = await asyncio.gather(*(plain.get(f"{url}/metrics") for url in fleet.servers.values()))
    return [answer.text for answer in answers]


def total(texts: list[str], name: str, label: str = "") -> float:
    return sum(_value(text, name, label) for text in texts)


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


def show_upload(fleet: Fleet, key: str, work: Path, console: Console) -> None:
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
    console.print(push_refused(folder, "acme:lab", fleet.url, key), markup=False)


if __name__ == "__main__":
    raise SystemExit(main())
