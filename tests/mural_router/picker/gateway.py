"""Envoy as a gateway in front of Mural replicas: the configuration that the tests run."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from typing import Any

import pytest

DESTINATION = "x-gateway-destination-endpoint"
SUBSET_HEADER = "x-test-subset"
"""Of the tests alone: how they say which endpoints a gateway's route allows."""
SERVED_HEADER = "x-test-served"
"""Of the tests alone: how their replicas have the gateway say who served."""


def envoy_program() -> str:
    """Where Envoy is; where it is not, the test is skipped, or fails in a full run."""
    found = os.environ.get("MURAL_ENVOY") or shutil.which("envoy")
    if found is None:
        message = "no Envoy: make test-peers installs one, or name it in MURAL_ENVOY"
        if os.environ.get("MURAL_CI_FULL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return found


def free_port() -> int:
    """One that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gateway(
    *,
    port: int,
    picker_port: int,
    replicas: Sequence[int],
    fail_open: bool,
    quiet: bool = False,
) -> dict[str, object]:
    """One listener in front of replicas on loopback ports; for Envoy's ``--config-yaml``.

    ``quiet``: Envoy adds no headers of its own to answers, as some gateways have it.
    """
    router = _named("http.router", "router.v3.Router")
    router["typed_config"] |= {"suppress_envoy_headers": quiet}
    filters = [
        _subset_filter(),
        _ext_proc_filter(fail_open),
        # After the picker's filter, which answers pass in the opposite order.
        _served_filter(),
        router,
    ]
    manager = {
        "@type": _type("filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "gateway",
        # A client must not name a destination itself, also where the picker is not asked.
        "early_header_mutation_extensions": [
            {
                "name": "envoy.http.early_header_mutation.header_mutation",
                "typed_config": {
                    "@type": _type("http.early_header_mutation.header_mutation.v3.HeaderMutation"),
                    "mutations": [{"remove": DESTINATION}],
                },
            }
        ],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": _routes()}]},
        "http_filters": filters,
    }
    listener = {
        "address": _address(port),
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }
    return {
        "static_resources": {
            "listeners": [listener],
            "clusters": [_picked(), _any_of(replicas), _picker(picker_port)],
        }
    }


def _routes() -> list[dict[str, object]]:
    return [
        {
            "match": {"prefix": "/", "headers": [{"name": DESTINATION, "present_match": True}]},
            "route": {"cluster": "picked", "timeout": "0s"},
        },
        {"match": {"prefix": "/"}, "route": {"cluster": "any", "timeout": "0s"}},
    ]


def _ext_proc_filter(fail_open: bool) -> dict[str, object]:
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": _type("filters.http.ext_proc.v3.ExternalProcessor"),
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "failure_mode_allow": fail_open,
            # Above the router's longest wait for capacity.
            "message_timeout": "30s",
            "processing_mode": {
                "request_header_mode": "SEND",
                "request_body_mode": "FULL_DUPLEX_STREAMED",
                "request_trailer_mode": "SEND",
                "response_header_mode": "SEND",
                "response_body_mode": "FULL_DUPLEX_STREAMED",
                "response_trailer_mode": "SEND",
            },
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
        },
    }


def _subset_filter() -> dict[str, object]:
    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": _type("filters.http.header_to_metadata.v3.Config"),
            "request_rules": [
                {
                    "header": SUBSET_HEADER,
                    "on_header_present": {
                        "metadata_namespace": "envoy.lb.subset_hint",
                        "key": f"{DESTINATION}-subset",
                        "type": "STRING",
                    },
                    "remove": True,
                }
            ],
        },
    }


def _served_filter() -> dict[str, object]:
    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": _type("filters.http.header_to_metadata.v3.Config"),
            "response_rules": [
                {
                    "header": SERVED_HEADER,
                    "on_header_present": {
                        "metadata_namespace": "envoy.lb",
                        "key": f"{DESTINATION}-served",
                        "type": "STRING",
                    },
                    "remove": True,
                }
            ],
        },
    }


def _picked() -> dict[str, object]:
    return {
        "name": "picked",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _any_of(ports: Sequence[int]) -> dict[str, object]:
    """Where requests go when the gateway is to work on without its picker."""
    return {"name": "any", "type": "STATIC", "connect_timeout": "2s", **_assigned("any", ports)}


def _picker(port: int) -> dict[str, object]:
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": _type("upstreams.http.v3.HttpProtocolOptions"),
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        # A picker that is down is known to be before a request: one whose body is on its way to
        # it cannot be let pass any more, also where the gateway fails open.
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": "liveness"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        **_assigned("picker", [port]),
    }


def _assigned(name: str, ports: Sequence[int]) -> dict[str, object]:
    endpoints = [{"endpoint": {"address": _address(port)}} for port in ports]
    return {"load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}}


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _named(name: str, type_: str) -> dict[str, Any]:
    return {
        "name": f"envoy.filters.{name}",
        "typed_config": {"@type": _type(f"filters.http.{type_}")},
    }


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.extensions.{name}"
