"""The one Secret that routers read: hashes of the tenants' keys, written when they change."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Final

import msgspec

from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.paths import SECRETS

__all__ = ["ENTRY", "RouterKeys"]

ENTRY: Final = "keys.json"
CHECK_S: Final = 10.0
"""So often it is looked at whether it still holds what was written: where someone has deleted it,
every tenant of a key in a Secret is locked out until then."""


class _Secret(msgspec.Struct):
    data: dict[str, str] | None = None


class RouterKeys:
    """One Secret. Raises `KubeError` where the API server does not do as it is asked."""

    def __init__(
        self, client: KubeClient, namespace: str, name: str, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._namespace = namespace
        self.name = name
        self._clock = clock
        self._holds: bytes | None = None
        self._checked_s = float("-inf")

    async def write(self, content: bytes) -> None:
        """Have it hold these hashes."""
        if self._holds == content and self._clock() - self._checked_s < CHECK_S:
            return
        found = await self._read()
        if found != content:
            await self._put(content, exists=found is not None)
        self._holds, self._checked_s = content, self._clock()

    async def _read(self) -> bytes | None:
        """None: there is no such Secret."""
        try:
            body = await self._client.get(SECRETS.named(self._namespace, self.name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        data = msgspec.json.decode(body, type=_Secret).data or {}
        try:
            return b64decode(data.get(ENTRY, ""))
        except ValueError:
            return b""

    async def _put(self, content: bytes, *, exists: bool) -> None:
        data = {"data": {ENTRY: b64encode(content).decode()}}
        if exists:
            await self._client.patch(SECRETS.named(self._namespace, self.name), data)
            return
        about: dict[str, object] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {
                "name": self.name,
                "labels": {"app.kubernetes.io/managed-by": "mural-operator"},
            },
        }
        await self._client.create(SECRETS.of(self._namespace), about | data)
