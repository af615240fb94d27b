"""Lets go of all Adapters, so that they can be deleted when there is no operator any more.

An Adapter that bears the operator's finalizer could never go once the operator has gone. So the
operator is stopped first (it would put the finalizer back), then the finalizer is taken off. The
servers go, too: there is nothing to unload.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from mural_operator.reconcile import FINALIZER
from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.paths import ADAPTERS, Resource

__all__ = ["release_adapters"]

DEPLOYMENTS: Final = Resource("apps", "v1", "deployments")
STOPPED_S: Final = 60.0
"""An operator ends within seconds; over it the finalizers are taken off all the same."""
ROUNDS: Final = 10
PAUSE_S: Final = 2.0
"""Between two looks: an operator that was just ending has had its last word in it."""
LOOK_S: Final = 0.5
PAGE: Final = "500"

log = logging.getLogger(__name__)


class _Scaled(msgspec.Struct, rename="camel"):
    replicas: int = 0
    observed_generation: int = 0


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    generation: int = 0
    resource_version: str = ""
    finalizers: tuple[str, ...] = ()


class _Deployment(msgspec.Struct):
    metadata: _Metadata
    status: _Scaled = msgspec.field(default_factory=_Scaled)

    @property
    def stopped(self) -> bool:
        seen = self.status.observed_generation >= self.metadata.generation
        return seen and self.status.replicas == 0


class _Object(msgspec.Struct):
    metadata: _Metadata


class _ListMetadata(msgspec.Struct):
    next_page: str = msgspec.field(name="continue", default="")


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: tuple[_Object, ...] = ()


async def release_adapters(
    client: KubeClient, operator: str, namespaces: Sequence[str] | None
) -> int:
    """Stop the Deployment ``operator`` of the client's namespace, and free the Adapters.

    ``namespaces`` None: all of them. Gives how many Adapters were freed. Raises `InvalidInput`
    where the API server refuses, or where Adapters are held again and again.
    """
    try:
        await _stop(client, operator)
        return await _free_all(client, namespaces)
    except KubeError as error:
        raise InvalidInput(f"The Adapters cannot be released: {error}.") from None


async def _stop(client: KubeClient, operator: str) -> None:
    path = DEPLOYMENTS.named(client.namespace, operator)
    try:
        await client.patch(f"{path}/scale", {"spec": {"replicas": 0}})
        async with asyncio.timeout(STOPPED_S):
            await _stopped(client, path)
    except KubeError as error:
        if error.status != 404:
            raise
        log.info("there is no operator to stop")
    except TimeoutError:
        log.warning("the operator has not stopped after %g s", STOPPED_S)


async def _stopped(client: KubeClient, path: str) -> None:
    while True:
        if msgspec.json.decode(await client.get(path), type=_Deployment).stopped:
            return
        await asyncio.sleep(LOOK_S)


async def _free_all(client: KubeClient, namespaces: Sequence[str] | None) -> int:
    paths = [ADAPTERS.all()] if namespaces is None else [ADAPTERS.of(each) for each in namespaces]
    freed: set[tuple[str, str]] = set()
    for _ in range(ROUNDS):
        held = [each for path in paths for each in await _held(client, path)]
        for metadata in held:
            await _free(client, metadata)
            freed.add((metadata.namespace, metadata.name))
        await asyncio.sleep(PAUSE_S)
        if not held:
            log.info("%d adapters are free to go", len(freed))
            return len(freed)
    raise InvalidInput(
        f"Adapters bear the finalizer {FINALIZER} again and again: another operator runs."
    )


async def _held(client: KubeClient, path: str) -> list[_Metadata]:
    found: list[_Metadata] = []
    params = {"limit": PAGE}
    while True:
        try:
            page = msgspec.json.decode(await client.get(path, params), type=_List)
        except KubeError as error:
            if error.status == 404:
                # The definitions have gone, and the objects with them.
                return []
            raise
        found += [each.metadata for each in page.items if FINALIZER in each.metadata.finalizers]
        if not page.metadata.next_page:
            return found
        params = {"limit": PAGE, "continue": page.metadata.next_page}


async def _free(client: KubeClient, metadata: _Metadata) -> None:
    rest = [each for each in metadata.finalizers if each != FINALIZER]
    body = {"metadata": {"resourceVersion": metadata.resource_version, "finalizers": rest}}
    try:
        await client.patch(ADAPTERS.named(metadata.namespace, metadata.name), body)
    except KubeError as error:
        # It has gone, or has changed since: the next look says.
        if error.status not in (404, 409):
            raise
