"""What a running router is made of, and how it takes over changed settings."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_resolvers.file_watch import FileWatch
from mural_resolvers.open_store import open_store
from mural_resolvers.redaction import redacted
from mural_resolvers.tenants import TenantsFile
from mural_resolvers.tracing import Tracing, open_tracing
from mural_resolvers.watched_file import POLL_S
from mural_router.cluster import Cluster
from mural_router.config import Config
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.places import open_discovery
from mural_router.fleet.view import FleetSettings, FleetView
from mural_router.http.tls import replica_side
from mural_router.limits.limiter import Limiter
from mural_router.limits.local import LocalLimiter
from mural_router.limits.queue import FairQueue
from mural_router.objects import FileObjects, Objects
from mural_router.proxy import Proxy
from mural_router.routing.access_log import AccessLog
from mural_router.routing.aliases_file import AliasesFile
from mural_router.routing.breaker import Breakers
from mural_router.routing.dispatch import Attempt, Dispatch, undeclared
from mural_router.routing.identity import Authenticator
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.retry import RetryBudget
from mural_router.routing.router import FleetRouting
from mural_router.routing.versions import StoreVersions, Versions
from mural_router.settings import KUBERNETES, RouterSettings, Secrets
from mural_router.tokens import ReplicaTokens

if TYPE_CHECKING:
    from mural_router.picker import Picker

__all__ = ["ConfiguredDiscovery", "Router", "open_limiter"]

logger = logging.getLogger("mural.router")


class ConfiguredDiscovery(Discovery):
    """Whichever discovery the settings name at the time."""

    def __init__(self, discovery: Discovery) -> None:
        self._current = discovery
        self._changed = asyncio.Event()

    def use(self, discovery: Discovery) -> None:
        """Find replicas in another way from now on."""
        self._current = discovery
        self._changed.set()

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        while True:
            self._changed.clear()
            async with (
                contextlib.aclosing(self._current.watch()) as found,
                contextlib.aclosing(self._until_changed(found)) as kept,
            ):
                async for endpoints in kept:
                    yield endpoints

    async def _until_changed(
        self, found: AsyncGenerator[tuple[Endpoint, ...], None]
    ) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        changed = asyncio.create_task(self._changed.wait())
        following: asyncio.Task[tuple[Endpoint, ...]] | None = None
        try:
            while not changed.done():
                following = asyncio.create_task(_next(found))
                await asyncio.wait({following, changed}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    yield following.result()
        finally:
            changed.cancel()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


async def _next(
    found: AsyncGenerator[tuple[Endpoint, ...], None],
) -> tuple[Endpoint, ...]:
    return await anext(found)


class Router:
    """Everything between the settings and the ports. For one event loop."""

    def __init__(self, config: Config, limiter: Limiter) -> None:
        """`open_limiter` makes the limiter.

        Raises ``InvalidInput`` for what the settings name and cannot be opened.
        """
        self.config = config
        self.limiter = limiter
        settings, secrets = config.settings, config.secrets
        self.tokens = ReplicaTokens(secrets, self._use_tokens)
        self.cluster = Cluster()
        self.tenants = _open_tenants(settings)
        self.aliases = _open_aliases(settings)
        self.objects = _open_objects(settings, self.cluster)
        self.discovery = ConfiguredDiscovery(_discovery(settings, self.cluster))
        self.fleet = FleetView(self.discovery, _fleet_settings(settings, secrets))
        self.queue: FairQueue[Attempt] = FairQueue(
            max_waiting=settings.queue.max_waiting,
            max_waiting_per_tenant=settings.queue.max_waiting_per_tenant,
        )
        self.metrics = RouterMetrics(settings.metrics_adapters)
        self.breakers = Breakers(settings.breaker)
        self.dispatch = Dispatch(
            self.fleet,
            self.breakers,
            self.metrics,
            policy=settings.placement,
            clock=asyncio.get_running_loop().time,
            freed=self.queue.pump,
            declared=undeclared if self.objects is None else self.objects.declared.replicas,
        )
        self.versions = Versions(
            None if settings.store is None else StoreVersions(open_store(settings.store)),
            settings.versions,
            overlay=self.aliases if self.objects is None else self.objects.declared,
        )
        self.log = _open_log(settings)
        self.tracing = _open_tracing(settings)
        self.routing = FleetRouting(
            auth=Authenticator(
                settings.resolved_auth(secrets),
                admin_keys=secrets.api_keys,
                tenants=self.objects or self.tenants,
            ),
            versions=self.versions,
            limiter=limiter,
            queue=self.queue,
            dispatch=self.dispatch,
            budget=RetryBudget(settings.retry),
            metrics=self.metrics,
            log=self.log,
            tracing=self.tracing,
            options=_options(settings, self.tokens),
            clock=asyncio.get_running_loop().time,
        )
        self.proxy: Proxy | None = None
        self.picker: Picker | None = None
        self.certificates = FileWatch(
            settings.http.tls.files, self.reload_certificates, what="certificates"
        )
        self.stopping = False
        self._in_force = settings

    def take_over(self, settings: RouterSettings) -> None:
        """Use changed settings: those that can change while requests are on their way.

        Raises a ``MuralError``, with nothing changed, for what they name and cannot be opened.
        """
        old, aliases, discovery = self._in_force, self.aliases, None
        if settings.aliases_file != old.aliases_file:
            aliases = _open_aliases(settings)
        if settings.replicas != old.replicas:
            discovery = _discovery(settings, self.cluster)
        self._in_force = settings
        self.routing.options = _options(settings, self.tokens)
        self.routing.budget.settings = settings.retry
        self.breakers.settings = settings.breaker
        self.dispatch.policy = settings.placement
        self.queue.max_waiting = settings.queue.max_waiting
        self.queue.max_waiting_per_tenant = settings.queue.max_waiting_per_tenant
        self.versions.settings = settings.versions
        if discovery is not None:
            self.discovery.use(discovery)
        if aliases is not self.aliases:
            self.versions.overlay = self.aliases = aliases

    async def watch_aliases(self) -> None:
        """Look for ever at the aliases file that the settings name at the time."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.aliases is not None:
                await self.aliases.look()

    def file_watches(self) -> dict[str, FileWatch]:
        """Of what is renewed while the router runs, by a name for metrics."""
        certificates = {"certificates": self.certificates} if self.certificates.needed else {}
        return {**self.tokens.watches, **certificates}

    def _use_tokens(self, tokens: ReplicaTokens) -> None:
        self.routing.options = _options(self._in_force, tokens)
        if tokens.control_token is not None:
            self.fleet.use_control_token(tokens.control_token)
        if tokens.vllm_api_key is not None:
            self.fleet.use_vllm_api_key(tokens.vllm_api_key)

    def reload_certificates(self) -> None:
        """Read the files of TLS anew; raises ``ValueError`` and keeps the old ones."""
        context = replica_side(self.config.settings.http.tls)
        if self.picker is not None:
            self.picker.reload_certificates()
        if self.proxy is not None:
            self.proxy.reload_certificates()
        self.fleet.use_tls(context)

    def not_ready(self) -> str | None:
        """Why a balancer should send nothing here; None: it may."""
        if self.stopping:
            return "The router is shutting down."
        if self.proxy is None or not self.fleet.settled:
            return "The router is starting."
        unknown = None if self.objects is None else self.objects.not_ready()
        if unknown is not None:
            return unknown
        if not self.fleet.fleet.accepting:
            return "No replica is ready."
        return None

    async def close(self) -> None:
        """Close what was opened, the proxy first. Each step has a bound."""
        self.tokens.close()
        if self.proxy is not None:
            await self.proxy.close()
        self.dispatch.close()
        await self.versions.close()
        await self.cluster.close()
        if self.log is not None:
            await self.log.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)


