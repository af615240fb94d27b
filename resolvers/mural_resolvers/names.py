"""The grammar of adapter names: one parser with a typed result, used everywhere.

``tenant:version``, ``tenant/adapter:version``, or either without ``:version``, which means
``latest``. ``tenant:version`` is short for ``tenant/default:version``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mural_resolvers.errors import MalformedName, quoted
from mural_resolvers.redaction import holds_key

__all__ = [
    "DEFAULT_ADAPTER",
    "LATEST",
    "MAX_NAME_CHARS",
    "AdapterName",
    "is_tenant",
    "is_version",
    "parse_name",
    "validate_admin_name",
]

DEFAULT_ADAPTER = "default"
LATEST = "latest"

# tenant (63) + "/" + adapter (63) + ":" + version (128)
MAX_NAME_CHARS = 256

_SEGMENT = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADMIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def is_tenant(text: str) -> bool:
    """Tell whether the text is a tenant's or an adapter's name (they share one grammar)."""
    return len(text) <= 63 and ".." not in text and _SEGMENT.fullmatch(text) is not None


def is_version(text: str) -> bool:
    """Tell whether the text is the name of a version or of an alias."""
    if len(text) > 128 or ".." in text or _VERSION.fullmatch(text) is None:
        return False
    # Names stand in logs and metrics, where a key that was pasted in their place must not.
    return not holds_key(text)


@dataclass(frozen=True, slots=True, order=True)
class AdapterName:
    """A tenant's adapter at a version (or alias); every instance keeps to the grammar.

    ``str()`` gives the form that people write: ``acme:v1`` for ``acme/default:v1``. It parses
    back to the same name. Raises ``MalformedName`` when a part breaks the grammar, so that a
    name can be joined to a folder without further thought.
    """

    tenant: str
    adapter: str
    version: str

    def __post_init__(self) -> None:
        if not is_tenant(self.tenant):
            raise MalformedName(f"{quoted(self.tenant)} is not a tenant name.")
        if not is_tenant(self.adapter):
            raise MalformedName(f"{quoted(self.adapter)} is not an adapter name.")
        if not is_version(self.version):
            raise MalformedName(f"{quoted(self.version)} is not a version name.")

    @property
    def exact(self) -> str:
        """The full form ``tenant/adapter:version``, which placement hashes."""
        return f"{self.tenant}/{self.adapter}:{self.version}"

    @property
    def short(self) -> str:
        """``tenant:version`` when the adapter is ``default``, else the full form."""
        if self.adapter == DEFAULT_ADAPTER:
            return f"{self.tenant}:{self.version}"
        return self.exact

    def at(self, version: str) -> AdapterName:
        """Give the same adapter at another version."""
        return AdapterName(self.tenant, self.adapter, version)

    def __str__(self) -> str:
        return self.short


def parse_name(text: str) -> AdapterName:
    """Parse ``tenant[/adapter][:version]``; raise ``MalformedName`` for anything else."""
    # The length is bounded before any other work is done on text that anyone may send.
    if len(text) > MAX_NAME_CHARS:
        raise MalformedName(f"A model name has at most {MAX_NAME_CHARS} characters.")
    path, colon, version = text.partition(":")
    tenant, slash, adapter = path.partition("/")
    return AdapterName(
        tenant=tenant,
        adapter=adapter if slash else DEFAULT_ADAPTER,
        version=version if colon else LATEST,
    )


def validate_admin_name(text: str) -> str:
    """Return a name that an admin registers, which belongs to no tenant; raise ``MalformedName``.

    The grammar is ``[A-Za-z0-9][A-Za-z0-9._/-]{0,127}`` and never ``..``.
    """
    if len(text) > 128 or ".." in text or _ADMIN_NAME.fullmatch(text) is None or holds_key(text):
        raise MalformedName(
            f"{quoted(text)} is not a name to register: letters, digits and . _ / - only, "
            "a letter or digit first, at most 128 characters, never '..'."
        )
    return text
