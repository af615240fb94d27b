"""Where replicas are looked for, as settings write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from mural_router.cluster import Cluster
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.dns import DnsDiscovery, parse_dns
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.static import StaticDiscovery, parse_endpoint

__all__ = ["JoinedDiscovery", "open_discovery"]


class JoinedDiscovery(Discovery):
    """What several ways find, together; of two replicas with one name the first way's counts."""

    def __init__(self, parts: Iterable[Discovery]) -> None:
        self._parts = tuple(parts)

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        found: list[tuple[Endpoint, ...] | None] = [None] * len(self._parts)
        changed = asyncio.Event()

        async def follow(place: int, part: Discovery) -> None:
            async with aclosing(part.watch()) as sets:
                async for endpoints in sets:
                    found[place] = endpoints
                    changed.set()
            raise RuntimeError("discovery ended")

        tasks = [asyncio.create_task(follow(*part)) for part in enumerate(self._parts)]
        waiting = asyncio.create_task(changed.wait())
        try:
            while True:
                await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        # What no waiting can cure ends the whole.
                        task.result()
                changed.clear()
                waiting = asyncio.create_task(changed.wait())
                # A fleet that is not complete yet would send adapters away from home.
                if None not in found:
                    yield _joined(endpoints for endpoints in found if endpoints is not None)
        finally:
            waiting.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(waiting, *tasks, return_exceptions=True)


def _joined(sets: Iterable[tuple[Endpoint, ...]]) -> tuple[Endpoint, ...]:
    named: dict[str, Endpoint] = {}
    for endpoints in sets:
        for endpoint in endpoints:
            named.setdefault(endpoint.name, endpoint)
    return tuple(named.values())


def open_discovery(places: Iterable[str], cluster: Cluster) -> Discovery:
    """The ways of finding replicas that ``places`` write; raises ValueError with what is wrong.

    ``http://…`` and ``https://…`` (`parse_endpoint`), ``dns://…`` and ``dns+srv://…``
    (`parse_dns`), ``kubernetes://…`` (`parse_kubernetes`, by ``cluster``), any number of each.
    """
    listed: list[Endpoint] = []
    others: list[Discovery] = []
    for text in places:
        scheme = text.partition("://")[0]
        if scheme in ("dns", "dns+srv"):
            others.append(DnsDiscovery(parse_dns(text)))
        elif scheme == "kubernetes":
            others.append(_kubernetes(text, cluster))
        else:
            listed.append(parse_endpoint(text))
    static = StaticDiscovery(listed)
    if not others:
        return static
    return JoinedDiscovery([static, *others] if listed else others)


def _kubernetes(text: str, cluster: Cluster) -> Discovery:
    try:
        cluster.check()
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    from mural_router.fleet.kubernetes import KubernetesDiscovery, parse_kubernetes

    return KubernetesDiscovery(parse_kubernetes(text), cluster.client)
