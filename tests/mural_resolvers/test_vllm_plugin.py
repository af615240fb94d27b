"""The plug-in for vLLM, against a stand-in for vllm's two classes; tests/vllm has the real one."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import FileEntry, compute_digest
from mural_resolvers.errors import AdapterNotFound, Forbidden, InvalidInput, Unavailable
from mural_resolvers.manifest import Manifest, PeftFacts
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.resolver import AdapterDescription, LoRAResolver
from mural_resolvers.tenants import Principal
from mural_resolvers.vllm_plugin import MuralLoRAResolver, VLLMPluginSettings, register

BASE = "org/tiny"
Answer = Callable[[AdapterName], Awaitable[AdapterDescription | None]]


@dataclass
class FakeLoRARequest:
    """A stand-in for ``vllm.lora.request.LoRARequest``: its fields and its one check."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        assert self.lora_int_id >= 1
        assert self.lora_path


class FakeVLLMRegistry:
    """A stand-in for ``vllm.lora.resolver.LoRAResolverRegistry``."""

    def __init__(self) -> None:
        self.resolvers: dict[str, MuralLoRAResolver] = {}
        self.registered = 0

    def get_supported_resolvers(self) -> set[str]:
        return set(self.resolvers)

    def register_resolver(self, name: str, resolver: MuralLoRAResolver) -> None:
        self.resolvers[name] = resolver
        self.registered += 1


@pytest.fixture(autouse=True)
def vllm_registry(monkeypatch: pytest.MonkeyPatch) -> FakeVLLMRegistry:
    registry = FakeVLLMRegistry()
    names = ("vllm", "vllm.lora", "vllm.lora.request", "vllm.lora.resolver")
    modules = {name: ModuleType(name) for name in names}
    modules["vllm.lora.request"].LoRARequest = FakeLoRARequest  # type: ignore[attr-defined] # a stand-in
    modules["vllm.lora.resolver"].LoRAResolverRegistry = registry  # type: ignore[attr-defined] # a stand-in
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return registry


@pytest.fixture(autouse=True)
def own_way_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = logging.getLogger("mural")
    monkeypatch.setattr(ours, "parent", ours.parent)


# -- the environment -------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    file = tmp_path / "sources.yaml"
    file.write_text(f"resolvers:\n- type: directory\n  path: {tmp_path / 'adapters'}\n")
    return file


def test_without_sources_nothing_is_registered_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch,
    vllm_registry: FakeVLLMRegistry,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("MURAL_SOURCES", raising=False)
    with caplog.at_level(logging.INFO, "mural"):
        register()
    assert not vllm_registry.resolvers
    assert [record.name for record in caplog.records] == ["mural.vllm"]


def test_registering_twice_leaves_the_first_resolver(
    monkeypatch: pytest.MonkeyPatch, vllm_registry: FakeVLLMRegistry, sources: Path
) -> None:
    monkeypatch.setenv("MURAL_SOURCES", str(sources))
    monkeypatch.setenv("MURAL_VLLM_GRANTS", "*")
    register()
    register()
    assert vllm_registry.registered == 1
    assert set(vllm_registry.resolvers) == {"mural"}


@pytest.mark.parametrize(
    ("value", "warned"), [("1", False), ("True", False), ("0", True), ("", True)]
)
def test_a_vllm_that_would_never_ask_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sources: Path,
    value: str,
    warned: bool,
) -> None:
    monkeypatch.setenv("MURAL_SOURCES", str(sources))
    monkeypatch.setenv("MURAL_VLLM_TENANT", "acme")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    with caplog.at_level(logging.WARNING, "mural"):
        register()
    assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in caplog.text) == warned


def test_sources_that_cannot_be_read_end_the_start(
    monkeypatch: pytest.MonkeyPatch, vllm_registry: FakeVLLMRegistry, tmp_path: Path
) -> None:
    monkeypatch.setenv("MURAL_SOURCES", str(tmp_path / "absent.yaml"))
    monkeypatch.setenv("MURAL_VLLM_TENANT", "acme")
    with pytest.raises(InvalidInput):
        register()
    assert not vllm_registry.resolvers


