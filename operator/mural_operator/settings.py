"""Every setting of the operator, read once from its flags."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

__all__ = ["DEFAULT_KEYS", "DEFAULT_LEASE", "OperatorSettings"]

DEFAULT_LEASE: Final = "mural-operator"
DEFAULT_KEYS: Final = "mural-router-keys"


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator is started with."""

    namespace: str | None = None
    """Of its pools, tenants, pods, Secrets and Lease; None: the one that the configuration of the
    cluster names, in a pod its own."""
    watch_namespaces: tuple[str, ...] = ()
    """Those of adapters and aliases; none: its own."""
    all_namespaces: bool = False
    """Watch adapters and aliases in every namespace; needs a ClusterRole."""
    pod_name: str | None = None
    """For people who look at the Lease; None: the host's name."""
    lease: str = DEFAULT_LEASE
    keys_secret: str = DEFAULT_KEYS
    admin_host: str = "0.0.0.0"
    """Every interface: the kubelet's probes and Prometheus come from elsewhere."""
    admin_port: int | None = 9091
    """Of /health, /ready and /metrics; None: none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
