"""Settings from files into their types, and the one way to say what is wrong in them: the file, the
field's place, what is wanted there, and what was found."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect

from mural_resolvers.errors import InvalidInput, MuralError, quoted
from mural_resolvers.files import read_settings
from mural_resolvers.redaction import redacted
from mural_resolvers.strict_yaml import YamlValue, parse_yaml

__all__ = ["converted", "in_file", "read_yaml", "wanted"]

SHOWN_CHARS: Final = 8
"""Shorter texts are shown in a refusal. What stands in the wrong place may be a secret, and a key
has at least so many characters."""

T = TypeVar("T")

_NAMES: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "array": "a list",
    "object": "a mapping",
}
_PLACE = re.compile(r"(key` in `)?\$(.*)")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_ANY_NAME: Final = "[...]"
"""Of a mapping with names of the user's own: msgspec does not say under which of them."""
_EXPECTED = re.compile(r"Expected `([a-z |]+)`, got `[a-z]+`")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}")

_Path = list[str | int]


def read_yaml(path: Path, max_bytes: int) -> YamlValue:
    """The one document of a file; raise ``InvalidInput`` with the file, and the line."""
    with in_file(path):
        try:
            data = read_settings(path, max_bytes + 1)
        except OSError as error:
            raise InvalidInput(f"cannot be read: {error.strerror}.") from None
        if len(data) > max_bytes:
            raise InvalidInput(f"larger than {max_bytes} bytes.")
        return parse_yaml(data)


@contextmanager
def in_file(path: Path | str | None) -> Iterator[None]:
    """What is refused is told with the file that it stands in; None: in none."""
    try:
        yield
    except MuralError as error:
        if path is None:
            raise
        raise InvalidInput(f"{path}: {error.message}") from None


