"""Replicas on the command line."""

from __future__ import annotations

import asyncio

import pytest

from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.static import StaticDiscovery, parse_endpoint


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        (
            "http://a:8000",
            Endpoint(name="a:8000", host="a", port=8000, control_port=8001),
        ),
        (
            "http://m\u00fcnchen.example:8000,engine=vllm",
            Endpoint(
                name="xn--mnchen-3ya.example:8000",
                host="xn--mnchen-3ya.example",
                port=8000,
                engine="vllm",
            ),
        ),
        (
            "https://a,name=first,control=9,weight=2.5",
            Endpoint(name="first", host="a", port=443, control_port=9, tls=True, weight=2.5),
        ),
        (
            "http://[::1]:8000/,engine=vllm",
            Endpoint(name="[::1]:8000", host="::1", port=8000, engine="vllm"),
        ),
    ],
)
def test_a_replica_is_a_url_with_options(text, endpoint):
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a:8000",
        "ftp://a:8000",
        "http://:8000",
        "http://a:port",
        "http://a:99999",
        "http://a..b:8000",
        f"http://{'a' * 64}.b:8000",
        "http://user:secret@a:8000",
        "http://a:8000/v1",
        "http://a:8000?x=1",
        "http://a:8000,weight=0",
        "http://a:8000,weight=nan",
        "http://a:8000,weight=inf",
        "http://a:8000,weight=x",
        "http://a:8000,engine=other",
        "http://a:8000,engine=vllm,control=8001",
        "http://a:8000,control=0",
        "http://a:8000,control=70000",
        "http://a:8000,name=",
        "http://a:8000,colour=red",
        "http://a:8000,name=x,name=y",
        "http://a:65535",
    ],
)
def test_what_is_no_replica_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_endpoint(text)


def test_two_replicas_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two replicas"):
        StaticDiscovery([parse_endpoint("http://a:1,name=x"), parse_endpoint("http://b:1,name=x")])


async def test_the_list_is_told_once():
    watch = StaticDiscovery([parse_endpoint("http://a:8000")]).watch()
    assert [endpoint.name for endpoint in await anext(watch)] == ["a:8000"]
    more = asyncio.ensure_future(anext(watch))
    done, _ = await asyncio.wait([more], timeout=0)
    assert not done
    more.cancel()
