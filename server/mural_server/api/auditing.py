"""Puts an admin's action into the audit log, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mural_resolvers.audit import AuditLog
from mural_resolvers.errors import MuralError
from mural_resolvers.tenants import Principal

__all__ = ["Audited", "audited"]


@dataclass(slots=True)
class Audited:
    """What an action turns out to be about while it runs."""

    digest: str | None = None


@contextmanager
def audited(
    audit: AuditLog, principal: Principal, action: str, name: str | None = None
) -> Iterator[Audited]:
    """Record the action when the block ends: ``ok``, the error's code, or ``cancelled``."""
    about, result = Audited(), "cancelled"
    try:
        yield about
        result = "ok"
    except MuralError as error:
        result = error.code
        raise
    except Exception:
        result = "internal_error"
        raise
    finally:
        audit.record(principal, action, name=name, digest=about.digest, result=result)
