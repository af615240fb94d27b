"""``mural route``: flags and a settings file, and from there to the router.

Nothing heavy is imported before `run`, so that ``mural --help`` answers at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mural_resolvers.cli import OneLineParser
from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.redaction import redacted
from mural_resolvers.secret_text import read_secret
from mural_resolvers.sizes import size_argument
from mural_resolvers.stderr_log import log_to_stderr

if TYPE_CHECKING:
    from mural_router.config import Config

__all__ = ["RouteCommand", "flag_settings", "route", "route_config"]

GARBAGE_LOOKED_AT: Final = 10_000
"""Objects made and not freed, after which the collector looks at the young ones."""
API_KEY_VARIABLE: Final = "MURAL_API_KEY"

SECRETS: Final = (
    # (field, flag of its file, environment variable)
    ("router_token", "router_token_file", "MURAL_ROUTER_TOKEN"),
    ("control_token", "control_token_file", "MURAL_CONTROL_TOKEN"),
    ("vllm_api_key", "vllm_api_key_file", "MURAL_VLLM_API_KEY"),
    ("redis_url", "redis_url_file", "MURAL_REDIS_URL"),
)

RENEWED: Final = ("router_token_file", "control_token_file", "vllm_api_key_file")
"""Of those, the files that are read again when they change."""

# A flag's name in argparse, and where its value stands in the settings.
PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    "host": ("http", "host"),
    "port": ("http", "port"),
    "max_body_bytes": ("http", "max_body_bytes"),
    "ssl_certfile": ("http", "tls", "certfile"),
    "ssl_keyfile": ("http", "tls", "keyfile"),
    "replica_ca_file": ("http", "tls", "replica_ca_file"),
    "replica_server_name": ("http", "tls", "replica_server_name"),
    "replica_certfile": ("http", "tls", "replica_certfile"),
    "replica_keyfile": ("http", "tls", "replica_keyfile"),
    "admin_host": ("admin_host",),
    "admin_port": ("admin_port",),
    "ext_proc": ("ext_proc_port",),
    "replica": ("replicas",),
    "stale_after_s": ("fleet", "stale_after_s"),
    "auth": ("auth",),
    "tenants_file": ("tenants_file",),
    "shared_names": ("shared_names",),
    "store": ("store",),
    "aliases_file": ("aliases_file",),
    "objects": ("objects",),
    "objects_namespace": ("objects_namespace",),
    "watch_namespace": ("watch_namespaces",),
    "keys_secret": ("keys_secret",),
    "queue_wait_s": ("queue", "wait_s"),
    "load_bound": ("placement", "load_bound"),
    "access_log": ("access_log",),
    "otlp_traces_endpoint": ("otlp_traces_endpoint",),
    "shutdown_grace_s": ("shutdown_grace_s",),
    "log_level": ("log_level",),
}


class RouteCommand:
    """``mural route``."""

    help = "route OpenAI requests to a fleet of Mural servers and vLLM pods"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags, in groups. Unset ones are left out, so the settings' defaults hold."""
        parser.argument_default = argparse.SUPPRESS
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="all settings in YAML; flags override it; read again when it changes",
        )
        _add_replica_flags(parser)
        _add_http_flags(parser)
        _add_access_flags(parser)
        _add_object_flags(parser)
        _add_routing_flags(parser)
        _add_log_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Route until stopped; 0 after a drain, 1 when it cannot start."""
        try:
            return _run(vars(args), os.environ)
        except MuralError as error:
            print(f"mural route: {redacted(error.message)}", file=sys.stderr)
            return 1

    def check(self, given: Mapping[str, object], environment: Mapping[str, str]) -> None:
        """Raise a ``MuralError`` for what parsed flags say and `run` could not start with."""
        from mural_router.start_checks import check_files, check_start

        settings = route_config(given, environment).settings
        check_files(settings)
        check_start(settings)


route = RouteCommand()


def flag_settings(given: Mapping[str, object]) -> dict[str, object]:
    """The settings that flags say, in the form of the file."""
    found: dict[str, object] = {}
    for flag, place in PLACES.items():
        if flag not in given:
            continue
        inner = found
        for name in place[:-1]:
            below = inner.setdefault(name, {})
            assert isinstance(below, dict)
            inner = below
        inner[place[-1]] = given[flag]
    if given.get("all_namespaces"):
        if "watch_namespaces" in found:
            raise InvalidInput("--all-namespaces and --watch-namespace exclude each other.")
        found["watch_namespaces"] = ["*"]
    if given.get("no_admin"):
        found["admin_port"] = None
    if given.get("no_access_log"):
        found["access_log"] = None
    return found


def route_config(given: Mapping[str, object], environment: Mapping[str, str]) -> Config:
    """The checked settings and secrets of parsed flags; raise ``InvalidInput``."""
    try:
        from mural_router.config import Config
        from mural_router.settings import Secrets
    except ImportError as error:
        raise _not_installed(error) from None
    keys = given.get("api_key")
    environment_key = environment.get(API_KEY_VARIABLE)
    secrets = Secrets(
        api_keys=(
            *(keys if isinstance(keys, list) else ()),
            *((environment_key,) if environment_key else ()),
        ),
        **{
            field: read_secret(given.get(flag), flag, variable, environment)
            for field, flag, variable in SECRETS
        },
        **{flag: path for flag in RENEWED if isinstance(path := given.get(flag), str)},
    )
    path = given.get("config")
    return Config(Path(path) if isinstance(path, str) else None, flag_settings(given), secrets)


def _run(given: Mapping[str, object], environment: Mapping[str, str]) -> int:
    config = route_config(given, environment)
    try:
        import asyncio

        import uvloop

        from mural_router.start_checks import check_start

        # Before what takes longer to import, and long before the ports are served.
        check_start(config.settings)
        from mural_router.process import run_router
    except ImportError as error:
        raise _not_installed(error) from None
    log_to_stderr(config.settings.log_level)
    _spare_the_collector()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_router(config, version=_version()))


def _not_installed(error: ImportError) -> InvalidInput:
    return InvalidInput(
        f"The router's packages are not installed ({error}): pip install 'mural[router]'."
    )


def _spare_the_collector() -> None:
    """What was imported stays: to go through it again and again costs a tenth of all CPU.

    Requests make no cycles, so those that are under way need not be looked at so often either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_LOOKED_AT, 10, 10)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mural")
    except PackageNotFoundError:
        return "unknown"


