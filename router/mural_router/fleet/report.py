"""What is known of one replica, cleaned: it comes from another machine, which may lie."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mural_resolvers.errors import MalformedName
from mural_resolvers.names import parse_name, validate_admin_name
from mural_router.placement import Base, Residency
from mural_server.protocol import AdapterStatus
from mural_server.protocol.caution import count, rate

__all__ = [
    "Report",
    "exact_name",
    "residency",
]

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Report:
    """One replica's last word about itself; the units are `mural_router.placement.Replica`'s."""

    ready: bool
    base_names: tuple[str, ...] = ()
    """The served names of its base model, the main one first."""
    spec_hash: str = ""
    """Equal for replicas that take the same adapters; empty: unknown."""
    boot_id: str = ""
    """Another one is another process; empty: unknown."""
    reports: bool = True
    slots: int = 0
    host_bytes: int = 0
    max_cpu_loras: int = 0
    max_lora_rank: int = 0
    max_num_seqs: int = 0
    max_model_len: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_per_s: float = 0.0
    adapters: Mapping[str, Residency] = field(default_factory=dict)
    """By exact name."""
    dropped: int = 0
    """Names that it told and that were not kept: malformed, or too many."""

    @property
    def base(self) -> Base:
        """What it serves."""
        return Base(self.base_names, self.spec_hash)


@lru_cache(maxsize=65_536)
def exact_name(text: str) -> str | None:
    """The name as placement hashes it (an admin's name stays as it is), or None for no name."""
    try:
        return parse_name(text).exact if ":" in text else validate_admin_name(text)
    except MalformedName:
        return None


def residency(status: AdapterStatus) -> Residency:
    """What placement keeps of a replica's word about one adapter."""
    return Residency(
        level=status.level,
        digest=status.digest if _DIGEST.fullmatch(status.digest) else "",
        loading=status.loading,
        pinned=status.pinned,
        rank=count(status.rank),
        bytes=count(status.bytes),
        requests=count(status.requests),
        load=rate(status.load),
    )
