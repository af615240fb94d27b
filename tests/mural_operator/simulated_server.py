"""A server without an engine: the real control API's behaviour, and whatever faults a test wants.

``engine="mural"`` speaks the control API on its own port and the little of the OpenAI API that an
operator or a router's test needs; ``engine="vllm"`` speaks the latter alone, as a vLLM pod with
Mural's plug-in does. Both are plain asyncio, so that twenty of them with 500 adapters each live in
one process. ``test_control_api_contract.py`` holds it to the real server.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl as tls
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from mural_resolvers.errors import MalformedName
from mural_resolvers.names import parse_name, validate_admin_name
from mural_server.protocol import (
    AdapterStatus,
    Base,
    DeclaredAnswer,
    DeclaredRequest,
    Delta,
    DrainAnswer,
    Freed,
    FreedAnswer,
    Heartbeat,
    Limits,
    Load,
    PrefixStatistics,
    ResidentRequest,
    Snapshot,
    StateEvent,
)

__all__ = ["Done", "Knobs", "Refusal", "SimulatedServer", "digest_of"]

HISTORY = 1024
WRITE_S = 60.0
MAX_HEAD_BYTES = 64 << 10
SPEC_HASH = hashlib.sha256(b"tiny").hexdigest()
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}

Handler = Callable[["_Request", asyncio.StreamWriter], Any]
T = TypeVar("T")


def digest_of(name: str) -> str:
    """The digest that every simulated server gives a name, in any of its forms, by default."""
    return hashlib.sha256(parse_name(name).exact.encode()).hexdigest()


class Refusal(NamedTuple):
    """What a load of one name is refused with."""

    status: int
    message: str = "refused by the test"
    retry_after_s: int | None = None


class Done(NamedTuple):
    """One thing that the server was asked to do, for tests of order and number."""

    what: Literal["resident", "remove", "declare", "drain", "complete", "unload"]
    name: str
    status: int
    at: float
    """Of the loop's clock."""


class _Refused(Exception):
    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


