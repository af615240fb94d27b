"""Every setting of the engine and of its server, read once at the edge and checked together.

Names are vLLM's where vLLM has one; a field says its unit in its name where it has one.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from mural_resolvers.errors import MalformedName, MuralError
from mural_resolvers.names import validate_admin_name
from mural_resolvers.sources import (
    SourcesConfig,
    directory_source,
    parse_source,
    read_sources,
)

__all__ = [
    "AuthMode",
    "DType",
    "EngineSettings",
    "LoRAModule",
    "ServerSettings",
    "SettingsError",
    "is_loopback",
]

MiB = 1 << 20
GiB = 1 << 30

DType = Literal["auto", "float32", "bfloat16"]
AuthMode = Literal["keys", "router", "open"]
OpsBackend = Literal["auto", "reference", "packed", "native"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Where a CPU multiplies bfloat16 itself; elsewhere it is emulated and slower than float32.
BF16_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

KV_SHARE = 0.25
KV_MIN_BYTES = 64 * MiB
KV_MAX_BYTES = 4 * GiB
ADAPTER_SHARE = 0.10
ADAPTER_MIN_BYTES = 64 * MiB
ADAPTER_MAX_BYTES = 4 * GiB
MAX_LORA_RANK_LIMIT = 512
MIN_TOKEN_CHARS = 16
MAX_AWAIT_S = 3600.0


class SettingsError(ValueError):
    """Settings that cannot work together; the sentence says what to change."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine core is started with. ``None`` means: chosen at start and logged."""

    model: str
    """A Hugging Face directory or a .gguf file."""
    dtype: DType = "auto"
    """auto: bfloat16 where the CPU multiplies it natively (avx512_bf16, amx), else float32."""
    max_model_len: int | None = None
    """Prompt and output tokens of one sequence; None: the model's own, if the KV memory holds it,
    else what it holds."""
    max_num_seqs: int = 16
    """Sequences in one step."""
    max_num_batched_tokens: int = 256
    """Tokens (prompt and decode rows) in one step: larger means faster prefill, longer stalls."""
    block_size: int = 16
    """Tokens per KV block."""
    kv_cache_memory_bytes: int | None = None
    """None: a quarter of the memory free after the base is loaded, 64 MiB to 4 GiB."""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    cpu_threads: int | None = None
    """None: every core this process may run on."""
    enable_lora: bool = True
    max_loras: int = 8
    """Slots: distinct adapters in one step."""
    max_cpu_loras: int = 64
    """Adapters registered in host memory, those in slots included."""
    max_cpu_lora_bytes: int | None = None
    """Host bytes of registered adapters; None: a tenth of free memory, 64 MiB to 4 GiB."""
    max_lora_rank: int = 64
    lora_target_modules: tuple[str, ...] | None = None
    """Suffixes of modules that adapters may target; None: every module that can take one."""
    allow_bin_adapters: bool = False
    """Read adapter_model.bin (a pickle, weights_only) where there is no safetensors file."""
    loader_nice: int = 10
    """Niceness of the threads that load adapters, so that a load does not slow the steps."""
    adapter_quantum_tokens: int = 16
    """Tokens each sequence of an adapter may generate while another adapter waits for the slot."""
    seed: int | None = None
    """Noise of requests that name no seed; None: different at every start."""
    ops: OpsBackend = "auto"

    def validate(self) -> None:
        """Raise `SettingsError` for the first value or combination that cannot work."""
        for ok, message in (*self._value_rules(), *self._batch_rules(), *self._lora_rules()):
            if not ok:
                raise SettingsError(message)

    def _value_rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                bool(self.model),
                "No model was given: name a Hugging Face directory or a .gguf file.",
            ),
            (
                self.max_model_len is None or self.max_model_len >= 2,
                f"max_model_len is {self.max_model_len}: set it to 2 or more, since a prompt token "
                "and an output token need a place each.",
            ),
            (
                self.max_num_seqs >= 1,
                f"max_num_seqs is {self.max_num_seqs}: set it to 1 or more.",
            ),
            (
                4 <= self.block_size <= 256 and self.block_size & (self.block_size - 1) == 0,
                f"block_size is {self.block_size}: set it to a power of two from 4 to 256.",
            ),
            (
                self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
                f"kv_cache_memory_bytes is {self.kv_cache_memory_bytes}: set it above 0, or leave "
                "it out to use a quarter of the free memory.",
            ),
            (
                self.cpu_threads is None or 1 <= self.cpu_threads <= 1024,
                f"cpu_threads is {self.cpu_threads}: set it from 1 to 1024, or leave it out to use "
                "every core.",
            ),
            (
                0 <= self.loader_nice <= 19,
                f"loader_nice is {self.loader_nice}: set it from 0 to 19.",
            ),
            (
                self.seed is None or 0 <= self.seed < 1 << 63,
                f"seed is {self.seed}: set it from 0 to 2**63 - 1.",
            ),
        )

    def _batch_rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                self.max_num_batched_tokens >= self.max_num_seqs,
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}), so a step could not hold one token of each sequence: "
                "raise the first or lower the second.",
            ),
            (
                self.enable_chunked_prefill
                or self.max_model_len is None
                or self.max_num_batched_tokens >= self.max_model_len,
                f"Without chunked prefill a whole prompt must fit in one step, but "
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_model_len "
                f"({self.max_model_len}): raise the first, lower the second, or leave chunked "
                "prefill on.",
            ),
        )

    def _lora_rules(self) -> tuple[tuple[bool, str], ...]:
        if not self.enable_lora:
            return ()
        return (
            (
                1 <= self.max_loras <= 1024,
                f"max_loras is {self.max_loras}: set it from 1 to 1024, or turn adapters off with "
                "--no-enable-lora.",
            ),
            (
                self.max_cpu_loras >= self.max_loras,
                f"max_cpu_loras ({self.max_cpu_loras}) is below max_loras ({self.max_loras}), but "
                "every adapter in a slot is also kept in host memory: raise the first or lower "
                "the second.",
            ),
            (
                self.max_cpu_lora_bytes is None or self.max_cpu_lora_bytes > 0,
                f"max_cpu_lora_bytes is {self.max_cpu_lora_bytes}: set it above 0, or leave it "
                "out to use a tenth of the free memory.",
            ),
            (
                1 <= self.max_lora_rank <= MAX_LORA_RANK_LIMIT,
                f"max_lora_rank is {self.max_lora_rank}: set it from 1 to {MAX_LORA_RANK_LIMIT}.",
            ),
            (
                self.lora_target_modules is None
                or (len(self.lora_target_modules) > 0 and all(self.lora_target_modules)),
                "lora_target_modules is empty, so no adapter could match: name at least one "
                "module, or leave it out to allow every module.",
            ),
            (
                self.adapter_quantum_tokens >= 1,
                f"adapter_quantum_tokens is {self.adapter_quantum_tokens}: set it to 1 or more.",
            ),
        )

    def resolved_dtype(self, cpu_flags: frozenset[str]) -> Literal["float32", "bfloat16"]:
        """What ``dtype`` means on a CPU with these flags."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if cpu_flags & BF16_CPU_FLAGS else "float32"

    def resolved_kv_bytes(self, free_bytes: int) -> int:
        """KV memory, given what is free after the base was loaded."""
        if self.kv_cache_memory_bytes is not None:
            return self.kv_cache_memory_bytes
        return min(max(int(free_bytes * KV_SHARE), KV_MIN_BYTES), KV_MAX_BYTES)

    def resolved_cpu_lora_bytes(self, free_bytes: int) -> int:
        """Host memory for registered adapters, given what is free after the base was loaded."""
        if self.max_cpu_lora_bytes is not None:
            return self.max_cpu_lora_bytes
        return min(max(int(free_bytes * ADAPTER_SHARE), ADAPTER_MIN_BYTES), ADAPTER_MAX_BYTES)


class LoRAModule(msgspec.Struct, frozen=True):
    """One ``--lora-modules``: ``name=path``, or vLLM's JSON with ``shared`` beside."""

    name: str
    path: str
    shared: bool = False
    """For every tenant; otherwise for admins and for those whose grants name it."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the API process is started with."""

    host: str | None = None
    """None: every interface, except loopback under ``auth="open"``."""
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int | None = 8001
    """None: no control API."""
    control_token: str | None = None
    """None: the control API is open, which is allowed on loopback only."""
    control_token_file: str | None = None
    """Where the token was read from, and is read again when it changes; the one before it holds
    for five minutes more."""
    await_declared_s: float = 0.0
    """For how long the server is not ready until an operator has declared adapters and they are
    resident; then it is ready all the same. 0: it does not wait."""
    served_model_name: tuple[str, ...] = ()
    """The base's names, the first being the main one; empty: the model's folder or file name."""
    lora_modules: tuple[LoRAModule, ...] = ()
    adapter_dir: str | None = None
    """Root of ``tenant/adapter/version/`` folders."""
    adapter_source: tuple[str, ...] = ()
    """Sources as URLs (``s3://…``, ``hub+https://…``, a folder), asked in this order."""
    adapter_sources: str | None = None
    """A YAML file of sources, cache and bounds, in place of ``adapter_source``."""
    adapter_cache_dir: str | None = None
    """Where downloaded adapters are kept; None: what the file says, or the user's cache folder."""
    adapter_cache_bytes: int | None = None
    """None: what the file says, or 10 GiB."""
    allowed_adapter_path: tuple[str, ...] = ()
    """Folders beside ``adapter_dir`` from which the load endpoint may take an adapter."""
    upload_store: str | None = None
    """Where tenants' uploads are published, for all replicas: a folder or s3://…; None: off."""
    upload_dir: str | None = None
    """Where they lie until they are judged; None: a folder of this user's among the temporary."""
    upload_ttl_s: float = 7 * 86_400.0
    """0: they stay."""
    upload_max_bytes: int = 2 * GiB
    upload_quota_adapters: int = 100
    """Per tenant, where its own limits do not say; so is the next."""
    upload_quota_bytes: int = 20 * GiB
    auth: AuthMode | None = None
    """None: keys when a key is configured, else open."""
    api_key: tuple[str, ...] = ()
    """Admin keys."""
    tenants_file: str | None = None
    """Tenants, their keys, grants and limits, read again when it changes. Under ``auth="router"``
    only the sources and the upload quotas of tenants count: the rest is the router's to keep."""
    router_token: str | None = None
    """Proves a router, in ``Authorization``."""
    router_token_file: str | None = None
    """As ``control_token_file``."""
    router_cert_name: tuple[str, ...] = ()
    """DNS names or URIs of client certificates that prove a router."""
    audit_log: str | None = None
    """File of the actions of admins, a JSON line each; None: the log, as ``mural.audit``."""
    allow_runtime_lora_updating: bool = False
    adapter_wait_s: float = 30.0
    queue_wait_s: float = 300.0
    max_queued_requests: int = 1024
    shutdown_grace_s: float = 30.0
    max_body_bytes: int = 8 * MiB
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """What client certificates are verified with; None: none is asked for."""
    otlp_traces_endpoint: str | None = None
    """Where OpenTelemetry spans are sent, over HTTP; None: none are made."""
    log_level: LogLevel = "info"
    chat_template: str | None = None
    """A template file for the base, in place of the tokenizer's own."""
    response_role: str = "assistant"
    generation_config: Literal["auto", "none"] = "auto"
    """auto: the model's generation_config.json gives the sampling defaults."""
    metrics_adapters: int = 50
    """Adapters with a label of their own in the per-adapter counters; the rest are ``other``."""

    @property
    def resolved_auth(self) -> AuthMode:
        if self.auth is not None:
            return self.auth
        return "keys" if self.api_key or self.tenants_file else "open"

    @property
    def resolved_host(self) -> str:
        if self.host is not None:
            return self.host
        return "127.0.0.1" if self.resolved_auth == "open" else "0.0.0.0"

    def validate(self) -> None:
        """Raise `SettingsError` for the first value or combination that cannot work."""
        rules = (self._network_rules, self._auth_rules, self._upload_rules, self._bound_rules)
        for ok, message in (rule for group in rules for rule in group()):
            if not ok:
                raise SettingsError(message)
        self._check_names()
        self.sources()

    def _network_rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                0 <= self.port <= 65535,
                f"port is {self.port}: set it from 0 (any free one) to 65535.",
            ),
            (
                self.control_port is None or 0 <= self.control_port <= 65535,
                f"control_port is {self.control_port}: set it from 0 (any free one) to 65535.",
            ),
            (
                self.control_port in (None, 0) or self.control_port != self.port,
                f"The control API needs a port of its own, but both are {self.port}: change "
                "--port or --control-port.",
            ),
            (
                self.control_port is None
                or is_loopback(self.control_host)
                or bool(self.control_token),
                f"The control API would be open to the network on {self.control_host}: give it a "
                "token with --control-token-file or MURAL_CONTROL_TOKEN, or bind it to 127.0.0.1.",
            ),
            (
                0 <= self.await_declared_s <= MAX_AWAIT_S,
                f"await_declared_s is {self.await_declared_s}: set it from 0 to {MAX_AWAIT_S:g}.",
            ),
            (
                self.await_declared_s == 0 or self.control_port is not None,
                "--await-declared waits for the control API: leave out --no-control.",
            ),
            (
                (self.ssl_certfile is None) == (self.ssl_keyfile is None),
                "TLS needs both --ssl-certfile and --ssl-keyfile.",
            ),
            (
                self.ssl_ca_certs is None or self.ssl_certfile is not None,
                "--ssl-ca-certs is of use on a TLS port only: give --ssl-certfile.",
            ),
            *(
                (path is None or Path(path).is_file(), f"{flag}: there is no file {path}.")
                for flag, path in (
                    ("--ssl-certfile", self.ssl_certfile),
                    ("--ssl-keyfile", self.ssl_keyfile),
                    ("--ssl-ca-certs", self.ssl_ca_certs),
                    ("--chat-template", self.chat_template),
                    ("--tenants-file", self.tenants_file),
                    ("--adapter-sources", self.adapter_sources),
                )
            ),
        )

    def _auth_rules(self) -> tuple[tuple[bool, str], ...]:
        has_keys = bool(self.api_key or self.tenants_file)
        return (
            (
                not (self.adapter_source and self.adapter_sources),
                "Sources are given one by one with --adapter-source, or all in the file of "
                "--adapter-sources: leave one of them out.",
            ),
            (
                self.adapter_cache_bytes is None or self.adapter_cache_bytes > 0,
                f"adapter_cache_bytes is {self.adapter_cache_bytes}: set it above 0.",
            ),
            (
                self.auth != "keys" or has_keys,
                "--auth keys needs keys: give --tenants-file or --api-key.",
            ),
            (
                self.auth != "open" or not has_keys,
                "--auth open ignores keys: leave out --tenants-file and --api-key, or use "
                "--auth keys.",
            ),
            *self._router_rules(),
            (
                all(len(key) >= 8 and key.isascii() and key.isprintable() for key in self.api_key),
                "An API key has at least 8 printable ASCII characters.",
            ),
        )

    def _router_rules(self) -> tuple[tuple[bool, str], ...]:
        proven = self.router_token is not None or bool(self.router_cert_name)
        token = self.router_token or ""
        return (
            (
                self.auth == "router" or not proven,
                "A router's token or certificate is of use with --auth router only.",
            ),
            (
                self.auth != "router" or proven,
                "--auth router needs a proof of the router: give --router-token-file, or "
                "--router-cert-name with --ssl-ca-certs.",
            ),
            (
                self.auth != "router" or not self.api_key,
                "--auth router takes no keys of clients: leave out --api-key.",
            ),
            (
                not self.router_cert_name or self.ssl_ca_certs is not None,
                "--router-cert-name needs --ssl-ca-certs, with which certificates are verified.",
            ),
            (
                self.router_token is None
                or (len(token) >= MIN_TOKEN_CHARS and token.isascii() and token.isprintable()),
                f"A router's token has at least {MIN_TOKEN_CHARS} printable ASCII characters.",
            ),
        )

    def _upload_rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (
                self.upload_store is None or self.resolved_auth != "open",
                "--upload-store needs keys, since an upload belongs to a tenant: give "
                "--tenants-file or --api-key, or use --auth router.",
            ),
            (
                self.upload_ttl_s >= 0,
                f"upload_ttl_s is {self.upload_ttl_s}: set it above 0, or to 0 to keep uploads.",
            ),
            *(
                (value > 0, f"{name} is {value}: set it above 0.")
                for name, value in (
                    ("upload_max_bytes", self.upload_max_bytes),
                    ("upload_quota_adapters", self.upload_quota_adapters),
                    ("upload_quota_bytes", self.upload_quota_bytes),
                )
            ),
        )

    def _bound_rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            *(
                (value > 0, f"{name} is {value}: set it above 0.")
                for name, value in (
                    ("adapter_wait_s", self.adapter_wait_s),
                    ("queue_wait_s", self.queue_wait_s),
                    ("max_queued_requests", self.max_queued_requests),
                    ("max_body_bytes", self.max_body_bytes),
                )
            ),
            *(
                (value >= 0, f"{name} is {value}: set it to 0 or more.")
                for name, value in (
                    ("shutdown_grace_s", self.shutdown_grace_s),
                    ("metrics_adapters", self.metrics_adapters),
                )
            ),
            *(
                (Path(folder).is_dir(), f"{flag}: there is no folder {folder}.")
                for flag, folders in (
                    ("--adapter-dir", (self.adapter_dir,) if self.adapter_dir else ()),
                    ("--allowed-adapter-path", self.allowed_adapter_path),
                    ("--audit-log", (str(Path(self.audit_log).parent),) if self.audit_log else ()),
                )
                for folder in folders
            ),
        )

    def sources(self) -> SourcesConfig:
        """Where adapters come from; raises `SettingsError` naming what is wrong.

        The directory is asked first, since it needs no download.
        """
        try:
            config = SourcesConfig()
            if self.adapter_sources is not None:
                config = read_sources(Path(self.adapter_sources))
            urls = tuple(parse_source(url) for url in self.adapter_source)
        except MuralError as error:
            raise SettingsError(f"{error.message}") from None
        first = (directory_source(self.adapter_dir),) if self.adapter_dir else ()
        told = {"path": self.adapter_cache_dir, "quota": self.adapter_cache_bytes}
        cache = msgspec.structs.replace(
            config.cache, **{name: value for name, value in told.items() if value is not None}
        )
        return replace(config, resolvers=(*first, *urls, *config.resolvers), cache=cache)

    def _check_names(self) -> None:
        for name in self.served_model_name:
            if not name or len(name) > 256 or not name.isprintable():
                raise SettingsError(
                    "--served-model-name takes names of 1 to 256 printable characters."
                )
        taken = set(self.served_model_name)
        for module in self.lora_modules:
            try:
                validate_admin_name(module.name)
            except MalformedName as error:
                raise SettingsError(f"--lora-modules: {error.message}") from None
            if module.name in taken:
                raise SettingsError(
                    f"--lora-modules: the name {module.name} is taken twice: rename one of them."
                )
            taken.add(module.name)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a socket bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
