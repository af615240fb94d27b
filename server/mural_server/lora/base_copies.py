"""Digests of the base's own tensors, to tell whether an adapter's copy of one is equal to it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from mural_server.lora.checkpoint import tensor_digest

__all__ = ["BaseDigests"]


class BaseDigests:
    """`tensor_digest` of a module's raw weight, worked out when first asked for and kept.

    ``base_weight`` gives the weight [vocab, hidden] in the served dtype, or None. Thread-safe.
    """

    def __init__(self, base_weight: Callable[[str], torch.Tensor | None]) -> None:
        self._base_weight = base_weight
        self._digests: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def __call__(self, module: str) -> str | None:
        with self._lock:
            if module not in self._digests:
                self._digests[module] = self._digest(module)
            return self._digests[module]

    def _digest(self, module: str) -> str | None:
        with torch.inference_mode():
            weight = self._base_weight(module)
            if weight is None:
                return None
            raw = weight.contiguous().view(torch.uint8).numpy()
        return tensor_digest(raw.data)
