"""Where credentials come from: each link of botocore's chain, held to a server that checks them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.names import AdapterName
from mural_resolvers.s3 import S3Resolver, S3Settings
from mural_resolvers.tenants import Principal

pytestmark = pytest.mark.stores

KEY_ID, SECRET = "mural", "muralsecret"
END = "2099-01-01T00:00:00Z"
ROLE = "the-role"

ASSUMED = f"""<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{KEY_ID}</AccessKeyId>
<SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken></SessionToken>
<Expiration>{END}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""
OF_THE_INSTANCE = json.dumps(
    {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": KEY_ID,
        "SecretAccessKey": SECRET,
        "Token": "",
        "Expiration": END,
        "LastUpdated": "2026-01-01T00:00:00Z",
    }
)


@contextmanager
def answering(answers: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """A server that knows these paths; its URL, and what it is asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", "0"))).decode()
            asked.append(f"{self.command} {self.path} {sent}")
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            data = (body or "").encode()
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = _answer  # http.server asks for these

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


@pytest.fixture
def settings(
    versitygw: Any, new_bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Settings]:
    """Of a bucket for which this process has no credentials."""
    bucket = new_bucket(versitygw)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    yield bucket.settings(max_attempts=1)
    bucket.boto.close()


async def reads(settings: S3Settings, base: BaseSpec) -> None:
    """Have the server answer, which it does to nobody whose signature is wrong."""
    resolver = S3Resolver(settings)
    try:
        name = AdapterName("acme", "default", "v1")
        assert await resolver.resolve(Principal("acme"), name, base) is None
    finally:
        await resolver.close()


async def test_of_a_profile(
    settings: S3Settings, base_spec: BaseSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n"
        f"[ml]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    stated = {field: getattr(settings, field) for field in settings.__dataclass_fields__}
    await reads(S3Settings(**stated | {"profile": "ml"}), base_spec)


async def test_of_a_web_identity(
    settings: S3Settings, base_spec: BaseSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a-signed-token")
    with answering({"/": ASSUMED}) as (url, asked):
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ROLE_ARN", f"arn:aws:iam::123456789012:role/{ROLE}")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        await reads(settings, base_spec)
    assert len(asked) == 1
    assert "WebIdentityToken=a-signed-token" in asked[0]


async def test_of_the_instances_role(
    settings: S3Settings, base_spec: BaseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = "/latest/meta-data/iam/security-credentials/"
    answers = {"/latest/api/token": "t", roles: ROLE, roles + ROLE: OF_THE_INSTANCE}
    with answering(answers) as (url, asked):
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", url)
        await reads(settings, base_spec)
    assert [line.split()[1] for line in asked] == list(answers)
