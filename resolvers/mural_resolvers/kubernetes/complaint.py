"""What the API server does not do for us, as the log has it: what, why, and what to do."""

from __future__ import annotations

import logging
import time
from typing import Final

from mural_resolvers.kubernetes.client import KubeError

__all__ = ["Complaint", "remedy"]

REPEAT_S: Final = 300.0
"""So often it is said again while it lasts: the end of a log is what people see of it."""
FLAP_S: Final = 10.0
"""What works and does not in turn is said this often."""


class Complaint:
    """One thing that may not work: said when it begins, when its cause is another, and now and
    then while it lasts; and that it is over."""

    def __init__(self, log: logging.Logger, broken: str, mended: str) -> None:
        """``broken`` begins the sentence: "pods cannot be watched". ``mended`` is all of one."""
        self.trouble = ""
        """Why it does not work; empty: it does."""
        self.status = 0
        """What the API server answered last."""
        self._log = log
        self._broken = broken
        self._mended = mended
        self._said: dict[int, float] = {}
        self._is_open = False
        """Whether somebody who reads the log waits for its end."""

    def note(self, error: KubeError) -> bool:
        """It does not work. Whether it did before."""
        began = not self.trouble
        self.trouble, self.status = f"{self._broken}: {error}", error.status
        now = time.monotonic()
        rest_s = REPEAT_S if self._is_open else FLAP_S
        if now - self._said.get(error.status, float("-inf")) >= rest_s:
            self._said[error.status], self._is_open = now, True
            self._log.warning("%s%s", self.trouble.rstrip("."), remedy(error))
        return began

    def over(self) -> None:
        """It works."""
        self.trouble = ""
        if self._is_open:
            self._log.info("%s", self._mended)
            self._is_open = False


def remedy(error: KubeError) -> str:
    """What somebody has to do about it, as the end of a sentence; empty: wait."""
    if error.status == 0 and "CERTIFICATE_VERIFY" in error.message:
        return ": the configuration's certificate authority is not this API server's"
    if error.status == 0:
        return ": look whether the address is right, and whether a NetworkPolicy is between"
    if error.status == 401:
        return ": the token or certificate that the configuration has is not accepted any more"
    if error.status == 403:
        return ": give the account this right, which the chart's roles have (helm upgrade)"
    if error.status == 404 and error.message.startswith("namespaces "):
        return ": make the namespace, or start with another one"
    if error.status == 404:
        return ": the API server does not know it; Mural's kinds come with charts/mural/crds"
    return ""
