"""The tests' own hub, held to huggingface_hub's client: what its caller sees is the real thing."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._http import default_client_factory

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run with HF_HUB_OFFLINE, which is right for every hub but this one.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def api(hub: Any, small_hub_tools: dict[str, Any]) -> HfApi:
    return HfApi(endpoint=hub.url, token=small_hub_tools["token"])


def read_all(folder: str) -> Files:
    root = Path(folder)
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_a_snapshot_has_every_file_of_the_commit(
    hub: Any, api: HfApi, adapter_files: Files, tmp_path: Path
) -> None:
    commit = hub.add("acme/sql", adapter_files, "main", "v1")

    folder = api.snapshot_download("acme/sql", revision="v1", cache_dir=tmp_path / "cache")

    assert read_all(folder) == adapter_files
    assert Path(folder).name == commit


def test_the_description_has_the_commit_and_the_files(
    hub: Any, api: HfApi, adapter_files: Files
) -> None:
    commit = hub.add("acme/sql", adapter_files)

    info = api.model_info("acme/sql", files_metadata=True)

    assert (info.id, info.sha) == ("acme/sql", commit)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings}
    assert sizes == {path: len(data) for path, data in adapter_files.items()}
    weights = next(s for s in info.siblings if s.rfilename == "adapter_model.safetensors")
    assert (
        weights.lfs["sha256"]
        == hashlib.sha256(adapter_files["adapter_model.safetensors"]).hexdigest()
    )


def test_a_tree_is_listed_over_its_pages(hub: Any, api: HfApi, adapter_files: Files) -> None:
    hub.add("acme/sql", adapter_files)
    hub.page_size = 2

    assert set(api.list_repo_files("acme/sql")) == set(adapter_files)


def test_one_file_comes_from_the_store_without_the_token(
    hub: Any, api: HfApi, adapter_files: Files, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files)

    path = api.hf_hub_download("acme/sql", "adapter_model.safetensors", cache_dir=tmp_path / "c")

    assert Path(path).read_bytes() == adapter_files["adapter_model.safetensors"]
    assert [asked.token for asked in hub.asked if asked.server == "store"] == [None]


def test_a_small_file_is_redirected_on_the_same_host(
    hub: Any, api: HfApi, adapter_files: Files, tmp_path: Path
) -> None:
    hub.add("acme/sql", adapter_files)

    path = api.hf_hub_download("acme/sql", "adapter_config.json", cache_dir=tmp_path / "c")

    assert Path(path).read_bytes() == adapter_files["adapter_config.json"]
    assert any("resolve-cache" in asked.path for asked in hub.asked)


def test_a_download_is_resumed_by_a_range(
    hub: Any, api: HfApi, small_hub_tools: dict[str, Any], tmp_path: Path
) -> None:
    data = bytes(range(256)) * (11 << 12)
    hub.add("acme/sql", {"adapter_model.safetensors": data})
    cuts = iter([len(data) - 1])

    def cut(asked: Any, answer: Any) -> Any:
        if asked.server == "store":
            return small_hub_tools["replace"](answer, cut_at=next(cuts, None))
        return None

    hub.alter = cut
    path = api.hf_hub_download("acme/sql", "adapter_model.safetensors", cache_dir=tmp_path / "c")

    assert Path(path).read_bytes() == data
    ranges = [asked.headers.get("range") for asked in hub.asked if asked.server == "store"]
    assert ranges == [None, "bytes=10485760-"]


@pytest.mark.parametrize(
    ("repo", "revision", "file", "error"),
    [
        ("acme/none", "main", "adapter_config.json", RepositoryNotFoundError),
        ("acme/sql", "v9", "adapter_config.json", RevisionNotFoundError),
        ("acme/sql", "main", "none.json", RemoteEntryNotFoundError),
        ("acme/gated", "main", "adapter_config.json", GatedRepoError),
        ("acme/private", "main", "adapter_config.json", RepositoryNotFoundError),
    ],
)
def test_the_client_knows_each_refusal(
    hub: Any,
    api: HfApi,
    repo: str,
    revision: str,
    file: str,
    error: type[Exception],
    tmp_path: Path,
) -> None:
    files = {"adapter_config.json": b"{}"}
    hub.add("acme/sql", files)
    hub.add("acme/gated", files, gated=True, readers=set())
    hub.add("acme/private", files, private=True, readers=set())

    with pytest.raises(error):
        api.hf_hub_download(repo, file, revision=revision, cache_dir=tmp_path / "cache")


def test_a_gated_repository_is_described_to_everybody(hub: Any, api: HfApi) -> None:
    hub.add("acme/gated", {"adapter_config.json": b"{}"}, gated=True, readers=set())

    assert api.model_info("acme/gated").gated == "manual"


def test_a_renamed_repository_is_followed(hub: Any, api: HfApi) -> None:
    commit = hub.add("globex/new", {"adapter_config.json": b"{}"})
    hub.moved["acme/sql"] = "globex/new"

    assert api.model_info("acme/sql").sha == commit


def test_a_warm_cache_of_the_client_answers_a_revoked_token(
    hub: Any, api: HfApi, adapter_files: Files, small_hub_tools: dict[str, Any], tmp_path: Path
) -> None:
    """The trap because of which nothing here goes through the client's cache."""
    hub.add("acme/sql", adapter_files, private=True)
    first = api.snapshot_download("acme/sql", cache_dir=tmp_path / "cache")
    hub.tokens.remove(small_hub_tools["token"])

    assert api.snapshot_download("acme/sql", cache_dir=tmp_path / "cache") == first


def test_the_client_takes_wrong_bytes_of_the_right_size(
    hub: Any, api: HfApi, adapter_files: Files, small_hub_tools: dict[str, Any], tmp_path: Path
) -> None:
    """The trap because of which every file is hashed here."""
    hub.add("acme/sql", adapter_files)
    hub.alter = lambda asked, answer: (
        small_hub_tools["replace"](answer, body=bytes(len(answer.body)))
        if asked.server == "store"
        else None
    )

    path = api.hf_hub_download("acme/sql", "adapter_model.safetensors", cache_dir=tmp_path / "c")

    assert set(Path(path).read_bytes()) == {0}


def test_a_snapshot_of_a_hub_that_is_busy_is_not_found_locally(
    hub: Any, api: HfApi, small_hub_tools: dict[str, Any], tmp_path: Path
) -> None:
    hub.alter = lambda asked, answer: small_hub_tools["answer"](503)

    with pytest.raises(LocalEntryNotFoundError):
        api.snapshot_download("acme/sql", cache_dir=tmp_path / "cache")


@pytest.fixture
def trusting_client(ca_file: Path) -> Iterator[None]:
    context = ssl.create_default_context(cafile=ca_file)
    huggingface_hub.set_client_factory(
        lambda: httpx2.Client(verify=context, follow_redirects=True, timeout=None)
    )
    yield
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.mark.usefixtures("trusting_client")
def test_over_tls_a_401_without_a_token_is_a_repository_not_found(tls_hub: Any) -> None:
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=tls_hub.url, token=False).model_info("acme/none")


@pytest.mark.usefixtures("trusting_client")
def test_over_tls_a_snapshot_has_every_file(
    tls_hub: Any, adapter_files: Files, tmp_path: Path
) -> None:
    tls_hub.add("acme/sql", adapter_files)

    folder = HfApi(endpoint=tls_hub.url, token=False).snapshot_download(
        "acme/sql", cache_dir=tmp_path / "cache"
    )

    assert read_all(folder) == adapter_files
