"""An API server in memory, as far as an operator asks it, and an operator on it: no process, no
socket but the pods'. It can do what a real one does once in years, such as wake up in its past.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from mural_operator.election import ElectionTiming
from mural_operator.operating import Operator
from mural_operator.settings import OperatorSettings
from mural_resolvers.kubernetes.client import JsonObject, KubeClient, KubeError, PatchKind
from tests.mural_operator.operated import Operated

Object = dict[str, Any]

NAMESPACE = "mural"


class MemoryApi:
    """Objects by their path. Admission, schemas and rights are a real one's business."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[str, Object] = {}
        self._history: list[tuple[int, str, bytes]] = []
        self._watchers: dict[str, list[asyncio.Queue[bytes | None]]] = defaultdict(list)
        self._uids = itertools.count(1)

    def client(self) -> MemoryClient:
        """One user's way to it."""
        return MemoryClient(self)

    def snapshot(self) -> tuple[int, dict[str, Object]]:
        """What a backup holds."""
        return self.version, copy.deepcopy(self.objects)

    def restore(self, backup: tuple[int, dict[str, Object]]) -> None:
        """Wake up as it was then: versions that are known out there are yet to come."""
        self.version, self.objects = backup[0], copy.deepcopy(backup[1])
        self._history = [each for each in self._history if each[0] <= self.version]
        self.cut()

    def cut(self) -> None:
        """Break every watch."""
        for queues in self._watchers.values():
            for queue in queues:
                queue.put_nowait(None)
        self._watchers.clear()

    @property
    def watches(self) -> int:
        """Those that are open."""
        return sum(map(len, self._watchers.values()))

    # -- objects ----------------------------------------------------------------------------------

    def get(self, path: str) -> Object:
        if path not in self.objects:
            raise KubeError(404, "NotFound", f"{path} not found")
        return self.objects[path]

    def list(self, path: str) -> Object:
        items = [each for key, each in self.objects.items() if _collection(key) == path]
        return {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    def create(self, collection: str, body: Object) -> Object:
        made = copy.deepcopy(body)
        path = f"{collection}/{made['metadata']['name']}"
        if path in self.objects:
            raise KubeError(409, "AlreadyExists", "there is one")
        made["metadata"] |= {
            "namespace": NAMESPACE,
            "uid": f"uid-{next(self._uids)}",
            "generation": 1,
            "creationTimestamp": datetime.now(UTC).isoformat(),
        }
        return self._put(path, made, "ADDED")

    def change(self, path: str, change: Object, *, status: bool = False) -> Object:
        """A merge patch."""
        before = self.get(path)
        asked = change.get("metadata", {}).get("resourceVersion")
        if asked not in (None, before["metadata"]["resourceVersion"]):
            raise KubeError(409, "Conflict", "not the last version")
        if status:
            change = {"status": change.get("status", {})}
        after = _merged(before, change)
        if after == before:
            return before
        if after.get("spec") != before.get("spec"):
            after["metadata"]["generation"] += 1
        metadata = after["metadata"]
        if "deletionTimestamp" in metadata and not metadata.get("finalizers"):
            return self._remove(path)
        return self._put(path, after, "MODIFIED")

    def delete(self, path: str) -> None:
        found = self.get(path)
        if not found["metadata"].get("finalizers"):
            self._remove(path)
        elif "deletionTimestamp" not in found["metadata"]:
            stamp = {"metadata": {"deletionTimestamp": datetime.now(UTC).isoformat()}}
            self._put(path, _merged(found, stamp), "MODIFIED")

    def put(self, collection: str, body: Object) -> Object:
        """Create or replace, whatever version there is."""
        path = f"{collection}/{body['metadata']['name']}"
        texts = body.pop("stringData", {})
        if texts:
            body["data"] = {key: b64encode(text.encode()).decode() for key, text in texts.items()}
        return self.change(path, body) if path in self.objects else self.create(collection, body)

    def _put(self, path: str, found: Object, kind: str) -> Object:
        found["metadata"]["resourceVersion"] = self._tick()
        self.objects[path] = found
        self._tell(path, kind, found)
        return found

    def _remove(self, path: str) -> Object:
        found = self.objects.pop(path)
        gone = _merged(found, {"metadata": {"resourceVersion": self._tick()}})
        self._tell(path, "DELETED", gone)
        return gone

    def _tick(self) -> str:
        self.version += 1
        return str(self.version)

    def _tell(self, path: str, kind: str, found: Object) -> None:
        collection = _collection(path)
        line = msgspec.json.encode({"type": kind, "object": found})
        self._history.append((self.version, collection, line))
        for queue in self._watchers[collection]:
            queue.put_nowait(line)

    # -- watches ----------------------------------------------------------------------------------

    def watch(self, collection: str, version: int) -> asyncio.Queue[bytes | None]:
        if version > self.version:
            raise KubeError(504, "Timeout", f"Too large resource version: {version}")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for each, which, line in self._history:
            if each > version and which == collection:
                queue.put_nowait(line)
        self._watchers[collection].append(queue)
        return queue

    def leave(self, collection: str, queue: asyncio.Queue[bytes | None]) -> None:
        if queue in self._watchers[collection]:
            self._watchers[collection].remove(queue)


class MemoryClient(KubeClient):
    """What is asked of a `KubeClient`, counted by verb, and each write kept."""

    def __init__(self, api: MemoryApi) -> None:
        self.calls: Counter[str] = Counter()
        self.writes: list[tuple[str, str]] = []
        """Verb and path."""
        self.namespace = NAMESPACE
        self.forbidden: set[tuple[str, str]] = set()
        """Verb and last part of a collection's path: refused, as for want of a role."""
        self.lost = False
        """Whether nothing that it asks arrives, as once its process is killed."""
        self._api = api

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        if params is None:
            await self._count("get", path)
            return msgspec.json.encode(self._api.get(path))
        await self._count("list", path)
        return msgspec.json.encode(self._api.list(path))

    async def create(self, path: str, body: Mapping[str, Any]) -> bytes:
        await self._count("create", path)
        return msgspec.json.encode(self._api.create(path, dict(body)))

    async def replace(self, path: str, body: Mapping[str, Any]) -> bytes:
        await self._count("update", path)
        return msgspec.json.encode(self._api.change(path, dict(body)))

    async def patch(
        self,
        path: str,
        body: JsonObject | list[JsonObject],
        *,
        kind: PatchKind = "merge",
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        await self._count("patch", path)
        assert isinstance(body, Mapping)
        if kind == "apply":
            return msgspec.json.encode(self._api.put(_collection(path), dict(body)))
        of, _, sub = path.rpartition("/")
        status = sub == "status"
        return msgspec.json.encode(
            self._api.change(of if status else path, dict(body), status=status)
        )

    async def delete(self, path: str) -> None:
        await self._count("delete", path)
        try:
            self._api.delete(path)
        except KubeError as error:
            if error.status != 404:
                raise

    @asynccontextmanager
    async def stream(
        self, path: str, params: Mapping[str, str], *, silence_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        await self._count("watch", path)
        queue = self._api.watch(path, int(params["resourceVersion"]))
        try:
            yield _lines(queue)
        finally:
            self._api.leave(path, queue)

    async def _count(self, verb: str, path: str) -> None:
        # As over a network: others have their turn.
        await asyncio.sleep(0)
        self.calls[verb] += 1
        if verb in ("create", "update", "patch", "delete"):
            self.writes.append((verb, path))
        if self.lost:
            raise KubeError(0, "NoAnswer", "no answer")
        for forbidden, what in self.forbidden:
            if verb == forbidden and f"/{what}" in path:
                raise KubeError(403, "Forbidden", f'User "x" cannot {verb} resource "{what}"')


class InMemory(Operated):
    """A namespace on a `MemoryApi`, with simulated pods and any number of operators."""

    def __init__(self, held: AsyncExitStack) -> None:
        self.api = MemoryApi()
        super().__init__(self.api.client(), NAMESPACE, Path(), held)

    @asynccontextmanager
    async def operator(self, name: str = "one", **more: Any) -> AsyncIterator[Operator]:
        """One more, with a client of its own, until the block ends."""
        settings = OperatorSettings(namespace=NAMESPACE, admin_port=None, pod_name=name, **more)
        operator = Operator(settings, self.api.client())
        stop = asyncio.Event()
        running = asyncio.create_task(operator.run(stop))
        try:
            yield operator
        finally:
            stop.set()
            await running


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter pauses. An operator that would end its process fails its test alone."""
    monkeypatch.setattr("mural_operator.worker.PAUSE_S", 0.01)
    monkeypatch.setattr("mural_operator.worker.SHARE", 0.5)
    monkeypatch.setattr("mural_operator.pool_worker.TELL_S", 0.02)
    monkeypatch.setattr("mural_operator.statuses.SPACING_S", 0.02)
    monkeypatch.setattr("mural_operator.executor.SHOWS_S", 0.5)
    # The Lease is renewed more often, and holds for as long as ever.
    often = ElectionTiming(renew_s=0.1)
    monkeypatch.setattr("mural_operator.election.ElectionTiming", lambda: often)

    def end(status: int) -> NoReturn:
        raise AssertionError(f"the process would have ended with {status}")

    monkeypatch.setattr("mural_operator.operating.os._exit", end)


def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lapses in two seconds."""
    quick = ElectionTiming(duration_s=2, renew_s=0.2, act_s=1.2, stop_s=0.6)
    monkeypatch.setattr("mural_operator.election.ElectionTiming", lambda: quick)


@asynccontextmanager
async def in_memory() -> AsyncIterator[InMemory]:
    """With a tenant that may declare adapters, and an empty pool."""
    async with AsyncExitStack() as held:
        kube = InMemory(held)
        await kube.tenant()
        await kube.pool()
        yield kube


async def _lines(queue: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
    while (line := await queue.get()) is not None:
        yield line


def _collection(path: str) -> str:
    return path.rpartition("/")[0]


def _merged(before: Object, change: Mapping[str, Any]) -> Object:
    after = dict(before)
    for key, each in change.items():
        if each is None:
            after.pop(key, None)
        elif isinstance(each, Mapping):
            known = after.get(key)
            after[key] = _merged(known if isinstance(known, dict) else {}, each)
        else:
            after[key] = copy.deepcopy(each)
    return after


def paths(writes: Iterable[tuple[str, str]], *, but: str) -> list[tuple[str, str]]:
    """Those that do not have a text in their path."""
    return [each for each in writes if but not in each[1]]
