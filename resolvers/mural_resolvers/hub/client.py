"""The requests that a hub source makes, on a connection pool of its own.

Not through huggingface_hub's client: that has one pool and no timeout for the whole process, takes
certificates and offline mode from the process's environment, and cannot be cancelled. Nothing of
its cache, its environment or its Xet client has a part here: content is asked for with plain
ranged requests, which a hub answers whether or not it stores it in Xet.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from urllib.parse import quote
from urllib.request import getproxies, proxy_bypass

import httpx2

from mural_resolvers.errors import InvalidInput, Unavailable, UnusableAdapter, quoted
from mural_resolvers.hub.answers import (
    Revision,
    TreeEntry,
    Unreadable,
    parse_revision,
    parse_tree,
    refusal,
)
from mural_resolvers.hub.settings import HubSettings, read_token

__all__ = ["HubClient", "HubResponse"]

logger = logging.getLogger("mural.hub")

_MAX_REDIRECTS = 5
_MAX_JSON_BYTES = 8 << 20
_MAX_PAGES = 10
_KEEP_ALIVE_S = 30.0


@dataclass(frozen=True, slots=True)
class HubResponse:
    """A response whose body has not been read; ``headers`` have lower-case names.

    ``at_hub`` tells that the hub's own origin gave it, not one that it redirected to.
    """

    status: int
    headers: Mapping[str, str]
    at_hub: bool
    raw: httpx2.Response

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes; raises ``Unavailable`` where it breaks off or stalls."""
        with _unavailable():
            async for piece in self.raw.aiter_raw():
                yield piece


class HubClient:
    """Asks one hub. For one event loop.

    A redirect is followed at most five times, and never from https to http. The token goes to the
    endpoint's own origin only, and never again once a redirect has left that. Plain HTTP is
    followed on the endpoint's own host only; ``redirect_hosts`` narrows the rest, and admits more
    hosts over plain HTTP.
    """

    def __init__(self, settings: HubSettings) -> None:
        self._settings = settings
        self._endpoint = httpx2.URL(settings.endpoint.rstrip("/"))
        tls = _tls(settings)
        limits = httpx2.Limits(
            max_connections=settings.max_connections, keepalive_expiry=_KEEP_ALIVE_S
        )
        self._proxies = {s: url for s, url in getproxies().items() if s in ("http", "https")}
        self._transports = {
            proxy: _transport(tls, limits, proxy) for proxy in (None, *self._proxies.values())
        }
        self._timeout = httpx2.Timeout(
            settings.read_timeout_s,
            connect=settings.connect_timeout_s,
            pool=settings.answer_timeout_s,
        )
        # Read once at the start too, so that a source without its token is not started.
        read_token(settings)

    async def revision(self, repo: str, revision: str) -> Revision | None:
        """The commit that a revision is now; None where repository or revision are absent."""
        path = f"/api/models/{repo}/revision/{quote(revision, safe='')}"
        async with self._asked("GET", path) as response:
            if not self._granted(response):
                return None
            return parse_revision(await _body(response))

    async def tree(self, repo: str, commit: str) -> list[TreeEntry] | None:
        """The entries of a commit's top folder, or None where that is absent."""
        path = f"/api/models/{repo}/tree/{commit}"
        query = "recursive=false&expand=false"
        entries: list[TreeEntry] = []
        for _ in range(_MAX_PAGES):
            async with self._asked("GET", path, query) as response:
                if not self._granted(response):
                    return None
                entries += parse_tree(await _body(response))
                following = response.raw.links.get("next", {}).get("url")
            if following is None:
                return entries
            # Only the cursor is taken over: a mirror may name the hub that it mirrors.
            query = httpx2.URL(following).query.decode("ascii")
        raise UnusableAdapter("The adapter's repository has too many files.")

    async def may_read(self, repo: str, commit: str, path: str) -> bool:
        """Ask for a file's content, not for the content itself; False where it is absent.

        A hub describes a gated repository to everybody: only the content shows the right.
        """
        async with self._asked("HEAD", f"/{repo}/resolve/{commit}/{path}") as response:
            # Sent on to where the content lies: the hub checks the right before.
            return response.raw.has_redirect_location or self._granted(response)

    @asynccontextmanager
    async def content(
        self, repo: str, commit: str, path: str, byte_range: tuple[int, int] | None
    ) -> AsyncIterator[HubResponse]:
        """Open a file's content, ``[start, stop)`` of it or all; give the response, any status."""
        headers = {} if byte_range is None else _range_header(*byte_range)
        asked = self._asked("GET", f"/{repo}/resolve/{commit}/{path}", "", headers, leave=True)
        async with asked as response:
            yield response

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports.values():
            await transport.aclose()

    def _granted(self, response: HubResponse) -> bool:
        """True for a success, False for what is absent; raises what a refusal means."""
        if response.status == 200:
            return True
        error = refusal(response.status, response.headers, hidden_is_absent=self._hidden_is_absent)
        if error is not None:
            self.log_refusal(response)
            raise error
        return False

    def log_refusal(self, response: HubResponse) -> None:
        """Tell the operator what the hub said; the user is told less."""
        request = response.raw.request
        logger.warning(
            "hub %s answered %d to %s %s: %s",
            self._settings.name,
            response.status,
            request.method,
            # Without the query: the URLs that a hub redirects to are signed there.
            quoted(f"{request.url.host}{request.url.path}", 200),
            quoted(response.headers.get("x-error-message", ""), 200),
        )

    @property
    def _hidden_is_absent(self) -> bool:
        return self._settings.hidden_is_absent and not self._settings.has_token

    # -- one request ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _asked(
        self,
        method: str,
        path: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        leave: bool = False,
    ) -> AsyncIterator[HubResponse]:
        """Send a request and follow redirects, to other hosts only with ``leave``.

        Where that is not wanted, the response is the redirect. Raises ``Unavailable``.
        """
        url = httpx2.URL(f"{self._endpoint}{path}" + (f"?{query}" if query else ""))
        with _unavailable():
            async with asyncio.timeout(self._settings.answer_timeout_s):
                response = await self._follow(method, url, headers or {}, leave)
            try:
                yield response
            finally:
                await response.raw.aclose()

    async def _follow(
        self, method: str, url: httpx2.URL, headers: Mapping[str, str], leave: bool
    ) -> HubResponse:
        at_hub = True
        for _ in range(_MAX_REDIRECTS + 1):
            raw = await self._send(method, url, headers, with_token=at_hub)
            lower = {name.lower(): value for name, value in raw.headers.items()}
            response = HubResponse(raw.status_code, lower, at_hub, raw)
            if not raw.has_redirect_location:
                return response
            async with _closing_on_error(raw):
                following = self._redirected(url, raw.headers["location"])
            stays = at_hub and _origin(following) == _origin(self._endpoint)
            if not stays and not leave:
                return response
            await raw.aclose()
            url, at_hub = following, stays
        raise Unreadable("The hub redirects without an end.")

    async def _send(
        self, method: str, url: httpx2.URL, headers: Mapping[str, str], *, with_token: bool
    ) -> httpx2.Response:
        """One request. The transport below the client: no cookies, no URLs in logs."""
        sent = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "mural", **headers}
        token = await self._token() if with_token else None
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        request = httpx2.Request(
            method, url, headers=sent, extensions={"timeout": self._timeout.as_dict()}
        )
        response = await self._transport_to(url).handle_async_request(request)
        response.request = request
        return response

    async def _token(self) -> str | None:
        try:
            if self._settings.token_file is None:
                return read_token(self._settings)
            return await asyncio.to_thread(read_token, self._settings)
        except InvalidInput as error:
            logger.error("hub %s: %s", self._settings.name, error.message)
            raise Unavailable("The hub cannot be asked without its token.") from None

    def _transport_to(self, url: httpx2.URL) -> httpx2.AsyncHTTPTransport:
        proxy = self._proxies.get(url.scheme)
        bypassed = proxy is not None and proxy_bypass(url.host)
        return self._transports[None if bypassed else proxy]

    def _redirected(self, url: httpx2.URL, location: str) -> httpx2.URL:
        """Where a redirect leads, if that is a place that we go to."""
        target = url.join(location)
        home = target.host == self._endpoint.host
        hosts = self._settings.redirect_hosts
        listed = hosts is not None and any(fnmatchcase(target.host, host) for host in hosts)
        if target.scheme == "https":
            known = home or listed or hosts is None
        else:
            # Never down from https, and over plain HTTP to nobody whom the operator has not named.
            known = target.scheme == url.scheme == "http" and (home or listed)
        if not known or target.userinfo or not 0 < (target.port or 80) < 1 << 16:
            where = f"{target.scheme}://{target.host}"
            logger.error("hub %s redirects to %s", self._settings.name, quoted(where, 200))
            raise Unavailable("The hub redirects to a place that is not allowed.")
        return target


