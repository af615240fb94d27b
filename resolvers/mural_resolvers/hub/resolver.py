"""Adapters in the repositories of a Hugging Face hub, or of a mirror.

``acme/sql:v1`` is, unless the settings say otherwise, the tag ``v1`` of the repository
``acme/sql``. The tag is pinned to a commit before anything is read; a tag that is moved gives
another commit under the same name, which the cache refuses. ``acme/sql:latest`` follows the
branch ``main``: its exact version is the commit, ``acme/sql:0123…cdef``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import BIN_WEIGHTS_FILE, WEIGHTS_FILE, choose_engine_files
from mural_resolvers.errors import AdapterNotFound, Conflict, InvalidInput, Unavailable, quoted
from mural_resolvers.hub.answers import (
    COMMIT,
    Unreadable,
    refusal,
    source_file,
    unique_paths,
)
from mural_resolvers.hub.content import byte_range, read_window
from mural_resolvers.hub.settings import HubSettings
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.tenants import Principal

if TYPE_CHECKING:
    from mural_resolvers.hub.client import HubClient, HubResponse
    from mural_resolvers.hub.places import Place, Places

__all__ = ["HubResolver"]

logger = logging.getLogger("mural.hub")


class HubResolver(LoRAResolver):
    """A hub as a source; for one event loop. Needs the packages of ``mural[hub]``.

    Each look-up asks the hub anew, for the commit and for the right to read its content, so that
    nobody is served on a right that was taken away. Raises ``InvalidInput`` for wrong settings.
    """

    def __init__(self, settings: HubSettings, limits: AdapterLimits = DEFAULT_LIMITS) -> None:
        self._settings = settings
        self._limits = limits
        self._places, self._client = _connect(settings)

    @property
    def name(self) -> str:
        """As the settings say."""
        return self._settings.name

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        """Describe a commit's files; None where repository or revision are absent.

        Raises ``Forbidden`` for what is gated, private or asked for with a token that is not
        accepted; ``UnusableAdapter`` for a repository without an adapter in its top folder;
        ``Unavailable`` when the hub cannot tell, with its own ``Retry-After`` where it gave one.
        """
        place = self._places.find(name)
        if place is None:
            return None
        try:
            async with asyncio.timeout(self._settings.answer_timeout_s):
                return await self._describe(name, place)
        except TimeoutError:
            raise Unavailable("The hub did not answer in time.", retry_after_s=2.0) from None

    @asynccontextmanager
    async def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read from the described commit.

        A file that the hub keeps without LFS has no sha256 in its description; it is read as a
        whole and held to git's sha1 of it. Raises ``Conflict`` for other content, also at the end
        of the last piece; ``Forbidden``; ``AdapterNotFound`` for what has been deleted since;
        ``Unavailable``.
        """
        place = self._places.find(adapter.name)
        if place is None:
            raise AdapterNotFound(f"The hub has no place for {adapter.name}.")
        wanted = byte_range(file, start, stop)
        async with self._client.content(place.repo, adapter.revision, file.path, wanted) as found:
            self._check_content(found, adapter)
            async with aclosing(read_window(found, file, start, stop)) as pieces:
                yield pieces

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _describe(self, name: AdapterName, place: Place) -> AdapterDescription | None:
        revision = await self._client.revision(place.repo, place.revision)
        if revision is None:
            return None
        if COMMIT.fullmatch(place.revision) and revision.sha != place.revision:
            raise Unreadable("The hub answers with another commit than was asked for.")
        if revision.id.casefold() != place.repo.casefold():
            # A renamed repository answers under its new name, which may be anybody's.
            logger.warning(
                "hub %s: %s is now %s: name that instead",
                self.name,
                quoted(place.repo),
                quoted(revision.id),
            )
            return None
        files = await self._files(revision.id, revision.sha)
        if files is None:
            return None
        if not place.is_alias:
            return AdapterDescription(name, revision.sha, files)
        return AdapterDescription(
            name.at(revision.sha), revision.sha, files, alias_ttl_s=self._settings.alias_cache_s
        )

    async def _files(self, repo: str, commit: str) -> tuple[SourceFile, ...] | None:
        """The adapter's files at a commit, once the hub has granted their content."""
        entries = await self._client.tree(repo, commit)
        if entries is None:
            return None
        present = unique_paths(entry for entry in entries if entry.type == "file")
        names = choose_engine_files(present, self._limits)
        weights = next(path for path in names if path in (WEIGHTS_FILE, BIN_WEIGHTS_FILE))
        if not await self._client.may_read(repo, commit, weights):
            return None
        return tuple(source_file(present[path]) for path in names)

    def _check_content(self, response: HubResponse, adapter: AdapterDescription) -> None:
        """Raise what a response that has not the content means."""
        if response.status in (200, 206):
            commit = response.headers.get("x-repo-commit", adapter.revision)
            if response.at_hub and commit != adapter.revision:
                raise Conflict("The hub sends another commit than was asked for.")
            return
        if response.status == 416:
            raise Conflict("The hub has fewer bytes of the file than it described.")
        self._client.log_refusal(response)
        if not response.at_hub and response.status < 500 and response.status != 429:
            # Where the content lies knows no rights: a link that has expired, or a file lost.
            raise Unavailable("The hub's store does not have the content.", retry_after_s=2.0)
        error = refusal(response.status, response.headers, hidden_is_absent=False)
        raise error or AdapterNotFound(f"The adapter {adapter.name} is no longer in the hub.")


def _connect(settings: HubSettings) -> tuple[Places, HubClient]:
    # Only here: these two need packages that not every installation has.
    try:
        from mural_resolvers.hub.client import HubClient
        from mural_resolvers.hub.places import Places
    except ImportError:
        raise InvalidInput("A hub as a source needs `pip install mural[hub]`.") from None
    return Places(settings), HubClient(settings)
