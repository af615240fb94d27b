"""A Mural server as a place to publish adapters in, by its upload API."""

from mural_resolvers.server_store.settings import ServerSettings
from mural_resolvers.server_store.store import ServerStore

__all__ = ["ServerSettings", "ServerStore"]
