"""What the parts of the forward pass are to each other: modules that call straight through."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["ForwardModule"]


class ForwardModule(nn.Module):
    """A module whose call is its ``forward``, without nn.Module's hooks.

    Looking for hooks costs a microsecond, which a decode step of 30 layers would pay 400 times.
    """

    def __call__(self, *args: Any) -> Any:  # as loosely typed as nn.Module's own
        return self.forward(*args)
