"""Carries a routed request's bytes to a replica and its answer back."""

from mural_router.proxy.running import Proxy, ProxyState

__all__ = ["Proxy", "ProxyState"]
