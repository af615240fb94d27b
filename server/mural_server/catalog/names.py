"""The names that a server knows, and what stands behind each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from mural_resolvers.digest import TEMPLATE_FILE, FileEntry
from mural_resolvers.errors import AdapterNotFound, MalformedName, quoted
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.request import LoRARequest
from mural_resolvers.tenants import ADMIN, Principal, may_use, may_use_source
from mural_server.engine.messages import AdapterInfo

__all__ = [
    "MAX_ADMIN_NAMES",
    "MAX_RESOLVED_NAMES",
    "OPERATOR",
    "AdapterView",
    "Asker",
    "Entry",
    "KnownNames",
    "ServedModel",
    "not_loaded",
]

OPERATOR = Principal(tenant=None, rights=frozenset({ADMIN}), key_id="operator")
"""The principal of the command line and of the control API."""

MAX_ADMIN_NAMES = 4096
MAX_RESOLVED_NAMES = 4096

AdapterState = Literal["slot", "host", "disk"]


class ServedModel(NamedTuple):
    """What a request's ``model`` means: the exact name, and the adapter (None: the base)."""

    name: str
    lora: LoRARequest | None = None
    template: FileEntry | None = None
    """The chat template that the adapter ships, as its digest knows it."""


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """One known name, as lists show it."""

    name: str
    digest: str
    path: str
    rank: int
    bytes: int
    state: AdapterState
    loading: bool = False
    pinned: bool = False
    running: int = 0
    waiting: int = 0
    registered: bool = False
    """By an admin, rather than found through the grammar."""


class Asker(NamedTuple):
    """What two principals must share for a source's answer to one to be one to the other."""

    tenant: str | None
    rights: frozenset[str]
    grants: tuple[str, ...]
    sources: frozenset[str] | None

    @classmethod
    def of(cls, principal: Principal) -> Asker:
        return cls(principal.tenant, principal.rights, principal.grants, principal.sources)


class Entry(msgspec.Struct, kw_only=True):
    """A known name and its content."""

    name: str
    lora: LoRARequest
    manifest: Manifest
    shared: bool = False
    parsed: AdapterName | None = None
    """None for an admin's name."""
    cached: bool = False
    """Whether its files lie in the disk cache, where they stay only under a lease."""
    checked: dict[Asker, float] = {}
    """When the sources last gave this to whom: a source may refuse one and not another."""
    sources: set[str] = set()
    """Those that have it, as far as is known."""
    host_bytes: int | None = None
    """What its weights take in host memory; None where that is not known before they are there."""

    def served(self) -> ServedModel:
        """What a request is told."""
        template = next((f for f in self.manifest.files if f.path == TEMPLATE_FILE), None)
        return ServedModel(self.name, self.lora, template)

    def usable_by(self, principal: Principal) -> bool:
        """Whether lists may show it to the principal."""
        return may_use(principal, self.parsed or self.name, shared=self.shared) and (
            self.parsed is None or any(may_use_source(principal, name) for name in self.sources)
        )

    def view(self, info: AdapterInfo | None, *, loading: bool) -> AdapterView:
        """As lists show it; ``info`` is None where its weights are not resident.

        Its bytes are those of host memory at every level, since routers place by them; those of
        its files only where no more is known.
        """
        on_disk = self.manifest.num_bytes if self.host_bytes is None else self.host_bytes
        return AdapterView(
            name=self.name,
            digest=self.lora.digest,
            path=self.lora.lora_path,
            rank=self.manifest.facts.rank,
            bytes=on_disk if info is None else info.bytes,
            state="disk" if info is None else info.level,
            loading=loading,
            pinned=info is not None and info.pinned,
            running=0 if info is None else info.running,
            waiting=0 if info is None else info.waiting,
            registered=self.parsed is None,
        )


class KnownNames:
    """Names that an admin registered, and those found through the grammar, the last used last."""

    def __init__(self) -> None:
        self.admin: dict[str, Entry] = {}
        self.resolved: OrderedDict[str, Entry] = OrderedDict()
        self.version = 0
        """Grows with every change of the names; for those who watch."""

    def changed(self) -> None:
        """Have those who watch look again."""
        self.version += 1

    def __iter__(self) -> Iterator[Entry]:
        """All of them, the admin's first."""
        yield from self.admin.values()
        yield from self.resolved.values()

    def get(self, name: str) -> Entry | None:
        """The entry of a name in any of its forms."""
        return self.admin.get(name) or self.resolved.get(_short(name))

    def known(self, name: str) -> Entry:
        """As ``get``; raises `AdapterNotFound`."""
        entry = self.get(name)
        if entry is None:
            raise not_loaded(name)
        return entry

    def of_content(self, lora_int_id: int) -> int:
        """How many names a content has."""
        return sum(entry.lora.lora_int_id == lora_int_id for entry in self)

    def check_integrity(self) -> None:
        """Raise `AssertionError` for what lies under another name, or is too much."""
        assert len(self.resolved) <= MAX_RESOLVED_NAMES
        assert len(self.admin) <= MAX_ADMIN_NAMES
        for name, entry in (*self.admin.items(), *self.resolved.items()):
            assert name == entry.name


def not_loaded(name: str) -> AdapterNotFound:
    """What a load's or an unload's caller is told of a name that is not known here."""
    return AdapterNotFound(f"The lora adapter {quoted(name)} cannot be found.")


def _short(name: str) -> str:
    try:
        return parse_name(name).short
    except MalformedName:
        return name
