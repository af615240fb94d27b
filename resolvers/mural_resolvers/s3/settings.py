"""What an S3 store is told: where it is, how it is spoken to, how long we wait."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from mural_resolvers.conversion import wanted
from mural_resolvers.errors import InvalidInput, quoted

__all__ = ["S3Settings"]

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_SEGMENT = re.compile(r"[A-Za-z0-9!_.*'()@=+,:$&;~ -]+")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_MAX_PREFIX_CHARS = 512
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_CHECKSUMS = ("when_supported", "when_required")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """Settings of one S3 store or source; raises ``InvalidInput`` for what cannot be meant.

    Where: ``bucket`` and ``prefix`` (below which ``tenant/adapter/version/`` lie), ``endpoint_url``
    and ``region`` (None: AWS, and what the environment or the profile says), ``path_style`` (None:
    where there is an endpoint, as stores other than AWS's want it), ``ca_bundle`` (a PEM file that
    replaces the machine's roots). Proxies are those of the environment.

    As whom: never here. Botocore's chain finds the credentials: environment, ``profile`` of the
    shared files, web identity, container and instance role. They need to get objects *and* to list
    the prefix; without the latter, S3 calls a version that does not exist forbidden.

    What: ``accept_unpublished`` takes folders without a ``manifest.json``, put there by other
    tools. ``alias_cache_s`` is how long aliases are believed. ``checksums`` is ``when_required``
    for a store that refuses the newer checksums.

    How long, in seconds: ``connect_timeout_s``; ``read_timeout_s`` between two pieces of an
    answer; ``call_timeout_s`` for a whole call, its ``max_attempts`` included;
    ``part_timeout_s`` for an upload of one part; ``transfer_timeout_s`` for a version.
    Files of ``multipart_bytes`` and more go up in parts of ``upload_part_bytes``,
    ``max_upload_parts`` at once.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    ca_bundle: Path | None = None
    profile: str | None = None
    accept_unpublished: bool = False
    alias_cache_s: float = 5.0
    checksums: str = "when_supported"
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 15.0
    call_timeout_s: float = 30.0
    part_timeout_s: float = 300.0
    transfer_timeout_s: float = 1800.0
    max_attempts: int = 3
    max_connections: int = 64
    multipart_bytes: int = 32 << 20
    upload_part_bytes: int = 16 << 20
    max_upload_parts: int = 4

    def __post_init__(self) -> None:
        if _BUCKET.fullmatch(self.bucket) is None or ".." in self.bucket:
            raise InvalidInput(f"{quoted(self.bucket)} is not the name of a bucket.")
        _check_prefix(self.prefix)
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        if self.region is not None and _REGION.fullmatch(self.region) is None:
            raise InvalidInput(f"{quoted(self.region)} is not a region.")
        if self.checksums not in _CHECKSUMS:
            raise InvalidInput(f"checksums is one of {', '.join(_CHECKSUMS)}.")
        self._check_numbers()

    def _check_numbers(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if not math.isfinite(value) or value < 0 or (value == 0 and setting.name != _MAY_BE_0):
                raise InvalidInput(f"{setting.name}: {wanted('a number above 0', value)}.")
        if self.upload_part_bytes < _MIN_PART_BYTES:
            raise InvalidInput(f"upload_part_bytes is at least {_MIN_PART_BYTES}, S3's own limit.")

    @property
    def location(self) -> str:
        """Where it is, for people: ``s3://bucket/prefix``, at the endpoint if there is one."""
        path = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        return path if self.endpoint_url is None else f"{path} at {self.endpoint_url}"

    @property
    def addressing_style(self) -> str:
        """Botocore's word for how the bucket is named in a request."""
        if self.path_style is None:
            return "auto" if self.endpoint_url is None else "path"
        return "path" if self.path_style else "virtual"

    @classmethod
    def from_url(cls, url: str) -> S3Settings:
        """Read ``s3://bucket/prefix?endpoint_url=…&region=…&path_style=1&…``.

        Any setting may stand in the query. Credentials may not.
        """
        try:
            parts = urlsplit(url)
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError:
            raise InvalidInput("This is not an s3:// URL.") from None
        if parts.scheme != "s3" or not parts.netloc or parts.fragment:
            raise InvalidInput("A store's URL is s3://bucket/prefix.")
        if "@" in parts.netloc:
            raise InvalidInput("A store's URL has no credentials in it: they are found elsewhere.")
        place = {"bucket": parts.netloc, "prefix": unquote(parts.path).strip("/")}
        if len(dict(query)) != len(query) or place.keys() & dict(query).keys():
            raise InvalidInput("A store's URL says a setting twice.")
        return cls._read(place | dict(query))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> S3Settings:
        """Read the settings of a file: ``url`` with or without others beside it, or ``bucket``."""
        raw = dict(mapping)
        url = raw.pop("url", None)
        if url is None:
            return cls._read(raw)
        if not isinstance(url, str):
            raise InvalidInput(f"url: {wanted('a text', url)}.")
        stated = cls.from_url(url)
        defaults = {setting.name: setting.default for setting in fields(cls)}
        told = {
            name: value
            for name, default in defaults.items()
            if (value := getattr(stated, name)) != default
        }
        if twice := told.keys() & raw.keys():
            raise InvalidInput(f"{min(twice)} stands in the URL already.")
        return cls._read(told | raw)

    @classmethod
    def _read(cls, raw: Mapping[str, object]) -> S3Settings:
        values: dict[str, object] = {}
        for name, value in raw.items():
            if name not in _TYPES:
                raise InvalidInput(f"{quoted(str(name))} is no setting of an S3 store.")
            if value is not None:
                values[name] = _converted(name, value)
        if "bucket" not in values:
            raise InvalidInput("An S3 store needs a bucket.")
        if isinstance(prefix := values.get("prefix"), str):
            values["prefix"] = prefix.strip("/")
        return cls(**values)  # type: ignore[arg-type]  # _converted gave each its type


_MIN_PART_BYTES = 5 << 20
_MAY_BE_0 = "alias_cache_s"
_FLAGS = {"path_style", "accept_unpublished"}
_PATHS = {"ca_bundle"}
_NUMBERS = {field.name for field in fields(S3Settings) if str(field.type) in ("int", "float")}
_WHOLE = {field.name for field in fields(S3Settings) if str(field.type) == "int"}
_TYPES = {field.name for field in fields(S3Settings)}


def _converted(name: str, value: object) -> object:
    """A setting from a text (of a URL, of YAML) or from its own type already."""
    if name in _FLAGS:
        return _flag(name, value)
    if name in _NUMBERS:
        return _number(name, value)
    if name in _PATHS and isinstance(value, str | Path) and str(value):
        return Path(value)
    if isinstance(value, str) and (value or name == "prefix"):
        return value
    raise InvalidInput(f"{name}: {wanted('a text that is not empty', value)}.")


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise InvalidInput(f"{name}: {wanted('true or false', value)}.")


def _number(name: str, value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            return int(value) if name in _WHOLE else float(value)
        except (ValueError, OverflowError):
            pass
    what = "a whole number" if name in _WHOLE else "a number"
    raise InvalidInput(f"{name}: {wanted(what, value)}.")


def _check_prefix(prefix: str) -> None:
    segments = prefix.split("/") if prefix else []
    if len(prefix) > _MAX_PREFIX_CHARS or any(
        _SEGMENT.fullmatch(segment) is None or segment in (".", "..") for segment in segments
    ):
        # Stores differ on empty and dotted segments: some fold a//b and a/../b.
        raise InvalidInput(f"{quoted(prefix)} is not a prefix of keys.")


def _check_endpoint(url: str) -> None:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or not url.isascii() or any(char.isspace() for char in url):
        raise InvalidInput("endpoint_url is http://host[:port] or https://host[:port].")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise InvalidInput("endpoint_url has no user, no query and no fragment.")
