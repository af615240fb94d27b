"""A namespace of a real API server with an operator in it, over pods that are simulated servers.

Pods are objects that nobody schedules; their status says that they run, at a loopback address where
a simulated server listens. Used by the tests of the operator and by benchmarks/operator.py.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import yaml
from lightkube.config.kubeconfig import KubeConfig

from mural_operator.operating import Operator
from mural_operator.settings import OperatorSettings
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.config import cluster_config
from mural_resolvers.kubernetes.paths import (
    ADAPTER_ALIASES,
    ADAPTERS,
    PODS,
    SECRETS,
    SERVING_POOLS,
    TENANTS,
)
from mural_resolvers.kubernetes.watch import Watch
from tests.mural_operator.simulated_server import Knobs, SimulatedServer

WAIT_S = 60.0
CRDS = Path(__file__).parents[2] / "charts" / "mural" / "crds"
CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LABELS = {"app": "mural-server"}
KINDS = {
    "Adapter": ADAPTERS,
    "AdapterAlias": ADAPTER_ALIASES,
    "ServingPool": SERVING_POOLS,
    "Tenant": TENANTS,
}

Object = dict[str, Any]


async def install_crds(client: KubeClient) -> None:
    """Have the API server know the custom resources."""
    for path in sorted(CRDS.glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        try:
            await client.create(CRD_PATH, crd)
        except KubeError as error:
            if error.status != 409:
                raise
    # The API server serves them only a moment later; a watch tries until then.
    for resource in KINDS.values():
        watch: Watch[Object] = Watch(client, resource.all(), msgspec.json.decode, what="objects")
        listed = asyncio.Event()
        running = asyncio.create_task(watch.run(partial(_tell, watch, listed)))
        async with asyncio.timeout(WAIT_S):
            await listed.wait()
        running.cancel()


def _tell(watch: Watch[Object], listed: asyncio.Event, _: object) -> None:
    if watch.synced:
        listed.set()


class Seen:
    """Objects of one kind as the API server tells them, to wait for."""

    def __init__(self, client: KubeClient, path: str) -> None:
        self._watch: Watch[Object] = Watch(client, path, msgspec.json.decode, what=path)
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._watch.run(lambda _: self._changed.set()))

    async def until(self, holds: Callable[[dict[str, Object]], object]) -> dict[str, Object]:
        """By name, once something holds."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    found = {
                        each["metadata"]["name"]: each for each in self._watch.objects.values()
                    }
                    if self._watch.synced and holds(found):
                        return found
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            raise AssertionError(f"not in time; there is {found}") from None


