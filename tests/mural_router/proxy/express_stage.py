"""A proxy over the router's own routing and books, with replicas that play scripts.

With the express way and without it, all that can be observed of it can be compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from mural_resolvers.names import parse_name
from mural_resolvers.tenants import KeyRing, Principal, StoredKey, TenantLimits
from mural_resolvers.tenants.keys import hash_secret
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.http.server import Server
from mural_router.http.settings import HttpSettings, TlsSettings
from mural_router.limits.limiter import Limiter
from mural_router.limits.local import LocalLimiter
from mural_router.limits.queue import FairQueue
from mural_router.placement import Base, Fleet, PlacementPolicy, Replica, Residency
from mural_router.proxy import Proxy, start
from mural_router.routing.access_log import AccessLog
from mural_router.routing.breaker import Breakers, BreakerSettings
from mural_router.routing.dispatch import Attempt, Dispatch
from mural_router.routing.identity import Authenticator
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.retry import RetryBudget, RetrySettings
from mural_router.routing.router import FleetRouting
from mural_router.routing.versions import Versions, VersionSource
from tests.mural_router.proxy.scripted_answers import ANSWER
from tests.mural_router.proxy.scripted_replica import (
    BOUND_S,
    Received,
    Script,
    ScriptedReplica,
    says,
)

SECRET = "s" * 43
DIGEST = "d" * 64
UNLIMITED = TenantLimits()
HTTP = HttpSettings(port=0)
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def whole(body: bytes = ANSWER, status: str = "200 OK", *fields: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in ("content-type: application/json", *fields))
    return f"HTTP/1.1 {status}\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def bearer(key_id: str) -> str:
    return f"authorization: Bearer mural_{key_id}_{SECRET}"


ACME, GLOBEX, ADMIN = "acme0000", "globex00", "authorization: Bearer the-admin-key"


def answers_after(go: asyncio.Event, *pieces: bytes) -> Script:
    async def script(received: Received) -> None:
        await go.wait()
        await received.send(*(pieces or (whole(),)))

    return script


class Client:
    """A connection to the proxy; ``seen`` is told what comes back."""

    def __init__(
        self, seen: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.seen, self.reader, self.writer = seen, reader, writer

    def send(self, *pieces: bytes) -> None:
        self.writer.writelines(pieces)

    @property
    def reading(self) -> Any:
        """To pause and resume it: asyncio knows a writer's transport for writing alone."""
        return self.writer.transport

    async def answer(self) -> bytes:
        """One whole answer; 1xx before it included."""
        async with asyncio.timeout(BOUND_S):
            got = await self.reader.readuntil(b"\r\n\r\n")
            if b"\r\ntransfer-encoding: chunked\r\n" in got:
                while True:
                    line = await self.reader.readuntil(b"\r\n")
                    got += line + await self.reader.readexactly(int(line, 16) + 2)
                    if line == b"0\r\n":
                        break
            else:
                length = re.search(rb"content-length: (\d+)", got)
                assert length is not None, got
                got += await self.reader.readexactly(int(length[1]))
        self.seen.append(got)
        return got

    async def rest(self) -> bytes:
        """Until the proxy closes the connection."""
        got = b""
        async with asyncio.timeout(BOUND_S):
            try:
                while data := await self.reader.read(65536):
                    got += data
            except ConnectionResetError:
                got += b" and a reset"
        self.seen.append(got + b" and the end")
        return got

    def leave(self) -> None:
        self.writer.transport.abort()


def request(
    model: str = "acme:v1",
    *fields: str,
    key: str | None = bearer(ACME),
    path: str = "/v1/completions",
    **members: object,
) -> bytes:
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 16, **members}).encode()
    lines = [*fields, *([] if key is None else [key]), "content-type: application/json"]
    text = "".join(f"{line}\r\n" for line in lines)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\n{text}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def held(*names: str, **options: object) -> dict[str, Residency]:
    options = {"level": "slot", "digest": DIGEST, "rank": 4, **options}
    return {parse_name(name).exact: Residency(**options) for name in names}  # type: ignore[arg-type] # fields by name


@dataclass(kw_only=True)
class Setting:
    """What a scenario begins with."""

    engine: Engine = "mural"
    replicas: tuple[dict[str, Residency], ...] = (held("acme:v1", "globex:v4"), {})
    limits: TenantLimits = UNLIMITED
    auth: str = "keys"
    http: HttpSettings = HTTP
    source: VersionSource | None = None
    limiter: Callable[[], Limiter] | None = None
    queue_wait_s: float = 0.05
    warm: bool = True
    tls: bool = False
    """On both sides of the proxy."""


