"""Bounds on what tenants upload."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UploadSettings"]


@dataclass(frozen=True, slots=True)
class UploadSettings:
    """Bounds of one upload, and of what tenants may have uploaded.

    ``ttl_s``: an upload is gone after it (None: never). ``max_bytes``: all files of one upload.
    ``max_adapters`` and ``max_tenant_bytes``: what a tenant may keep, unless its own limits say
    otherwise. ``max_concurrent`` in all (then 503) and per tenant (then 429), and a tenant's
    ``per_minute`` after ``burst`` at once.

    ``max_reads`` downloads at once in all (then 503), ``max_reads_per_tenant`` of a tenant's (then
    429), each of at most ``deadline_s``.

    A client may take ``deadline_s`` for its body, and keep us waiting ``grace_s`` and what its
    bytes take at ``min_bytes_per_s``. ``finish_timeout_s``: judging and publishing what came.
    """

    ttl_s: float | None = 7 * 86_400.0
    max_bytes: int = 2 << 30
    max_adapters: int = 100
    max_tenant_bytes: int = 20 << 30
    max_concurrent: int = 8
    max_concurrent_per_tenant: int = 2
    max_reads: int = 16
    max_reads_per_tenant: int = 4
    per_minute: float = 20.0
    burst: int = 20
    deadline_s: float = 900.0
    grace_s: float = 10.0
    min_bytes_per_s: float = 16_384.0
    finish_timeout_s: float = 300.0
    reap_interval_s: float = 60.0
