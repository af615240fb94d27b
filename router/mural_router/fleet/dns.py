"""Replicas behind a DNS name: its addresses, or the targets of its SRV records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from mural_resolvers.backoff import Backoff
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.fleet.options import (
    read_engine,
    read_port,
    read_weight,
    split_options,
    url_port,
)

__all__ = ["DnsDiscovery", "DnsPlace", "parse_dns"]

log = logging.getLogger(__name__)

OPTIONS = ("engine", "control", "tls", "weight")
LIFETIME_S = 5.0
MIN_TTL_S = 1.0
MAX_TTL_S = 30.0
"""A change is seen within it, whatever lifetime the records claim."""


@dataclass(frozen=True, slots=True)
class DnsPlace:
    """A name to ask for. ``port``: of every address; None: the SRV records say."""

    name: str
    port: int | None
    engine: Engine = "mural"
    control_port: int | None = None
    """None: the next one after each port."""
    tls: bool = False
    weight: float = 1.0
    """Of every replica."""

    def endpoint(self, host: str, port: int) -> Endpoint:
        """One replica, named by its address, which every router sees alike."""
        control = None
        if self.engine == "mural":
            control = self.control_port or port + 1
        return Endpoint(
            name=Endpoint(name="", host=host, port=port).authority,
            host=host,
            port=port,
            engine=self.engine,
            control_port=control,
            tls=self.tls,
            weight=self.weight,
        )


class _Answer(NamedTuple):
    places: frozenset[tuple[str, int]]
    ttl_s: float


class DnsDiscovery(Discovery):
    """Asks again when the records' lifetime is over, between 1 and 30 s later.

    A name that cannot be resolved, or is not there, takes nothing away: a failing DNS must not
    empty a fleet, and replicas that have really gone are seen to be by those who follow them.
    IPv6 addresses count where there is no IPv4 one, so that no replica is there twice. Priorities
    and weights of SRV records are not used: load is spread by what replicas report, and a cluster's
    DNS writes weights that fall with the number of pods.
    """

    def __init__(self, place: DnsPlace, resolver: dns.asyncresolver.Resolver | None = None) -> None:
        """``resolver``: None: as this machine is configured. Raises ValueError for no name."""
        try:
            dns.name.from_text(place.name)
            self._resolver = resolver or dns.asyncresolver.Resolver()
        except dns.exception.DNSException as error:
            raise ValueError(f"{place.name!r}: {error}") from None
        self._place = place
        self._backoff = Backoff(MIN_TTL_S, MAX_TTL_S)

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        found: frozenset[tuple[str, int]] | None = None
        trouble = ""
        while True:
            try:
                answer = await self._ask()
            except (dns.exception.DNSException, OSError) as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("%s cannot be resolved: %s", self._place.name, trouble)
                if found is None:
                    # Whoever waits for the first set may know that there is none yet.
                    found = frozenset()
                    yield ()
                await asyncio.sleep(self._backoff.next_s())
                continue
            trouble = ""
            self._backoff.reset()
            if answer.places != found:
                found = answer.places
                yield tuple(self._place.endpoint(host, port) for host, port in sorted(found))
            await asyncio.sleep(min(max(answer.ttl_s, MIN_TTL_S), MAX_TTL_S))

    async def _ask(self) -> _Answer:
        if self._place.port is None:
            return await self._ask_srv()
        try:
            return await self._ask_addresses(self._place.port, dns.rdatatype.A)
        except dns.resolver.NoAnswer:
            return await self._ask_addresses(self._place.port, dns.rdatatype.AAAA)

    async def _resolve(self, kind: dns.rdatatype.RdataType) -> dns.resolver.Answer:
        asking = asyncio.create_task(
            self._resolver.resolve(self._place.name, kind, lifetime=LIFETIME_S)
        )
        try:
            # In a task of its own: on Python 3.11 a cancellation that comes together with the
            # answer gets lost in asyncio.wait_for, with which the resolver waits.
            await asyncio.wait((asking,))
            return asking.result()
        finally:
            asking.cancel()

    async def _ask_addresses(self, port: int, kind: dns.rdatatype.RdataType) -> _Answer:
        answer = await self._resolve(kind)
        rrset = answer.rrset or ()
        return _Answer(frozenset((record.to_text(), port) for record in rrset), _ttl_s(answer))

    async def _ask_srv(self) -> _Answer:
        answer = await self._resolve(dns.rdatatype.SRV)
        places = frozenset(
            (record.target.to_text(omit_final_dot=True), record.port)
            for record in answer.rrset or ()
            # A target of "." says that there is no such service.
            if isinstance(record, SRV) and record.target != dns.name.root
        )
        return _Answer(places, _ttl_s(answer))


def _ttl_s(answer: dns.resolver.Answer) -> float:
    return float(answer.rrset.ttl) if answer.rrset is not None else MIN_TTL_S


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def parse_dns(text: str) -> DnsPlace:
    """Read ``dns://name:port`` or ``dns+srv://_http._tcp.name``, with options.

    ``,engine=vllm``, ``,control=PORT``, ``,tls=on`` and ``,weight=N``. Raises ValueError with what
    is wrong.
    """
    url, options = split_options(text, OPTIONS)
    parts = urlsplit(url)
    if parts.scheme not in ("dns", "dns+srv") or not parts.hostname:
        raise ValueError(f"{text!r} is not dns://name:port or dns+srv://_service._tcp.name")
    if _is_address(parts.hostname):
        raise ValueError(f"{text!r}: an address needs no look-up; say http://{parts.netloc}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r}: it is a name and a port, nothing more")
    port = url_port(text, parts)
    if (parts.scheme == "dns") != (port is not None):
        raise ValueError(f"{text!r}: dns:// needs a port, and dns+srv:// takes none")
    engine = read_engine(text, options.get("engine", "mural"))
    if engine == "vllm" and "control" in options:
        raise ValueError(f"{text!r}: vLLM has no control port")
    if options.get("tls", "off") not in ("on", "off"):
        raise ValueError(f"{text!r}: tls is on or off")
    control = options.get("control")
    return DnsPlace(
        name=parts.hostname,
        port=port,
        engine=engine,
        control_port=None if control is None else read_port(text, control),
        tls=options.get("tls") == "on",
        weight=read_weight(text, options.get("weight", "1")),
    )
