"""The order in which replicas are an adapter's home."""

from __future__ import annotations

from mural_router.placement.fleet import Fleet, Replica

__all__ = ["order"]


def order(adapter: str, fleet: Fleet) -> tuple[Replica, ...]:
    """The accepting replicas, an adapter's first home first: the same for whoever sees this fleet.

    ``adapter`` is the exact name ``tenant/adapter:version``: never an alias, which would have two
    routers disagree while it changes, and never a digest, which would tie tenants' placement
    together.
    """
    accepting = fleet.accepting_names
    ordered = (fleet.replicas[i] for i in fleet.members.order(adapter))
    return tuple(replica for replica in ordered if replica.name in accepting)
