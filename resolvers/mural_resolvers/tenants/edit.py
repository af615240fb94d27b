"""Changes to ``tenants.yaml`` that leave every other byte of it alone, comments too.

The places come from PyYAML's marks. Whatever was done is parsed again and compared with what was
wanted, so that a form of YAML that is not foreseen here is refused and never spoilt.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import yaml

from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.strict_yaml import parse_yaml
from mural_resolvers.tenants.config import KeyRecord, Tenant, TenantsConfig, parse_tenants

__all__ = ["add_key", "add_tenant", "key_yaml", "remove_key", "rewrite", "says_nothing"]

ADMIN_KEYS = "admin_keys"

_ELSE = "leave out --file and put the record in by hand"


def key_yaml(key: KeyRecord) -> str:
    """A key's record as one line of YAML, which fits a list of any form."""
    return "{" + ", ".join(_fields(key)) + "}"


def _fields(key: KeyRecord) -> list[str]:
    fields = [f"id: '{key.id}'", f"sha256: '{key.sha256}'"]
    for name, moment in (("created", key.created), ("expires", key.expires)):
        if moment is not None:
            fields.append(f"{name}: {moment.strftime('%Y-%m-%dT%H:%M:%SZ')}")
    if key.note:
        # Single quotes know one escape.
        fields.append("note: '" + key.note.replace("'", "''") + "'")
    return fields


def _block_item(key: KeyRecord, column: int) -> str:
    indent = " " * column
    return f"{indent}- " + f"\n{indent}  ".join(_fields(key)) + "\n"


def add_key(text: str, tenant: str | None, key: KeyRecord) -> str:
    """Give the file's text with one more key of a tenant that is in it (None: of an admin).

    Raises ``InvalidInput`` when the tenant is not there, or the file has a form that cannot be
    changed safely.
    """
    before = parse_tenants(text.encode())
    owner = _owner(text, before, tenant)
    field = ADMIN_KEYS if tenant is None else "keys"
    keys = _value(owner, field)
    if keys is None:
        changed = _insert_field(text, owner, field, key)
    elif not isinstance(keys, yaml.SequenceNode):
        raise InvalidInput(f"The file's {field} have an unusual form: {_ELSE}.")
    elif keys.flow_style:
        at, comma = keys.end_mark.index - 1, ", " if keys.value else ""
        changed = text[:at] + comma + key_yaml(key) + text[at:]
    else:
        item = _block_item(key, keys.start_mark.column)
        changed = _after_line(text, _end(keys), item)
    return _checked(changed, _with_keys(before, tenant, lambda found: (*found, key)))


def add_tenant(text: str, tenant: str) -> str:
    """Give the file's text with one more tenant, which has nothing yet."""
    if says_nothing(text):
        begun = _after_line(text, len(text), f"tenants:\n  - id: '{tenant}'\n")
        return _checked(begun, TenantsConfig((Tenant(tenant),)))
    before = parse_tenants(text.encode())
    wanted = replace(before, tenants=(*before.tenants, Tenant(tenant)))
    tenants = _value(_root(text), "tenants")
    assert isinstance(tenants, yaml.SequenceNode)
    if tenants.flow_style:
        at, comma = tenants.end_mark.index - 1, ", " if tenants.value else ""
        changed = f"{text[:at]}{comma}{{id: '{tenant}'}}{text[at:]}"
    else:
        indent = " " * tenants.start_mark.column
        changed = _after_line(text, _end(tenants.value[-1]), f"{indent}- id: '{tenant}'\n")
    return _checked(changed, wanted)


def says_nothing(text: str) -> bool:
    """Tell whether a file has comments at most."""
    return parse_yaml(text.encode()) is None


def remove_key(text: str, key_id: str) -> str:
    """Give the file's text without a key; raise ``InvalidInput`` when it is not there."""
    before = parse_tenants(text.encode())
    owner = next((owner for owner, key in before.all_keys() if key.id == key_id), _ABSENT)
    if isinstance(owner, str):
        raise InvalidInput(f"The file has no key {quoted(key_id)}.")
    tenant = None if owner is None else owner.id
    field = ADMIN_KEYS if tenant is None else "keys"
    keys = _value(_owner(text, before, tenant), field)
    if not isinstance(keys, yaml.SequenceNode):
        raise InvalidInput(f"The file's {field} have an unusual form: change them by hand.")
    place = next(at for at, item in enumerate(keys.value) if _has_id(item, key_id))
    changed = _without(text, keys, place)
    return _checked(
        changed,
        _with_keys(before, tenant, lambda found: tuple(k for k in found if k.id != key_id)),
    )


_ABSENT = "absent"


