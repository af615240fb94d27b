"""``mural operate``: flags, and from there to the operator.

Nothing heavy is imported before `run`, so that ``mural --help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from mural_resolvers.cli import OneLineParser
from mural_resolvers.conversion import converted
from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.redaction import redacted
from mural_resolvers.stderr_log import log_to_stderr

__all__ = ["OperateCommand", "operate"]

POD_NAME_VARIABLE: Final = "MURAL_POD_NAME"

_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class OperateCommand:
    """``mural operate``."""

    help = "keep declared adapters resident on a Kubernetes cluster"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags, in groups. Unset ones are left out, so the settings' defaults hold."""
        parser.argument_default = argparse.SUPPRESS
        parser.epilog = (
            "The cluster is the one whose service account runs the pod, else that of KUBECONFIG, "
            "else of ~/.kube/config. Several operators share the work of one: the holder of the "
            "Lease acts, another takes over within seconds. MURAL_POD_NAME is who the Lease says "
            "acts (default: the name of the host)."
        )
        _add_watch_flags(parser)
        _add_object_flags(parser)
        _add_admin_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Operate until stopped; 0 after a graceful end, 1 when it cannot start or go on."""
        try:
            return _run(vars(args), os.environ)
        except MuralError as error:
            print(f"mural operate: {redacted(error.message)}", file=sys.stderr)
            return 1


operate = OperateCommand()


def _run(given: Mapping[str, object], environment: Mapping[str, str]) -> int:
    try:
        import asyncio

        import uvloop

        from mural_operator.operating import run_operator
        from mural_operator.settings import OperatorSettings
    except ImportError as error:
        raise InvalidInput(
            f"The operator's packages are not installed ({error}): pip install 'mural[operator]'."
        ) from None
    fields = {name: given[name] for name in OperatorSettings.__struct_fields__ if name in given}
    if given.get("no_admin"):
        fields["admin_port"] = None
    if environment.get(POD_NAME_VARIABLE):
        fields["pod_name"] = environment[POD_NAME_VARIABLE]
    settings = converted(fields, OperatorSettings, strict=True)
    if settings.all_namespaces and settings.watch_namespaces:
        raise InvalidInput("--all-namespaces and --watch-namespace exclude each other.")
    log_to_stderr(settings.log_level)
    # A line for every request is nobody's log.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_operator(settings))


# -- flags ----------------------------------------------------------------------------------------


def _namespace(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a namespace")
    return text


def _object_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an object")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)


def _add_watch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is watched")
    group.add_argument(
        "--namespace",
        type=_namespace,
        metavar="NAME",
        help="of the ServingPools, Tenants, pods and Secrets (default: the pod's own)",
    )
    group.add_argument(
        "--watch-namespace",
        dest="watch_namespaces",
        action="append",
        type=_namespace,
        metavar="NAME",
        help="where Adapters and AdapterAliases are looked for; may be repeated (default: the "
        "same namespace; each one more costs two watches, and a Role there)",
    )
    group.add_argument(
        "--all-namespaces",
        action="store_true",
        help="look for them in every namespace (needs a ClusterRole)",
    )


def _add_object_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what it writes beside statuses")
    group.add_argument(
        "--lease",
        type=_object_name,
        metavar="NAME",
        help="name of the Lease by which one of several operators acts (default mural-operator); "
        "operators of different pools need different ones",
    )
    group.add_argument(
        "--keys-secret",
        type=_object_name,
        metavar="NAME",
        help="the Secret of key hashes that routers read (default mural-router-keys)",
    )


def _add_admin_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("probes, metrics and log")
    group.add_argument("--admin-host", metavar="HOST", help="default: every interface")
    group.add_argument(
        "--admin-port",
        type=_port,
        metavar="PORT",
        help="of /health, /ready and /metrics (default 9091; 0: any free one)",
    )
    group.add_argument("--no-admin", action="store_true", help="serve none of them")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="default info"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m mural_operator.commands``: operate, without the ``mural`` command."""
    parser = OneLineParser(prog="mural operate", description=operate.help, allow_abbrev=False)
    operate.add_arguments(parser)
    return operate.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
