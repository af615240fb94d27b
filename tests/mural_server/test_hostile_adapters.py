"""Spoilt adapter folders against a real server: refused with a reason, or answered right.

One `mural serve` for all of them. Each is asked for by name and given to the load endpoint. What
is not refused must answer as PEFT does with the very same files. Afterwards the server answers a
good adapter, and holds no more processes, files or names than before.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from mural_resolvers.manifest import build_manifest
from mural_server.models.source import load_tokenizer
from tests.mural_server.spoilt_adapters import BOMB, KINDS, MAX_RANK, Kind, change_config

if TYPE_CHECKING:
    from tests.mural_server.conftest import PeftOracle

PROMPT = [10, 20, 30, 40, 50]
TOKENS = 6
WAIT_S = 120.0
ADAPTER_WAIT_S = 30.0  # a hostile pattern takes two seconds of a processor that others use too
OWN_ADAPTER_WAIT_S = 5.0  # where none is asked for
CASES = 200


# -- the server --------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What the server said: log-probabilities and text that it generated, or why not."""

    status: int
    logprobs: list[float]
    text: str
    error: dict[str, str | None]


@dataclass
class Served:
    """A `mural serve` in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path
    temp: Path
    url: str
    http: httpx.Client

    def complete(self, model: str, **more: object) -> Answer:
        body = {
            "model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": True, "logprobs": 0, "skip_special_tokens": False,
        }  # fmt: skip
        return self._answer(self.http.post("/v1/completions", json=body | more))

    def load(self, name: str, path: Path | str, **more: object) -> Answer:
        body = {"lora_name": name, "lora_path": str(path)}
        return self._answer(self.http.post("/v1/load_lora_adapter", json=body | more))

    def unload(self, name: str) -> Answer:
        return self._answer(self.http.post("/v1/unload_lora_adapter", json={"lora_name": name}))

    def _answer(self, response: httpx.Response) -> Answer:
        if response.status_code == 200:
            if not response.headers["content-type"].startswith("application/json"):
                return Answer(200, [], response.text, {})
            [choice] = response.json()["choices"]
            return Answer(200, choice["logprobs"]["token_logprobs"], choice["text"], {})
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) > 0
        return Answer(response.status_code, [], "", error)

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The child that runs a module; waited for, since a dead one is started again."""
        return eventually(lambda: self._child(module))

    def _child(self, module: str) -> psutil.Process | None:
        for child in self.children:
            try:
                if module in child.cmdline():
                    return child
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    def models(self) -> set[str]:
        return {model["id"] for model in self.http.get("/v1/models").json()["data"]}

    def loaded(self) -> set[str]:
        """The adapters that the metrics call loaded."""
        lines = self.http.get("/metrics").text.splitlines()
        return {line for line in lines if line.startswith("vllm:lora_adapter_loaded{")}


