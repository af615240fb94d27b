"""YAML as settings need it: every scalar a string, no key twice, errors that name the line.

What a scalar means is up to who asked: YAML's own guesses make a number of the key id ``123e4567``
and a boolean of ``no``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import yaml

from mural_resolvers.errors import InvalidInput

__all__ = ["YamlDocument", "YamlValue", "parse_yaml", "parse_yaml_documents"]

T = TypeVar("T")

YamlValue = None | str | list["YamlValue"] | dict["YamlValue", "YamlValue"]

if TYPE_CHECKING:
    _Base = yaml.BaseLoader
else:
    # libyaml's parser is eight times as fast, where PyYAML was built with it.
    _Base = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


class _Loader(_Base):
    """Strings, lists, mappings, and None for what stands empty."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a key stands twice in this mapping", node.start_mark
            )
        return mapping

    # PyYAML's own type knows no scalar that stands for nothing.
    def construct_scalar(self, node: yaml.ScalarNode) -> str | None:  # type: ignore[override]
        value = super().construct_scalar(node)
        return None if not node.style and value in ("", "~", "null") else value


class YamlDocument(NamedTuple):
    """One of several in a file; ``line`` is where its content begins, from 1 on."""

    line: int
    value: YamlValue


def parse_yaml(data: bytes) -> YamlValue:
    """Parse one document in UTF-8; raise ``InvalidInput`` with the line for everything else."""

    def load(text: str) -> YamlValue:
        value: YamlValue = yaml.load(text, _Loader)
        return value

    return _refusing(load, data)


def parse_yaml_documents(data: bytes) -> list[YamlDocument]:
    """Parse a file of any number of documents, in the same way; those with no content are left out.

    Raises ``InvalidInput`` with the line.
    """
    return _refusing(_documents, data)


def _documents(text: str) -> list[YamlDocument]:
    found: list[YamlDocument] = []
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "there was one to check"
            value: YamlValue = loader.construct_document(node)
            if value is not None:
                found.append(YamlDocument(node.start_mark.line + 1, value))
    finally:
        loader.dispose()
    return found


def _refusing(load: Callable[[str], T], data: bytes) -> T:
    try:
        return load(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise InvalidInput("This is not UTF-8.") from None
    except RecursionError:
        raise InvalidInput("This is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"Line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise InvalidInput(f"{place}{problem}.") from None