def converted(value: object, kind: type[T], where: str = "", *, strict: bool = False) -> T:
    """Read a value as its type; raise ``InvalidInput`` with the place, below ``where``.

    Texts stand for numbers and truth values unless ``strict``. Every number is finite: no
    comparison finds what is no number, and no wait may be endless.
    """
    # Types are hashable, though typeshed does not say so.
    form = _form(cast("Hashable", kind))
    unknown = next(_unknown(value, form.type, []), None) if form.dataclasses else None
    if unknown is not None:
        raise _refusal(where, unknown, "there is no such field")
    try:
        found = msgspec.convert(value, kind, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise _told(str(error), value, form.type, where) from None
    endless = _endless(found)
    if endless is not None:
        path, number = endless
        raise _refusal(where, path, wanted("a finite number", number))
    return found


def _path(kind: type[object], value: object) -> object:
    """Of what settings are, msgspec does not know paths, nor that anything may be left as it is."""
    if kind is object:
        return value
    if not issubclass(kind, Path) or not isinstance(value, str | Path) or not str(value):
        raise ValueError(wanted("a path", value))
    return Path(value)


def wanted(what: str, found: object) -> str:
    """``a number is wanted, not 'ten'``, with nothing that may be a secret."""
    if found is None:
        return f"{what} is wanted, and nothing stands there"
    return f"{what} is wanted, not {_shown(found)}"


def _shown(found: object) -> str:
    if isinstance(found, bool):
        return str(found).lower()
    if isinstance(found, int | float):
        return f"{found:g}" if isinstance(found, float) else str(found)[:20]
    if isinstance(found, str):
        short = len(found) < SHOWN_CHARS
        return quoted(found) if short else f"a text of {len(found)} characters"
    return "a mapping" if isinstance(found, Mapping) else "a list"


def _told(message: str, value: object, form: inspect.Type, where: str) -> InvalidInput:
    """msgspec tells the place last, as ``- at `$.tenants[0].weight```, and never the value."""
    problem, _, place = message.rpartition(" - at `")
    match = _PLACE.fullmatch(place.rstrip("`")) if problem else None
    place, any_name, _ = match[2].partition(_ANY_NAME) if match else ("", "", "")
    path = _steps(place)
    problem = problem if match else message
    if match and match[1]:
        return _refusal(where, path, "its names are texts, every one")
    if missing := _MISSING.fullmatch(problem):
        return _refusal(where, [*path, missing[1]], "is missing")
    if unknown := _UNKNOWN.fullmatch(problem):
        return _refusal(where, [*path, unknown[1]], "there is no such field")
    found = _below(value, path)
    if expected := _EXPECTED.fullmatch(problem):
        names = [_NAMES[each] for each in expected[1].split(" | ") if each in _NAMES]
        what = " or ".join(names) or "nothing"
        return _refusal(
            where, path, f"{what} is wanted under each name" if any_name else wanted(what, found)
        )
    if problem.startswith("Invalid enum value"):
        return _refusal(where, path, wanted(_choice(_type_at(form, path)), found))
    return _refusal(where, path, problem.replace("`", ""))


def _refusal(where: str, path: _Path, problem: str) -> InvalidInput:
    place = where
    for step in path:
        if isinstance(step, int):
            place += f"[{step}]"
        else:
            name = step if _PLAIN.fullmatch(redacted(step)) else quoted(step)
            place += f".{name}" if place else name
    return InvalidInput(f"{place}: {problem}." if place else f"{problem}.")


def _steps(place: str) -> _Path:
    return [name or int(index) for name, index in _STEP.findall(place)]


def _below(value: object, path: _Path) -> object:
    """What stands at a place."""
    for step in path:
        if isinstance(step, int) and isinstance(value, list | tuple):
            value = value[step]
        elif isinstance(value, Mapping):
            value = value.get(step)
    return value


# -- types ----------------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A type, and whether a dataclass is anywhere in it."""

    type: inspect.Type
    dataclasses: bool


@lru_cache(maxsize=256)
def _form(kind: Hashable) -> _Form:
    found = inspect.type_info(kind)
    return _Form(found, _holds_dataclass(found))


def _holds_dataclass(kind: inspect.Type) -> bool:
    below = [*_fields(kind).values(), *(each for each in _members(kind) if each is not kind)]
    if (item := _item(kind)) is not None:
        below.append(item)
    return isinstance(kind, inspect.DataclassType) or any(map(_holds_dataclass, below))


def _fields(kind: inspect.Type) -> dict[str, inspect.Type]:
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        return {each.encode_name: each.type for each in kind.fields}
    return {}


def _item(kind: inspect.Type) -> inspect.Type | None:
    return kind.item_type if isinstance(kind, inspect.ListType | inspect.VarTupleType) else None


def _members(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _type_at(kind: inspect.Type, path: _Path) -> inspect.Type:
    for step in path:
        for each in _members(kind):
            below = _item(each) if isinstance(step, int) else _fields(each).get(step)
            if below is not None:
                kind = below
                break
    return kind


def _choice(kind: inspect.Type) -> str:
    """The words that may stand somewhere, and what else may."""
    found = [each.values for each in _members(kind) if isinstance(each, inspect.LiteralType)]
    words = [str(word) for words in found for word in words]
    number = any(isinstance(each, inspect.IntType) for each in _members(kind))
    either = [f"one of {', '.join(words)}" if words[1:] else "".join(words)]
    return " or ".join([*either, *(["a whole number"] if number else [])])


def _unknown(value: object, kind: inspect.Type, path: _Path) -> Iterator[_Path]:
    """Fields that a dataclass does not have, over which msgspec would pass."""
    for each in _members(kind):
        item = _item(each)
        if item is not None and isinstance(value, list):
            for at, below in enumerate(value):
                yield from _unknown(below, item, [*path, at])
        elif isinstance(value, Mapping) and (known := _fields(each)):
            for name, below in value.items():
                if name in known:
                    yield from _unknown(below, known[name], [*path, name])
                elif isinstance(each, inspect.DataclassType):
                    yield [*path, str(name)]


def _endless(value: object) -> tuple[_Path, float] | None:
    """The first number that is infinite, or none, and where it stands."""
    entries: Iterable[tuple[str | int, object]]
    if isinstance(value, float):
        return None if math.isfinite(value) else ([], value)
    if value is None or isinstance(value, str | int):
        return None
    if isinstance(value, list | tuple):
        entries = enumerate(value)
    elif isinstance(value, msgspec.Struct):
        entries = ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif is_dataclass(value):
        entries = ((each.name, getattr(value, each.name)) for each in fields(value))
    else:
        return None
    for step, below in entries:
        if (found := _endless(below)) is not None:
            return [step, *found[0]], found[1]
    return None
