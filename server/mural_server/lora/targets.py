"""Which modules an engine lets adapters target."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["admits"]


def admits(target_modules: Sequence[str] | None, module: str) -> bool:
    """Tell whether ``module`` (a full dotted name) ends in one of the targets; None admits all."""
    if target_modules is None:
        return True
    return any(module == target or module.endswith(f".{target}") for target in target_modules)
