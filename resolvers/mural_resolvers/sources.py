"""Which sources are asked, in which order, and where their content is kept: configuration.

A YAML file, or one URL per source on the command line. A source's ``type`` names an entry point of
the group ``mural.resolvers``: a callable ``(name, options, limits) -> LoRAResolver``. Those of this
package stand there beside everybody else's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

import msgspec

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.conversion import converted, in_file, read_yaml, wanted
from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.disk_cache import CacheSettings, DiskCache
from mural_resolvers.download import Downloader
from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.fetcher import AdapterFetcher, FetcherSettings
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.registry import LoRAResolverRegistry, RegistrySettings
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import LoRAResolver
from mural_resolvers.sizes import parse_size

__all__ = [
    "RESOLVER_GROUP",
    "CacheConfig",
    "FetchConfig",
    "ResolverFactory",
    "SourceConfig",
    "SourcesConfig",
    "build_resolvers",
    "convert_options",
    "default_cache_path",
    "directory_source",
    "open_registry",
    "parse_source",
    "read_sources",
]

RESOLVER_GROUP = "mural.resolvers"

ResolverFactory = Callable[[str, Mapping[str, object], AdapterLimits], LoRAResolver]

T = TypeVar("T")

_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """One source: its ``type``, its ``name`` in logs and metrics, and what the type understands."""

    type: str
    name: str
    options: Mapping[str, object]

    def __str__(self) -> str:
        """Its name and where it is, for the log. Credentials are in no option."""
        places = (self.options.get(key) for key in ("path", "url", "endpoint", "bucket"))
        return " ".join(str(part) for part in (self.name, *places) if part)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The disk cache. ``quota`` in bytes (``10Gi``); ``verify`` hashes at every lease."""

    path: str | None = None
    quota: int | str = "10Gi"
    verify: bool = False

    def settings(self) -> CacheSettings:
        """The cache's own settings; raise ``InvalidInput`` for a quota that is no size."""
        try:
            quota_bytes = parse_size(str(self.quota))
        except InvalidInput as error:
            raise InvalidInput(f"cache.quota: {error.message}") from None
        return CacheSettings(quota_bytes=quota_bytes, verify_on_lease=self.verify)


class FetchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds on downloads; see ``FetcherSettings``."""

    deadline_s: float = 600.0
    max_concurrent: int = 8
    max_concurrent_per_tenant: int = 2
    cold_loads_per_minute: float = 60.0
    cold_burst: int = 32

    def settings(self) -> FetcherSettings:
        """As the fetcher takes them; raise ``InvalidInput`` for a bound that lets nothing by."""
        values = msgspec.structs.asdict(self)
        for name, value in values.items():
            if not value > 0:
                raise InvalidInput(f"fetch.{name}: {wanted('a number above 0', value)}.")
        return FetcherSettings(**values)


@dataclass(frozen=True, slots=True)
class SourcesConfig:
    """The sources in their order, the cache in front of them, the bounds of fetching."""

    resolvers: tuple[SourceConfig, ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)


class _FileBody(msgspec.Struct, forbid_unknown_fields=True):
    resolvers: list[dict[str, object]]
    cache: CacheConfig = CacheConfig()
    fetch: FetchConfig = FetchConfig()


def read_sources(path: Path) -> SourcesConfig:
    """Read the YAML file of sources; raise ``InvalidInput`` that names the place that is wrong."""
    raw = read_yaml(path, _MAX_FILE_BYTES)
    with in_file(path):
        body = converted(raw, _FileBody)
        resolvers = tuple(_source(place, entry) for place, entry in enumerate(body.resolvers))
        body.cache.settings()
        body.fetch.settings()
    return SourcesConfig(resolvers, body.cache, body.fetch)


def _source(place: int, entry: dict[str, object]) -> SourceConfig:
    options = dict(entry)
    kind, name = options.pop("type", None), options.pop("name", None)
    if not isinstance(kind, str) or not kind:
        raise InvalidInput(f"resolvers[{place}].type: s3, hub, directory or another is wanted.")
    if name is not None and (not isinstance(name, str) or not name):
        raise InvalidInput(f"resolvers[{place}].name: {wanted('a text', name)}.")
    return SourceConfig(kind, name or kind, options)


def parse_source(text: str) -> SourceConfig:
    """One source as a URL.

    ``s3://bucket/prefix?endpoint_url=…``, ``hub+https://host?organisations=…``, a folder. What
    follows the ``?`` are the type's options.
    """
    url = urlsplit(text)
    options: dict[str, object] = dict(parse_qsl(url.query, keep_blank_values=True))
    name = str(options.pop("name", ""))
    if url.scheme == "s3":
        bare = f"s3://{url.netloc}{url.path}"
        return SourceConfig("s3", name or "s3", {"url": bare, **options})
    if url.scheme in ("hub+https", "hub+http"):
        endpoint = f"{url.scheme.removeprefix('hub+')}://{url.netloc}{url.path}"
        return SourceConfig("hub", name or "hub", {"endpoint": endpoint, **options})
    if url.scheme in ("", "file"):
        return directory_source(url.path if url.scheme else text)
    raise InvalidInput(
        # No more of it: anything may be secret in a URL that nobody knows how to read.
        f"{quoted(url.scheme + ':')} begins no source of adapters: write s3://bucket/prefix, "
        "hub+https://host or a folder."
    )


def directory_source(path: str) -> SourceConfig:
    """A folder of ``tenant/adapter/version/``."""
    return SourceConfig("directory", "directory", {"path": path})


def default_cache_path() -> Path:
    """``$XDG_CACHE_HOME/mural/adapters``, or the same under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "mural" / "adapters"


