"""Mural's sources of adapters inside vLLM: a general plug-in that resolves LoRA names.

vLLM calls ``register`` in each of its processes; its API server then asks the resolver for every
adapter that it does not know. Inside vLLM there is no tenant: the plug-in acts as one configured
principal, and the router and the network are the border.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import InvalidInput, MuralError, Unavailable, quoted
from mural_resolvers.names import LATEST, AdapterName, is_tenant, parse_name
from mural_resolvers.registry import LoRAResolverRegistry, RegistrySettings
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.sources import open_registry, read_sources
from mural_resolvers.tenants import Principal, is_grant

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest as VLLMLoRARequest

__all__ = ["MuralLoRAResolver", "VLLMPluginSettings", "register"]

RESOLVER_NAME: Final = "mural"

SOURCES: Final = "MURAL_SOURCES"
TENANT: Final = "MURAL_VLLM_TENANT"
GRANTS: Final = "MURAL_VLLM_GRANTS"
TIMEOUT_S: Final = "MURAL_VLLM_TIMEOUT_S"
MAX_ADAPTERS: Final = "MURAL_VLLM_MAX_ADAPTERS"
LEASE_S: Final = "MURAL_VLLM_LEASE_S"

# vLLM's own switch, without which it asks no resolver.
_ALLOWED: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

T = TypeVar("T", int, float)

logger = logging.getLogger("mural.vllm")


def register() -> None:
    """Give vLLM a resolver over the sources that the environment names; without any, nothing.

    The entry point of ``vllm.general_plugins``. Opens nothing, since most of vLLM's processes
    never resolve a name, and may be called again. Raises ``InvalidInput`` for settings that
    cannot mean anything, which ends vLLM's start.
    """
    from vllm.lora.resolver import LoRAResolverRegistry as VLLMRegistry

    _log_as_vllm_does()
    settings = VLLMPluginSettings.from_environment(os.environ)
    if settings is None:
        logger.info("%s is not set: Mural resolves no adapters here", SOURCES)
        return
    if RESOLVER_NAME in VLLMRegistry.get_supported_resolvers():
        return
    read_sources(settings.sources)
    VLLMRegistry.register_resolver(RESOLVER_NAME, MuralLoRAResolver(settings))
    if os.environ.get(_ALLOWED, "").strip().lower() not in ("1", "true"):
        logger.warning("vLLM asks for adapters by name only under %s=1", _ALLOWED)
    principal = settings.principal
    logger.info(
        "Mural resolves adapters from %s for the tenant %s with the grants %s",
        settings.sources,
        principal.tenant or "(none)",
        ", ".join(principal.grants) or "(none)",
    )


@dataclass(frozen=True, slots=True)
class VLLMPluginSettings:
    """What the environment says.

    ``sources``: the YAML file of sources. ``principal``: who is acted as. ``timeout_s``: the
    longest that one look-up may take, download included. ``max_adapters``: the most that is held
    for vLLM at one time. ``lease_s``: how long, after it was last handed out; None for as long
    as vLLM runs.
    """

    sources: Path
    principal: Principal
    timeout_s: float = 30.0
    max_adapters: int = 1000
    lease_s: float | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> VLLMPluginSettings | None:
        """Read the variables; None where no sources are named. Raises ``InvalidInput``."""
        sources = environ.get(SOURCES)
        if not sources:
            return None
        return cls(
            sources=Path(sources),
            principal=_principal(environ),
            timeout_s=_above_0(environ, TIMEOUT_S, float) or 30.0,
            max_adapters=_above_0(environ, MAX_ADAPTERS, int) or 1000,
            lease_s=_above_0(environ, LEASE_S, float),
        )


OpenChain = Callable[[VLLMPluginSettings, BaseSpec], LoRAResolverRegistry]


class MuralLoRAResolver:
    """What vLLM's registry asks. For one event loop.

    vLLM reads an adapter's files after it was told of them, and again whenever it has dropped
    the weights meanwhile; an engine that does not find them then ends. It never says that it is
    done with an adapter. So what was handed out stays leased in the disk cache, and above
    ``max_adapters`` nothing more is handed out.
    """

    def __init__(self, settings: VLLMPluginSettings, open_chain: OpenChain | None = None) -> None:
        self._settings = settings
        self._open_chain = open_chain or _open_chain
        self._opening: asyncio.Task[LoRAResolverRegistry] | None = None
        self._leases = _Leases(settings.max_adapters, settings.lease_s)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> VLLMLoRARequest | None:
        """Have an exact version's files on this machine, for vLLM to read.

        ``lora_name`` comes back as it was asked. None, and a line in the log that says why, for
        an alias and for whatever fails: vLLM would turn an error into a 500 and ask no further
        resolver.
        """
        from vllm.lora.request import LoRARequest as VLLMLoRARequest

        try:
            async with asyncio.timeout(self._settings.timeout_s):
                folder = await self._find(base_model_name, lora_name)
        except MuralError as error:
            logger.warning("%s is not served: %s", quoted(lora_name), error.message)
        except TimeoutError:
            logger.warning("%s is not served: no answer in time", quoted(lora_name))
        except Exception:
            logger.exception("%s is not served", quoted(lora_name))
        else:
            # vLLM puts an id of its own in the place of this one.
            return VLLMLoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(folder))
        return None

    async def close(self) -> None:
        """Let go of what is held, and of the sources."""
        await self._leases.close()
        if self._opening is not None:
            registry = await self._opening
            await registry.close()

    async def _find(self, base_model_name: str, lora_name: str) -> Path:
        name = parse_name(lora_name)
        if name.version == LATEST:
            raise _not_exact(name)
        registry = await self._registry(base_model_name)
        request = await registry.get(self._settings.principal, name)
        if request.lora_name != name.short:
            raise _not_exact(name)
        lease = partial(registry.lease, self._settings.principal, request)
        return await self._leases.hold(request.digest, lease)

    async def _registry(self, base_model_name: str) -> LoRAResolverRegistry:
        """The chain, opened by whoever asks first; what failed is tried again."""
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            # In a thread: sweeping the cache reads the disk.
            opened = asyncio.to_thread(self._open_chain, self._settings, _spec(base_model_name))
            opening = self._opening = asyncio.create_task(opened, name="open sources of adapters")
        return await asyncio.shield(opening)


@dataclass(slots=True)
class _Lease:
    """One content's: ``folder`` is set once it is held, and the ``keeper`` holds it."""

    folder: asyncio.Future[Path]
    keeper: asyncio.Task[None]
    timer: asyncio.TimerHandle | None = None


