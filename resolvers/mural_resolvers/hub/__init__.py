"""Adapters in the repositories of a Hugging Face hub or of a mirror of one."""

from mural_resolvers.hub.resolver import HubResolver
from mural_resolvers.hub.settings import HubSettings

__all__ = ["HubResolver", "HubSettings"]
