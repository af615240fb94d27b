"""The custom resources from a file, outside Kubernetes: the same objects, read as strictly as the
API server reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from mural_resolvers.conversion import converted
from mural_resolvers.errors import InvalidInput, MuralError, quoted
from mural_resolvers.kubernetes.objects import (
    GROUP,
    VERSION,
    Adapter,
    AdapterAlias,
    Placement,
    Tenant,
    read_adapter,
    read_alias,
    read_tenant,
)
from mural_resolvers.kubernetes.tenants import inline_keys, tenants_config
from mural_resolvers.names import LATEST
from mural_resolvers.redaction import holds_key
from mural_resolvers.strict_yaml import YamlDocument, YamlValue, parse_yaml_documents

__all__ = ["DeclaredObjects", "parse_objects"]

MAX_FILE_BYTES = 16 << 20
MAX_REPLICAS = 1000
MAX_PRIORITY = 1000
MAX_WEIGHT = 10**9
MAX_VERSIONS = 16
METADATA = ("name", "namespace", "labels", "annotations")
"""The rest is the API server's to say."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SOURCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")


class DeclaredObjects(NamedTuple):
    """What a file says, in its order. Nothing stands in it twice."""

    tenants: tuple[Tenant, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    aliases: tuple[AdapterAlias, ...] = ()


def parse_objects(data: bytes) -> DeclaredObjects:
    """Read a file's documents: any number of `Tenant`, `Adapter` and `AdapterAlias` objects.

    Raises `InvalidInput` that names the document, its line and the field, for what the schemas
    refuse, unknown fields and kinds, and two objects for one thing (in a file none is the older).
    Keys stand in it as id and sha256: there are no Secrets to name.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"The objects' file is larger than {MAX_FILE_BYTES} bytes.")
    if holds_key(data.decode("utf-8", "replace")):
        # The message must not say more: what it would quote is the secret.
        raise InvalidInput("A whole API key stands in the objects' file: only its sha256 may.")
    found: list[Object] = []
    places: dict[tuple[str, ...], int] = {}
    for number, document in enumerate(parse_yaml_documents(data), 1):
        try:
            each = _read(document)
            for claim in _claims(each):
                if claim in places:
                    raise InvalidInput(f"{' '.join(claim)} stands in document {places[claim]}.")
                places[claim] = number
        except MuralError as error:
            where = f"Document {number} (line {document.line})"
            raise InvalidInput(f"{where}: {error.message}") from None
        found.append(each)
    return DeclaredObjects(
        tuple(each for each in found if isinstance(each, Tenant)),
        tuple(each for each in found if isinstance(each, Adapter)),
        tuple(each for each in found if isinstance(each, AdapterAlias)),
    )


# -- one document ---------------------------------------------------------------------------------

Object = Tenant | Adapter | AdapterAlias
T = TypeVar("T", Tenant, Adapter, AdapterAlias)


def _read(document: YamlDocument) -> Object:
    fields = document.value
    if not isinstance(fields, dict):
        raise InvalidInput("An object with apiVersion, kind, metadata and spec is wanted.")
    api, kind = fields.get("apiVersion"), fields.get("kind")
    if api != f"{GROUP}/{VERSION}" or kind not in ("Adapter", "AdapterAlias", "Tenant"):
        raise InvalidInput(
            f"kind: an Adapter, AdapterAlias or Tenant of {GROUP}/{VERSION} is wanted here, not "
            f"{quoted(str(kind))} of {quoted(str(api))}."
        )
    content = {key: fields[key] for key in fields if key not in ("apiVersion", "kind")}
    if kind == "Adapter":
        adapter = _convert(content, Adapter, read_adapter)
        _check_adapter(adapter)
        return adapter
    if kind == "AdapterAlias":
        alias = _convert(content, AdapterAlias, read_alias)
        _check_alias(alias)
        return alias
    tenant = _convert(content, Tenant, read_tenant)
    _check_tenant(tenant)
    return tenant


def _convert(fields: dict[YamlValue, YamlValue], kind: type[T], read: Callable[[object], T]) -> T:
    unknown = next(_unknown(fields, inspect.type_info(kind), ""), None)
    if unknown is not None:
        raise InvalidInput(f"{unknown}: there is no such field.")
    # Every scalar is text here: what it means is the schema's to say.
    each = converted(fields, kind)
    for name, text in (("name", each.metadata.name), ("namespace", each.metadata.namespace)):
        pattern = _NAME if name == "name" else _LABEL
        if not (pattern.fullmatch(text) or (name == "namespace" and not text)):
            raise InvalidInput(f"metadata.{name}: {quoted(text)} is not the name of an object.")
    return read(msgspec.to_builtins(each))


def _unknown(value: YamlValue, kind: inspect.Type, place: str) -> Iterator[str]:
    """The places of fields that the type does not have."""
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _unknown(value, each, place)
    elif isinstance(kind, inspect.VarTupleType) and isinstance(value, list):
        for at, item in enumerate(value):
            yield from _unknown(item, kind.item_type, f"{place}[{at}]")
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        known = {field.encode_name: field.type for field in kind.fields}
        if not place:
            # What was seen of it is never the file's to say.
            known.pop("status", None)
        if place == "metadata":
            known = {key: known.get(key, inspect.AnyType()) for key in METADATA}
        for key, item in value.items():
            inner = f"{place}.{key}" if place else str(key)
            if not isinstance(key, str) or key not in known:
                yield inner
            else:
                yield from _unknown(item, known[key], inner)


def _claims(each: Object) -> Iterator[tuple[str, ...]]:
    """What no other object may be or say."""
    kind = type(each).__name__
    yield (kind, each.metadata.key.removeprefix("/"))
    if isinstance(each, Adapter):
        yield ("The version", each.exact)
    elif isinstance(each, AdapterAlias):
        yield ("The alias", f"{each.spec.tenant}/{each.spec.name}:{each.spec.alias}")
    else:
        yield ("The tenant", each.id)
        yield from (("The key id", key.id) for key in inline_keys(each))


# -- the schemas' rules ---------------------------------------------------------------------------


def _check_adapter(adapter: Adapter) -> None:
    spec = adapter.spec
    if spec.version == LATEST:
        raise InvalidInput("spec.version: latest is an alias: name the version that is meant.")
    if _LABEL.fullmatch(spec.pool) is None:
        raise InvalidInput(f"spec.pool: {quoted(spec.pool)} is not a pool's name.")
    if spec.digest is not None and _DIGEST.fullmatch(spec.digest) is None:
        raise InvalidInput("spec.digest: sha256: and 64 hexadecimal digits are wanted.")
    if spec.source is not None and _SOURCE.fullmatch(spec.source) is None:
        raise InvalidInput(f"spec.source: {quoted(spec.source)} is not a source's name.")
    if spec.base is not None and not 0 < len(spec.base) <= 256:
        raise InvalidInput("spec.base: 1 to 256 characters are wanted.")
    _check_placement(spec.placement)


def _check_placement(placement: Placement) -> None:
    least, most = placement.min_replicas, placement.max_replicas
    if placement.replicas is not None and (least is not None or most is not None):
        raise InvalidInput(
            "spec.placement: give either replicas or minReplicas and maxReplicas, not both."
        )
    if (least is None) != (most is None):
        raise InvalidInput("spec.placement: minReplicas and maxReplicas come together.")
    if least is not None and most is not None and least > most:
        raise InvalidInput("spec.placement: minReplicas is more than maxReplicas.")
    numbers = {"replicas": placement.replicas, "minReplicas": least}
    for name, number in numbers.items():
        if isinstance(number, int) and not 0 <= number <= MAX_REPLICAS:
            raise InvalidInput(f"spec.placement.{name}: a number from 0 to {MAX_REPLICAS}.")
    if most is not None and not 1 <= most <= MAX_REPLICAS:
        raise InvalidInput(f"spec.placement.maxReplicas: a number from 1 to {MAX_REPLICAS}.")
    if not 0 <= placement.priority <= MAX_PRIORITY:
        raise InvalidInput(f"spec.placement.priority: a number from 0 to {MAX_PRIORITY}.")


def _check_alias(alias: AdapterAlias) -> None:
    versions = [each.version for each in alias.spec.versions]
    if alias.spec.alias in versions:
        raise InvalidInput("spec.versions: an alias cannot stand for itself.")
    if LATEST in versions:
        raise InvalidInput("spec.versions: latest is an alias: name the version that is meant.")
    if len(versions) > MAX_VERSIONS:
        raise InvalidInput(f"spec.versions: at most {MAX_VERSIONS} are wanted.")
    if len(set(versions)) != len(versions):
        raise InvalidInput("spec.versions: a version stands here twice.")
    if any(not 0 <= each.weight <= MAX_WEIGHT for each in alias.spec.versions):
        raise InvalidInput(f"spec.versions: a weight is a number from 0 to {MAX_WEIGHT}.")
    if not any(each.weight for each in alias.spec.versions):
        raise InvalidInput("spec.versions: one of them needs a weight above 0.")


def _check_tenant(tenant: Tenant) -> None:
    for at, key in enumerate(tenant.spec.keys):
        if key.secret_ref is not None:
            raise InvalidInput(
                f"spec.keys[{at}].secretRef: there are no Secrets outside Kubernetes: give the "
                "key's id and sha256."
            )
    inline_keys(tenant)
    for why in tenants_config([tenant], {})[1].values():
        raise InvalidInput(why)
    for at, namespace in enumerate(tenant.spec.namespaces):
        if _LABEL.fullmatch(namespace) is None:
            raise InvalidInput(f"spec.namespaces[{at}]: {quoted(namespace)} is no namespace.")
