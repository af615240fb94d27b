"""From where a store is, in one line of text, to the store.

=============================================  ==================================================
``/srv/adapters``, ``file:///srv/adapters``    a directory that is there
``s3://bucket/prefix?endpoint_url=…&…``        S3: any setting of ``S3Settings`` but credentials
``http(s)://host[:port]``                      a Mural server, by its upload API
=============================================  ==================================================
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.store import AdapterStore

__all__ = ["open_store"]


def open_store(
    location: str, limits: AdapterLimits = DEFAULT_LIMITS, *, api_key: str | None = None
) -> AdapterStore:
    """Open the store at ``location``; ``api_key`` is for a server, and never part of the text.

    Nothing is asked of the store yet, and each kind is imported only where it is asked for.
    Raises ``InvalidInput`` for what is no store, and where its packages are not installed.
    """
    scheme, colon, _ = location.partition("://")
    match scheme if colon else "":
        case "":
            return _open_directory(location, limits)
        case "file":
            return _open_directory(_local_path(location), limits)
        case "s3":
            return _open_s3(location, limits)
        case "http" | "https":
            return _open_server(location, api_key)
        case _:
            raise InvalidInput(
                f"{quoted(scheme + '://')} is no kind of store: give s3://bucket/prefix, a folder "
                "or a server's http(s)://host:port."
            )


def _open_directory(path: str, limits: AdapterLimits) -> AdapterStore:
    # Made by nobody here: a path that was mistyped would be a new, empty store.
    if not path or not Path(path).is_dir():
        raise InvalidInput(f"There is no folder {quoted(path)} to be a store.")
    from mural_resolvers.directory_store import DirectoryStore

    return DirectoryStore(Path(path), limits)


def _local_path(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path or parts.query or parts.fragment:
        raise InvalidInput("A folder's URL is file:// and its whole path: file:///srv/adapters.")
    return unquote(parts.path)


def _open_s3(url: str, limits: AdapterLimits) -> AdapterStore:
    from mural_resolvers.s3 import S3Settings, S3Store

    return S3Store(S3Settings.from_url(url), limits)


def _open_server(url: str, api_key: str | None) -> AdapterStore:
    from mural_resolvers.server_store import ServerSettings, ServerStore

    return ServerStore(ServerSettings.from_url(url, api_key))