def eventually(find: Callable[[], object]):
    """What ``find`` gives once it gives something; the deadline is for a server that hangs."""
    deadline = time.monotonic() + WAIT_S
    while not (found := find()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
    return found


LOADER = "mural_server.lora.loader_process"
CORE = "mural_server.engine.process"
URL = re.compile(r"OpenAI API on (http://\S+?),")


@contextmanager
def serving(
    model: Path, root: Path, work: Path, *, adapter_wait_s: float = ADAPTER_WAIT_S
) -> Iterator[Served]:
    """A server over ``root``; whatever it was, nothing of it is left at the end."""
    temp = work / "tmp"
    temp.mkdir()
    log = work / "log"
    command = [
        sys.executable, "-m", "mural_resolvers.cli", "serve", str(model), "--port", "0",
        "--control-port", "0", "--adapter-dir", str(root), "--allow-runtime-lora-updating",
        "--served-model-name", "base", "--dtype", "float32", "--cpu-threads", "1",
        "--max-lora-rank", str(MAX_RANK), "--adapter-wait-s", str(adapter_wait_s),
        "--max-loras", "2", "--max-cpu-loras", "4", "--shutdown-grace-s", "60",
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=os.environ | {"TMPDIR": str(temp), "OMP_NUM_THREADS": "1"},
        )
    try:
        started = eventually(lambda: process.poll() is not None or URL.search(log.read_text()))
        assert not isinstance(started, bool), log.read_text()
        with httpx.Client(base_url=started[1], timeout=WAIT_S) as http:
            yield Served(process, log, temp, started[1], http)
        children = psutil.Process(process.pid).children(recursive=True) if running(process) else []
        process.terminate()
        assert process.wait(WAIT_S) in (0, 1)
        psutil.wait_procs(children, WAIT_S)
        assert not [child for child in children if child.is_running()]
        assert list(temp.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def running(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


@dataclass
class Site:
    """A served root with the oracle for what lies in it."""

    served: Served
    root: Path
    oracle: PeftOracle
    tokenizer: PreTrainedTokenizerBase

    def put(self, name: str, content: Path) -> Path:
        tenant, _, version = name.partition(":")
        return Path(shutil.copytree(content, self.root / tenant / "default" / version))

    def check_right(self, answer: Answer, folder: Path | None) -> None:
        wanted = self.oracle.answer(folder, PROMPT, TOKENS)
        assert answer.status == 200, answer.error
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
        assert answer.text == self.tokenizer.decode(wanted.token_ids)

    def check_good(self, name: str) -> None:
        self.check_right(self.served.complete(name), self.oracle.folder("all", 0))
        self.check_right(self.served.complete("base"), None)


def make_site(served: Served, root: Path, oracle) -> Site:
    site = Site(served, root, oracle, load_tokenizer(str(oracle.path)))
    site.put("good:v1", oracle.folder("all", 0))
    return site


@pytest.fixture(scope="module")
def site(peft_oracle, tmp_path_factory) -> Iterator[Site]:
    work = tmp_path_factory.mktemp("hostile")
    (work / "secret").write_text("a secret")
    root = work / "adapters"
    root.mkdir()
    oracle = peft_oracle("llama")
    with serving(oracle.path, root, work) as served:
        yield make_site(served, root, oracle)


@pytest.fixture(scope="module")
def own_sites(peft_oracle, tmp_path_factory) -> Iterator[Callable[[], Site]]:
    """Gives a server that runs: the last one, or where a test has ended that, another."""
    oracle = peft_oracle("llama")
    with contextlib.ExitStack() as held:
        sites: list[Site] = []

        def give() -> Site:
            if not sites or not running(sites[-1].served.process):
                work = tmp_path_factory.mktemp("own")
                root = work / "adapters"
                root.mkdir()
                server = serving(oracle.path, root, work, adapter_wait_s=OWN_ADAPTER_WAIT_S)
                sites.append(make_site(held.enter_context(server), root, oracle))
            return sites[-1]

        yield give


@pytest.fixture
def own_site(own_sites: Callable[[], Site]) -> Site:
    """A server that the test may kill, and that waits for no adapter for long."""
    return own_sites()


class Held(NamedTuple):
    """What a server holds on to, as seen from outside."""

    models: frozenset[str]
    loaded: frozenset[str]
    children: int
    descriptors: int
    temp: frozenset[str]


def held(served: Served) -> Held:
    family = [psutil.Process(served.process.pid), *served.children]
    return Held(
        frozenset(served.models()),
        frozenset(served.loaded()),
        len(family),
        sum(process.num_fds() for process in family),
        frozenset(path.name for path in served.temp.iterdir()),
    )


def resident_bytes(served: Served) -> int:
    return sum(p.memory_info().rss for p in (psutil.Process(served.process.pid), *served.children))


# -- spoilt folders ----------------------------------------------------------------------------


def test_spoilt_folders_of_every_kind_are_refused_or_answered_right(site: Site) -> None:
    try_spoilt(site, 0, every=4)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 7))
def test_two_hundred_spoilt_folders_are_refused_or_answered_right(site: Site, seed: int) -> None:
    try_spoilt(site, seed)


def try_spoilt(site: Site, seed: int, *, every: int = 1) -> None:
    """The first of each kind, and from there every so many."""
    served = site.served
    site.check_good("good:v1")
    before, bytes_before = held(served), resident_bytes(served)
    faults: list[str] = []
    done = 0
    for kind in KINDS:
        for place in range(kind.times):
            done += 1
            if place % every:
                continue
            name = f"tenant{done % 7}:v{seed}.{done}"
            folder = site.put(name, site.oracle.folder("all", 0))
            kind.spoil(folder, random.Random(1000 * seed + done))
            for model, answer in asked_both_ways(site, name, folder):
                fault = fault_of(site, kind, folder, answer)
                if fault:
                    spoil = getattr(kind.spoil, "__qualname__", "")
                    faults.append(f"{done} {spoil} as {model}: {fault}")
    assert done == CASES
    assert not faults, "\n".join(faults)
    site.check_good("good:v1")
    # A loader that was ended by its last load is started again by the next one.
    name, content = f"good:after{seed}", site.oracle.folder("query_value", 2)
    site.put(name, content)
    site.check_right(served.complete(name), content)
    assert served.unload(name).status == 200
    eventually(lambda: held(served) == before)
    assert resident_bytes(served) < bytes_before + (64 << 20)
    assert not (site.root.parent / "executed").exists()


def asked_both_ways(site: Site, name: str, folder: Path) -> Iterator[tuple[str, Answer]]:
    """By its name, and by the name that the load endpoint gives it; unloaded afterwards."""
    served = site.served
    yield name, served.complete(name)
    served.unload(name)
    answer = served.load(folder.name, folder)
    if answer.status == 200:
        answer = served.complete(folder.name)
        served.unload(folder.name)
    yield folder.name, answer


def fault_of(site: Site, kind: Kind, folder: Path, answer: Answer) -> str:
    """Why an answer is not one that this folder may get; empty for a right one."""
    if answer.status != 200:
        if not 400 <= answer.status < 500:
            return f"{answer.status}: {answer.error['message']}"
        if str(site.root.parent) in str(answer.error):
            return "it tells a path of the server"
        return "a harmless change is refused" if kind.always_served else ""
    if kind.always_refused:
        return "it was served"
    try:
        site.check_right(answer, folder)
    except AssertionError as error:
        return f"it answers otherwise than PEFT: {str(error)[:300]}"
    except Exception as error:  # PEFT cannot read what was served
        return f"PEFT refuses it: {error!r:.300}"
    return ""


@pytest.mark.parametrize(
    "path",
    [
        "..", ".", "", "/", "/etc", "../../../etc", "good/../../..", "nowhere", "good/default/v1/x",
        "good/default/v1/adapter_config.json", "x" * 300, "x/" * 3000, "a\x00b", "\ud800",
        "\N{SNOWMAN}", "good/default/v1\n", "~root", "file:///etc", "//good/default/v1",
    ],
    ids=lambda path: repr(path[:20]),
)  # fmt: skip
def test_a_path_that_leads_nowhere_or_out_is_refused(site: Site, path: str) -> None:
    body = json.dumps({"lora_name": "hostile", "lora_path": path})
    response = site.served.http.post(
        "/v1/load_lora_adapter", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code in (400, 403, 404, 422), response.text
    assert response.json()["error"]["message"]
    assert "hostile" not in site.served.models()


@pytest.mark.parametrize(
    "model",
    [
        "good:v1\n", "good:..", "good:v1/../v2", "..:v1", "good/..:v1", "Good:v1",
        "g\u043e\u043ed:v1", "good:v1\x00", "good:\N{SNOWMAN}", "good:" + "v" * 10_000,
        "a:b:c", "-good:v1", "good:v1%2e",
    ],
    ids=lambda model: ascii(model[:20]),
)  # fmt: skip
def test_a_hostile_name_is_malformed(site: Site, model: str) -> None:
    answer = site.served.complete(model)
    assert (answer.status, answer.error["code"]) == (400, "malformed_name")


def test_a_link_that_leads_nowhere_hides_no_version_beside_it(site: Site) -> None:
    site.put("links:v1", site.oracle.folder("all", 0))
    versions = site.root / "links" / "default"
    (versions / "v2").symlink_to("v2")
    (versions / "v3").symlink_to("x" * 4000)
    (versions / "v4").symlink_to("v1/adapter_config.json/x")
    (versions / "v5").symlink_to("nowhere")
    (site.root / "links" / "long").symlink_to("x" * 4000)
    site.check_good("links:v1")
    site.check_good("links")
    for name in ("links:v2", "links:v3", "links:v4", "links:v5", "links/long:v1"):
        assert site.served.complete(name).status == 404, name


@pytest.mark.parametrize("target", ["_aliases.json", "x" * 4000, "v1/adapter_config.json/x"])
def test_an_alias_file_that_cannot_be_read_is_not_passed_over(site: Site, target: str) -> None:
    tenant = f"aliases{len(target)}"
    folder = site.put(f"{tenant}:v1", site.oracle.folder("all", 0))
    (folder.parent / "_aliases.json").symlink_to(target)
    assert site.served.complete(f"{tenant}:stable").status == 422


def test_a_manifest_that_states_other_files_is_held_to_by_the_load_endpoint(site: Site) -> None:
    folder = site.put("manifest:v1", site.oracle.folder("all", 0))
    stated = build_manifest(site.oracle.folder("all", 1))
    (folder / "manifest.json").write_bytes(stated.to_json())
    for answer in (site.served.complete("manifest:v1"), site.served.load("stated", folder)):
        assert (answer.status, answer.error["code"]) == (422, "manifest_mismatch")


LOOPS = [
    "{% for i in range(10 ** 9) %}{% for j in range(10 ** 9) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' * 10 ** 12 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{",
    "{{ '%1000000000000d' % 1 }}",
    "{{ 9 ** (9 ** (9 ** 9)) }}",
]


@pytest.mark.parametrize("place", range(len(LOOPS)))
def test_a_hostile_template_costs_its_own_chat_only(site: Site, place: int) -> None:
    name = f"template:v{place}"
    folder = site.put(name, site.oracle.folder("all", 0))
    (folder / "chat_template.jinja").write_text(LOOPS[place])
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for _ in range(2):
        response = site.served.http.post("/v1/chat/completions", json={"model": name} | chat)
        assert 400 <= response.status_code < 500, response.text
        assert "template" in response.json()["error"]["message"]
    site.check_good(name)  # its weights are as good as any
    response = site.served.http.post("/v1/chat/completions", json={"model": "base"} | chat)
    assert response.status_code == 200


# -- what dies, stalls or ends -----------------------------------------------------------------


def bomb(site: Site, name: str) -> Path:
    """An adapter that keeps the loader at work until it is stopped."""
    folder = site.put(name, site.oracle.folder("all", 0))
    # Of content that no other test has refused: that would not be read again.
    change_config(folder, target_modules=BOMB, lora_alpha=7)
    return folder


@contextmanager
def in_background(act: Callable[[], object]) -> Iterator[Future]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(act)


def test_a_loader_killed_in_mid_load_costs_that_load_only(site: Site) -> None:
    bomb(site, "killed:v1")
    loader = site.served.child(LOADER)
    idle_s = loader.cpu_times().user
    with in_background(lambda: site.served.complete("killed:v1")) as answer:
        eventually(lambda: loader.cpu_times().user > idle_s + 0.2)
        loader.kill()
        assert answer.result(WAIT_S).status == 503
    site.put("killed:v2", site.oracle.folder("query_value", 0))
    site.check_right(site.served.complete("killed:v2"), site.oracle.folder("query_value", 0))


def test_a_load_that_stalls_is_given_up_and_the_next_one_works(own_site: Site) -> None:
    """As under a disk that does not answer."""
    served, content = own_site.served, own_site.oracle.folder("query_value", 1)
    own_site.check_good("good:v1")
    own_site.put("stalled:v1", content)
    loader = served.child(LOADER)
    loader.suspend()
    try:
        with in_background(lambda: served.complete("stalled:v1")) as answer:
            own_site.check_good("good:v1")  # what is loaded is served meanwhile
            assert answer.result(WAIT_S).status == 503
    finally:
        loader.resume()
    own_site.check_right(served.complete("stalled:v1"), content)


def open_streams(served: Served, count: int, tokens: int) -> list[httpx.Response]:
    """Streams that have begun."""
    streams = []
    for place in range(count):
        body = {
            "model": ("base", "good:v1")[place % 2], "prompt": PROMPT, "max_tokens": tokens,
            "ignore_eos": True, "stream": True, "temperature": 0,
        }  # fmt: skip
        request = served.http.build_request("POST", "/v1/completions", json=body)
        streams.append(served.http.send(request, stream=True))
    return streams


def events(stream: httpx.Response) -> list[Any]:
    """A stream's events to its end, however it ends."""
    found: list[Any] = []
    for line in stream.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def test_a_killed_core_ends_every_stream_with_an_error_and_the_server(own_site: Site) -> None:
    served = own_site.served
    own_site.check_good("good:v1")
    streams = open_streams(served, 4, tokens=480)
    core, children = served.child(CORE), served.children
    core.kill()
    for stream in streams:
        last = [event for event in events(stream) if event != "[DONE]"][-1]
        assert last["error"]["code"] == "unavailable", last
    with contextlib.suppress(httpx.TransportError):  # it may have ended already
        assert served.http.get("/health").status_code == 503
    assert served.process.wait(WAIT_S) == 1
    psutil.wait_procs(children, WAIT_S)
    assert not [child for child in children if child.is_running()]


def test_a_terminated_server_finishes_what_is_open(own_site: Site) -> None:
    served = own_site.served
    own_site.check_good("good:v1")
    streams = open_streams(served, 4, tokens=200)
    served.process.send_signal(signal.SIGTERM)
    for stream in streams:
        *_, final, done = events(stream)
        assert done == "[DONE]"
        assert final["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(WAIT_S) == 0