async def test_what_is_registered_serves_the_sources_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
    vllm_registry: FakeVLLMRegistry,
    sources: Path,
    tmp_path: Path,
    write_adapter: Callable[..., Path],
) -> None:
    write_adapter(tmp_path / "adapters" / "acme" / "default" / "v1")
    write_adapter(tmp_path / "adapters" / "globex" / "default" / "v1")
    monkeypatch.setenv("MURAL_SOURCES", str(sources))
    monkeypatch.setenv("MURAL_VLLM_TENANT", "acme")
    register()
    resolver = vllm_registry.resolvers["mural"]
    request = await resolver.resolve_lora(BASE, "acme:v1")
    refused = await resolver.resolve_lora(BASE, "globex:v1")
    await resolver.close()
    assert isinstance(request, FakeLoRARequest)
    assert request.lora_path.endswith("/adapters/acme/default/v1")
    assert refused is None


def test_the_log_goes_where_vllms_goes_even_if_that_is_set_up_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MURAL_SOURCES", raising=False)
    register()
    theirs = logging.getLogger("vllm")
    monkeypatch.setattr(theirs, "handlers", [caplog.handler])
    monkeypatch.setattr(theirs, "propagate", False)
    with caplog.at_level(logging.INFO, "vllm"):
        logging.getLogger("mural.fetch").info("fetched acme:v1")
    assert caplog.messages == ["fetched acme:v1"]


def test_the_environment_is_read_whole() -> None:
    settings = VLLMPluginSettings.from_environment(
        {
            "MURAL_SOURCES": "/etc/mural/sources.yaml",
            "MURAL_VLLM_TENANT": "acme",
            "MURAL_VLLM_GRANTS": "globex/sql:*, public",
            "MURAL_VLLM_TIMEOUT_S": "2.5",
            "MURAL_VLLM_MAX_ADAPTERS": "7",
            "MURAL_VLLM_LEASE_S": "60",
        }
    )
    assert settings == VLLMPluginSettings(
        sources=Path("/etc/mural/sources.yaml"),
        principal=Principal("acme", grants=("globex/sql:*", "public")),
        timeout_s=2.5,
        max_adapters=7,
        lease_s=60.0,
    )


def test_what_the_environment_leaves_out_has_its_default() -> None:
    given = {"MURAL_SOURCES": "s.yaml", "MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_LEASE_S": ""}
    settings = VLLMPluginSettings.from_environment(given)
    assert settings == VLLMPluginSettings(sources=Path("s.yaml"), principal=Principal("acme"))


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"MURAL_VLLM_TENANT": "../acme"},
        {"MURAL_VLLM_GRANTS": "globex/"},
        {"MURAL_VLLM_GRANTS": " , "},
        {"MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_TIMEOUT_S": "soon"},
        {"MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_TIMEOUT_S": "nan"},
        {"MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_TIMEOUT_S": "inf"},
        {"MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_LEASE_S": "0"},
        {"MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_MAX_ADAPTERS": "1.5"},
        {"MURAL_VLLM_TENANT": "acme", "MURAL_VLLM_MAX_ADAPTERS": "-1"},
    ],
)
def test_a_wrong_variable_is_named(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="MURAL_VLLM_"):
        VLLMPluginSettings.from_environment({"MURAL_SOURCES": "s.yaml", **wrong})


# -- a chain with a source that answers as it is told ----------------------------------------------


def description(name: AdapterName) -> AdapterDescription:
    content = name.exact
    files = (FileEntry("adapter_config.json", len(content), content.encode().hex().zfill(64)),)
    facts = PeftFacts(rank=1, alpha=1, targets=())
    manifest = Manifest(files=files, facts=facts, digest=compute_digest(files))
    return AdapterDescription.of_folder(name, Path("/adapters") / name.version, manifest)


async def found(name: AdapterName) -> AdapterDescription | None:
    return description(name)


async def absent(name: AdapterName) -> AdapterDescription | None:
    return None


def raising(error: Exception) -> Answer:
    async def answer(name: AdapterName) -> AdapterDescription | None:
        raise error

    return answer


class FakeResolver(LoRAResolver):
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[AdapterName] = []
        self.bases: set[tuple[str, ...]] = set()

    @property
    def name(self) -> str:
        return "fake"

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        self.asked.append(name)
        self.bases.add(base.model_names)
        return await self.answer(name)


