"""The interface of where objects come from. One file an implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from mural_resolvers.errors import Unavailable
from mural_resolvers.tenants import KeyRing
from mural_router.objects.declared import Declared

__all__ = ["KindState", "Objects"]


@dataclass(frozen=True, slots=True)
class KindState:
    """One kind of objects, for metrics and the debug page."""

    kind: str
    in_force: int
    refused: Mapping[str, str]
    """Why an object does not count, by ``namespace/name``."""
    kept: Mapping[str, str]
    """Why an object cannot be read, whose last readable state stays in force."""
    stale: bool
    """What is in force may not be what there is now."""
    trouble: str = ""
    """Why it is stale."""


class Objects(ABC):
    """Keeps what objects declare in force, through every outage as it was last known."""

    def __init__(self) -> None:
        self.declared = Declared()
        self._known = False

    @property
    def ring(self) -> KeyRing:
        """The tenants' keys. Raises ``Unavailable`` until they are known."""
        if not self._known:
            reason = self.not_ready()
            if reason is not None:
                raise Unavailable(reason, retry_after_s=1.0)
            self._known = True
        return self.declared.ring

    @abstractmethod
    async def run(self) -> None:
        """Follow their changes for ever; whoever starts it notices if it dies."""

    @abstractmethod
    def not_ready(self) -> str | None:
        """What is not known yet; None: everything was, once."""

    @abstractmethod
    def states(self) -> tuple[KindState, ...]:
        """Tenants, keys, aliases and adapters as they are now."""
