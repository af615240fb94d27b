"""Whether a source of adapters is worth asking now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mural_resolvers.errors import Unavailable

__all__ = ["SourceHealth"]

_SHORTEST_WAIT_S = 1.0


class SourceHealth:
    """What became of the questions to one source. For one event loop.

    A source that could not tell counts as down for ``down_s``. One that let a question time out,
    and answered nobody else meanwhile, hangs: for ``hung_s`` nobody waits for it, and then one
    question at a time probes it, until it answers. So a hung store costs its waiters one timeout,
    not one for each look-up.
    """

    def __init__(self, down_s: float, hung_s: float, clock: Callable[[], float]) -> None:
        self._down_s = down_s
        self._hung_s = hung_s
        self._clock = clock
        self._down_until = -math.inf
        self._hung_until: float | None = None
        self._answered_at = -math.inf
        self._probing = False

    @property
    def is_down(self) -> bool:
        """Whether it could not tell when it was last asked, a moment ago."""
        return self._hung_until is not None or self._clock() < self._down_until

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a question; ``TimeoutError`` and ``Unavailable`` that come out of it are noted.

        Raises ``Unavailable``, with when to come back, where the source hangs.
        """
        began = self._clock()
        probe = self._hung_until is not None
        if self._hung_until is not None and (self._probing or began < self._hung_until):
            wait_s = max(_SHORTEST_WAIT_S, self._hung_until - began)
            raise Unavailable("A source of adapters does not answer.", retry_after_s=wait_s)
        self._probing = self._probing or probe
        try:
            yield
        except TimeoutError:
            self._down_until = self._clock() + self._down_s
            if self._answered_at <= began:
                self._hung_until = self._clock() + self._hung_s
            raise
        except Unavailable:
            self._answered()
            self._down_until = self._clock() + self._down_s
            raise
        else:
            self._answered()
            self._down_until = -math.inf
        finally:
            if probe:
                self._probing = False

    def _answered(self) -> None:
        self._answered_at = self._clock()
        self._hung_until = None
