"""The router's one client of a Kubernetes API server, made when something first asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mural_resolvers.kubernetes.client import KubeClient

__all__ = ["Cluster"]


class Cluster:
    """Whoever makes it closes it. For one event loop."""

    def __init__(self) -> None:
        self._client: KubeClient | None = None

    @property
    def calls(self) -> dict[str, int]:
        """What the API server was asked so far, by verb."""
        return {} if self._client is None else dict(self._client.calls)

    def check(self) -> None:
        """Raise ``ValueError`` where nothing says where an API server is, or packages lack."""
        try:
            # Of use in a cluster only, and so in an extra of its own.
            from mural_resolvers.kubernetes.config import cluster_config
        except ImportError as error:
            raise ValueError(
                f"its packages are not installed ({error}): pip install 'mural[kubernetes]'"
            ) from None
        cluster_config()

    def client(self) -> KubeClient:
        """Raises as `check`."""
        if self._client is None:
            self.check()
            from mural_resolvers.kubernetes.client import KubeClient
            from mural_resolvers.kubernetes.config import cluster_config

            self._client = KubeClient(cluster_config())
        return self._client

    async def close(self) -> None:
        """Close what was opened."""
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
            self._client = None