def _root(text: str) -> yaml.MappingNode:
    root = yaml.compose(text, yaml.BaseLoader)
    assert isinstance(root, yaml.MappingNode)  # parse_tenants has seen to that
    return root


def _owner(text: str, config: TenantsConfig, tenant: str | None) -> yaml.MappingNode:
    root = _root(text)
    if tenant is None:
        return root
    place = next((at for at, found in enumerate(config.tenants) if found.id == tenant), None)
    if place is None:
        raise InvalidInput(f"The file has no tenant {quoted(tenant)}: add it with --new-tenant.")
    tenants = _value(root, "tenants")
    assert isinstance(tenants, yaml.SequenceNode)
    node = tenants.value[place]
    assert isinstance(node, yaml.MappingNode)
    return node


def _value(mapping: yaml.MappingNode, field: str) -> yaml.Node | None:
    return next((value for key, value in mapping.value if key.value == field), None)


def _has_id(item: yaml.Node, key_id: str) -> bool:
    found = _value(item, "id") if isinstance(item, yaml.MappingNode) else None
    return found is not None and found.value == key_id


def _end(node: yaml.Node) -> int:
    """Where a node's own text ends: a block's mark stands behind the comments that follow it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    # A block scalar ends behind its last line's end.
    behind = isinstance(node, yaml.ScalarNode) and node.style in ("|", ">")
    return int(node.end_mark.index) - behind


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1


def _after_line(text: str, at: int, line: str) -> str:
    end = _line_end(text, at)
    gap = "" if not text[:end] or text[:end].endswith("\n") else "\n"
    return text[:end] + gap + line + text[end:]


def _insert_field(text: str, owner: yaml.MappingNode, field: str, key: KeyRecord) -> str:
    if owner.flow_style:
        at = owner.end_mark.index - 1
        return f"{text[:at]}, {field}: [{key_yaml(key)}]{text[at:]}"
    column = owner.start_mark.column
    item = _block_item(key, column + 2)
    return _after_line(text, _end(owner), f"{' ' * column}{field}:\n{item}")


def _without(text: str, keys: yaml.SequenceNode, place: int) -> str:
    items = keys.value
    if keys.flow_style:
        start, end = items[place].start_mark.index, _end(items[place])
        if place + 1 < len(items):
            end = items[place + 1].start_mark.index
        elif place > 0:
            start = _end(items[place - 1])
        return text[:start] + text[end:]
    # From the dash, which stands before the item, to the end of the item's last line.
    start = text.rfind("\n", 0, items[place].start_mark.index) + 1
    end = _line_end(text, _end(items[place]))
    if len(items) == 1:
        return f"{text[:start]}{' ' * (keys.start_mark.column + 2)}[]\n{text[end:]}"
    return text[:start] + text[end:]


def _with_keys(
    config: TenantsConfig,
    tenant: str | None,
    change: Callable[[tuple[KeyRecord, ...]], tuple[KeyRecord, ...]],
) -> TenantsConfig:
    if tenant is None:
        return replace(config, admin_keys=change(config.admin_keys))
    return replace(
        config,
        tenants=tuple(
            replace(found, keys=change(found.keys)) if found.id == tenant else found
            for found in config.tenants
        ),
    )


def _checked(text: str, wanted: TenantsConfig) -> str:
    try:
        found = parse_tenants(text.encode())
    except InvalidInput as error:
        raise InvalidInput(f"{error.message.rstrip('.')} after the change: {_ELSE}.") from None
    if found != wanted:
        raise InvalidInput(f"The file has a form that cannot be changed safely: {_ELSE}.")
    return text


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others of us from the folder's files: of two changes at once one would be lost."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Replace a file (a link's target) by its changed text, whole or not at all.

    An absent file is empty text. Mode and, where allowed, owner stay; a new one is for its owner
    alone. Raises ``InvalidInput`` when it cannot be read or written.
    """
    path = Path(os.path.realpath(path))
    try:
        with _locked(path.parent):
            mode, old = 0o600, ""
            status = path.stat() if path.exists() else None
            if status is not None:
                mode = stat.S_IMODE(status.st_mode)
                # Its line ends are its own.
                with path.open(encoding="utf-8", newline="") as file:
                    old = file.read()
            _replace(path, change(old), mode, status)
    except UnicodeError:
        raise InvalidInput(f"{path}: this is not UTF-8.") from None
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}.") from None


def _replace(path: Path, text: str, mode: int, status: os.stat_result | None) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            os.fchmod(descriptor, mode)
            if status is not None and os.geteuid() == 0:
                os.fchown(descriptor, status.st_uid, status.st_gid)
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