class _Request(NamedTuple):
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    def json(self, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Refused(400, f"The body is not what is wanted here: {error}.") from None


class _Completion(msgspec.Struct):
    model: str


class _Named(msgspec.Struct):
    lora_name: str
    lora_path: str = ""


@dataclass
class Knobs:
    """How the server behaves; a test may change any of it while the server runs."""

    load_delay_s: float = 0.0
    unload_delay_s: float = 0.0
    refusals: dict[str, Refusal] = field(default_factory=dict)
    """By name: loads and one-token requests of it are refused."""
    digests: dict[str, str] = field(default_factory=dict)
    """Other content than `digest_of`: a pinned digest conflicts with it."""
    misreported: dict[str, str] = field(default_factory=dict)
    """A lie: the digest that answers and states give, whatever was asked for."""
    phantoms: set[str] = field(default_factory=set)
    """A lie: a load answers 200 and leaves the name on disk."""
    only_in: dict[str, str] = field(default_factory=dict)
    """The one source that has a name; the others do not know it."""
    sources: tuple[str, ...] = ("s3",)
    disk_cache: bool = True
    rank: int = 8
    adapter_bytes: int = 1 << 20
    open_sequences: int = 0
    """That a drain would wait for."""
    interval_s: float = 0.25
    """Between two deltas."""
    heartbeat_s: float = 5.0
    await_declared: bool = False
    """Not ready before the first ``PUT declared``."""


class SimulatedServer:
    """One pod. ``start`` and ``stop`` as often as a test likes; the ports stay the same.

    Names in ``adapters``, ``done`` and the knobs are short forms, as the real server reports them
    (``acme:v1`` for ``acme/default:v1``).
    """

    def __init__(
        self,
        *,
        engine: Literal["mural", "vllm"] = "mural",
        host: str = "127.0.0.1",
        port: int = 0,
        control_port: int = 0,
        base: tuple[str, ...] = ("tiny",),
        spec_hash: str = SPEC_HASH,
        token: str | None = None,
        api_key: str | None = None,
        ssl: tls.SSLContext | None = None,
        slots: int = 8,
        capacity: int = 512,
        max_lora_rank: int = 64,
        knobs: Knobs | None = None,
    ) -> None:
        self.engine = engine
        self.host = host
        self.port = port
        self.control_port = control_port
        self.base = base
        self.spec_hash = spec_hash
        self.token = token
        self.api_key = api_key
        self.slots = slots
        self.capacity = capacity
        """Adapters in host memory; beyond it the longest unused goes to disk."""
        self.max_lora_rank = max_lora_rank
        self.knobs = knobs or Knobs()
        self.done: deque[Done] = deque(maxlen=100_000)
        self.connections = 0
        """Connections to the state stream since the start of the test."""
        self._ssl = ssl
        self._listening: list[asyncio.Server] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._watchers: list[tuple[Callable[[SimulatedServer], object], asyncio.Event]] = []
        self._forget()

    # -- the life ---------------------------------------------------------------------------------

    def _forget(self) -> None:
        """A new process: another boot id, and nothing known."""
        self.boot_id = uuid.uuid4().hex
        self.seq = 0
        self.adapters: OrderedDict[str, AdapterStatus] = OrderedDict()
        """Known names, the last loaded or asked for last."""
        self._slot_pins: set[str] = set()
        """Of those pinned, the ones that keep their slot as well."""
        self.declared: tuple[str, ...] = ()
        self.declared_once = False
        self.was_ready = False
        self.accepting = True
        self.load = Load()
        self._events: deque[tuple[int, bytes]] = deque(maxlen=HISTORY)
        self._news = asyncio.Event()
        self._touched: set[str] = set()
        self._told = self._flags()
        self._told_at = float("-inf")
        self._telling: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen; a port of 0 becomes a free one, which is kept over restarts."""
        handlers: list[tuple[str, Handler]] = [("port", self._openai)]
        if self.engine == "mural":
            handlers.append(("control_port", self._control))
        for which, handler in handlers:
            server = await asyncio.start_server(
                self._accepting_for(handler),
                self.host,
                getattr(self, which),
                ssl=self._ssl,
                limit=MAX_HEAD_BYTES,
            )
            setattr(self, which, server.sockets[0].getsockname()[1])
            self._listening.append(server)

    async def stop(self) -> None:
        """Die: connections are refused and those that are open end at once."""
        for server in self._listening:
            server.close()
        self._listening.clear()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        if self._telling is not None:
            self._telling.cancel()

    async def restart(self) -> None:
        """Die and come back on the same ports, with everything forgotten."""
        await self.stop()
        self._forget()
        await self.start()

    async def __aenter__(self) -> SimulatedServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def freeze(self) -> None:
        """Keep every connection and answer none; streams fall silent."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Go on."""
        self._thawed.set()

    # -- what tests do to it and see of it --------------------------------------------------------

    @property
    def resident(self) -> dict[str, AdapterStatus]:
        """What is in host memory or in a slot."""
        return {name: one for name, one in self.adapters.items() if one.level != "disk"}

    @property
    def ready(self) -> bool:
        """As ``/ready`` answers; once the declared set was resident, later changes do not count."""
        if not self.accepting:
            return False
        if not self.was_ready:
            if self.awaits_declared:
                return False
            self.was_ready = self.resident.keys() >= set(self.declared)
        return self.was_ready

    @property
    def awaits_declared(self) -> bool:
        """Whether it waits to be told what it is to hold."""
        return self.knobs.await_declared and not self.declared_once

    def lose(self, name: str, *, level: Literal["disk"] | None = "disk") -> None:
        """Drop an adapter without being asked: out of memory, or (None) out of all knowledge."""
        name = _key(name)
        if level is None:
            self._drop(name)
        else:
            self._put(self._status(name, level="disk", pinned=False))

    def hold(self, name: str, *, level: Literal["disk", "host", "slot"] = "host") -> None:
        """Have an adapter there, as a request's load would have brought it."""
        self._put(self._status(_key(name), level=level))

    def set_load(self, load: Load) -> None:
        """How busy it says it is."""
        self.load = load
        self._changed()

    def set_rate(self, name: str, tokens_per_s: float) -> None:
        """How busy it says one adapter is."""
        status = self.adapters[_key(name)]
        self._put(msgspec.structs.replace(status, load=tokens_per_s))

    async def until(
        self, holds: Callable[[SimulatedServer], object], timeout_s: float = 20.0
    ) -> None:
        """Return once something holds; looked at after every change of the state."""
        event = asyncio.Event()
        self._watchers.append((holds, event))
        try:
            if not holds(self):
                await asyncio.wait_for(event.wait(), timeout_s)
        finally:
            self._watchers = [one for one in self._watchers if one[1] is not event]

    def count(self, what: str, name: str | None = None) -> int:
        """How often something was asked for, and answered."""
        return sum(one.what == what and name in (None, one.name) for one in self.done)

    # -- state ------------------------------------------------------------------------------------

    def _status(self, name: str, **changes: Any) -> AdapterStatus:
        known = self.adapters.get(name) or AdapterStatus(
            name=name,
            digest=self.knobs.misreported.get(name) or self._digest(name),
            level="disk",
            rank=self.knobs.rank,
            bytes=self.knobs.adapter_bytes,
        )
        return msgspec.structs.replace(known, **changes)

    def _digest(self, name: str) -> str:
        return self.knobs.digests.get(name) or digest_of(name)

    def _put(self, status: AdapterStatus) -> None:
        same = self.adapters.get(status.name) == status
        self.adapters[status.name] = status
        self.adapters.move_to_end(status.name)
        if not same:
            self._changed(status.name)

    def _drop(self, name: str) -> None:
        del self.adapters[name]
        self._slot_pins.discard(name)
        self._changed(name)

    def _flags(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "accepting": self.accepting,
            "ready": self.ready,
            "awaits_declared": self.awaits_declared,
            "declared": self.declared,
        }

    def _changed(self, *names: str) -> None:
        """Have it told with what else changes meanwhile: as the real one, four times a second."""
        self._touched.update(names)
        for holds, event in self._watchers:
            if holds(self):
                event.set()
        if self._telling is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time(), self._told_at + self.knobs.interval_s)
            self._telling = loop.call_at(at, self._tell)

    def _tell(self) -> None:
        """Give what changed the next number."""
        self._told_at = asyncio.get_running_loop().time()
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        flags = self._flags()
        changes = {key: value for key, value in flags.items() if value != self._told[key]}
        if not changes and not self._touched:
            return
        touched, self._touched, self._told = sorted(self._touched), set(), flags
        self.seq += 1
        delta = Delta(
            boot_id=self.boot_id,
            seq=self.seq,
            changed=tuple(self.adapters[name] for name in touched if name in self.adapters),
            removed=tuple(name for name in touched if name not in self.adapters),
            **changes,
        )
        self._events.append((self.seq, _event(delta)))
        self._news.set()
        self._news = asyncio.Event()

    def snapshot(self) -> Snapshot:
        """The whole state now, as a new reader gets it."""
        self._tell()
        return Snapshot(
            boot_id=self.boot_id,
            seq=self.seq,
            base=Base(model_names=self.base, spec_hash=self.spec_hash),
            limits=Limits(
                slots=self.slots,
                max_cpu_loras=self.capacity,
                host_bytes=self.capacity * self.knobs.adapter_bytes,
                max_lora_rank=self.max_lora_rank,
                max_num_seqs=16,
                max_model_len=2048,
            ),
            load=self.load,
            prefix=PrefixStatistics(),
            accepting=self.accepting,
            ready=self.ready,
            awaits_declared=self.awaits_declared,
            declared=self.declared,
            adapters=dict(self.adapters),
        )

    # -- the control API --------------------------------------------------------------------------

    async def _control(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        match request.method, request.path:
            case "GET", "/health":
                await _answer(writer, 200)
                return
            case "GET", "/ready":
                await _answer(writer, 200 if self.ready else 503)
                return
        self._let_in(request)
        resident = "/mural/v1/resident/"
        match request.method, request.path:
            case "GET", "/mural/v1/state":
                await self._stream(_since(request), writer)
            case "PUT", "/mural/v1/resident":
                wanted = request.json(ResidentRequest)
                with self._noting("resident", wanted.name):
                    status = await self._make_resident(wanted)
                await _answer(writer, 200, status)
            case "DELETE", path if path.startswith(resident):
                name = unquote(path.removeprefix(resident))
                with self._noting("remove", name):
                    freed = await self._remove(name)
                await _answer(writer, 200, freed)
            case "PUT", "/mural/v1/declared":
                names = request.json(DeclaredRequest).names
                with self._noting("declare", " ".join(names)):
                    declared = self._declare(names)
                await _answer(writer, 200, declared)
            case "POST", "/mural/v1/drain":
                with self._noting("drain", ""):
                    self._drain()
                drained = DrainAnswer(accepting=False, open_sequences=self.knobs.open_sequences)
                await _answer(writer, 200, drained)
            case _:
                raise _Refused(404, "There is nothing here.")

    def _let_in(self, request: _Request) -> None:
        if "origin" in request.headers:
            raise _Refused(403, "The control API is not for browsers.")
        sent = request.headers.get("authorization", "")
        if self.token is not None and sent != f"Bearer {self.token}":
            raise _Refused(401, "A valid control token is required.")

    async def _make_resident(self, wanted: ResidentRequest) -> AdapterStatus:
        if wanted.name in self.base:
            raise _Refused(400, "The base model is always resident.")
        name = _checked(wanted.name)
        self._check_request(name, wanted)
        if name not in self.adapters:
            self._put(self._status(name))
        if wanted.digest not in (None, self._digest(name)) and name not in self.knobs.misreported:
            raise _Refused(409, f"{name} has the digest {self._digest(name)} here.")
        self._refuse(name)
        await asyncio.sleep(self.knobs.load_delay_s)
        if wanted.level != "disk":
            return self._load(name, wanted.level, wanted.pinned)
        return self._status(name)

    def _check_request(self, name: str, wanted: ResidentRequest) -> None:
        knobs = self.knobs
        if wanted.source is not None and wanted.source not in knobs.sources:
            raise _Refused(400, f"There is no source {wanted.source} here.")
        if wanted.level == "disk" and not knobs.disk_cache:
            raise _Refused(400, "There is no disk cache here.")
        if wanted.level == "disk" and wanted.pinned:
            raise _Refused(400, "Only what is resident can be pinned.")
        if wanted.source not in (None, knobs.only_in.get(name, wanted.source)):
            raise _Refused(404, f"The adapter {name} does not exist.")
        if name in knobs.refusals and knobs.refusals[name].status not in (409, 413, 422):
            # The others are found out with the content at hand, whose name is known then.
            self._refuse(name)

    def _refuse(self, name: str) -> None:
        refusal = self.knobs.refusals.get(name)
        if refusal is not None:
            raise _Refused(*refusal)

    def _load(self, name: str, level: Literal["host", "slot"], pinned: bool) -> AdapterStatus:
        was = self._status(name)
        self._check_pin(was, level, pinned)
        self._slot_pins.discard(name)
        if pinned and level == "slot":
            self._slot_pins.add(name)
        return self._become(name, level, pinned)

    def _become(self, name: str, level: Literal["host", "slot"], pinned: bool) -> AdapterStatus:
        was = self._status(name)
        self._make_room(name)
        level = "slot" if was.level == "slot" else level
        loaded = msgspec.structs.replace(was, level=level, pinned=pinned)
        if name in self.knobs.phantoms:
            return loaded
        self._put(loaded)
        self._bound_slots()
        return loaded

    def _check_pin(self, was: AdapterStatus, level: Literal["host", "slot"], pinned: bool) -> None:
        """Of the slots, and of the places in host memory, one is always left to the others."""
        if not pinned:
            return
        others = sum(one.pinned for one in self.adapters.values() if one.name != was.name)
        if others + 1 >= self.capacity:
            raise _Refused(503, f"{others} of {self.capacity} adapters in host memory are pinned.")
        in_slots = len(self._slot_pins - {was.name})
        if level == "slot" and in_slots + 1 >= self.slots:
            raise _Refused(503, f"{in_slots} of {self.slots} slots are pinned already.", 5)

    def _make_room(self, name: str) -> None:
        if len(self.adapters) <= self.capacity:
            return
        resident = self.resident
        if name in resident or len(resident) < self.capacity:
            return
        victim = next(one for one in resident.values() if not one.pinned)
        self._put(msgspec.structs.replace(victim, level="disk"))
        self.adapters.move_to_end(victim.name, last=False)

    def _bound_slots(self) -> None:
        in_slots = [one for one in self.adapters.values() if one.level == "slot"]
        movable = [one for one in in_slots if one.name not in self._slot_pins]
        leaving = movable[: max(0, len(in_slots) - self.slots)]
        for one in leaving:
            self._put(msgspec.structs.replace(one, level="host"))

    async def _remove(self, name: str) -> FreedAnswer:
        if name in self.base:
            raise _Refused(400, "The base model cannot be unloaded.")
        key = _checked(name)
        await asyncio.sleep(self.knobs.unload_delay_s)
        status = self.adapters.get(key)
        if status is None:
            return FreedAnswer(name=name, freed=Freed())
        self._drop(key)
        host = 0 if status.level == "disk" else status.bytes
        slot = status.bytes if status.level == "slot" else 0
        return FreedAnswer(name=name, freed=Freed(slot=slot, host=host))

    def _declare(self, names: tuple[str, ...]) -> DeclaredAnswer:
        declared = tuple(sorted({_checked(name) for name in names}))
        self.declared_once = True
        self.declared = declared
        self._changed()
        resident = self.resident
        return DeclaredAnswer(
            resident=tuple(name for name in declared if name in resident),
            missing=tuple(name for name in declared if name not in resident),
        )

    def _drain(self) -> None:
        self.accepting = False
        self._changed()

    # -- the state stream -------------------------------------------------------------------------

    async def _stream(self, since: int | None, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        )
        async for data in self._follow(-1 if since is None else since):
            await self._thawed.wait()
            writer.write(data)
            async with asyncio.timeout(WRITE_S):
                await writer.drain()

    async def _follow(self, place: int) -> AsyncIterator[bytes]:
        self._tell()
        while True:
            if not self._kept(place):
                snapshot = self.snapshot()
                place = snapshot.seq
                yield _event(snapshot)
                continue
            news = self._news
            data = b"".join(event for seq, event in self._events if seq > place)
            if data:
                place = self.seq
                yield data
                continue
            try:
                # `wait_for` of Python 3.11 may swallow the cancellation by `stop`.
                async with asyncio.timeout(self.knobs.heartbeat_s):
                    await news.wait()
            except TimeoutError:
                yield _event(Heartbeat(boot_id=self.boot_id, seq=place))

    def _kept(self, seq: int) -> bool:
        oldest = self._events[0][0] if self._events else self.seq + 1
        return oldest - 1 <= seq <= self.seq

    # -- the OpenAI API ---------------------------------------------------------------------------

    async def _openai(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        match request.method, request.path:
            case "GET", "/health":
                await _answer(writer, 200)
                return
            case "GET", "/ready" if self.engine == "mural":
                await _answer(writer, 200 if self.ready else 503)
                return
        sent = request.headers.get("authorization", "")
        if self.api_key is not None and sent != f"Bearer {self.api_key}":
            raise _Refused(401, "Unauthorized")
        match request.method, request.path:
            case "GET", "/v1/models":
                await _answer(writer, 200, self._models())
            case "POST", "/v1/completions":
                model = request.json(_Completion).model
                with self._noting("complete", model):
                    await self._complete(model)
                await _answer(writer, 200, _completion(model))
            case "POST", "/v1/unload_lora_adapter":
                name = request.json(_Named).lora_name
                with self._noting("unload", name):
                    await self._unload(name)
                await _answer(writer, 200, f"Success: LoRA adapter '{name}' removed successfully.")
            case _:
                raise _Refused(404, "Not Found")

    def _models(self) -> dict[str, object]:
        common = {"object": "model", "created": 0, "owned_by": self.engine}
        cards = [{**common, "id": name, "root": name, "parent": None} for name in self.base]
        cards += [
            {**common, "id": name, "root": name, "parent": self.base[0]} for name in self.adapters
        ]
        return {"object": "list", "data": cards}

    async def _complete(self, model: str) -> None:
        if not self.accepting:
            raise _Refused(503, "The server is draining.", 5)
        if model in self.base:
            return
        name = _checked(model)
        self._refuse(name)
        if self._status(name).level == "disk":
            await asyncio.sleep(self.knobs.load_delay_s)
        self._become(name, "slot", self._status(name).pinned)

    async def _unload(self, name: str) -> None:
        await asyncio.sleep(self.knobs.unload_delay_s)
        if _key(name) not in self.adapters:
            raise _Refused(404, f"The lora adapter '{name}' cannot be found.")
        self._drop(_key(name))

    # -- HTTP -------------------------------------------------------------------------------------

    def _noting(self, what: Any, name: str) -> _Noting:
        return _Noting(self, what, name)

    def _accepting_for(self, handler: Handler) -> Callable[..., Any]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            try:
                await self._serve(handler, reader, writer)
            except (ConnectionError, EOFError, TimeoutError):
                pass  # The peer has gone.
            except asyncio.CancelledError:
                # By `stop`: a pod that dies says nothing more.
                writer.transport.abort()
            finally:
                self._serving.discard(task)
                writer.close()

        return serve

    async def _serve(
        self, handler: Handler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = await _read_request(reader)
        await self._thawed.wait()
        try:
            if request.path == "/mural/v1/state":
                await self._until_gone(handler(request, writer), reader)
            else:
                await handler(request, writer)
        except _Refused as refused:
            await self._thawed.wait()
            detail = {"message": refused.message, "type": "", "param": None, "code": ""}
            await _answer(writer, refused.status, {"error": detail}, refused.retry_after_s)

    async def _until_gone(self, work: Any, reader: asyncio.StreamReader) -> None:
        """End a stream when its reader has closed the connection."""
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(working, gone, return_exceptions=True)


class _Noting:
    """Notes what was asked, once it has been answered or refused."""

    def __init__(self, server: SimulatedServer, what: Any, name: str) -> None:
        self._server = server
        self._what = what
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, _Refused):
            status = 200 if error is None else error.status
            name = self._name if self._what in ("declare", "drain") else _key(self._name)
            at = asyncio.get_running_loop().time()
            self._server.done.append(Done(self._what, name, status, at))


def _key(name: str) -> str:
    """As the server lists a name: the short form, or an admin's name as it is."""
    try:
        return parse_name(name).short if ":" in name else name
    except MalformedName:
        return name


def _checked(name: str) -> str:
    try:
        return parse_name(name).short if ":" in name else validate_admin_name(name)
    except MalformedName as error:
        raise _Refused(400, error.message) from None


def _event(event: StateEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _since(request: _Request) -> int | None:
    [text] = request.query.get("since", [None])
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise _Refused(400, "since is a sequence number.")
    return int(text)


def _completion(model: str) -> dict[str, object]:
    choice = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "cmpl-simulated",
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


async def _read_request(reader: asyncio.StreamReader) -> _Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *rest = head.split("\r\n")
    method, target, _ = line.split(" ", 2)
    headers = {}
    for header in rest:
        name, _, value = header.partition(":")
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    return _Request(method, url.path, query, headers, body)


async def _answer(
    writer: asyncio.StreamWriter,
    status: int,
    body: object = None,
    retry_after_s: int | None = None,
) -> None:
    data = b"" if body is None else msgspec.json.encode(body)
    head = [
        f"HTTP/1.1 {status} {REASONS.get(status, 'Refused')}",
        "content-type: application/json",
        f"content-length: {len(data)}",
        "connection: close",
    ]
    if retry_after_s is not None:
        head.append(f"retry-after: {retry_after_s}")
    writer.write(("\r\n".join(head) + "\r\n\r\n").encode() + data)
    await writer.drain()