class _Leases:
    """Leases by digest, at most ``max_leases``, each for ``lease_s`` after the last hand-out."""

    def __init__(self, max_leases: int, lease_s: float | None) -> None:
        self._max = max_leases
        self._lease_s = lease_s
        self._leases: dict[str, _Lease] = {}

    async def hold(
        self, digest: str, lease: Callable[[], AbstractAsyncContextManager[Path]]
    ) -> Path:
        """Give the folder, which stays; raises as ``lease``, and ``Unavailable`` at the bound."""
        held = self._leases.get(digest)
        if held is None:
            if len(self._leases) >= self._max:
                raise Unavailable(
                    f"{len(self._leases)} adapters are held for vLLM, the most that {MAX_ADAPTERS} "
                    "allows."
                )
            held = self._begin(digest, lease())
        if self._lease_s is not None:
            if held.timer is not None:
                held.timer.cancel()
            loop = asyncio.get_running_loop()
            held.timer = loop.call_later(self._lease_s, self._end, digest, held)
        # Whoever gives up leaves the lease to the others.
        return await asyncio.shield(held.folder)

    async def close(self) -> None:
        """End all."""
        leases = list(self._leases.items())
        for digest, held in leases:
            self._end(digest, held)
        await asyncio.gather(*(held.keeper for _, held in leases), return_exceptions=True)

    def _begin(self, digest: str, lease: AbstractAsyncContextManager[Path]) -> _Lease:
        folder: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        held = _Lease(folder, asyncio.create_task(_keep(lease, folder), name=f"hold {digest}"))
        held.keeper.add_done_callback(lambda _: self._end(digest, held))
        self._leases[digest] = held
        return held

    def _end(self, digest: str, held: _Lease) -> None:
        if self._leases.get(digest) is held:
            del self._leases[digest]
        if held.timer is not None:
            held.timer.cancel()
        held.keeper.cancel()


async def _keep(lease: AbstractAsyncContextManager[Path], folder: asyncio.Future[Path]) -> None:
    """Hold a lease until cancelled; an error on the way to it is the folder's."""
    try:
        async with lease as path:
            folder.set_result(path)
            await asyncio.Event().wait()
    except Exception as error:
        if folder.done():
            raise
        folder.set_exception(error)
    finally:
        folder.cancel()


def _open_chain(settings: VLLMPluginSettings, base: BaseSpec) -> LoRAResolverRegistry:
    bounds = RegistrySettings(timeout_s=settings.timeout_s)
    return open_registry(read_sources(settings.sources), base, LoRAIdAllocator(), bounds)


def _spec(model_name: str) -> BaseSpec:
    """All that is known of the base here is its name: vLLM itself judges what fits it."""
    return BaseSpec(
        model_names=(model_name,),
        modules={},
        vocab_size=0,
        hidden_size=0,
        num_layers=0,
        max_lora_rank=0,
    )


def _not_exact(name: AdapterName) -> InvalidInput:
    return InvalidInput(
        f"{name} is an alias. vLLM keeps what a name meant when it was first asked, so that only "
        "exact versions can be served."
    )


def _principal(environ: Mapping[str, str]) -> Principal:
    """Who the variables say is acted as; nobody by default is no answer."""
    tenant = environ.get(TENANT) or None
    grants = tuple(filter(None, (part.strip() for part in environ.get(GRANTS, "").split(","))))
    if tenant is None and not grants:
        raise InvalidInput(
            f"Say whose adapters vLLM may serve: {TENANT}=acme for one tenant's, or {GRANTS} for "
            f"grants such as globex/sql:*, or {GRANTS}=* for everybody's."
        )
    if tenant is not None and not is_tenant(tenant):
        raise InvalidInput(f"{TENANT}: {quoted(tenant)} is not a tenant name.")
    for grant in grants:
        if not is_grant(grant):
            raise InvalidInput(f"{GRANTS}: {quoted(grant)} is no grant, such as globex/sql:*.")
    return Principal(tenant, grants=grants)


def _above_0(environ: Mapping[str, str], variable: str, kind: Callable[[str], T]) -> T | None:
    text = environ.get(variable)
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = kind("0")
    if not 0 < value < math.inf:
        raise InvalidInput(f"{variable}: a number above 0 is wanted, not {quoted(text)}.")
    return value


def _log_as_vllm_does() -> None:
    """Let this package's lines take the way of vLLM's, which sets up no logger but its own.

    That happens after plug-ins are loaded, so that there is no handler to be had yet.
    """
    ours = logging.getLogger("mural")
    if not ours.handlers:
        ours.parent = logging.getLogger("vllm")
