"""The order of version names, and the choice among an alias's versions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mural_resolvers.errors import InvalidInput, TooLarge, UnusableAdapter, quoted
from mural_resolvers.names import is_version
from mural_resolvers.strict_json import JsonRefused, JsonValue, parse_object

__all__ = [
    "MAX_ALIAS_FILE_BYTES",
    "AliasTarget",
    "change_aliases",
    "encode_aliases",
    "highest_version",
    "parse_aliases",
    "pick_target",
    "version_key",
]

_NUMBERED = re.compile(r"[vV]?(\d+(?:\.\d+)*)(?:-([A-Za-z0-9.-]+))?")
MAX_ALIAS_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AliasTarget:
    """One version of an alias and its share of the requests (0 or above)."""

    version: str
    weight: float


VersionKey = tuple[bool, tuple[int, ...], bool, tuple[tuple[bool, int, str], ...], str]


def version_key(version: str) -> VersionKey:
    """Sort key of a version name: the greatest is the highest version.

    ``v`` and numbers (``v2``, ``1.10.3``) compare by their numbers, of any count: v9 < v10,
    1.2 < 1.10. A pre-release after ``-`` stands below its release and is ordered as in SemVer
    (https://semver.org, rule 11). Names without this form stand below all that have it and
    compare as text; so do, last, names that say the same (``v1`` above ``1``).
    """
    match = _NUMBERED.fullmatch(version)
    if match is None:
        return (False, (), False, (), version)
    numbers = tuple(int(part) for part in match[1].split("."))
    while numbers and numbers[-1] == 0:
        numbers = numbers[:-1]
    pre = tuple(_identifier(part) for part in match[2].split(".")) if match[2] else ()
    return (True, numbers, not pre, pre, version)


def _identifier(text: str) -> tuple[bool, int, str]:
    return (False, int(text), "") if text.isdigit() else (True, 0, text)


def highest_version(versions: Iterable[str]) -> str | None:
    """The highest of the versions, or None where there are none."""
    return max(versions, key=version_key, default=None)


def parse_aliases(data: bytes) -> dict[str, tuple[AliasTarget, ...]]:
    """Read ``{alias: [{version, weight}]}``; raise ``UnusableAdapter`` for any other form."""
    try:
        raw = parse_object(data, max_bytes=MAX_ALIAS_FILE_BYTES, max_depth=4)
    except JsonRefused as error:
        raise UnusableAdapter(f"The record of aliases cannot be read: {error}.") from None
    return {alias: _targets(alias, value) for alias, value in raw.items()}


def encode_aliases(aliases: Mapping[str, Sequence[AliasTarget]]) -> bytes:
    """Give the record that ``parse_aliases`` reads: canonical JSON, the same for equal aliases."""
    record = {
        alias: [{"version": target.version, "weight": target.weight} for target in targets]
        for alias, targets in aliases.items()
    }
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def change_aliases(
    aliases: Mapping[str, tuple[AliasTarget, ...]], alias: str, targets: Sequence[AliasTarget]
) -> dict[str, tuple[AliasTarget, ...]]:
    """The aliases with one of them pointed anew, or removed where there are no targets.

    Raises ``InvalidInput`` for a name or targets that a record cannot hold, ``TooLarge`` for a
    record above its limit.
    """
    if not is_version(alias):
        raise InvalidInput(f"{quoted(alias)} is not a name for an alias.")
    changed = {name: kept for name, kept in aliases.items() if name != alias}
    if not targets:
        return changed
    changed[alias] = tuple(targets)
    record = encode_aliases(changed)
    if len(record) > MAX_ALIAS_FILE_BYTES:
        raise TooLarge(f"The record of aliases would have more than {MAX_ALIAS_FILE_BYTES} bytes.")
    try:
        return parse_aliases(record)
    except UnusableAdapter as error:
        raise InvalidInput(error.message) from None


def _targets(alias: str, value: JsonValue) -> tuple[AliasTarget, ...]:
    targets = [_target(item) for item in value] if isinstance(value, list) else []
    known = tuple(target for target in targets if target is not None)
    if not is_version(alias) or not known or len(known) != len(targets):
        raise UnusableAdapter(f"The alias {quoted(alias)} is not a list of versions and weights.")
    if not sum(target.weight for target in known) > 0:
        raise UnusableAdapter(f"The alias {quoted(alias)} has no version with a weight above 0.")
    return known


def _target(item: JsonValue) -> AliasTarget | None:
    if not isinstance(item, dict) or not {"version"} <= item.keys() <= {"version", "weight"}:
        return None
    version, weight = item["version"], item.get("weight", 1)
    if not isinstance(version, str) or not is_version(version):
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        return None
    if not math.isfinite(weight) or not 0 <= weight <= 1e9:
        return None
    return AliasTarget(version, float(weight))


def pick_target(targets: Sequence[AliasTarget], draw: float) -> str:
    """The version that a draw from [0, 1) falls on, each with its weight's share.

    One with weight 0 is never picked. At least one weight is above 0.
    """
    picked, rest = "", draw * sum(target.weight for target in targets)
    for target in targets:
        if target.weight > 0:
            picked = target.version
            if rest < target.weight:
                return picked
        rest -= target.weight
    # Rounding may leave a draw close to 1 past the last weight.
    return picked