class LeasingRegistry(LoRAResolverRegistry):
    """Counts leases as the disk cache would: which are held, and when one is let go."""

    def __init__(self, resolver: LoRAResolver, base: BaseSpec) -> None:
        super().__init__([resolver], base, LoRAIdAllocator())
        self.held: list[str] = []
        self.let_go: asyncio.Queue[str] = asyncio.Queue()
        self.fails: Exception | None = None
        self.gate: asyncio.Event | None = None

    @asynccontextmanager
    async def lease(
        self, principal: Principal, request: LoRARequest, *, fetch: bool = True
    ) -> AsyncIterator[Path]:
        if self.gate is not None:
            await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        self.held.append(request.lora_name)
        try:
            async with super().lease(principal, request, fetch=fetch) as folder:
                yield folder
        finally:
            self.held.remove(request.lora_name)
            self.let_go.put_nowait(request.lora_name)


class Plugin:
    """The resolver as vLLM has it, over one fake source."""

    def __init__(self, answer: Answer, settings: VLLMPluginSettings) -> None:
        self.source = FakeResolver(answer)
        self.registry: LeasingRegistry | None = None
        self.openings = 0
        self.opening_fails: Exception | None = None
        self.resolver = MuralLoRAResolver(settings, self._open)

    def _open(self, settings: VLLMPluginSettings, base: BaseSpec) -> LoRAResolverRegistry:
        self.openings += 1
        if self.opening_fails is not None:
            raise self.opening_fails
        self.registry = LeasingRegistry(self.source, base)
        return self.registry

    async def path(self, name: str) -> str | None:
        request = await self.resolver.resolve_lora(BASE, name)
        return None if request is None else request.lora_path

    @property
    def chain(self) -> LeasingRegistry:
        assert self.registry is not None
        return self.registry


MakePlugin = Callable[..., Plugin]


@pytest.fixture
async def plugin_of() -> AsyncIterator[MakePlugin]:
    made: list[Plugin] = []

    def make(
        answer: Answer = found,
        *,
        timeout_s: float = 30.0,
        max_adapters: int = 1000,
        lease_s: float | None = None,
    ) -> Plugin:
        principal = Principal("acme", grants=("globex/sql:*",))
        settings = VLLMPluginSettings(
            Path("unread.yaml"), principal, timeout_s, max_adapters, lease_s
        )
        made.append(Plugin(answer, settings))
        return made[-1]

    yield make
    for plugin in made:
        if plugin.registry is not None:
            await plugin.resolver.close()
            assert not plugin.registry.held


@pytest.mark.parametrize("name", ["acme:v1", "acme/default:v1", "globex/sql:v3"])
async def test_an_exact_version_is_found_under_the_name_that_was_asked(
    plugin_of: MakePlugin, name: str
) -> None:
    plugin = plugin_of()
    request = await plugin.resolver.resolve_lora(BASE, name)
    assert isinstance(request, FakeLoRARequest)
    assert request.lora_name == name
    assert request.lora_path == f"/adapters/{parse_name(name).version}"
    assert request.lora_int_id >= 1
    assert plugin.source.bases == {(BASE,)}


async def test_nothing_is_opened_before_the_first_name(plugin_of: MakePlugin) -> None:
    plugin = plugin_of()
    assert plugin.openings == 0
    await asyncio.gather(plugin.path("acme:v1"), plugin.path("acme:v2"), plugin.path("acme:v3"))
    assert plugin.openings == 1


