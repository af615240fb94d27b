"""The custom resources' schemas: their form, and that the code that reads them says the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.objects import (
    GROUP,
    VERSION,
    Adapter,
    AdapterAlias,
    ServingPool,
    Tenant,
    read_adapter,
)
from mural_resolvers.names import LATEST, is_tenant, is_version
from mural_resolvers.sizes import parse_size
from mural_resolvers.tenants.keys import is_key_id
from mural_resolvers.tenants.principal import is_grant

CRDS = Path(__file__).resolve().parents[2] / "charts/mural/crds"
KINDS = {
    "adapters": Adapter,
    "adapteraliases": AdapterAlias,
    "servingpools": ServingPool,
    "tenants": Tenant,
}

Json = dict[str, Any]


@cache
def definition(plural: str) -> Json:
    return cast(Json, yaml.safe_load((CRDS / f"{plural}.yaml").read_text(encoding="utf-8")))


def version(plural: str) -> Json:
    (only,) = definition(plural)["spec"]["versions"]
    return cast(Json, only)


def schema(plural: str, *path: str) -> Json:
    """The schema of an object, or of what stands at a path in it (``[]``: of a list's items)."""
    found = version(plural)["schema"]["openAPIV3Schema"]
    for name in path:
        found = found["items"] if name == "[]" else found["properties"][name]
    return cast(Json, found)


def nodes(found: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every schema below, with its path."""
    yield path, found
    for name, below in found.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}")
    if "items" in found:
        yield from nodes(found["items"], f"{path}[]")
    if "additionalProperties" in found:
        yield from nodes(found["additionalProperties"], f"{path}{{}}")


@pytest.fixture(params=sorted(KINDS))
def plural(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_is_one_file_for_each_kind() -> None:
    assert {path.stem for path in CRDS.glob("*.yaml")} == set(KINDS)


def test_a_definition_is_of_our_group_and_has_a_status_of_its_own(plural: str) -> None:
    spec = definition(plural)["spec"]
    assert definition(plural)["metadata"]["name"] == f"{plural}.{GROUP}"
    assert (spec["group"], spec["scope"]) == (GROUP, "Namespaced")
    assert spec["names"]["plural"] == plural
    assert spec["names"]["kind"] == KINDS[plural].__name__
    assert spec["names"]["shortNames"]
    assert version(plural)["name"] == VERSION
    assert version(plural)["served"]
    assert version(plural)["storage"]
    assert version(plural)["subresources"] == {"status": {}}


def test_short_names_are_each_of_one_kind() -> None:
    short = [name for plural in KINDS for name in definition(plural)["spec"]["names"]["shortNames"]]
    assert len(short) == len(set(short))


def test_every_field_says_what_it_is_for(plural: str) -> None:
    meta = {".apiVersion", ".kind", ".metadata"}
    mute = [
        path
        for path, found in nodes(schema(plural))
        if not path.endswith(("[]", "{}")) and path not in meta and "description" not in found
    ]
    assert not mute


def test_everything_that_people_write_has_a_bound(plural: str) -> None:
    """So that the cost of the rules has one, too."""
    bounds = {
        "string": ("maxLength", "enum", "format"),
        "array": ("maxItems",),
        "integer": ("minimum",),
        "number": ("minimum",),
    }
    unbound = [
        path
        for path, found in nodes(schema(plural, "spec"))
        if not any(name in found for name in bounds.get(found.get("type", ""), found))
    ]
    unbound += [
        path
        for path, found in nodes(schema(plural, "spec"))
        if "additionalProperties" in found and "maxProperties" not in found
    ]
    assert not unbound


def test_every_rule_has_a_sentence_for_people(plural: str) -> None:
    for path, found in nodes(schema(plural)):
        for rule in found.get("x-kubernetes-validations", ()):
            assert rule.get("message"), path


def test_columns_read_fields_that_exist(plural: str) -> None:
    for column in version(plural)["additionalPrinterColumns"]:
        path = column["jsonPath"].strip(".").split(".")
        if path[0] != "metadata":
            schema(plural, *path)


# -- the structs say the same ---------------------------------------------------------------------


def test_structs_and_schema_have_the_same_fields_types_and_defaults(plural: str) -> None:
    assert list(differences(schema(plural, "spec"), _spec_of(KINDS[plural]), "spec")) == []


def test_what_others_read_of_an_adapters_status_is_in_its_schema() -> None:
    status = next(f.type for f in _fields(Adapter) if f.encode_name == "status")
    assert isinstance(status, msgspec.inspect.StructType)
    for field in status.fields:
        found = schema("adapters", "status", field.encode_name)
        assert list(type_differences(found, field.type, field.encode_name)) == []


def _fields(kind: type) -> tuple[msgspec.inspect.Field, ...]:
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def _spec_of(kind: type) -> msgspec.inspect.StructType:
    found = next(field.type for field in _fields(kind) if field.encode_name == "spec")
    assert isinstance(found, msgspec.inspect.StructType)
    return found


# A selector of pods is one struct; that a pool's selects something is the pool's schema's alone.
STRICTER = {"spec.selector.matchLabels"}


def differences(found: Json, struct: msgspec.inspect.StructType, path: str) -> Iterator[str]:
    fields = {field.encode_name: field for field in struct.fields}
    properties = found.get("properties", {})
    for name in sorted(fields.keys() ^ properties.keys()):
        yield f"{path}.{name} is in one of the two alone"
    for name in sorted(fields.keys() & properties.keys()):
        here, field = f"{path}.{name}", fields[name]
        required = name in found.get("required", ())
        if required != field.required and here not in STRICTER:
            yield f"{here} is required in one of the two alone"
        if not field.required and not required and _default(properties[name]) != _stated(field):
            yield f"{here}: {_default(properties[name])!r} and {_stated(field)!r} are the defaults"
        yield from type_differences(properties[name], field.type, here)


def _stated(field: msgspec.inspect.Field) -> object:
    """A struct's default as JSON, without what is itself a default."""
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        value = field.default
    # A struct, a tuple or a dict in place of what is left out says no more than that.
    return None if isinstance(value, msgspec.Struct | tuple | dict) else value


def _default(found: Json) -> object:
    default = found.get("default")
    return None if default == {} else default


def type_differences(found: Json, kind: msgspec.inspect.Type, path: str) -> Iterator[str]:
    shown = f"{path}: {found.get('type')} and {type(kind).__name__}"
    match kind:
        case msgspec.inspect.UnionType():
            options = [o for o in kind.types if not isinstance(o, msgspec.inspect.NoneType)]
            if len(options) == 1:
                yield from type_differences(found, options[0], path)
            elif not found.get("x-kubernetes-int-or-string"):
                yield shown
        case msgspec.inspect.StructType():
            if found.get("type") != "object":
                yield shown
            yield from differences(found, kind, path)
        case msgspec.inspect.DictType():
            yield from type_differences(found["additionalProperties"], kind.value_type, path)
        case msgspec.inspect.VarTupleType():
            if found.get("type") != "array":
                yield shown
            yield from type_differences(found["items"], kind.item_type, f"{path}[]")
        case msgspec.inspect.LiteralType():
            if set(kind.values) != set(found.get("enum", ())):
                yield f"{path}: {kind.values} and {found.get('enum')}"
        case msgspec.inspect.DateTimeType():
            if found.get("format") != "date-time":
                yield shown
        case _:
            plain: dict[type, str] = {
                msgspec.inspect.StrType: "string",
                msgspec.inspect.IntType: "integer",
                msgspec.inspect.FloatType: "number",
                msgspec.inspect.BoolType: "boolean",
            }
            if plain.get(type(kind)) != found.get("type"):
                yield shown


# -- the grammars ---------------------------------------------------------------------------------

SEGMENTS = [
    ("adapters", "spec", "tenant"),
    ("adapters", "spec", "name"),
    ("adapteraliases", "spec", "tenant"),
    ("adapteraliases", "spec", "name"),
    ("tenants", "spec", "tenant"),
]
VERSIONS = [
    ("adapters", "spec", "version"),
    ("adapteraliases", "spec", "alias"),
    ("adapteraliases", "spec", "versions", "[]", "version"),
]
KEY = f"mural_{'a' * 16}_{'b' * 43}"

# What the rules about one text mean; another rule must be added here.
RULES = {
    "!self.contains('..')": lambda text: ".." not in text,
    "self != 'latest'": lambda text: text != LATEST,
    "!self.matches('[Mm]ural_[a-z0-9]{8,32}_[A-Za-z0-9_-]{43}')": lambda text: (
        re.search("[Mm]ural_[a-z0-9]{8,32}_[A-Za-z0-9_-]{43}", text) is None
    ),
    "self == oldSelf": lambda text: True,
}


def accepts(found: Json, text: str) -> bool:
    """What the API server decides on a new text."""
    # Without a flag, $ is the very end there; Python's lets a line break follow.
    pattern = re.sub(r"\$$", r"\\Z", found["pattern"])
    return (
        len(text) <= found["maxLength"]
        and re.search(pattern, text) is not None
        and all(RULES[each["rule"]](text) for each in found.get("x-kubernetes-validations", ()))
    )


near_names = st.text("aZ09._-/:A\n é", max_size=70) | st.from_regex(
    r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,140}", fullmatch=True
)


@pytest.mark.parametrize("place", SEGMENTS, ids=" ".join)
@given(text=near_names)
@example(text="a" * 63)
@example(text="a" * 64)
@example(text="a..b")
@example(text="acme\n")
@example(text="_aliases")
def test_a_schema_takes_the_tenants_and_adapters_that_the_grammar_takes(
    place: tuple[str, ...], text: str
) -> None:
    assert accepts(schema(*place), text) == is_tenant(text)


@pytest.mark.parametrize("place", VERSIONS, ids=" ".join)
@given(text=near_names)
@example(text="v" * 128)
@example(text="v" * 129)
@example(text=KEY)
@example(text=f"M{KEY[1:]}")
@example(text="latest")
def test_a_schema_takes_the_versions_that_the_grammar_takes(
    place: tuple[str, ...], text: str
) -> None:
    wanted = is_version(text) and (text != LATEST or place[-1] == "alias")
    assert accepts(schema(*place), text) == wanted


@given(text=st.text("aZ09_\n", max_size=40))
def test_a_schema_takes_the_ids_of_keys_that_keys_have(text: str) -> None:
    assert accepts(schema("tenants", "spec", "keys", "[]", "id"), text) == is_key_id(text)


@given(text=st.text("aZ0*?@/:._-\n", max_size=200))
@example(text="globex/sql:v1")
@example(text="@sql*")
def test_a_schema_takes_the_grants_that_the_tenants_file_takes(text: str) -> None:
    assert accepts(schema("tenants", "spec", "grants", "[]"), text) == is_grant(text)


@given(text=st.text("09kKmMgGtTiIbB ", max_size=8).filter(lambda text: text == text.strip()))
@example(text="2Gi")
@example(text="512")
def test_a_schema_takes_the_sizes_that_are_sizes(text: str) -> None:
    (rule,) = schema("tenants", "spec", "limits", "bytes")["x-kubernetes-validations"]
    pattern = re.search(r"matches\('\^(.*)\$'\)", rule["rule"])
    assert pattern is not None
    taken = re.fullmatch(pattern[1], text) is not None
    try:
        parse_size(text)
    except InvalidInput:
        assert not taken
    else:
        assert taken


def test_what_an_older_schema_let_through_is_refused_with_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"spec\.placement\.priority"):
        read_adapter(
            {
                "metadata": {"name": "a"},
                "spec": {
                    "pool": "p",
                    "tenant": "acme",
                    "version": "v1",
                    "placement": {"priority": "high"},
                },
            }
        )
