"""vLLM's load and unload endpoints: its statuses, types and words."""

from __future__ import annotations

import pytest


@pytest.fixture
def path(adapter_dir) -> str:
    return str(adapter_dir / "acme/default/v1")


async def test_a_loaded_adapter_serves_and_an_unload_says_what_was_freed(server, path):
    loaded = await server.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": path})
    assert loaded.status_code == 200
    assert loaded.text == "Success: LoRA adapter 'sql' added successfully."
    assert (await server.complete(model="sql")).json()["model"] == "sql"
    unloaded = await server.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert unloaded.status_code == 200
    assert unloaded.text.startswith("Success: LoRA adapter 'sql' removed successfully.")
    assert "100 bytes of host memory and 2 KV blocks" in unloaded.text
    assert (await server.complete(model="sql")).status_code == 404


async def test_an_unload_of_a_shared_content_says_that_nothing_was_freed(server, path):
    for name in ("one", "two"):
        await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
    unloaded = await server.post("/v1/unload_lora_adapter", {"lora_name": "one"})
    assert "Nothing was freed" in unloaded.text


@pytest.mark.parametrize("body", [{}, {"lora_name": "x"}, {"lora_path": "/x"}, {"lora_name": ""}])
async def test_missing_fields_are_invalid_user_input(server, body):
    response = await server.post("/v1/load_lora_adapter", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "InvalidUserInput"
    assert error["message"] == "Both 'lora_name' and 'lora_path' must be provided."


async def test_a_name_that_is_taken_is_invalid_user_input(server, path):
    body = {"lora_name": "sql", "lora_path": path}
    await server.post("/v1/load_lora_adapter", body)
    again = await server.post("/v1/load_lora_adapter", body)
    assert again.status_code == 400
    assert again.json()["error"]["type"] == "InvalidUserInput"
    assert again.json()["error"]["message"] == ("The lora adapter 'sql' has already been loaded.")
    base = await server.post("/v1/load_lora_adapter", body | {"lora_name": "tiny"})
    assert base.status_code == 400
    assert base.json()["error"]["type"] == "InvalidUserInput"
    inplace = await server.post("/v1/load_lora_adapter", body | {"load_inplace": True})
    assert inplace.status_code == 200


async def test_absent_files_and_names_are_404(server, adapter_dir):
    body = {"lora_name": "sql", "lora_path": str(adapter_dir / "nothing")}
    assert (await server.post("/v1/load_lora_adapter", body)).status_code == 404
    for endpoint in ("unload", "pin", "unpin"):
        response = await server.post(f"/v1/{endpoint}_lora_adapter", {"lora_name": "sql"})
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "NotFoundError"


async def test_a_path_outside_the_allowed_folders_is_one_refusal(server):
    answers = set()
    for path in ("/etc", "/nowhere", "../..", "/proc/self"):
        response = await server.post(
            "/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": path}
        )
        assert response.status_code == 403
        answers.add(response.text)
    assert len(answers) == 1


async def test_a_folder_that_is_no_adapter_is_422(server, adapter_dir):
    (adapter_dir / "empty").mkdir()
    body = {"lora_name": "sql", "lora_path": str(adapter_dir / "empty")}
    response = await server.post("/v1/load_lora_adapter", body)
    assert response.status_code == 422
    assert "adapter_config.json" in response.json()["error"]["message"]


async def test_pinning_is_seen_in_the_list(server, path):
    await server.post("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": path})

    async def pinned() -> bool:
        cards = (await server.http.get("/v1/models")).json()["data"]
        return next(card["pinned"] for card in cards if card["id"] == "sql")

    assert not await pinned()
    assert (await server.post("/v1/pin_lora_adapter", {"lora_name": "sql"})).status_code == 200
    assert await pinned()
    assert (await server.post("/v1/unpin_lora_adapter", {"lora_name": "sql"})).status_code == 200
    assert not await pinned()


async def test_tokenize_and_detokenize_are_each_others_inverse(server):
    tokenized = await server.post(
        "/tokenize", {"model": "tiny", "prompt": "Hé", "return_token_strs": True}
    )
    answer = tokenized.json()
    assert answer["count"] == 3
    assert answer["max_model_len"] == 256
    assert answer["token_strs"] == ["H", "Ã", "©"]
    body = {"model": "tiny", "tokens": answer["tokens"]}
    assert (await server.post("/detokenize", body)).json() == {"prompt": "Hé"}
    assert (await server.post("/detokenize", {"model": "tiny", "tokens": [999]})).status_code == 400
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    assert (await server.post("/tokenize", chat)).json()["count"] > 3
    assert (await server.post("/tokenize", chat | {"prompt": "x"})).status_code == 400