# -- flags ----------------------------------------------------------------------------------------


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replica",
        action="append",
        metavar="URL",
        help="http[s]://host:port[,engine=vllm][,name=…][,control=PORT][,weight=N], or where to "
        "look for them: dns://name:port, dns+srv://name, kubernetes://service.namespace; may be "
        "repeated",
    )
    group.add_argument(
        "--stale-after-s",
        type=float,
        metavar="S",
        help="silence after which what a replica said is not trusted any more (default 12)",
    )
    group.add_argument(
        "--router-token-file",
        metavar="FILE",
        help="holds the token by which Mural servers (--auth router) know this router; read again "
        "when it changes, as are the next two (or MURAL_ROUTER_TOKEN)",
    )
    group.add_argument(
        "--control-token-file",
        metavar="FILE",
        help="holds the token of their control API (or MURAL_CONTROL_TOKEN)",
    )
    group.add_argument(
        "--vllm-api-key-file",
        metavar="FILE",
        help="holds the key of vLLM pods (or MURAL_VLLM_API_KEY)",
    )
    group.add_argument(
        "--replica-ca-file",
        metavar="FILE",
        help="certificates of the authority that signed the replicas'",
    )
    group.add_argument(
        "--replica-server-name",
        metavar="NAME",
        help="name in the replicas' certificates, where replicas are reached by address "
        "(default: the address)",
    )
    group.add_argument("--replica-certfile", metavar="FILE", help="is shown to replicas (mTLS)")
    group.add_argument("--replica-keyfile", metavar="FILE", help="and its key")