class Operated:
    """One namespace, its simulated pods, and what is seen of it."""

    def __init__(
        self, client: KubeClient, namespace: str, kubeconfig: Path, held: AsyncExitStack
    ) -> None:
        self.client = client
        self.namespace = namespace
        self.kubeconfig = kubeconfig
        """As whom operators speak to the API server."""
        self.port, self.control_port = _free_ports()
        self.servers: dict[str, SimulatedServer] = {}
        self._held = held
        self.adapters = Seen(client, ADAPTERS.of(namespace))
        self.pools = Seen(client, SERVING_POOLS.of(namespace))
        self.tenants = Seen(client, TENANTS.of(namespace))
        for seen in (self.adapters, self.pools, self.tenants):
            held.callback(seen.task.cancel)

    # -- objects ----------------------------------------------------------------------------------

    async def apply(self, kind: str, name: str, spec: Object) -> None:
        """Make or replace the spec of a custom resource."""
        body = {
            "apiVersion": "mural.dev/v1alpha1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec,
        }
        await self.client.patch(
            KINDS[kind].named(self.namespace, name),
            body,
            kind="apply",
            params={"fieldManager": "test", "force": "true"},
        )

    async def delete(self, kind: str, name: str) -> None:
        """Ask for an object's end."""
        await self.client.delete(KINDS[kind].named(self.namespace, name))

    async def pool(self, name: str = "pool", **spec: object) -> None:
        """A pool of the pods that have `LABELS`."""
        fields = {
            "selector": {"matchLabels": LABELS},
            "port": self.port,
            "controlPort": self.control_port,
        }
        await self.apply("ServingPool", name, fields | spec)

    async def tenant(self, name: str = "acme", **spec: object) -> None:
        """A tenant that may declare adapters in this namespace."""
        await self.apply("Tenant", name, {"namespaces": [self.namespace]} | spec)

    async def adapter(self, name: str, **spec: object) -> None:
        """Declare ``acme:<name>``, unless the spec says otherwise."""
        fields = {"pool": "pool", "tenant": "acme", "version": name}
        await self.apply("Adapter", name, fields | spec)

    async def secret(self, name: str, **entries: str) -> None:
        """Make or change a Secret."""
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "stringData": entries,
        }
        params = {"fieldManager": "test", "force": "true"}
        path = SECRETS.named(self.namespace, name)
        await self.client.patch(path, body, kind="apply", params=params)

    async def ready(self, *names: str) -> dict[str, Object]:
        """The adapters, once these are Ready."""
        return await self.adapters.until(
            lambda found: all(
                name in found and condition(found[name], "Ready")["status"] == "True"
                for name in names
            )
        )

    # -- pods -------------------------------------------------------------------------------------

    async def pods(self, number: int, **more: Any) -> list[SimulatedServer]:
        """So many more pods that run and are ready."""
        first = len(self.servers)
        return [await self.pod(f"server-{first + at}", **more) for at in range(number)]

    async def pod(self, name: str, *, ready: bool = True, **more: Any) -> SimulatedServer:
        """A pod that runs, and the server in it."""
        server = SimulatedServer(
            host=f"127.0.1.{len(self.servers) + 1}",
            port=self.port,
            control_port=self.control_port,
            **({"knobs": Knobs()} | more),
        )
        await self._held.enter_async_context(server)
        self.servers[name] = server
        await self._make_pod(name, server.host, ready=ready)
        return server

    async def _make_pod(self, name: str, address: str, *, ready: bool) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": LABELS},
            "spec": {
                "schedulerName": "nobody",
                "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "server", "image": "mural.local/server:1"}],
            },
        }
        await self.client.create(PODS.of(self.namespace), pod)
        await self.set_ready(name, ready=ready, address=address)

    async def set_ready(self, name: str, *, ready: bool = True, address: str = "") -> None:
        """What the kubelet would say of it."""
        status: Object = {
            "phase": "Running",
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True" if ready else "False",
                    "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
            ],
        }
        if address:
            status |= {"podIP": address, "podIPs": [{"ip": address}]}
        await self.client.patch(PODS.status(self.namespace, name), {"status": status})

    async def remove_pod(self, name: str) -> None:
        """Its process ends, and then its object."""
        await self.servers[name].stop()
        await self.client.delete(PODS.named(self.namespace, name))

    # -- the operator -----------------------------------------------------------------------------

    @asynccontextmanager
    async def operator(self) -> AsyncIterator[Operator]:
        """An operator in this process, with a client of its own, until the block ends."""
        config = KubeConfig.from_file(self.kubeconfig).get()
        assert config is not None
        async with KubeClient(config) as client:
            settings = OperatorSettings(namespace=self.namespace, admin_port=None)
            operator = Operator(settings, client)
            stop = asyncio.Event()
            running = asyncio.create_task(operator.run(stop))
            try:
                yield operator
            finally:
                stop.set()
                await running


async def shipped_account(cluster: Any, folder: Path) -> Path:
    """A configuration of the operator's own ServiceAccount, with the rights of the chart alone.

    Also what else the chart makes for it, which it has no right to make itself.
    """
    templates = ("rbac", "objects", "availability")
    shown = [argument for one in templates for argument in ("-s", f"templates/operator/{one}.yaml")]
    status, manifests, errors = await cluster.run(
        *("helm", "template", "mural", str(CRDS.parent), "--namespace", cluster.namespace, *shown)
    )
    assert status == 0, errors
    status, _, errors = await cluster.run("kubectl", "apply", "-f", "-", told=manifests.encode())
    assert status == 0, errors
    token = await cluster.kubectl("create", "token", "mural-operator", "--duration=1h")
    return _config_with(token.strip(), Path(cluster.environment["KUBECONFIG"]), folder)


def _config_with(token: str, administrator: Path, folder: Path) -> Path:
    config = yaml.safe_load(administrator.read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "operator-kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@asynccontextmanager
async def operated(namespace: str, kubeconfig: Path) -> AsyncIterator[Operated]:
    """A namespace that exists, on the API server that KUBECONFIG names, with an administrator.

    ``kubeconfig`` is for the operators.
    """
    async with AsyncExitStack() as held:
        client = await held.enter_async_context(KubeClient(cluster_config()))
        await install_crds(client)
        yield Operated(client, namespace, kubeconfig, held)


def condition(found: Object, kind: str) -> Object:
    """A condition of an object; one that is not there is of no status."""
    conditions: Iterable[Object] = found.get("status", {}).get("conditions", ())
    return next((each for each in conditions if each["type"] == kind), {"status": "", "reason": ""})


def _free_ports() -> tuple[int, int]:
    """Two ports that are free on every loopback address."""
    while True:
        first = random.randrange(32_100, 32_700)
        try:
            with (
                socket.create_server(("", first)),
                socket.create_server(("", first + 1)),
            ):
                return first, first + 1
        except OSError:
            continue
