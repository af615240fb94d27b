"""Which repository, at which revision, an adapter's name means. No I/O."""

from __future__ import annotations

from string import Formatter
from typing import NamedTuple

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from mural_resolvers.errors import InvalidInput, MalformedName, quoted
from mural_resolvers.hub.answers import COMMIT
from mural_resolvers.hub.settings import HubSettings
from mural_resolvers.names import LATEST, AdapterName, is_version, parse_name

__all__ = ["Place", "Places"]

_MAIN = "main"
_FIELDS = frozenset({"tenant", "adapter", "version"})


class Place(NamedTuple):
    """A repository ``organisation/name`` and a branch, tag or commit of it.

    ``is_alias``: the name follows a branch, so its exact version is the commit found there.
    """

    repo: str
    revision: str
    is_alias: bool = False


class Places:
    """The templates and maps of a source's settings; raises ``InvalidInput`` where they are wrong.

    A version of 40 hex digits is that commit, whatever the template of the revision: the exact
    name of what an alias meant. It and the aliases exist where the repository does not depend on
    the version.
    """

    def __init__(self, settings: HubSettings) -> None:
        self._repo = settings.repo
        self._revision = settings.revision
        self._any_organisation = "*" in settings.organisations
        self._organisations = {name.casefold() for name in settings.organisations}
        self._versioned_repo = "version" in _fields("repo", settings.repo)
        _fields("revision", settings.revision)
        if settings.repo.count("/") != 1:
            raise InvalidInput("A hub's template of the repository is organisation/name.")
        self._aliases = _aliases(settings, self._versioned_repo)
        self._repos: dict[str, str] = {}
        self._exact: dict[str, Place] = {}
        for text, target in settings.names.items():
            self._add(text, target)

    def find(self, name: AdapterName) -> Place | None:
        """Where a name is to be looked for; None where it can be nowhere in this source.

        That is an organisation that is not allowed, a repository's name that no hub accepts.
        """
        place = self._exact.get(name.exact) or self._by_template(name)
        return place if self._is_allowed(place.repo) else None

    def _by_template(self, name: AdapterName) -> Place:
        parts = {"tenant": name.tenant, "adapter": name.adapter, "version": name.version}
        mapped = self._repos.get(f"{name.tenant}/{name.adapter}")
        repo = mapped or self._repo.format_map(parts)
        if mapped is not None or not self._versioned_repo:
            if COMMIT.fullmatch(name.version):
                return Place(repo, name.version)
            if name.version in self._aliases:
                return Place(repo, self._aliases[name.version], is_alias=True)
        return Place(repo, self._revision.format_map(parts))

    def _is_allowed(self, repo: str) -> bool:
        organisation = repo.partition("/")[0].casefold()
        return _is_repo(repo) and (self._any_organisation or organisation in self._organisations)

    def _add(self, text: str, target: str) -> None:
        try:
            name = parse_name(text)
        except MalformedName as error:
            raise InvalidInput(f"A hub's names: {error.message}") from None
        repo, at, revision = target.partition("@")
        if not _is_repo(repo) or (at and not revision):
            raise InvalidInput(f"{quoted(target)} is not organisation/name[@revision].")
        if not self._is_allowed(repo):
            raise InvalidInput(f"{quoted(repo)} is of an organisation that is not allowed.")
        if ":" not in text:
            if at:
                raise InvalidInput(f"{quoted(text)} means every version: it takes no revision.")
            self._repos[f"{name.tenant}/{name.adapter}"] = repo
        elif name.version in self._aliases:
            raise InvalidInput(f"{quoted(text)} is an alias: it follows a branch by itself.")
        else:
            self._exact[name.exact] = Place(repo, revision or _MAIN)


def _aliases(settings: HubSettings, versioned_repo: bool) -> dict[str, str]:
    if settings.aliases is None:
        return {} if versioned_repo else {LATEST: _MAIN}
    if settings.aliases and versioned_repo:
        raise InvalidInput("Aliases need a repository that does not depend on the version.")
    for alias, branch in settings.aliases.items():
        if not is_version(alias) or COMMIT.fullmatch(alias) or not branch:
            raise InvalidInput(f"{quoted(alias)} is no alias of a branch.")
    return dict(settings.aliases)


def _fields(what: str, template: str) -> set[str]:
    """The fields of a template, which has plain ones only."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        raise InvalidInput(f"A hub's template of the {what} is no template.") from None
    fields = {name for _, name, _, _ in parts if name is not None}
    plain = not any(spec or conversion for _, _, spec, conversion in parts)
    if not template or not plain or not fields <= _FIELDS:
        raise InvalidInput(
            f"A hub's template of the {what} is text with {{tenant}}, {{adapter}} and {{version}}."
        )
    return fields


def _is_repo(repo: str) -> bool:
    """Whether a hub could have it; what passes needs no escaping in a URL."""
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return repo.isascii() and repo.count("/") == 1
