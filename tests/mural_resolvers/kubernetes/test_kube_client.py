"""Calls to an API server by hand: what is sent, what is refused, and what has a bound."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lightkube.config.kubeconfig import KubeConfig

from mural_resolvers.kubernetes import client as client_module
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.paths import ADAPTERS, LEASES, PODS, Resource

PATH = ADAPTERS.named("prod", "a")


@pytest.fixture
async def client(kube_api):
    async with KubeClient(kube_api.config(token="t"), timeout_s=5.0) as client:
        yield client


@pytest.mark.parametrize(
    ("call", "method", "media", "verb"),
    [
        (lambda c: c.get(PATH), "GET", None, "get"),
        (lambda c: c.get(PATH, {"limit": "1"}), "GET", None, "list"),
        (lambda c: c.create(PATH, {"a": 1}), "POST", "application/json", "create"),
        (lambda c: c.replace(PATH, {"a": 1}), "PUT", "application/json", "update"),
        (lambda c: c.patch(PATH, {"a": 1}), "PATCH", "application/merge-patch+json", "patch"),
        (
            lambda c: c.patch(PATH, [{"op": "test"}], kind="json"),
            "PATCH",
            "application/json-patch+json",
            "patch",
        ),
        (
            lambda c: c.patch(PATH, {"a": 1}, kind="apply", params={"fieldManager": "mural"}),
            "PATCH",
            "application/apply-patch+yaml",
            "patch",
        ),
    ],
)
async def test_each_verb_is_sent_as_the_api_wants_it_and_counted(
    kube_api, client, call, method, media, verb
):
    kube_api.answer(200, {"kind": "Adapter"})
    assert json.loads(await call(client)) == {"kind": "Adapter"}
    asked = kube_api.asked[0]
    assert (asked.method, asked.path) == (method, PATH)
    assert asked.headers.get("content-type") == media
    assert asked.headers["authorization"] == "Bearer t"
    assert client.calls == {verb: 1}
    assert client.namespace == "prod"


async def test_deleting_what_is_gone_is_a_success(kube_api, client):
    kube_api.answer(404, {"reason": "NotFound"})
    await client.delete(PATH)
    kube_api.answer(403, {"reason": "Forbidden"})
    with pytest.raises(KubeError, match="Forbidden"):
        await client.delete(PATH)
    assert client.calls == {"delete": 2}


@pytest.mark.parametrize(
    ("status", "body", "reason", "message"),
    [
        (409, {"reason": "Conflict", "message": "modified"}, "Conflict", "modified"),
        (403, {"reason": "Forbidden", "message": "no"}, "Forbidden", "no"),
        (422, {"reason": "Invalid", "message": "x" * 9999}, "Invalid", "x" * 500),
        # Not the API server's own: a proxy's page.
        (502, b"<html>bad gateway</html>", "X", "X"),
        (500, b"", "X", "X"),
        (500, b'{"reason": 7}', "X", "X"),
        (500, b"[" * 100_000, "X", "X"),
        (302, b"", "X", "X"),
    ],
    ids=range(8),
)
async def test_a_refusal_says_its_status_reason_and_message(
    kube_api, client, status, body, reason, message
):
    kube_api.answer(status, body)
    with pytest.raises(KubeError) as caught:
        await client.get(PATH)
    error = caught.value
    assert (error.status, error.reason, error.message) == (status, reason, message)
    assert len(kube_api.asked) == 1


async def test_no_server_at_all_is_status_zero(kube_api, client):
    kube_api.down()
    with pytest.raises(KubeError, match="ConnectError") as caught:
        await client.get(PATH)
    assert (caught.value.status, caught.value.reason) == (0, "NoAnswer")


async def test_a_server_that_never_answers_is_given_up(kube_api):
    kube_api.hanging = True
    async with KubeClient(kube_api.config(), timeout_s=0.05) as client:
        with pytest.raises(KubeError, match=r"no answer from http.* within 0\.05 s") as caught:
            await client.create(PATH, {})
    assert caught.value.status == 0


async def test_what_the_api_server_has_dropped_is_said_once(kube_api, client, caplog):
    warning = '299 - "unknown field \\"status.rank\\"", 299 - "v1 is deprecated"'
    kube_api.answer(200, {}, times=2, warning=warning)
    await client.patch(PATH, {})
    await client.patch(PATH, {})
    assert len(caplog.messages) == 2
    assert 'unknown field "status.rank": its definitions' in caplog.messages[0]
    assert "charts/mural/crds" in caplog.messages[0]
    assert caplog.messages[1] == "the API server warns: v1 is deprecated"


async def test_a_body_that_never_ends_in_time_is_given_up(kube_api):
    # The head promises more than ever comes.
    kube_api.answer(200, b"x", content_length="100")
    async with KubeClient(kube_api.config(), timeout_s=0.05) as client:
        with pytest.raises(KubeError, match=r"no answer from \S+ within"):
            await client.get(PATH)


async def test_an_answer_that_is_too_large_is_refused(kube_api, client, monkeypatch):
    monkeypatch.setattr(client_module, "MAX_BODY_BYTES", 100)
    kube_api.answer(200, b"x" * 101)
    with pytest.raises(KubeError, match="larger than 100 bytes"):
        await client.get(PATH)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_call_that_shall_come_again_soon_comes_again_once(kube_api, client, status):
    kube_api.answer(status, {"message": "busy"}, retry_after="0")
    kube_api.answer(201, {"done": True})
    assert json.loads(await client.create(PATH, {"a": 1})) == {"done": True}
    assert [each.body for each in kube_api.asked] == [b'{"a":1}'] * 2
    kube_api.answer(status, {"message": "busy"}, times=2, retry_after="0")
    with pytest.raises(KubeError, match="busy") as caught:
        await client.create(PATH, {"a": 1})
    assert caught.value.retry_after_s == 0.0
    assert client.calls == {"create": 4}


@pytest.mark.parametrize(
    ("text", "told"),
    [("60", 60.0), ("-1", None), ("Wed, 21 Oct 2037 07:28:00 GMT", None), ("9" * 99, None)],
)
async def test_a_server_that_wants_long_patience_is_reported(kube_api, client, text, told):
    kube_api.answer(503, {"message": "busy"}, retry_after=text)
    with pytest.raises(KubeError, match="busy") as caught:
        await client.get(PATH)
    assert caught.value.retry_after_s == told
    assert len(kube_api.asked) == 1


async def test_a_service_accounts_token_is_read_again_when_it_has_been_replaced(
    kube_api, tmp_path, monkeypatch
):
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("prod")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(kube_api.port))
    account = KubeConfig.from_service_account(tmp_path).get()
    assert account is not None
    config = kube_api.config()._replace(user=account.user)
    async with KubeClient(config) as client:
        kube_api.answer(200, {})
        await client.get(PATH)
        # The kubelet replaces the file long before the token in it expires.
        (tmp_path / "token").write_text("second\n")
        kube_api.answer(401, {"reason": "Unauthorized"})
        kube_api.answer(200, {})
        await client.get(PATH)
        kube_api.answer(200, {})
        await client.get(PATH)
        sent = [each.headers["authorization"].split()[1] for each in kube_api.asked]
        assert sent == ["first", "first", "second", "second"]
        # One that is refused twice is refused.
        kube_api.answer(401, {"reason": "Unauthorized"}, times=2)
        with pytest.raises(KubeError, match="Unauthorized"):
            await client.get(PATH)
        (tmp_path / "token").unlink()
        kube_api.answer(401, {"reason": "Unauthorized"})
        with pytest.raises(KubeError, match="token") as caught:
            await client.get(PATH)
        assert caught.value.status == 0


async def test_a_watch_too_is_opened_with_the_token_that_replaced_the_first(kube_api, tmp_path):
    (tmp_path / "token").write_text("first")
    config = kube_api.config(token_file=str(tmp_path / "token"))
    async with KubeClient(config) as client:
        kube_api.answer(200, {})
        await client.get(PATH)
        (tmp_path / "token").write_text("second")
        kube_api.answer(401, {"reason": "Unauthorized"})
        kube_api.answer(200, b"line\n")
        params = {"watch": "true"}
        async with client.stream(ADAPTERS.of("prod"), params, silence_s=5.0) as lines:
            assert [line async for line in lines] == [b"line"]
    assert kube_api.asked[-1].headers["authorization"] == "Bearer second"


async def test_a_program_that_makes_no_token_is_no_answer(kube_api):
    program: dict[str, Any] = {
        "apiVersion": "client.authentication.k8s.io/v1beta1",
        "command": "echo",
        "args": ['{"status": null}'],
    }
    config = KubeConfig.from_dict(
        {
            "current-context": "x",
            "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{kube_api.port}"}}],
            "users": [{"name": "x", "user": {"exec": program}}],
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        }
    ).get()
    assert config is not None
    async with KubeClient(config) as client:
        with pytest.raises(KubeError) as caught:
            await client.get(PATH)
    assert caught.value.status == 0


def test_a_certificate_that_is_not_there_is_said_at_the_start(kube_api):
    config = kube_api.config()
    cluster = type(config.cluster)(server="https://x", certificate_auth="/absent/ca.crt")
    with pytest.raises(ValueError, match="no Kubernetes to ask"):
        KubeClient(config._replace(cluster=cluster))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (ADAPTERS.all(), "/apis/mural.dev/v1alpha1/adapters"),
        (ADAPTERS.of("prod"), "/apis/mural.dev/v1alpha1/namespaces/prod/adapters"),
        (ADAPTERS.named("prod", "a"), "/apis/mural.dev/v1alpha1/namespaces/prod/adapters/a"),
        (ADAPTERS.status("p", "a"), "/apis/mural.dev/v1alpha1/namespaces/p/adapters/a/status"),
        (PODS.of("prod"), "/api/v1/namespaces/prod/pods"),
        (
            LEASES.named("prod", "a/../b?c"),
            "/apis/coordination.k8s.io/v1/namespaces/prod/leases/a%2F..%2Fb%3Fc",
        ),
        (Resource("", "v1", "configmaps").all(), "/api/v1/configmaps"),
    ],
)
def test_objects_have_the_paths_that_the_api_gives_them(path, text):
    assert path == text


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_lead_elsewhere_is_refused(name):
    with pytest.raises(ValueError, match="no name of an object"):
        PODS.named("prod", name)
    with pytest.raises(ValueError, match="no name of an object"):
        PODS.of(name)
