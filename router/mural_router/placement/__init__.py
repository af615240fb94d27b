"""Which replicas an adapter is at home on, and which of them takes a request: pure functions.

The operator calls them too, so that both agree. No web framework, no torch, no I/O, no clock.
"""

from mural_router.placement.fleet import Fleet, PlacementRequest, Replica, Residency

__all__ = ["Fleet", "PlacementRequest", "Replica", "Residency"]
