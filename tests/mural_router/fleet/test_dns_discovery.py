"""Replicas behind a name, asked of a real DNS server in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest

from mural_router.cluster import Cluster
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.dns import DnsDiscovery, DnsPlace, parse_dns
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.places import JoinedDiscovery, open_discovery


class Zone(asyncio.DatagramProtocol):
    """Answers with its records: ``{(name, type): (ttl, *values)}``; absent names are NXDOMAIN."""

    resolver: dns.asyncresolver.Resolver

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, *tuple[str, ...]]] = {}
        self.broken = False
        self.asked = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's own, which is no subclass of DatagramTransport.
        self.transport: Any = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        if self.broken:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif (name, kind) in self.records:
            ttl, *values = self.records[name, kind]
            answer.answer.append(dns.rrset.from_text(question.name, ttl, "IN", kind, *values))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self.transport.sendto(answer.to_wire(), address)
        self.asked.set()


@pytest.fixture
async def zone(monkeypatch):
    monkeypatch.setattr("mural_router.fleet.dns.MIN_TTL_S", 0.02)
    loop = asyncio.get_running_loop()
    transport, zone = await loop.create_datagram_endpoint(Zone, local_addr=("127.0.0.1", 0))
    zone.resolver = dns.asyncresolver.Resolver(configure=False)
    zone.resolver.nameservers = ["127.0.0.1"]
    zone.resolver.port = transport.get_extra_info("sockname")[1]
    yield zone
    transport.close()


@pytest.fixture
async def watch(zone):
    """``watch(text)``: a function that gives the next set of names."""
    watches = []

    def start(text: str):
        watches.append(DnsDiscovery(parse_dns(text), zone.resolver).watch())

        async def told() -> list[str]:
            found = await asyncio.wait_for(anext(watches[-1]), 20)
            return [endpoint.name for endpoint in found]

        return told

    yield start
    for each in watches:
        await each.aclose()


async def test_addresses_of_a_name_are_replicas_and_follow_its_changes(zone, watch):
    zone.records["mural.test", "A"] = (0, "10.0.0.2", "10.0.0.1")
    told = watch("dns://mural.test:8000")
    assert await told() == ["10.0.0.1:8000", "10.0.0.2:8000"]
    zone.records["mural.test", "A"] = (0, "10.0.0.3")
    assert await told() == ["10.0.0.3:8000"]


async def test_ipv6_counts_where_there_is_no_ipv4(zone, watch):
    zone.records["mural.test", "AAAA"] = (0, "2001:db8::1")
    assert await watch("dns://mural.test:8000")() == ["[2001:db8::1]:8000"]


async def test_all_replicas_of_a_name_have_its_weight(zone):
    zone.records["mural.test", "A"] = (0, "10.0.0.1", "10.0.0.2")
    zone.records["_http._tcp.mural.test", "SRV"] = (0, "0 7 8000 a.mural.test.")
    for text in ("dns://mural.test:8000,weight=2", "dns+srv://_http._tcp.mural.test,weight=2"):
        watch = DnsDiscovery(parse_dns(text), zone.resolver).watch()
        found = await asyncio.wait_for(anext(watch), 20)
        assert {endpoint.weight for endpoint in found} == {2.0}
        await watch.aclose()


async def test_srv_records_tell_ports_too(zone, watch):
    zone.records["_http._tcp.mural.test", "SRV"] = (
        *(0, "0 100 8000 a.mural.test."),
        *("10 5 9000 b.mural.test.", "0 0 1 ."),
    )
    assert await watch("dns+srv://_http._tcp.mural.test")() == [
        "a.mural.test:8000",
        "b.mural.test:9000",
    ]


async def test_a_failing_dns_takes_nothing_away(zone, watch, caplog):
    zone.records["mural.test", "A"] = (0, "10.0.0.1")
    told = watch("dns://mural.test:8000")
    assert await told() == ["10.0.0.1:8000"]
    zone.broken = True
    following = asyncio.ensure_future(told())
    await asked_again(zone)
    zone.broken, zone.records = False, {}
    await asked_again(zone)
    zone.records["mural.test", "A"] = (0, "10.0.0.1", "10.0.0.2")
    # Neither SERVFAIL nor NXDOMAIN has told an empty set before.
    assert await following == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert "mural.test cannot be resolved" in caplog.text


async def asked_again(zone: Zone) -> None:
    for _ in range(3):
        zone.asked.clear()
        await asyncio.wait_for(zone.asked.wait(), 20)


async def test_a_name_that_is_not_there_yet_is_an_empty_fleet_until_it_is(zone, watch):
    told = watch("dns://mural.test:8000")
    assert await told() == []
    zone.records["mural.test", "A"] = (0, "10.0.0.1")
    assert await told() == ["10.0.0.1:8000"]


async def test_equal_answers_in_another_order_are_no_news(zone, watch):
    zone.records["mural.test", "A"] = (0, "10.0.0.1", "10.0.0.2")
    told = watch("dns://mural.test:8000")
    await told()
    zone.records["mural.test", "A"] = (0, "10.0.0.2", "10.0.0.1")
    following = asyncio.ensure_future(told())
    await asked_again(zone)
    assert not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("dns://mural.prod:8000", DnsPlace("mural.prod", 8000)),
        (
            "dns+srv://_http._tcp.mural.prod,engine=vllm,tls=on",
            DnsPlace("_http._tcp.mural.prod", None, "vllm", tls=True),
        ),
        ("dns://mural:8000,control=9", DnsPlace("mural", 8000, control_port=9)),
        ("dns://mural:8000,weight=2.5", DnsPlace("mural", 8000, weight=2.5)),
    ],
)
def test_a_name_is_written_as_a_url(text, place):
    assert parse_dns(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "dns://mural",
        "dns+srv://mural:8000",
        "dns://:8000",
        "dns://mural:8000/x",
        "dns://mural:99999",
        "dns://mural:8000,engine=x",
        "dns://mural:8000,engine=vllm,control=1",
        "dns://mural:8000,tls=maybe",
        "dns://mural:8000,weight=0",
        "dns+srv://mural,weight=much",
        "dns://mural:8000,name=x",
        "http://mural:8000",
    ],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_dns(text)


@pytest.mark.parametrize("text", ["dns://10.0.0.1:80", "dns://[::1]:80,weight=2"])
def test_an_address_is_refused_with_the_form_that_it_has(text):
    with pytest.raises(ValueError, match="needs no look-up; say http://"):
        parse_dns(text)


def test_a_name_that_dns_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="label"):
        DnsDiscovery(DnsPlace("x" * 70, 8000))


def test_a_replica_has_the_control_port_that_is_written_or_the_next_one():
    assert parse_dns("dns://m:8000").endpoint("h", 8000).control_port == 8001
    assert parse_dns("dns://m:8000,control=9").endpoint("h", 8000).control_port == 9
    assert parse_dns("dns://m:8000,engine=vllm").endpoint("h", 8000).control_port is None


# -- several ways together ------------------------------------------------------------------------


async def test_a_fleet_is_told_when_every_way_has_answered(listed):
    a, b = Endpoint(name="a", host="a", port=1), Endpoint(name="b", host="b", port=1)
    other = Endpoint(name="a", host="other", port=1)
    first, second = listed(a), listed()
    second.sets.get_nowait()
    watch = JoinedDiscovery([first, second]).watch()
    following = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    assert not following.done()
    second.sets.put_nowait((b, other))
    assert await asyncio.wait_for(following, 20) == (a, b)
    first.sets.put_nowait(())
    assert set(await asyncio.wait_for(anext(watch), 20)) == {b, other}
    await watch.aclose()


async def test_the_end_of_one_way_ends_all(listed):
    class Broken(Discovery):
        async def watch(self):
            raise LookupError("no such service")
            yield ()

    with pytest.raises(LookupError):
        await anext(JoinedDiscovery([listed(), Broken()]).watch())


async def test_places_are_opened_as_they_are_written():
    watch = open_discovery(["http://a:1", "http://b:1"], Cluster()).watch()
    assert [endpoint.name for endpoint in await anext(watch)] == ["a:1", "b:1"]
    await watch.aclose()
    assert isinstance(
        open_discovery(["http://a:1", "dns://mural:8000"], Cluster()), JoinedDiscovery
    )
    assert isinstance(open_discovery(["dns://mural:8000"], Cluster()), JoinedDiscovery)
    with pytest.raises(ValueError, match="ftp"):
        open_discovery(["ftp://a"], Cluster())
