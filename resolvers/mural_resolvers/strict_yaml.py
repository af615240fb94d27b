"""YAML as settings need it: every scalar a string, no key twice, errors that name the line.

What a scalar means is up to who asked: YAML's own guesses make a number of the key id ``123e4567``
and a boolean of ``no``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from mural_resolvers.errors import InvalidInput

__all__ = ["YamlValue", "parse_yaml"]

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


def parse_yaml(data: bytes) -> YamlValue:
    """Parse one document in UTF-8; raise ``InvalidInput`` with the line for everything else."""
    try:
        value: YamlValue = yaml.load(data.decode("utf-8"), _Loader)
    except UnicodeDecodeError:
        raise InvalidInput("This is not UTF-8.") from None
    except RecursionError:
        raise InvalidInput("This is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"Line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise InvalidInput(f"{place}{problem}.") from None
    return value