def build_resolvers(
    sources: Iterable[SourceConfig], limits: AdapterLimits = DEFAULT_LIMITS
) -> list[LoRAResolver]:
    """Make the sources; raise ``InvalidInput`` for a type nobody knows or options it refuses."""
    known = {entry.name: entry for entry in metadata.entry_points(group=RESOLVER_GROUP)}
    return [_build(known, source, limits) for source in sources]


def _build(
    known: Mapping[str, metadata.EntryPoint], source: SourceConfig, limits: AdapterLimits
) -> LoRAResolver:
    entry = known.get(source.type)
    if entry is None:
        raise InvalidInput(
            f"There is no source of the type {quoted(source.type)}; known are "
            f"{', '.join(sorted(known))}."
        )
    try:
        factory = cast(ResolverFactory, entry.load())
    except ImportError as error:
        raise InvalidInput(
            f"The source {quoted(source.name)} needs a package that is not installed: {error}."
        ) from None
    try:
        return factory(source.name, source.options, limits)
    except InvalidInput as error:
        raise InvalidInput(f"The source {quoted(source.name)}: {error.message}") from None


def convert_options(options: Mapping[str, object], form: type[T]) -> T:
    """Read a source's options into its struct or dataclass; raise ``InvalidInput``.

    Texts stand for numbers and truth values, since a URL has nothing else.
    """
    return converted(dict(options), form)


class _DirectoryOptions(msgspec.Struct, forbid_unknown_fields=True):
    path: str


def directory(name: str, options: Mapping[str, object], limits: AdapterLimits) -> LoRAResolver:
    """The factory of ``type: directory``."""
    path = Path(convert_options(options, _DirectoryOptions).path)
    return DirectoryResolver(path, limits, name=name)


def s3(name: str, options: Mapping[str, object], limits: AdapterLimits) -> LoRAResolver:
    """The factory of ``type: s3``; see ``S3Settings``."""
    try:
        from mural_resolvers.s3 import S3Resolver, S3Settings
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{error.name} is missing: pip install 'mural[s3]'.") from None
    return S3Resolver(S3Settings.from_mapping(options), limits, name=name)


def hub(name: str, options: Mapping[str, object], limits: AdapterLimits) -> LoRAResolver:
    """The factory of ``type: hub``; see ``HubSettings``. A URL's lists are cut at commas."""
    try:
        from mural_resolvers.hub import HubResolver, HubSettings
    except ModuleNotFoundError as error:
        raise InvalidInput(f"{error.name} is missing: pip install 'mural[hub]'.") from None
    known = {setting.name for setting in fields(HubSettings)} - {"name"}
    if unknown := options.keys() - known:
        raise InvalidInput(f"{quoted(min(unknown))} is no setting of a hub.")
    lists = ("organisations", "redirect_hosts")
    split = {
        key: value.split(",") if key in lists and isinstance(value, str) else value
        for key, value in options.items()
    }
    return HubResolver(convert_options({**split, "name": name}, HubSettings), limits)


def open_registry(
    config: SourcesConfig,
    base: BaseSpec,
    ids: LoRAIdAllocator,
    settings: RegistrySettings | None = None,
    limits: AdapterLimits = DEFAULT_LIMITS,
    *,
    resolvers: Sequence[LoRAResolver] = (),
) -> LoRAResolverRegistry:
    """The whole chain: cache, the configured sources, then the ``resolvers`` that stand ready.

    The cache is opened, and swept, only where a source downloads. Raises ``InvalidInput``.
    """
    chain = [*build_resolvers(config.resolvers, limits), *resolvers]
    fetcher = None
    if any(resolver.downloads for resolver in chain):
        path = Path(config.cache.path) if config.cache.path else default_cache_path()
        cache = DiskCache(path, config.cache.settings(), limits)
        cache.open()
        fetcher = AdapterFetcher(cache, Downloader(limits=limits), config.fetch.settings(), limits)
    return LoRAResolverRegistry(chain, base, ids, settings, fetcher=fetcher)
