"""Serve SmolLM2 with two tenants' adapters, ask all of them at once, and show what happened.

Starts `mural serve` on this machine as anyone would, talks to it with the openai client, and
leaves nothing running.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ADAPTERS = ("acme:v1", "acme:v2", "globex:v1", "globex:v2")
BASE = "smollm2"
START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 300.0
MAX_TOKENS = 48


class Server(NamedTuple):
    """A running server and where to reach it."""

    url: str
    process: subprocess.Popen[bytes]


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
    with serve(console) as server:
        asyncio.run(show(server, console))
    console.print("\nThe server has ended. Next: docs/tutorial/first-ten-minutes.md")
    return 0


@contextlib.contextmanager
def serve(console: Console) -> Iterator[Server]:
    """A server on free ports, ended on the way out whatever happens; its log on failure."""
    port, control_port = free_port(), free_port()
    command = [sys.executable, "-m", "mural_resolvers.cli", "serve"]
    command += ["--served-model-name", BASE, "--adapter-dir", str(HERE / "adapters")]
    command += ["--port", str(port), "--control-port", str(control_port), "--max-loras", "4"]
    shown = f"mural serve --served-model-name {BASE} --adapter-dir examples/adapters --max-loras 4"
    console.print(f"$ {shown}", style="cyan")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            await_ready(process, url, time.monotonic() + START_TIMEOUT_S)
            yield Server(url, process)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"mural serve ended with status {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"mural serve was not ready within {START_TIMEOUT_S:.0f} s")


async def show(server: Server, console: Console) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="open", timeout=REQUEST_TIMEOUT_S, max_retries=0
    )
    async with client, httpx.AsyncClient(base_url=server.url) as plain:
        questions = read_questions()
        before = await metrics(plain)
        started = time.monotonic()
        watching = asyncio.create_task(watch(plain))
        answers = await asyncio.gather(*(ask(client, *question) for question in questions))
        seconds = time.monotonic() - started
        watching.cancel()
        seen = await watching  # it answers to the cancellation with what it saw
        print_answers(console, answers)
        tokens = sum(answer.tokens for answer in answers)
        console.print(
            f"{len(answers)} requests at once, {tokens} tokens in {seconds:.1f} s: "
            f"[bold]{tokens / seconds:.0f} tokens/s[/], cold loads of all adapters included."
        )
        console.print(
            f"Up to {seen.most_running} of them ran in one batch, under the base and "
            f"[bold]{', '.join(seen.adapters_together) or 'no adapter'}[/]."
        )
        await asyncio.gather(*(ask(client, *question) for question in questions))
        after = await metrics(plain)
        hits, queries = (
            after[name] - before[name]
            for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        )
        console.print(
            f"Asked once more, each found its own prefix blocks: [bold]{hits:.0f}[/] of "
            f"{queries:.0f} prompt tokens of both rounds came from the cache."
        )
        await show_refusal(client, console)


def read_questions() -> list[tuple[str, str]]:
    """(model, prompt): one prompt of each tenant to the base and to that tenant's versions."""
    prompts = json.loads((HERE / "prompts.json").read_text())
    questions = []
    for tenant in ("acme", "globex"):
        versions = [name for name in ADAPTERS if name.startswith(f"{tenant}:")]
        for entry in prompts[versions[0]][:2]:
            questions += [(model, entry["prompt"]) for model in (BASE, *versions)]
    return questions


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


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+]+)$", text, re.MULTILINE)
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


async def show_refusal(client: openai.AsyncOpenAI, console: Console) -> None:
    """A version that nobody uploaded is refused, never answered by the base."""
    try:
        await ask(client, "acme:v9", "Hello")
    except openai.NotFoundError as error:
        console.print(f"acme:v9 → [bold]{error.status_code}[/] {error.body['message']}")  # type: ignore[index]  # the client types it as object
    else:
        raise SystemExit("acme:v9 does not exist and was answered all the same")


if __name__ == "__main__":
    raise SystemExit(main())
