"""Bounds on what an adapter's folder may hold: everything in it may have been uploaded."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_LIMITS", "AdapterLimits"]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits that are held before the thing they bound is read, parsed or matched."""

    max_config_bytes: int = 1 << 20
    max_header_bytes: int = 4 << 20
    max_template_bytes: int = 256 << 10
    max_manifest_bytes: int = 1 << 20
    max_weights_bytes: int = 8 << 30
    max_tensors: int = 16_384
    max_tensor_name_chars: int = 512
    max_json_depth: int = 16
    max_targets: int = 8_192
    max_patterns: int = 2_048
    max_pattern_chars: int = 2_048
    # A pickle is read only where an admin said so; then with weights_only.
    admit_bin: bool = False


DEFAULT_LIMITS = AdapterLimits()
