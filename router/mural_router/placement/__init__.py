"""Which replicas an adapter is at home on, and which of them takes a request: pure functions.

The operator calls them too, so that both agree. No web framework, no torch, no I/O, no clock.
"""

from mural_router.placement.base import Base, agreed_base, base_names
from mural_router.placement.choose import Choice, OnlyHome, Reason, choose, homes_of, only_home
from mural_router.placement.explain import Explanation, explain
from mural_router.placement.fleet import (
    CountedAdapters,
    Fleet,
    PlacementRequest,
    Replica,
    Residency,
    Resident,
    Use,
    UseCount,
)
from mural_router.placement.ledger import LoadLedger, Loads, reported_loads
from mural_router.placement.order import order
from mural_router.placement.policy import DEFAULT_POLICY, PlacementPolicy
from mural_router.placement.replicas import replicas_for

__all__ = [
    "DEFAULT_POLICY",
    "Base",
    "Choice",
    "CountedAdapters",
    "Explanation",
    "Fleet",
    "LoadLedger",
    "Loads",
    "OnlyHome",
    "PlacementPolicy",
    "PlacementRequest",
    "Reason",
    "Replica",
    "Residency",
    "Resident",
    "Use",
    "UseCount",
    "agreed_base",
    "base_names",
    "choose",
    "explain",
    "homes_of",
    "only_home",
    "order",
    "replicas_for",
    "reported_loads",
]
