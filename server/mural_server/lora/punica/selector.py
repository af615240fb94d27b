"""Which wrapper a device gets."""

from __future__ import annotations

import torch

from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.punica.cpu import PunicaWrapperCPU
from mural_server.ops.base import Ops

__all__ = ["get_punica_wrapper"]


def get_punica_wrapper(
    ops: Ops, max_rows: int, max_loras: int, device: torch.device
) -> PunicaWrapper:
    """The wrapper for ``device``; raise ``ValueError`` where there is none."""
    if device.type == "cpu":
        return PunicaWrapperCPU(ops, max_rows, max_loras, device)
    raise ValueError(f"adapters cannot be applied on {device.type} yet")
