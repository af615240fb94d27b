"""What a router can know to be wrong before it starts anything: its ports are served last, after
discovery, Redis and the first news of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mural_resolvers.errors import InvalidInput
from mural_resolvers.ports import check_port, listen
from mural_resolvers.tenants import TenantsFile
from mural_router.http.tls import client_side, replica_side
from mural_router.objects import FileObjects
from mural_router.routing.aliases_file import AliasesFile
from mural_router.settings import KUBERNETES, RouterSettings

__all__ = ["ADMIN_PORT", "EXT_PROC_PORT", "PORT", "check_files", "check_start"]

PORT: Final = "http.port (--port)"
ADMIN_PORT: Final = "admin_port (--admin-port)"
EXT_PROC_PORT: Final = "ext_proc_port (--ext-proc)"


def check_start(settings: RouterSettings) -> None:
    """Raise ``InvalidInput`` for a port that is taken, or what cannot be spoken on it."""
    try:
        client_side(settings.http.tls)
        replica_side(settings.http.tls)
    except ValueError as error:
        raise InvalidInput(f"http.tls: {error}.") from None
    http = settings.http
    if http.port:
        check_port(http.host, http.port, PORT)
    if settings.admin_port:
        listen(settings.admin_host, settings.admin_port, ADMIN_PORT).close()
    if settings.ext_proc_port is not None:
        _check_packages()
    if settings.ext_proc_port:
        check_port(http.host, settings.ext_proc_port, EXT_PROC_PORT)


def _check_packages() -> None:
    try:
        import mural_router.picker  # noqa: F401 - gRPC, which nobody else needs
    except ImportError as error:
        raise InvalidInput(
            f"--ext-proc needs packages that are not installed ({error}): "
            "pip install 'mural[picker]'."
        ) from None


def check_files(settings: RouterSettings) -> None:
    """Raise a ``MuralError`` for files that a router refuses as one of its first steps."""
    objects = None if settings.objects == KUBERNETES else settings.objects
    for path, read in (
        (settings.tenants_file, TenantsFile),
        (settings.aliases_file, AliasesFile),
        (objects, FileObjects),
    ):
        if path is not None:
            read(Path(path))