async def test_an_opening_that_failed_is_tried_again(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = plugin_of()
    plugin.opening_fails = InvalidInput("The cache cannot be used: disk full.")
    assert await plugin.path("acme:v1") is None
    assert "disk full" in caplog.text
    plugin.opening_fails = None
    assert await plugin.path("acme:v1") == "/adapters/v1"


@pytest.mark.parametrize("name", ["acme", "acme:latest", "acme:stable"])
async def test_an_alias_is_not_served(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async def answer(name: AdapterName) -> AdapterDescription | None:
        return description(name.at("v7"))

    plugin = plugin_of(answer)
    assert await plugin.path(name) is None
    assert "is an alias" in caplog.text


@pytest.mark.parametrize("name", ["globex:v1", "initech:v1", "globex/sql2:v1"])
async def test_a_name_outside_the_grants_reaches_no_source(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    plugin = plugin_of()
    assert await plugin.path(name) is None
    assert not plugin.source.asked
    assert name in caplog.text


@pytest.mark.parametrize(
    "name", ["", "../etc", "a" * 5000, "acme:../v1", "acme:v1\nfake line", "/srv/x"]
)
async def test_a_text_that_is_no_name_opens_nothing(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    plugin = plugin_of()
    assert await plugin.path(name) is None
    assert plugin.openings == 0
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (absent, "does not exist"),
        (raising(AdapterNotFound("It is not there.")), "does not exist"),
        (raising(Forbidden("The source refuses.")), "The source refuses."),
        (raising(Unavailable("It is down.")), "cannot be reached"),
        (raising(OSError("broken")), "cannot be reached"),
    ],
)
async def test_what_fails_is_no_adapter_and_a_line_that_says_why(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture, answer: Answer, told: str
) -> None:
    assert await plugin_of(answer).path("acme:v1") is None
    assert "acme:v1" in caplog.text
    assert told in caplog.text


async def test_a_fault_that_nobody_knew_of_is_logged_whole(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = plugin_of()
    plugin.opening_fails = ZeroDivisionError("nobody knew")
    assert await plugin.path("acme:v1") is None
    assert "ZeroDivisionError: nobody knew" in caplog.text


async def test_waiting_is_bounded_while_a_source_hangs(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    async def hang(name: AdapterName) -> AdapterDescription | None:
        await asyncio.Event().wait()
        return None

    assert await plugin_of(hang, timeout_s=0.01).path("acme:v1") is None
    assert "in time" in caplog.text


async def test_a_caller_that_leaves_is_not_answered_with_none(plugin_of: MakePlugin) -> None:
    async def hang(name: AdapterName) -> AdapterDescription | None:
        asking.set()
        await asyncio.Event().wait()
        return None

    asking = asyncio.Event()
    asked = asyncio.create_task(plugin_of(hang).path("acme:v1"))
    await asking.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


# -- what vLLM may read ----------------------------------------------------------------------------


async def test_what_was_handed_out_stays_leased_once_for_each_content(
    plugin_of: MakePlugin,
) -> None:
    plugin = plugin_of()
    for name in ("acme:v1", "acme:v2", "acme:v1", "acme/default:v1"):
        assert await plugin.path(name) is not None
    assert sorted(plugin.chain.held) == ["acme:v1", "acme:v2"]


async def test_above_the_bound_nothing_more_is_handed_out_and_nothing_is_taken_back(
    plugin_of: MakePlugin, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = plugin_of(max_adapters=2)
    for name in ("acme:v1", "acme:v2"):
        assert await plugin.path(name) is not None
    assert await plugin.path("acme:v3") is None
    assert "MURAL_VLLM_MAX_ADAPTERS" in caplog.text
    assert await plugin.path("acme:v1") is not None
    assert sorted(plugin.chain.held) == ["acme:v1", "acme:v2"]


async def test_a_lease_ends_at_its_time_and_begins_anew_when_asked_again(
    plugin_of: MakePlugin,
) -> None:
    plugin = plugin_of(max_adapters=1, lease_s=0.01)
    assert await plugin.path("acme:v1") is not None
    assert await plugin.chain.let_go.get() == "acme:v1"
    assert await plugin.path("acme:v2") is not None
    assert await plugin.chain.let_go.get() == "acme:v2"
    assert await plugin.path("acme:v1") is not None


async def test_an_adapter_that_cannot_be_leased_takes_no_place(plugin_of: MakePlugin) -> None:
    plugin = plugin_of(max_adapters=1)
    await plugin.path("acme:v0:")  # no name: opens nothing
    plugin.source.answer = absent
    assert await plugin.path("acme:v0") is None
    plugin.source.answer = found
    plugin.chain.fails = Unavailable("The cache is too small.")
    assert await plugin.path("acme:v1") is None
    plugin.chain.fails = None
    assert await plugin.path("acme:v2") is not None


async def test_a_lease_that_comes_late_is_there_for_the_next_who_asks(
    plugin_of: MakePlugin,
) -> None:
    plugin = plugin_of(timeout_s=0.05)
    plugin.source.answer = absent
    await plugin.path("acme:v0")
    plugin.source.answer = found
    plugin.chain.gate = asyncio.Event()
    assert await plugin.path("acme:v1") is None
    plugin.chain.gate.set()
    assert await plugin.path("acme:v1") == "/adapters/v1"
    assert plugin.chain.held == ["acme:v1"]
