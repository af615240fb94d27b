"""YAML as settings need it: every scalar a string, no key twice, errors that name the line.

What a scalar means is up to who asked: YAML's own guesses make a number of the key id ``123e4567``
and a boolean of ``no``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import yaml

from mural_resolvers.errors import InvalidInput

__all__ = ["YamlDocument", "YamlValue", "parse_yaml", "parse_yaml_documents"]

MAX_NODES: Final = 2_000_000
"""Of a file of one document. Each takes some 350 bytes while it is read: a text of nothing but
commas would take hundreds of times its size."""
MAX_DOCUMENT_NODES: Final = 100_000
"""Of each document in a file of many."""
MAX_ALIASED: Final = 1 << 20
"""Values and characters that a document's aliases (``*a``) may stand for, all together."""

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
    with _refusing():
        text = data.decode("utf-8")
        _check_size(text, MAX_NODES)
        value: YamlValue = yaml.load(text, _Loader)
        return value


def parse_yaml_documents(data: bytes) -> Iterator[YamlDocument]:
    """Parse a file of any number of documents, in the same way, one after the other; those with
    no content are left out.

    Raises ``InvalidInput`` with the line.
    """
    with _refusing():
        text = data.decode("utf-8")
        _check_size(text, MAX_DOCUMENT_NODES)
        loader = _Loader(text)
    try:
        while (found := _next_document(loader)) is not None:
            if found.value is not None:
                yield found
    finally:
        loader.dispose()


def _next_document(loader: _Loader) -> YamlDocument | None:
    with _refusing():
        if not loader.check_node():
            return None
        node = loader.get_node()
        assert node is not None, "there was one to check"
        return YamlDocument(node.start_mark.line + 1, loader.construct_document(node))


def _check_size(text: str, max_nodes: int) -> None:
    """Refuse, before anything is made of it, what is small as a text and large as values."""
    loader = _Loader(text)
    nodes = size = aliased = 0
    sizes: dict[str, int] = {}
    begun: list[tuple[str | None, int]] = []
    try:
        while loader.check_event():
            event = loader.get_event()  # type: ignore[no-untyped-call]  # yaml's stubs lack it
            if isinstance(event, yaml.DocumentStartEvent):
                nodes = size = aliased = 0
                sizes.clear()
            elif isinstance(event, yaml.AliasEvent):
                # One that is not known, or not ended yet, is refused when it is read.
                more = sizes.get(event.anchor or "", 0)
                size, aliased = size + more, aliased + more
            elif isinstance(event, yaml.ScalarEvent):
                nodes, size = nodes + 1, size + 1 + len(event.value)
                if event.anchor is not None:
                    sizes[event.anchor] = 1 + len(event.value)
            elif isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, size))
                nodes, size = nodes + 1, size + 1
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = begun.pop()
                if anchor is not None:
                    sizes[anchor] = size - before
            if nodes > max_nodes or aliased > MAX_ALIASED:
                what = "more values" if nodes > max_nodes else "aliases that stand for more"
                raise InvalidInput(
                    f"Line {event.start_mark.line + 1}: {what} than a document may have."
                )
    finally:
        loader.dispose()


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise InvalidInput("This is not UTF-8.") from None
    except RecursionError:
        raise InvalidInput("This is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f"Line {mark.line + 1}, column {mark.column + 1}: "
        problem = getattr(error, "problem", None) or "this is not YAML"
        raise InvalidInput(f"{place}{problem}.") from None
