"""`LLM` as one uses it in a script or a notebook."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import AdapterNotFound, InvalidInput, MalformedName, UnusableAdapter
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.request import LoRARequest
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.tenants import Principal
from mural_server import LLM, SamplingParams
from mural_server.llm import EngineOptions
from mural_server.settings import EngineSettings, SettingsError

if TYPE_CHECKING:
    from tests.mural_server.conftest import OracleOf

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [70, 71, 72, 73, 74]


@pytest.fixture(scope="module")
def root(peft_oracle: OracleOf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one tenant: acme:v1 and acme:v2."""
    root = tmp_path_factory.mktemp("store")
    oracle = peft_oracle("llama")
    for version, adapter in (("v1", "all"), ("v2", "query_value")):
        shutil.copytree(oracle.folder(adapter), root / "acme" / "default" / version)
    return root


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path], root: Path) -> Iterator[LLM]:
    options: EngineOptions = {"dtype": "float32", "cpu_threads": 1, "max_loras": 2}
    with LLM(str(tiny_model("llama")), adapter_dir=root, **options) as llm:
        yield llm
        llm.check_integrity()


def test_the_options_are_the_engines_settings() -> None:
    fields = {field.name for field in msgspec.structs.fields(EngineSettings)}
    assert EngineOptions.__annotations__.keys() == fields - {"model"}


def test_an_adapter_is_found_by_its_name(llm: LLM, peft_oracle: OracleOf) -> None:
    oracle = peft_oracle("llama")
    outputs = llm.generate(
        [PROMPT] * 4, GREEDY, ["acme:v1", "acme/default:v2", "acme:latest", None], use_tqdm=False
    )
    folders = [oracle.folder("all"), *[oracle.folder("query_value")] * 2, None]
    for output, folder in zip(outputs, folders, strict=True):
        assert output.outputs[0].token_ids == oracle.answer(folder, PROMPT, 6).token_ids
    names = [output.lora_request.lora_name for output in outputs if output.lora_request]
    assert names == ["acme:v1", "acme:v2", "acme:v2"]


class Away(LoRAResolver):
    """A folder as a source that has to be downloaded from."""

    name = "away"

    def __init__(self, root: Path) -> None:
        self._root = root

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        manifest = build_manifest(self._root / name.tenant / name.adapter / name.version)
        return replace(AdapterDescription.of_folder(name, self._root, manifest), folder=None)

    @asynccontextmanager
    async def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        name = adapter.name
        path = self._root / name.tenant / name.adapter / name.version / file.path

        async def pieces() -> AsyncIterator[bytes]:
            yield path.read_bytes()[start:stop]

        yield pieces()


def test_an_adapter_is_fetched_into_the_cache_of_the_file_of_sources(
    tiny_model: Callable[[str], Path],
    root: Path,
    peft_oracle: OracleOf,
    tmp_path: Path,
) -> None:
    oracle = peft_oracle("llama")
    sources = tmp_path / "sources.yaml"
    sources.write_text(f"cache: {{path: {tmp_path / 'cache'}}}\nresolvers: []\n")
    options: EngineOptions = {"dtype": "float32", "cpu_threads": 1, "max_loras": 2}
    model = str(tiny_model("llama"))
    with LLM(model, adapter_sources=sources, resolvers=[Away(root)], **options) as llm:
        (output,) = llm.generate(PROMPT, GREEDY, "acme:v1", use_tqdm=False)

    assert output.outputs[0].token_ids == oracle.answer(oracle.folder("all"), PROMPT, 6).token_ids
    assert output.lora_request is not None
    assert Path(output.lora_request.lora_path).is_relative_to(tmp_path / "cache")


def test_requests_that_are_given_together_share_steps(llm: LLM) -> None:
    outputs = llm.generate([PROMPT] * 3, GREEDY, ["acme:v1", "acme:v2", None], use_tqdm=False)
    first, second, base = (set(output.outputs[0].steps) for output in outputs)
    assert first & second & base


def test_one_prompt_one_answer_with_n_texts(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4, ignore_eos=True)
    [output] = llm.generate("hello", params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert all(len(answer.token_ids) == 4 for answer in output.outputs)
    assert output.prompt == "hello"


def test_chat_puts_the_models_template_around_the_messages(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, GREEDY, "acme:v1", use_tqdm=False)
    text = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        ("acme:v9", AdapterNotFound),
        ("nobody:v1", AdapterNotFound),
        ("../acme:v1", MalformedName),
        (LoRARequest("x", 1, "/nowhere/at/all"), UnusableAdapter),
    ],
)
def test_an_adapter_that_is_not_there_is_an_error_and_never_the_base(
    llm: LLM, lora: str | LoRARequest, error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate([PROMPT, PROMPT], GREEDY, [lora, None], use_tqdm=False)


def test_one_bad_request_ends_the_call_and_leaves_the_engine_whole(llm: LLM) -> None:
    with pytest.raises(InvalidInput, match="maximum"):
        llm.generate([PROMPT, [70] * 5000], GREEDY, use_tqdm=False)
    llm.check_integrity()
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)


def test_an_id_that_is_used_for_two_adapters_mixes_nothing_up(
    llm: LLM, peft_oracle: OracleOf
) -> None:
    oracle = peft_oracle("llama")
    folders = [oracle.folder("all"), oracle.folder("query_value")]
    outputs = llm.generate(
        [PROMPT] * 2, GREEDY, [LoRARequest("mine", 1, str(f)) for f in folders], use_tqdm=False
    )
    for output, folder in zip(outputs, folders, strict=True):
        assert output.outputs[0].token_ids == oracle.answer(folder, PROMPT, 6).token_ids


def test_unloading_frees_slot_and_host_memory(llm: LLM) -> None:
    llm.generate(PROMPT, GREEDY, "acme:v1", use_tqdm=False)
    before = {adapter.name: adapter for adapter in llm.stats().adapters}
    assert llm.unload("acme:v1") >= before["acme:v1"].bytes
    llm.check_integrity()
    assert "acme:v1" not in {adapter.name for adapter in llm.stats().adapters}


def test_more_parameters_than_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY], use_tqdm=False)


def test_a_setting_of_the_wrong_kind_is_refused_with_a_sentence(
    tiny_model: Callable[[str], Path],
) -> None:
    with pytest.raises(SettingsError, match="max_loras"):
        LLM(str(tiny_model("llama")), max_loras="many")  # type: ignore[arg-type]
