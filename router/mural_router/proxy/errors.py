"""What the proxy itself tells a client when replicas fail it."""

from __future__ import annotations

import logging

from mural_resolvers.errors import MuralError, Unavailable
from mural_router.http.upstream import AnswerTimeout, ConnectFailed

__all__ = ["ReplicaFailed", "RouterUnknown", "log_unknown", "told"]

_log = logging.getLogger(__name__)


class ReplicaFailed(MuralError):
    """A replica took the request and broke off, or answered with what is no answer."""

    status = 502
    code = "replica_failed"
    type = "server_error"


class RouterUnknown(ReplicaFailed):
    """A replica answered 401, which is about the router: no key of a client reaches it."""

    def __init__(self) -> None:
        super().__init__("The replica does not accept this router.")


def log_unknown(replica: str) -> None:
    """Say of a 401 what the client is not told: it is the operator's to mend."""
    _log.error(
        "replica %s answers 401: it does not accept what this router shows it. Compare the "
        "router's token (of vLLM its key) with the replica's.",
        replica,
    )


def told(error: Exception) -> MuralError:
    """The error that a client is told of a failed attempt: nothing of addresses or causes."""
    if isinstance(error, MuralError):
        return error
    if isinstance(error, ConnectFailed):
        return Unavailable("No replica could be reached.", retry_after_s=1.0)
    if isinstance(error, AnswerTimeout):
        return Unavailable("The replica did not answer in time.", retry_after_s=5.0)
    return ReplicaFailed("The replica broke off before its answer was complete.")
