"""What a hub source is told: where the hub is, what may be asked of it, how long we wait."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from mural_resolvers.errors import InvalidInput, MuralError, quoted
from mural_resolvers.files import read_bounded

__all__ = ["HubSettings", "read_token"]

_MAX_TOKEN_BYTES = 4096
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")
_ORGANISATION = re.compile(r"\*|[A-Za-z0-9]([A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")

_LONGEST_ALIAS_CACHE_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Settings of one hub source; raises ``InvalidInput`` for what cannot be meant.

    Where: ``endpoint`` (a path may follow the host, as mirrors have it), ``ca_bundle`` (a PEM
    file that replaces the machine's roots), ``redirect_hosts`` (globs of the hosts that content
    may be redirected to; None: any, see ``HubClient``). Proxies are those of the environment.

    As whom: the token stands in the environment variable ``token_env`` or in ``token_file``, never
    here, and is read anew each time. Over plain HTTP it goes to this machine only, unless
    ``plain_http_token`` says otherwise. A hub answers 401 to who brings no token for what is
    private and for what does not exist; ``hidden_is_absent`` takes that for the latter, so that
    further sources are asked.

    What: ``organisations`` that may be asked for (``*``: any). ``repo`` and ``revision`` are
    templates over ``{tenant}``, ``{adapter}`` and ``{version}``. ``aliases`` name the branch that
    each alias follows (None: ``latest`` follows ``main``; there are none where the template of the
    repository has the version). ``names`` maps exactly, over the templates: ``tenant/adapter`` to
    ``org/repo``, ``tenant/adapter:version`` to ``org/repo`` or ``org/repo@revision``.

    How long, in seconds: ``connect_timeout_s``; ``read_timeout_s`` between two pieces of a body;
    ``answer_timeout_s`` for a whole description, and until the first byte of content.
    ``alias_cache_s`` is how long an alias is taken to mean the commit that it meant.
    """

    organisations: tuple[str, ...]
    name: str = "hub"
    endpoint: str = "https://huggingface.co"
    repo: str = "{tenant}/{adapter}"
    revision: str = "{version}"
    aliases: Mapping[str, str] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    token_env: str | None = None
    token_file: Path | None = None
    plain_http_token: bool = False
    hidden_is_absent: bool = False
    ca_bundle: Path | None = None
    redirect_hosts: tuple[str, ...] | None = None
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 15.0
    answer_timeout_s: float = 8.0
    max_connections: int = 32
    alias_cache_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.organisations:
            raise InvalidInput("A hub needs the organisations that it may be asked for, or '*'.")
        for organisation in self.organisations:
            if _ORGANISATION.fullmatch(organisation) is None:
                raise InvalidInput(f"{quoted(organisation)} is no organisation of a hub.")
        _check_endpoint(self.endpoint)
        if self.token_env is not None and self.token_file is not None:
            raise InvalidInput("A hub's token is in token_env or in token_file, not in both.")
        if self.has_token and not self.plain_http_token and _is_open_http(self.endpoint):
            raise InvalidInput(
                "A hub's token would cross the network over plain HTTP; use https, or say "
                "plain_http_token."
            )
        waits = (self.connect_timeout_s, self.read_timeout_s, self.answer_timeout_s)
        if not all(0 < wait < float("inf") for wait in waits) or self.max_connections < 1:
            raise InvalidInput("A hub's timeouts and max_connections are above 0, and finite.")
        if not 0 <= self.alias_cache_s <= _LONGEST_ALIAS_CACHE_S:
            raise InvalidInput(f"alias_cache_s is from 0 to {_LONGEST_ALIAS_CACHE_S}.")

    @property
    def has_token(self) -> bool:
        """Whether requests to the hub carry a token."""
        return self.token_env is not None or self.token_file is not None


def read_token(settings: HubSettings) -> str | None:
    """Read the token from where the settings say; raise ``InvalidInput``, which never shows it."""
    if settings.token_env is not None:
        place = f"the environment variable {quoted(settings.token_env)}"
        text = os.environ.get(settings.token_env, "")
    elif settings.token_file is not None:
        place = "token_file"
        text = _read_text(settings.token_file)
    else:
        return None
    token = text.strip()
    if _TOKEN.fullmatch(token) is None:
        raise InvalidInput(f"There is no token in {place}.")
    return token


def _read_text(path: Path) -> str:
    try:
        return read_bounded(path.resolve(strict=True), _MAX_TOKEN_BYTES).decode("ascii", "replace")
    except (OSError, MuralError):
        raise InvalidInput("A hub's token_file cannot be read.") from None


def _check_endpoint(endpoint: str) -> None:
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or not endpoint.isascii() or any(c.isspace() for c in endpoint):
        raise InvalidInput("A hub's endpoint is http://host[:port][/path] or https://….")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidInput("A hub's endpoint has no user, no query and no fragment.")


def _is_open_http(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True