def _add_http_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", help="default: every interface, but 127.0.0.1 where auth is open")
    group.add_argument("--port", type=int, help="default 8080; 0: any free one")
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="and its key")
    group.add_argument(
        "--max-body-bytes",
        type=size_argument,
        metavar="BYTES",
        help="larger inference requests are refused unread (default 8Mi)",
    )
    group.add_argument("--admin-host", metavar="HOST", help="default 127.0.0.1")
    group.add_argument(
        "--admin-port", type=int, metavar="PORT", help="of metrics and debug pages (default 9090)"
    )
    group.add_argument(
        "--ext-proc",
        type=int,
        metavar="PORT",
        help="pick endpoints for Envoy gateways on this port too, over gRPC (usually 9002)",
    )
    group.add_argument("--no-admin", action="store_true", help="leave the admin pages out")
    group.add_argument(
        "--shutdown-grace-s",
        type=float,
        metavar="S",
        help="what is in flight may end within this time after SIGTERM (default 30)",
    )


def _add_access_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--auth",
        choices=("keys", "open"),
        help="default: keys where a key is given, else open",
    )
    group.add_argument(
        "--api-key",
        nargs="+",
        action="extend",
        metavar="KEY",
        help=f"admin keys; {API_KEY_VARIABLE} keeps one out of the list of processes",
    )
    group.add_argument(
        "--tenants-file",
        metavar="FILE",
        help="tenants, their keys, grants and limits; read again when it changes",
    )
    group.add_argument(
        "--shared-names",
        nargs="+",
        metavar="NAME",
        help="registered names that every tenant may use",
    )


def _add_object_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "objects",
        "Tenant, Adapter and AdapterAlias objects in place of --tenants-file and --aliases-file.",
    )
    group.add_argument(
        "--objects",
        metavar="SOURCE",
        help="kubernetes: watched in the API server; or a YAML file of such objects, read again "
        "when it changes",
    )
    group.add_argument(
        "--objects-namespace",
        metavar="NAME",
        help="holds the Tenants and the Secret of their keys' hashes (default: the pod's own)",
    )
    group.add_argument(
        "--watch-namespace",
        action="append",
        metavar="NAME",
        help="holds Adapters and AdapterAliases (default: the Tenants' namespace); may be repeated",
    )
    group.add_argument(
        "--all-namespaces", action="store_true", help="watch all of them; needs a ClusterRole"
    )
    group.add_argument(
        "--keys-secret",
        metavar="NAME",
        help="the Secret that the operator writes (default mural-router-keys)",
    )


def _add_routing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument(
        "--store",
        metavar="PLACE",
        help="where aliases and versions are looked up: a folder, or s3://bucket/prefix?…",
    )
    group.add_argument(
        "--aliases-file", metavar="FILE", help="aliases by adapter, over those of the store"
    )
    group.add_argument(
        "--queue-wait-s",
        type=float,
        metavar="S",
        help="longest wait for capacity, then 503 (default 10)",
    )
    group.add_argument(
        "--load-bound",
        type=float,
        metavar="C",
        help="a replica is given more only below C times its share (default 1.25): lower spreads "
        "more, higher keeps more together",
    )
    group.add_argument(
        "--redis-url-file",
        metavar="FILE",
        help="holds redis[s]://…: limits are counted there over all routers (or MURAL_REDIS_URL); "
        "default: in this process",
    )


def _add_log_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs and traces")
    group.add_argument(
        "--access-log", metavar="FILE", help="a JSON line a request (default: standard output)"
    )
    group.add_argument("--no-access-log", action="store_true", help="write none")
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans there, such as http://collector:4318/v1/traces "
        "(default: none are made)",
    )
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="default info"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m mural_router.commands``: route, without the ``mural`` command."""
    parser = OneLineParser(prog="mural route", description=route.help, allow_abbrev=False)
    route.add_arguments(parser)
    return route.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
