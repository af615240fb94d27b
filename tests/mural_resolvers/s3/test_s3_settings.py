"""Settings of an S3 store, from a URL and from a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput
from mural_resolvers.s3 import S3Settings


def test_a_url_gives_bucket_prefix_and_any_setting() -> None:
    settings = S3Settings.from_url(
        "s3://models/team/adapters?endpoint_url=https%3A%2F%2Fs3.example.org%3A9000&region=eu-1"
        "&path_style=0&ca_bundle=/etc/ca.pem&accept_unpublished=true&alias_cache_s=2.5"
        "&max_attempts=4&checksums=when_required&profile=ml"
    )
    assert settings == S3Settings(
        bucket="models",
        prefix="team/adapters",
        endpoint_url="https://s3.example.org:9000",
        region="eu-1",
        path_style=False,
        ca_bundle=Path("/etc/ca.pem"),
        accept_unpublished=True,
        alias_cache_s=2.5,
        max_attempts=4,
        checksums="when_required",
        profile="ml",
    )


def test_a_bare_url_is_aws_with_its_defaults() -> None:
    settings = S3Settings.from_url("s3://models")
    assert settings == S3Settings(bucket="models")
    assert settings.addressing_style == "auto"
    assert settings.location == "s3://models"


def test_an_endpoint_means_path_style_unless_told_otherwise() -> None:
    endpoint = "http://127.0.0.1:9000"
    assert S3Settings(bucket="models", endpoint_url=endpoint).addressing_style == "path"
    told = S3Settings(bucket="models", endpoint_url=endpoint, path_style=False)
    assert told.addressing_style == "virtual"
    assert told.location == "s3://models at http://127.0.0.1:9000"


def test_a_mapping_takes_texts_and_values_alike() -> None:
    texts = {"bucket": "models", "prefix": "/a/b/", "path_style": "yes", "read_timeout_s": "7"}
    values = {"bucket": "models", "prefix": "a/b", "path_style": True, "read_timeout_s": 7}
    assert S3Settings.from_mapping(texts) == S3Settings.from_mapping(values)


def test_a_mapping_may_have_a_url_and_settings_beside_it() -> None:
    told = S3Settings.from_mapping({"url": "s3://models/a?region=eu-1", "path_style": True})
    assert told == S3Settings(bucket="models", prefix="a", region="eu-1", path_style=True)


@pytest.mark.parametrize(
    "url",
    [
        "http://models/a",
        "s3:///a",
        "s3://",
        "s3://key:secret@models/a",
        "s3://models/a#b",
        "s3://models/a//b",
        "s3://models/a/../b",
        "s3://models/a/%2e%2e/b",
        "s3://models/a?nonsense=1",
        "s3://models/a?region=eu-1&region=eu-2",
        "s3://models/a?bucket=other",
        "s3://models/a?path_style=perhaps",
        "s3://models/a?max_attempts=0",
        "s3://models/a?max_attempts=1.5",
        "s3://models/a?read_timeout_s=inf",
        "s3://models/a?read_timeout_s=nan",
        "s3://models/a?read_timeout_s=-1",
        "s3://models/a?checksums=never",
        "s3://models/a?endpoint_url=ftp://host",
        "s3://models/a?endpoint_url=http://user:secret@host",
        "s3://models/a?endpoint_url=http://host?x=1",
        "s3://models/a?endpoint_url=",
        "s3://models/a?upload_part_bytes=1000",
        "s3://mo..dels/a",
        "s3://m/a",
    ],
)
def test_what_cannot_be_meant_is_refused_without_repeating_a_secret(url: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        S3Settings.from_url(url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"bucket": 3},
        {"bucket": "models", "path_style": 3},
        {"bucket": "models", "max_attempts": True},
        {"bucket": "models", "ca_bundle": ""},
        {"url": "s3://models", "bucket": "other"},
        {"url": 3},
    ],
)
def test_a_mapping_that_cannot_be_meant_is_refused(mapping: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        S3Settings.from_mapping(mapping)


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    for url in (text, f"s3://{text}", f"s3://models/{text}"):
        try:
            settings = S3Settings.from_url(url)
        except InvalidInput:
            continue
        assert ".." not in settings.prefix.split("/")
        assert "" not in settings.prefix.split("/") or settings.prefix == ""


def test_without_aiobotocore_it_is_said_what_to_install() -> None:
    """In a process that cannot import it, as with only the base installed."""
    script = (
        "import sys; sys.modules['aiobotocore'] = None\n"
        "from mural_resolvers.errors import InvalidInput\n"
        "try:\n    import mural_resolvers.s3\n"
        "except InvalidInput as error:\n    print(error.message)\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'mural[s3]'" in answer.stdout, answer.stderr


def test_a_root_logger_at_debug_does_not_make_botocore_write_what_it_signs() -> None:
    probe = (
        "import logging; logging.basicConfig(level='DEBUG'); import mural_resolvers.s3;"
        "print([logging.getLogger(name).isEnabledFor(logging.DEBUG)"
        " for name in ('botocore', 'botocore.auth', 'aiobotocore.endpoint')])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, False, False]"
