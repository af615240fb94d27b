"""Starts the engine and both ports, and ends them in order: by a signal, or with the core."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from mural_resolvers.audit import AuditLog
from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.file_watch import FileWatch
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.ports import listen
from mural_resolvers.registry import LoRAResolverRegistry, RegistrySettings
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import LoRAResolver
from mural_resolvers.secret_text import watch_secret
from mural_resolvers.sources import open_registry
from mural_resolvers.tenants import TenantAccounts, TenantsFile
from mural_resolvers.tracing import Tracing, open_tracing
from mural_server.api.admission import Admission
from mural_server.api.app import create_app
from mural_server.api.auth import Authenticator
from mural_server.api.chat_template import AdapterTemplates, SandboxedRenderer
from mural_server.api.control import create_control_app
from mural_server.api.control_gate import ControlGate
from mural_server.api.http_protocol import OpenAIHttpProtocol
from mural_server.api.metrics import AccessCollector, Metrics, SourcesCollector, UploadsCollector
from mural_server.api.readiness import Readiness
from mural_server.api.renewed_token import RenewedToken
from mural_server.api.router_identity import RouterIdentity
from mural_server.api.sampling import SamplingDefaults
from mural_server.api.state import AppState
from mural_server.api.state_feed import StateFeed
from mural_server.api.text import TextPipeline
from mural_server.api.tls import PortTls
from mural_server.api.traffic import Traffic
from mural_server.api.upload_source import open_upload_source
from mural_server.catalog import AdapterCatalog
from mural_server.engine.client import EngineClient
from mural_server.engine.process import start_engine
from mural_server.generation import Generator
from mural_server.models.location import model_name
from mural_server.sampling_params import GenerationDefaults
from mural_server.settings import EngineSettings, ServerSettings, SettingsError, is_loopback
from mural_server.tokenizer import ModelTokenizer

__all__ = ["build_state", "run_server", "serve_state"]

logger = logging.getLogger("mural")

EXIT_STOPPED = 0
EXIT_CORE_DIED = 1
FLUSH_S = 5.0
KEEP_ALIVE_S = 75
MAX_ENGINE_LINES = 5

T = TypeVar("T")


async def run_server(engine: EngineSettings, settings: ServerSettings) -> int:
    """Serve until a signal (exit status 0, after draining) or the core's death (1).

    Raises `SettingsError`, or `InvalidInput` for a port that is taken, with one sentence when it
    cannot start; nothing is left running then.
    """
    engine.validate()
    settings.validate()
    stop = _stop_on_signals()
    async with AsyncExitStack() as held:
        sockets = _bind_all(settings)
        for bound in sockets:
            held.callback(bound.close)
        started = await _unless_stopped(_start(engine, settings, held), stop)
        if started is None:
            return EXIT_STOPPED
        _log_start(started, sockets)
        return await serve_state(started, sockets, stop)


@asynccontextmanager
async def build_state(
    settings: ServerSettings,
    client: EngineClient,
    tokenizer: ModelTokenizer,
    defaults: SamplingDefaults,
    *,
    allow_bin_adapters: bool = False,
) -> AsyncIterator[AppState]:
    """Everything between the engine and the routes; raises `SettingsError`."""
    auth = _authenticator(settings)
    limits = AdapterLimits(admit_bin=allow_bin_adapters)
    ids = LoRAIdAllocator()
    source = open_upload_source(settings, limits)
    registry = _registry(settings, client, ids, limits, [] if source is None else [source.resolver])
    roots = [*([settings.adapter_dir] if settings.adapter_dir else ())]
    catalog = AdapterCatalog(
        client,
        registry,
        ids,
        served=settings.served_model_name or (model_name(client.info.model),),
        adapter_wait_s=settings.adapter_wait_s,
        roots=[Path(root) for root in (*roots, *settings.allowed_adapter_path)],
        limits=limits,
    )
    admission = Admission(client.info.max_num_seqs + settings.max_queued_requests)
    templates = AdapterTemplates(SandboxedRenderer(), catalog.files)
    generator = Generator(client, tokenizer.backend)
    texts = TextPipeline(
        tokenizer,
        generator.texts,
        max_model_len=client.info.max_model_len,
        vocab_size=client.info.base_spec.vocab_size,
        chat_template=_base_template(settings, tokenizer),
        templates=templates,
    )
    tracing = _tracing(settings)
    audit = AuditLog(Path(settings.audit_log) if settings.audit_log else None)
    accounts = TenantAccounts()
    metrics = Metrics(
        client, catalog, admission, Traffic(), max_adapter_labels=settings.metrics_adapters
    )
    metrics.add(AccessCollector(auth.tenants, accounts, audit))
    sources = SourcesCollector(registry)
    metrics.add(sources)
    uploads = None if source is None else source.uploads(settings, client, registry, catalog)
    if uploads is not None:
        metrics.add(UploadsCollector(uploads.counts))
    beside: list[asyncio.Task[None]] = []
    if auth.tenants is not None:
        beside.append(asyncio.create_task(auth.tenants.watch(), name="watch tenants"))
    if uploads is not None:
        beside.append(asyncio.create_task(uploads.run(), name="reap uploads"))
    try:
        yield AppState(
            settings=settings,
            client=client,
            generator=generator,
            catalog=catalog,
            texts=texts,
            auth=auth,
            admission=admission,
            metrics=metrics,
            sources=sources,
            audit=audit,
            uploads=uploads,
            tracing=tracing,
            accounts=accounts,
            defaults=defaults,
            readiness=Readiness(settings.await_declared_s),
            started_at=int(time.time()),
        )
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        if uploads is not None:
            await uploads.close()
        await asyncio.to_thread(audit.close)
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
        await catalog.close()
        await registry.close()
        await templates.close()
        texts.close()


def _tracing(settings: ServerSettings) -> Tracing | None:
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        return open_tracing(settings.otlp_traces_endpoint, "mural-server")
    except MuralError as error:
        raise SettingsError(error.message) from None


def _registry(
    settings: ServerSettings,
    client: EngineClient,
    ids: LoRAIdAllocator,
    limits: AdapterLimits,
    resolvers: Sequence[LoRAResolver],
) -> LoRAResolverRegistry:
    """The sources and the cache in front of them; the cache is swept here, once."""
    try:
        return open_registry(
            settings.sources(),
            client.info.base_spec,
            ids,
            RegistrySettings(timeout_s=settings.adapter_wait_s),
            limits,
            resolvers=resolvers,
        )
    except MuralError as error:
        raise SettingsError(f"adapters: {error.message}") from None


# -- starting -------------------------------------------------------------------------------------


async def _start(
    engine: EngineSettings, settings: ServerSettings, held: AsyncExitStack
) -> AppState:
    client, tokenizer, recommended = await start_engine(engine)
    held.push_async_callback(client.close)
    use_recommended = settings.generation_config == "auto"
    state = await held.enter_async_context(
        build_state(
            settings,
            client,
            await asyncio.to_thread(ModelTokenizer, tokenizer),
            _sampling_defaults(recommended) if use_recommended else SamplingDefaults(),
            allow_bin_adapters=engine.allow_bin_adapters,
        )
    )
    await _load_modules(state)
    return state


def _sampling_defaults(found: GenerationDefaults) -> SamplingDefaults:
    plain = SamplingDefaults()
    return SamplingDefaults(
        temperature=_or(found.temperature, plain.temperature),
        top_p=_or(found.top_p, plain.top_p),
        top_k=_or(found.top_k, plain.top_k),
        min_p=_or(found.min_p, plain.min_p),
        repetition_penalty=_or(found.repetition_penalty, plain.repetition_penalty),
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


async def _load_modules(state: AppState) -> None:
    for module in state.settings.lora_modules:
        try:
            await state.catalog.admin.load_trusted(module.name, module.path, shared=module.shared)
        except MuralError as error:
            raise SettingsError(f"--lora-modules {module.name}: {error.message}") from None


def _base_template(settings: ServerSettings, tokenizer: ModelTokenizer) -> str | None:
    if settings.chat_template is not None:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    return tokenizer.chat_template


def _authenticator(settings: ServerSettings) -> Authenticator:
    tenants = None
    if settings.tenants_file is not None:
        try:
            tenants = TenantsFile(Path(settings.tenants_file))
        except MuralError as error:
            raise SettingsError(f"--tenants-file: {error.message}") from None
    router = None
    if settings.resolved_auth == "router":
        router = RouterIdentity(
            token=_renewed(settings.router_token),
            cert_names=settings.router_cert_name,
            tenants=tenants,
        )
    return Authenticator(
        settings.resolved_auth, admin_keys=settings.api_key, tenants=tenants, router=router
    )


def _bind_all(settings: ServerSettings) -> list[socket.socket]:
    bound = [listen(settings.resolved_host, settings.port, "--port")]
    if settings.control_port is not None:
        try:
            bound.append(listen(settings.control_host, settings.control_port, "--control-port"))
        except InvalidInput:
            bound[0].close()
            raise
    return bound


def _log_start(state: AppState, sockets: list[socket.socket]) -> None:
    info, settings = state.client.info, state.settings
    logger.info("serving %s as %s", info.model, ", ".join(state.catalog.served))
    for line in info.chosen[:MAX_ENGINE_LINES]:
        logger.info("%s", line)
    if info.max_loras:
        logger.info(
            "adapters from %s; %d names registered",
            _sources(settings) or "no source",
            len(settings.lora_modules),
        )
    elif _sources(settings):
        logger.warning("no adapter is served from anywhere: they are off (--no-enable-lora)")
    if settings.resolved_auth == "open":
        reach = "this machine" if is_loopback(settings.resolved_host) else "THE NETWORK"
        logger.info("auth open: no key is asked for, and %s can reach the port", reach)
    elif settings.resolved_auth == "router":
        logger.info("auth router: every request comes from a router, by %s", _proofs(settings))
    else:
        logger.info("auth keys: every request needs an API key (%s)", _known_keys(state))
    scheme = "http" if settings.ssl_certfile is None else "https"
    places = [f"{scheme}://{_address(bound)}" for bound in sockets]
    logger.info("OpenAI API on %s, control API on %s", *[*places, "no port"][:2])


def _sources(settings: ServerSettings) -> str:
    found = [str(source) for source in settings.sources().resolvers]
    return ", ".join([*found, *(["uploads"] if settings.upload_store else [])])


def _proofs(settings: ServerSettings) -> str:
    token = ["its token"] if settings.router_token is not None else []
    names = [f"a certificate of {name}" for name in settings.router_cert_name]
    return " or ".join([*token, *names])


def _known_keys(state: AppState) -> str:
    tenants = state.auth.tenants
    if tenants is None:
        return "admin keys alone"
    return f"{len(tenants.ring)} of {len(tenants.config.tenants)} tenants and of admins"


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- serving and ending ---------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the signals to us: they drain before they end it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: ASGIApp, tls: PortTls | None) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            http=OpenAIHttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(FLUSH_S),
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        )
    )


async def serve_state(state: AppState, sockets: list[socket.socket], stop: asyncio.Event) -> int:
    """Serve on the first socket, the control API on the second, until ``stop`` or the core's death.

    Gives the exit status. What was open when it ends has been drained, or told why not.
    """
    feed = StateFeed(state)
    control_token = _renewed(state.settings.control_token)
    gate = ControlGate(control_token)
    tls = _tls(state.settings)
    servers = [_server(create_app(state), tls)]
    if len(sockets) > 1:
        servers.append(_server(create_control_app(state, feed, gate), tls))
    serving = [
        asyncio.create_task(server.serve([bound]), name="the HTTP server")
        for server, bound in zip(servers, sockets, strict=True)
    ]
    beside = [asyncio.create_task(feed.run(), name="the state's watch")]
    for watch in _watches(state, control_token, tls):
        beside.append(asyncio.create_task(watch.run(), name="a watch of files"))
    try:
        return await _until_end(state, feed, stop, [*serving, *beside])
    finally:
        feed.close()
        for task in beside:
            task.cancel()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving, *beside, return_exceptions=True)


def _tls(settings: ServerSettings) -> PortTls | None:
    if settings.ssl_certfile is None:
        return None
    try:
        return PortTls(settings)
    except ValueError as error:
        raise SettingsError(f"--ssl-certfile: {error}.") from None


def _renewed(token: str | None) -> RenewedToken | None:
    return None if token is None else RenewedToken(token)


def _watches(
    state: AppState, control_token: RenewedToken | None, tls: PortTls | None
) -> Iterator[FileWatch]:
    """Of what is renewed while the server runs."""
    settings, router = state.settings, state.auth.router
    if tls is not None:
        files = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        yield FileWatch(files, tls.reload, what="certificates")
    for flag, path, token in (
        ("control_token_file", settings.control_token_file, control_token),
        (
            "router_token_file",
            settings.router_token_file,
            None if router is None else router.token,
        ),
    ):
        if path is not None and token is not None:
            what = flag.removesuffix("_file").replace("_", " ")
            yield watch_secret(path, flag, token.renew, what=what)


async def _until_end(
    state: AppState, feed: StateFeed, stop: asyncio.Event, tasks: list[asyncio.Task[None]]
) -> int:
    stopping = asyncio.create_task(stop.wait())
    dying = asyncio.create_task(state.client.wait_dead())
    try:
        await asyncio.wait((stopping, dying, *tasks), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            return await _end_with_core(state, dying.result())
        if stopping.done():
            return await _drain(state, feed, dying)
        ended = next(task for task in tasks if task.done())
        error = None if ended.cancelled() else ended.exception()
        raise SettingsError(f"{ended.get_name()} has ended by itself: {error}.")
    finally:
        stopping.cancel()
        dying.cancel()


async def _end_with_core(state: AppState, reason: str) -> int:
    logger.error("the server ends, since %s", reason)
    state.admission.close("The engine core has died.")
    # Every open stream has got its error from the client; give it time to be sent.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(state.admission.wait_idle(), FLUSH_S)
    return EXIT_CORE_DIED


async def _drain(state: AppState, feed: StateFeed, dying: asyncio.Task[str]) -> int:
    grace_s = state.settings.shutdown_grace_s
    state.admission.close("The server is shutting down.")
    # Who follows the state sends nothing more from here on, not a quarter of a second later.
    feed.refresh()
    logger.info("stopping: %d sequences have %g s to end", state.admission.open_sequences, grace_s)
    idle = asyncio.create_task(state.admission.wait_idle())
    try:
        await asyncio.wait((idle, dying), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            return await _end_with_core(state, dying.result())
        if not idle.done():
            logger.warning("%d sequences are aborted", state.admission.open_sequences)
            await state.client.drain(0.0)
            await asyncio.wait((idle,), timeout=FLUSH_S)
    finally:
        idle.cancel()
    return EXIT_STOPPED


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result, or None when a stop came first."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        stopping.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