class Ring:
    """Keys that a test can change."""

    def __init__(self, *keys: StoredKey) -> None:
        self.ring = KeyRing(keys)

    def without(self, key_id: str) -> None:
        self.ring = KeyRing(key for key in self.ring.values() if key.key_id != key_id)


class Source:
    """A fleet that a test can change."""

    def __init__(self) -> None:
        self.base = Base(("tiny",), "")
        self.fleet = Fleet()
        self.endpoints: dict[str, Endpoint] = {}
        self.suspected: list[str] = []
        self._told: list[Callable[[Fleet], None]] = []

    def set(self, *replicas: Replica) -> None:
        self.fleet = Fleet(replicas)
        for told in self._told:
            told(self.fleet)

    def endpoint(self, name: str) -> Endpoint | None:
        return self.endpoints.get(name)

    def suspect(self, name: str) -> None:
        self.suspected.append(name)

    def subscribe(self, callback: Callable[[Fleet], None]) -> Callable[[], None]:
        self._told.append(callback)
        return lambda: self._told.remove(callback)


class Here:
    """Everything of one playing of a scenario."""

    proxy: Proxy

    def __init__(self, setting: Setting, authorities: str, *, express: bool) -> None:
        self.express = express
        self.setting = setting
        tls = TlsSettings(replica_ca_file=authorities)
        self.replica_context: ssl.SSLContext | None = None
        self.client_context: ssl.SSLContext | None = None
        if setting.tls:
            server = str(Path(authorities).with_name("server.pem"))
            tls = TlsSettings(replica_ca_file=authorities, certfile=server, keyfile=server)
            self.replica_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.replica_context.load_cert_chain(server)
            self.client_context = ssl.create_default_context(cafile=authorities)
        self.http = msgspec.structs.replace(setting.http, tls=tls)
        self.now = 1000.0
        self.source = Source()
        self.replicas: dict[str, ScriptedReplica] = {}
        self.declared: dict[str, int] = {}
        self.seen: list[bytes] = []
        self.used: list[str] = []
        self.lines: list[dict[str, object]] = []
        self.today = datetime(2026, 1, 1, tzinfo=UTC)
        self._clients: list[Client] = []

    async def begin(self) -> None:
        setting, source = self.setting, self.source
        made = []
        for name, adapters in zip("abcdef", setting.replicas, strict=False):
            self.replicas[name] = ScriptedReplica(says(whole()))
            source.endpoints[name] = await self.replicas[name].listen(
                name, setting.engine, self.replica_context
            )
            made.append(
                Replica(name, adapters=adapters, slots=4, max_num_seqs=4, max_lora_rank=8)
                if setting.engine == "mural"
                else Replica(name, adapters=adapters, reports=False)
            )
        self._authorities = {
            name: endpoint.authority.encode() for name, endpoint in source.endpoints.items()
        }
        source.set(*made)
        acme = Principal(tenant="acme", key_id=ACME, weight=2.0, limits=setting.limits)
        expiring = replace(acme, key_id="acmeexpires")
        globex = Principal(tenant="globex", key_id=GLOBEX)
        hashed = hash_secret(SECRET)
        self.keys = Ring(
            StoredKey(ACME, hashed, acme),
            StoredKey("acmeexpires", hashed, expiring, self.today + timedelta(days=1)),
            StoredKey(GLOBEX, hashed, globex),
        )
        self.queue: FairQueue[Attempt] = FairQueue(clock=self.clock)
        self.metrics = RouterMetrics(clock=self.clock)
        self.limiter: Limiter = (setting.limiter or (lambda: LocalLimiter(self.clock)))()
        self.breakers = Breakers(BreakerSettings(failures=2), draw=lambda: 0.5)
        self.versions = Versions(setting.source, clock=self.clock, draw=lambda: 0.0)
        self.log = AccessLog(flush_s=60, write=self._write)
        self.dispatch = Dispatch(
            source,
            self.breakers,
            self.metrics,
            policy=PlacementPolicy(),
            clock=self.clock,
            freed=self.queue.pump,
            declared=lambda name: self.declared.get(name),
        )
        self.budget = RetryBudget(RetrySettings())
        self.routing = FleetRouting(
            auth=Authenticator(
                setting.auth,  # type: ignore[arg-type] # one of two texts
                admin_keys=["the-admin-key"],
                tenants=self.keys,
                clock=lambda: self.today,
            ),
            versions=self.versions,
            limiter=self.limiter,
            queue=self.queue,
            dispatch=self.dispatch,
            budget=self.budget,
            metrics=self.metrics,
            log=self.log,
            tracing=None,
            options=RoutingOptions(
                queue_wait_s=setting.queue_wait_s, router_token="token-1", vllm_api_key="pod-1"
            ),
            clock=self.clock,
        )
        for name, word in (("finish", "whole"), ("unfold", "unfolded"), ("refuse", "refused")):
            setattr(self.routing, name, self._noting(word, getattr(self.routing, name)))
        if not self.express:
            self.routing.express = None
        self.proxy = await start(self.http, self.routing, version="1")
        if setting.warm:
            await self.ask(key=ADMIN if setting.auth == "keys" else None)
            self.used.clear()

    def clock(self) -> float:
        return self.now

    def _noting(self, word: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*arguments: object) -> object:
            self.used.append(word)
            return call(*arguments)

        return noted

    def _write(self, data: bytes) -> None:
        self.lines += [json.loads(line) for line in data.splitlines()]

    @property
    def server(self) -> Server:
        found = vars(self.proxy)["_server"]
        assert isinstance(found, Server)
        return found

    async def client(self) -> Client:
        streams = await asyncio.open_connection(
            "127.0.0.1", self.proxy.port, limit=1 << 22, ssl=self.client_context
        )
        self._clients.append(Client(self.seen, *streams))
        return self._clients[-1]

    def send_clients_away(self) -> None:
        """All of them leave, and are forgotten."""
        for client in self._clients:
            client.leave()
        self._clients.clear()

    async def ask(self, model: str = "acme:v1", *fields: str, **members: object) -> bytes:
        """One request on a connection of its own."""
        client = await self.client()
        client.send(request(model, *fields, **members))  # type: ignore[arg-type] # members of any type
        return await client.answer()

    def plays(self, *scripts: Script, replica: str = "a") -> None:
        self.replicas[replica].next += scripts

    def replica(self, name: str, **changes: object) -> None:
        """Change what one of them says."""
        self.source.set(
            *(
                replace(each, report=each.report + 1, **changes) if each.name == name else each  # type: ignore[arg-type] # fields by name
                for each in self.source.fleet.replicas
            )
        )

    async def until(self, so: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not so():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)

    async def has_had(self, requests: int) -> None:
        await self.until(lambda: self.proxy.state().requests_total == requests)

    async def replica_has_had(self, name: str, requests: int) -> None:
        await self.until(lambda: len(self.replicas[name].requests) == requests)

    async def at_rest(self) -> None:
        await self.until(lambda: self.proxy.state().requests == 0)

    async def end(self) -> dict[str, object]:
        """Everything that can be observed, once nothing is in flight."""
        await self.at_rest()
        state = dataclasses.asdict(self.proxy.state())
        # When the other side's end of a connection is seen is up to the machine.
        del state["connections"], state["idle_replica_connections"]
        assert (state["requests"], state["buffered_bytes"]) == (0, 0)
        for name in self.replicas:
            assert self.dispatch.ledger.in_flight(name) == 0
        self.queue.check_integrity()
        assert self.metrics.express == Counter(self.used)
        await self.log.close()
        observed = {
            "client": [self._plain(data) for data in self.seen],
            "replicas": {
                name: [self._plain(received.raw) for received in each.requests]
                for name, each in self.replicas.items()
            },
            "state": state,
            "log": [_without_times(line) for line in self.lines],
            "metrics": counts(self.metrics.exposition().decode()),
            "limits": self.limiter.snapshot(),
            "breakers": (self.breakers.states(self.now), self.breakers.troubled),
            "budget": round(self.budget._balance, 6),
            "suspected": self.source.suspected,
            "total": sum(self.dispatch.ledger.loads.by_name.values()),
        }
        await self.close()
        return observed

    async def close(self) -> None:
        await self.proxy.close()
        for client in self._clients:
            client.leave()
        for each in self.replicas.values():
            each.close()

    def _plain(self, data: bytes) -> bytes:
        for name, authority in self._authorities.items():
            data = data.replace(authority, name.encode())
        return re.sub(rb"req-[0-9a-f]{32}", b"req", data)


def _without_times(line: dict[str, object]) -> dict[str, object]:
    times = ("at", "first_byte_s", "total_s", "queued_s")
    alike = {name: name in times or value for name, value in line.items()}
    if str(alike["request_id"]).startswith("req-"):
        alike["request_id"] = "req"
    return alike


def counts(exposition: str) -> list[str]:
    return [
        line
        for line in exposition.splitlines()
        if not re.match(r"\w+_seconds(_bucket|_sum|_total|)\b|mural_router_express_total\b", line)
    ]
