"""Carries a routed request's bytes to a replica and its answer back."""

from mural_router.proxy.running import Proxy, ProxyState
from mural_router.proxy.start import start

__all__ = ["Proxy", "ProxyState", "start"]
