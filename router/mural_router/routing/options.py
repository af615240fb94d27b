"""What may change while requests are on their way."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoutingOptions"]


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """``queue_wait_s``: how long a request waits for capacity. ``shared_names``: registered names
    that every tenant may use. ``router_token`` and ``vllm_api_key`` are shown to replicas.
    """

    queue_wait_s: float = 10.0
    shared_names: frozenset[str] = frozenset()
    router_token: str | None = None
    vllm_api_key: str | None = None