def _options(settings: RouterSettings, tokens: ReplicaTokens) -> RoutingOptions:
    return RoutingOptions(
        queue_wait_s=settings.queue.wait_s,
        shared_names=frozenset(settings.shared_names),
        router_token=tokens.router_token,
        vllm_api_key=tokens.vllm_api_key,
    )


def _open_tenants(settings: RouterSettings) -> TenantsFile | None:
    return None if settings.tenants_file is None else TenantsFile(Path(settings.tenants_file))


def _open_aliases(settings: RouterSettings) -> AliasesFile | None:
    return None if settings.aliases_file is None else AliasesFile(Path(settings.aliases_file))


def _open_objects(settings: RouterSettings, cluster: Cluster) -> Objects | None:
    if settings.objects is None:
        return None
    if settings.objects != KUBERNETES:
        return FileObjects(Path(settings.objects))
    try:
        client = cluster.client()
    except ValueError as error:
        raise InvalidInput(f"objects: {redacted(str(error))}.") from None
    # Only where its packages are.
    from mural_router.objects.kubernetes import KubernetesObjects

    return KubernetesObjects(
        client,
        namespace=settings.objects_namespace,
        watched=settings.watch_namespaces,
        keys_secret=settings.keys_secret,
    )


def _discovery(settings: RouterSettings, cluster: Cluster) -> Discovery:
    try:
        return open_discovery(settings.replicas, cluster)
    except ValueError as error:
        raise InvalidInput(f"replicas: {redacted(str(error))}.") from None


async def open_limiter(settings: RouterSettings, secrets: Secrets) -> Limiter:
    """Counts in Redis, where there is a URL, else in this process; raises ``InvalidInput``."""
    if secrets.redis_url is None:
        return LocalLimiter()
    try:
        from mural_router.limits.redis_limiter import RedisLimiter, RedisSettings
    except ImportError as error:
        raise InvalidInput(
            f"Shared limits need a package that is not installed ({error.name}): "
            "pip install 'mural[redis]'."
        ) from None
    try:
        limiter = RedisLimiter(
            RedisSettings(url=secrets.redis_url, **msgspec.structs.asdict(settings.redis))
        )
    except ValueError as error:
        raise InvalidInput(f"The URL of Redis cannot be used: {redacted(str(error))}.") from None
    await limiter.start()
    return limiter


def _fleet_settings(settings: RouterSettings, secrets: Secrets) -> FleetSettings:
    try:
        context = replica_side(settings.http.tls)
    except ValueError as error:
        raise InvalidInput(f"http.tls: {error}.") from None
    return FleetSettings(
        control_token=secrets.control_token,
        vllm_api_key=secrets.vllm_api_key,
        ssl=context,
        stale_after_s=settings.fleet.stale_after_s,
        scrape_interval_s=settings.fleet.scrape_interval_s,
    )


def _open_log(settings: RouterSettings) -> AccessLog | None:
    if settings.access_log is None:
        return None
    try:
        return AccessLog(None if settings.access_log == "-" else Path(settings.access_log))
    except OSError as error:
        raise InvalidInput(f"access_log: {settings.access_log}: {error.strerror}.") from None


def _open_tracing(settings: RouterSettings) -> Tracing | None:
    if settings.otlp_traces_endpoint is None:
        return None
    return open_tracing(
        settings.otlp_traces_endpoint,
        "mural-router",
        sample_ratio=settings.trace_sample_ratio,
    )
