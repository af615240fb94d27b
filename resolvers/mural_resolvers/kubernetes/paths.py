"""Where the API server keeps the kinds of objects that Mural reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

from mural_resolvers.kubernetes.objects import GROUP, VERSION

__all__ = [
    "ADAPTERS",
    "ADAPTER_ALIASES",
    "ENDPOINT_SLICES",
    "EVENTS",
    "LEASES",
    "PODS",
    "SECRETS",
    "SERVING_POOLS",
    "TENANTS",
    "Resource",
]


@dataclass(frozen=True, slots=True)
class Resource:
    """A namespaced kind; ``group`` is empty for the API's oldest kinds."""

    group: str
    version: str
    plural: str

    def all(self) -> str:
        """The path of all its objects, in every namespace."""
        return f"{self._root}/{self.plural}"

    def of(self, namespace: str) -> str:
        """The path of a namespace's objects: to list, watch and create."""
        return f"{self._root}/namespaces/{_segment(namespace)}/{self.plural}"

    def named(self, namespace: str, name: str) -> str:
        """The path of one object. A name cannot lead out of it."""
        return f"{self.of(namespace)}/{_segment(name)}"

    def status(self, namespace: str, name: str) -> str:
        """The path of its status subresource."""
        return f"{self.named(namespace, name)}/status"

    @property
    def _root(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


def _segment(name: str) -> str:
    """``name`` as one step of a path; raises ValueError for what no object is called."""
    if name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no name of an object")
    return quote(name, safe="")


ADAPTERS = Resource(GROUP, VERSION, "adapters")
ADAPTER_ALIASES = Resource(GROUP, VERSION, "adapteraliases")
SERVING_POOLS = Resource(GROUP, VERSION, "servingpools")
TENANTS = Resource(GROUP, VERSION, "tenants")
PODS = Resource("", "v1", "pods")
SECRETS = Resource("", "v1", "secrets")
EVENTS = Resource("events.k8s.io", "v1", "events")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "endpointslices")
