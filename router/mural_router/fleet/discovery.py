"""The interface of discovery: which replicas there are. One file an implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from mural_router.fleet.endpoint import Endpoint

__all__ = ["Discovery"]


class Discovery(ABC):
    """Finds the replicas' addresses and says when they change."""

    @abstractmethod
    def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        """The complete set of endpoints: soon after the start, then whenever it changes.

        Whatever fails on the way is logged and tried again, and what was found last stays: the
        iterator ends, or raises, only for what no waiting can cure.
        """
