"""A hub as a source: what it describes, and for whom."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.errors import (
    Forbidden,
    InvalidInput,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.hub import HubResolver, HubSettings
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import build_manifest

Files = dict[str, bytes]
Make = Callable[[HubSettings], HubResolver]
Tools = dict[str, Any]

READ = {"adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"}


# -- what is described --------------------------------------------------------------------------


async def test_a_tag_is_pinned_to_its_commit(hub: Any, resolve: Any, adapter_files: Files) -> None:
    commit = hub.add("acme/sql", adapter_files, "v1")

    found = await resolve("acme/sql:v1")

    assert str(found.name) == "acme/sql:v1"
    assert found.revision == commit
    assert (found.folder, found.manifest) == (None, None)


async def test_only_the_engines_files_of_the_top_folder_are_described(
    hub: Any, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, "v1")

    found = await resolve("acme/sql:v1")

    assert {file.path: file.size for file in found.files} == {
        path: len(data) for path, data in adapter_files.items() if path in READ
    }


async def test_an_lfs_file_has_its_sha256_and_a_small_one_gits_sha1(
    hub: Any, resolve: Any, adapter_files: Files, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files, "v1")

    found = await resolve("acme/sql:v1")

    stated = {file.path: (file.sha256, file.tag) for file in found.files}
    weights = build_manifest(tmp_path / "adapter").files[1].sha256
    assert stated["adapter_model.safetensors"] == (weights, weights)
    assert stated["adapter_config.json"][0] is None
    assert len(stated["adapter_config.json"][1] or "") == 40
    assert found.digest is None


async def test_latest_is_the_commit_of_main_under_the_commits_name(
    hub: Any, resolve: Any, adapter_files: Files
) -> None:
    old = hub.add("acme/sql", adapter_files)
    first = await resolve("acme/sql:latest")
    new = hub.add("acme/sql", adapter_files | {"chat_template.jinja": b"new"})
    second = await resolve("acme/sql")

    assert [str(first.name), str(second.name)] == [f"acme/sql:{old}", f"acme/sql:{new}"]
    assert await resolve(f"acme/sql:{old}") == replace(first, alias_ttl_s=0.0)
    assert first.alias_ttl_s == 5.0


async def test_a_moved_tag_is_another_revision_under_the_same_name(
    hub: Any, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    first = await resolve("acme/sql:v1")
    hub.add("acme/sql", adapter_files | {"chat_template.jinja": b"new"}, "v1")
    second = await resolve("acme/sql:v1")

    assert first.name == second.name
    assert first.revision != second.revision


async def test_a_name_may_be_mapped_to_any_repository(
    hub: Any, settings: HubSettings, resolve: Any, adapter_files: Files
) -> None:
    commit = hub.add("models/sql-lora", adapter_files, "release/1")
    settings = replace(
        settings,
        organisations=("acme", "models"),
        names={"acme:v1": "models/sql-lora@release/1"},
    )

    found = await resolve("acme:v1", settings)

    assert (str(found.name), found.revision) == ("acme:v1", commit)
    assert "GET /api/models/models/sql-lora/revision/release%2F1" in hub.paths()


async def test_the_endpoint_may_have_a_path(
    hub: Any, settings: HubSettings, resolve: Any, small_hub_tools: Tools
) -> None:
    hub.alter = lambda asked, answer: small_hub_tools["answer"](404)

    assert await resolve("acme/sql:v1", replace(settings, endpoint=f"{hub.url}/mirror/")) is None
    assert hub.paths() == ["GET /mirror/api/models/acme/sql/revision/v1"]


async def test_a_tree_of_several_pages_is_read_to_its_end(
    hub: Any, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.page_size = 1

    found = await resolve("acme/sql:v1")

    assert {file.path for file in found.files} == READ


async def test_a_mirror_that_names_its_own_hub_for_the_next_page_is_asked_itself(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.page_size = 2

    def as_the_original(asked: Any, answer: Any) -> Any:
        link = answer.headers.get("Link", "").replace(hub.url, "https://huggingface.co")
        return small_hub_tools["replace"](answer, headers=answer.headers | {"Link": link})

    hub.alter = as_the_original

    assert len((await resolve("acme/sql:v1")).files) == 3


async def test_a_repository_without_an_end_is_refused(
    hub: Any, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files | {f"f{i}": b"" for i in range(20)}, "v1")
    hub.page_size = 1

    with pytest.raises(UnusableAdapter, match="too many files"):
        await resolve("acme/sql:v1")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("adapter_config.json", "no adapter_config.json"),
        ("adapter_model.safetensors", "no adapter_model.safetensors"),
    ],
)
async def test_a_repository_that_is_no_adapter_is_unusable(
    hub: Any, resolve: Any, adapter_files: Files, missing: str, message: str
) -> None:
    hub.add("acme/sql", {k: v for k, v in adapter_files.items() if k != missing}, "v1")

    with pytest.raises(UnusableAdapter, match=message):
        await resolve("acme/sql:v1")


async def test_a_pickle_is_described_only_where_it_is_admitted(
    hub: Any, settings: HubSettings, resolve: Any, adapter_files: Files
) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    hub.add("acme/sql", files, "v1")
    admitting = HubResolver(settings, AdapterLimits(admit_bin=True))

    with pytest.raises(UnusableAdapter, match="pickle"):
        await resolve("acme/sql:v1")
    found = await resolve("acme/sql:v1", resolver=admitting)
    await admitting.close()

    assert {file.path for file in found.files} == set(files)


async def test_another_case_of_the_repositorys_name_is_the_same_repository(
    hub: Any, resolve: Any, adapter_files: Files
) -> None:
    commit = hub.add("Acme/SQL", adapter_files, "v1")

    assert (await resolve("acme/sql:v1")).revision == commit


async def test_a_renamed_repository_is_not_followed_out_of_its_name(
    hub: Any,
    settings: HubSettings,
    resolve: Any,
    adapter_files: Files,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.add("globex/new", adapter_files, "v1")
    hub.moved["acme/sql"] = "globex/new"

    assert await resolve("acme/sql:v1", replace(settings, organisations=("*",))) is None
    assert "'globex/new'" in caplog.text


# -- what is absent -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["globex/sql:v1", "acme/a--b:v1"])
async def test_what_can_be_nowhere_is_not_asked_for(hub: Any, resolve: Any, name: str) -> None:
    assert await resolve(name) is None
    assert hub.asked == []


@pytest.mark.parametrize("name", ["acme/none:v1", "acme/sql:v9", f"acme/sql:{'0' * 40}"])
async def test_an_absent_repository_or_revision_is_none(
    hub: Any, with_token: HubSettings, resolve: Any, adapter_files: Files, name: str
) -> None:
    hub.add("acme/sql", adapter_files, "v1")

    assert await resolve(name, with_token) is None


@pytest.mark.parametrize("part", ["/tree/", "/resolve/"])
async def test_what_goes_away_between_two_questions_is_none(
    hub: Any, resolve: Any, adapter_files: Files, small_hub_tools: Tools, part: str
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.alter = lambda asked, answer: small_hub_tools["answer"](404) if part in asked.path else None

    assert await resolve("acme/sql:v1") is None


# -- rights -------------------------------------------------------------------------------------


async def test_a_private_repository_is_read_with_its_token(
    hub: Any, with_token: HubSettings, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, "v1", private=True)

    assert await resolve("acme/sql:v1", with_token) is not None


async def test_what_is_hidden_from_strangers_is_forbidden_or_by_setting_absent(
    hub: Any, settings: HubSettings, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, "v1", private=True)

    with pytest.raises(Forbidden):
        await resolve("acme/sql:v1")
    assert await resolve("acme/sql:v1", replace(settings, hidden_is_absent=True)) is None


async def test_a_token_that_is_not_accepted_is_forbidden(
    hub: Any, with_token: HubSettings, resolve: Any, adapter_files: Files, small_hub_tools: Tools
) -> None:
    hub.add("acme/sql", adapter_files, "v1")
    hub.tokens.remove(small_hub_tools["token"])

    with pytest.raises(Forbidden):
        await resolve("acme/sql:v1", replace(with_token, hidden_is_absent=True))


async def test_a_gated_repository_is_forbidden_although_it_is_described_to_everybody(
    hub: Any, settings: HubSettings, with_token: HubSettings, resolve: Any, adapter_files: Files
) -> None:
    hub.add("acme/sql", adapter_files, "v1", gated=True)
    hub.add("acme/other", adapter_files, "v1", gated=True, readers=set())

    assert await resolve("acme/sql:v1", with_token) is not None
    for name, asking in (("acme/sql:v1", settings), ("acme/other:v1", with_token)):
        with pytest.raises(Forbidden):
            await resolve(name, asking)


@pytest.mark.parametrize("taken", ["token", "gate"])
async def test_a_right_that_was_taken_away_is_noticed_at_the_next_look_up(
    hub: Any,
    with_token: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
    small_hub_tools: Tools,
    taken: str,
) -> None:
    commit = hub.add("acme/sql", adapter_files, "v1", gated=True)
    resolver = make_resolver(with_token)
    found = await resolve("acme/sql:v1", resolver=resolver)
    async with resolver.open(found, found.files[0], 0, found.files[0].size) as pieces:
        assert b"".join([piece async for piece in pieces])

    if taken == "token":
        hub.tokens.remove(small_hub_tools["token"])
    else:
        hub.repos["acme/sql"].readers.clear()

    for name in ("acme/sql:v1", f"acme/sql:{commit}"):
        with pytest.raises(Forbidden):
            await resolve(name, resolver=resolver)


async def test_a_refusal_has_one_body_and_the_log_has_the_reason(
    hub: Any, with_token: HubSettings, resolve: Any, adapter_files: Files, caplog: Any
) -> None:
    hub.add("acme/sql", adapter_files, "v1", gated=True, readers=set())

    with pytest.raises(Forbidden) as refused:
        await resolve("acme/sql:v1", with_token)

    assert refused.value.message == Forbidden().message
    assert "restricted" in caplog.text


async def test_a_new_token_in_the_file_is_used_at_once(
    hub: Any,
    settings: HubSettings,
    resolve: Any,
    make_resolver: Make,
    adapter_files: Files,
    small_hub_tools: Tools,
    tmp_path: Path,
) -> None:
    hub.add("acme/sql", adapter_files, "v1", private=True)
    (tmp_path / "token").write_text(small_hub_tools["other_token"])
    resolver = make_resolver(replace(settings, token_file=tmp_path / "token"))
    assert await resolve("acme/sql:v1", resolver=resolver) is None

    (tmp_path / "token").write_text(small_hub_tools["token"])
    assert await resolve("acme/sql:v1", resolver=resolver) is not None

    (tmp_path / "token").unlink()
    with pytest.raises(Unavailable, match="token"):
        await resolve("acme/sql:v1", resolver=resolver)


def test_a_source_without_its_token_does_not_start(
    settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MURAL_HUB_TOKEN", raising=False)

    with pytest.raises(InvalidInput, match="MURAL_HUB_TOKEN"):
        HubResolver(replace(settings, token_env="MURAL_HUB_TOKEN"))


@pytest.mark.parametrize("package", ["huggingface_hub", "httpx2"])
def test_without_its_packages_a_hub_says_what_to_install(package: str) -> None:
    # In a process of its own: here they have been imported long ago.
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from mural_resolvers.errors import InvalidInput\n"
        "from mural_resolvers.hub import HubResolver, HubSettings\n"
        "try: HubResolver(HubSettings(organisations=('acme',)))\n"
        "except InvalidInput as error: print(error.message)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )

    assert "pip install mural[hub]" in ran.stdout


async def test_the_machines_own_token_is_not_sent(
    hub: Any,
    resolve: Any,
    adapter_files: Files,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_machinemachine")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine localhost login me password canary\n")
    hub.add("acme/sql", adapter_files, "v1")

    await resolve("acme/sql:v1")

    assert {asked.headers.get("authorization") for asked in hub.asked} == {None}
