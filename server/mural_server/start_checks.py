"""What a server can know to be wrong before it starts anything: the core takes seconds to load
torch, and then the model. `mural up` asks the same of the servers that it is about to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mural_resolvers.errors import MuralError
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import read_facts
from mural_resolvers.open_store import open_store
from mural_resolvers.ports import listen
from mural_resolvers.sources import build_resolvers, parse_source
from mural_resolvers.tenants import TenantsFile
from mural_resolvers.tracing import check_tracing
from mural_server.api.tls import PortTls
from mural_server.models.check import check_model
from mural_server.models.errors import ModelError
from mural_server.settings import EngineSettings, LoRAModule, ServerSettings, SettingsError

__all__ = ["check_start"]


def check_start(engine: EngineSettings, server: ServerSettings) -> None:
    """Raise `SettingsError`, or `InvalidInput` for a port, with the first thing that cannot work.

    Both are validated here, too. Nothing is kept open, and nothing is asked over the network.
    """
    server.validate()
    engine.validate()
    try:
        check_model(engine.model)
    except ModelError as error:
        raise SettingsError(f"{error}.") from None
    limits = AdapterLimits(admit_bin=engine.allow_bin_adapters)
    _check_ports(server)
    _check_files(server)
    _check_adapters(server, limits)
    if server.upload_store is not None:
        if not engine.enable_lora:
            raise SettingsError(
                "--upload-store serves nothing: adapters are off (--no-enable-lora)."
            )
        with _of("--upload-store"):
            build_resolvers([parse_source(server.upload_store)], limits)
            open_store(server.upload_store, limits)
    if server.otlp_traces_endpoint is not None:
        with _of("--otlp-traces-endpoint"):
            check_tracing()


def _check_ports(server: ServerSettings) -> None:
    listen(server.resolved_host, server.port, "--port").close()
    if server.control_port is not None:
        listen(server.control_host, server.control_port, "--control-port").close()


def _check_files(server: ServerSettings) -> None:
    if server.ssl_certfile is not None:
        with _of("--ssl-certfile"):
            PortTls(server)
    if server.tenants_file is not None:
        with _of("--tenants-file"):
            TenantsFile(Path(server.tenants_file))
    if server.chat_template is not None:
        with _of("--chat-template"):
            Path(server.chat_template).read_text(encoding="utf-8")


def _check_adapters(server: ServerSettings, limits: AdapterLimits) -> None:
    file = server.adapter_sources
    with _of("adapters" if file is None else f"--adapter-sources: {file}"):
        build_resolvers(server.sources().resolvers, limits)
    for module in server.lora_modules:
        with _of(f"--lora-modules {module.name}"):
            _check_module(module, limits)


def _check_module(module: LoRAModule, limits: AdapterLimits) -> None:
    """By its configuration and headers; whether it fits the base is the core's to say."""
    folder = Path(module.path)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    read_facts(folder.resolve(), limits)


@contextmanager
def _of(flag: str) -> Iterator[None]:
    """What is wrong is told with the flag that it stands in."""
    try:
        yield
    except MuralError as error:
        raise SettingsError(f"{flag}: {error.message}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{flag}: this is not UTF-8.") from None
    except OSError as error:
        raise SettingsError(f"{flag}: {error.filename}: {error.strerror}.") from None
    except ValueError as error:
        raise SettingsError(f"{flag}: {error}.") from None