def _tls(settings: HubSettings) -> ssl.SSLContext:
    if settings.ca_bundle is None:
        return httpx2.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=settings.ca_bundle)
    except OSError:
        raise InvalidInput("A hub's ca_bundle is no readable PEM file.") from None


def _transport(
    tls: ssl.SSLContext, limits: httpx2.Limits, proxy: str | None
) -> httpx2.AsyncHTTPTransport:
    try:
        return httpx2.AsyncHTTPTransport(verify=tls, limits=limits, proxy=proxy)
    except (ImportError, ValueError, httpx2.InvalidURL):
        raise InvalidInput("The environment's proxy is not one that a hub can use.") from None


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    default = {"http": 80, "https": 443}.get(url.scheme)
    return url.scheme, url.host, url.port or default


@asynccontextmanager
async def _closing_on_error(raw: httpx2.Response) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await raw.aclose()
        raise


def _range_header(start: int, stop: int) -> dict[str, str]:
    return {"range": f"bytes={start}-{stop - 1}"}


async def _body(response: HubResponse) -> bytes:
    """A whole small body. Its bound on time is the caller's."""
    data = bytearray()
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            data += piece
            if len(data) > _MAX_JSON_BYTES:
                raise Unreadable("The hub's answer is too large.")
    return bytes(data)


@contextmanager
def _unavailable() -> Iterator[None]:
    """Turn what a connection fails with into a source that is down."""
    try:
        yield
    except (TimeoutError, httpx2.TimeoutException):
        raise Unavailable("The hub did not answer in time.", retry_after_s=2.0) from None
    except (httpx2.TransportError, httpx2.InvalidURL, httpx2.StreamError) as error:
        logger.warning("a hub cannot be reached: %s", type(error).__name__)
        raise Unavailable("The hub cannot be reached.", retry_after_s=2.0) from None
