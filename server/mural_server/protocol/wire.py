"""What goes over the control API: JSON, one struct a message.

Fields are only ever added. A reader ignores those that it does not know.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "AdapterResidency",
    "AdapterStatus",
    "Base",
    "DeclaredAnswer",
    "DeclaredRequest",
    "Delta",
    "DrainAnswer",
    "Freed",
    "FreedAnswer",
    "Heartbeat",
    "Limits",
    "Load",
    "PrefixStatistics",
    "ResidentRequest",
    "Snapshot",
    "StateEvent",
    "StateGap",
    "apply",
]

AdapterResidency = Literal["disk", "host", "slot"]


class StateGap(Exception):
    """An event does not follow on the state at hand: ask for a snapshot."""


class Base(msgspec.Struct, kw_only=True, frozen=True):
    """What is served."""

    model_names: tuple[str, ...]
    """The base's names, the main one first."""
    spec_hash: str
    """sha256 of the canonical `BaseSpec`: equal for replicas that take the same adapters."""


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """Fixed for the life of a process."""

    slots: int
    """Distinct adapters in one step; 0: adapters are off."""
    max_cpu_loras: int
    host_bytes: int
    """Host memory for adapters; 0: unknown."""
    max_lora_rank: int
    max_num_seqs: int
    max_model_len: int


class Load(msgspec.Struct, kw_only=True, frozen=True):
    """How busy the server is."""

    running: int = 0
    waiting: int = 0
    paused: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    tokens_per_s: float = 0.0
    """Generated, over the last seconds."""


class PrefixStatistics(msgspec.Struct, kw_only=True, frozen=True):
    """Prompt tokens looked up in the prefix cache and found there, since the start."""

    queries: int = 0
    hits: int = 0


class AdapterStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One known name."""

    name: str
    digest: str
    level: AdapterResidency
    loading: bool = False
    pinned: bool = False
    rank: int = 0
    bytes: int = 0
    requests: int = 0
    """Sequences that run or wait."""
    load: float = 0.0
    """Generated tokens per second, over a window of a minute that forgets."""


class Snapshot(msgspec.Struct, kw_only=True, frozen=True, tag="snapshot", tag_field="event"):
    """The whole state at ``seq``. Another ``boot_id`` means another process."""

    boot_id: str
    seq: int
    base: Base
    limits: Limits
    load: Load
    prefix: PrefixStatistics
    accepting: bool
    ready: bool
    awaits_declared: bool = False
    """It is not ready before it is told what it is to hold, were it nothing."""
    declared: tuple[str, ...] = ()
    adapters: dict[str, AdapterStatus] = {}
    """By name."""


class Delta(
    msgspec.Struct,
    kw_only=True,
    frozen=True,
    omit_defaults=True,
    tag="delta",
    tag_field="event",
):
    """What changed from ``seq - 1`` to ``seq``; None: nothing."""

    boot_id: str
    seq: int
    load: Load | None = None
    prefix: PrefixStatistics | None = None
    accepting: bool | None = None
    ready: bool | None = None
    awaits_declared: bool | None = None
    declared: tuple[str, ...] | None = None
    changed: tuple[AdapterStatus, ...] = ()
    removed: tuple[str, ...] = ()


class Heartbeat(msgspec.Struct, kw_only=True, frozen=True, tag="heartbeat", tag_field="event"):
    """Nothing changed: ``seq`` is the last one sent."""

    boot_id: str
    seq: int


StateEvent = Snapshot | Delta | Heartbeat


def apply(state: Snapshot | None, event: StateEvent) -> Snapshot:
    """Give the state after an event; raise `StateGap` when it does not follow."""
    if isinstance(event, Snapshot):
        return event
    if state is None or event.boot_id != state.boot_id:
        raise StateGap("the event is of another process")
    if isinstance(event, Heartbeat):
        if event.seq != state.seq:
            raise StateGap(f"at {state.seq}, but the server is at {event.seq}")
        return state
    if event.seq != state.seq + 1:
        raise StateGap(f"at {state.seq}, but the next change is {event.seq}")
    adapters = {**state.adapters, **{status.name: status for status in event.changed}}
    for name in event.removed:
        adapters.pop(name, None)
    return msgspec.structs.replace(
        state,
        seq=event.seq,
        load=state.load if event.load is None else event.load,
        prefix=state.prefix if event.prefix is None else event.prefix,
        accepting=state.accepting if event.accepting is None else event.accepting,
        ready=state.ready if event.ready is None else event.ready,
        awaits_declared=(
            state.awaits_declared if event.awaits_declared is None else event.awaits_declared
        ),
        declared=state.declared if event.declared is None else event.declared,
        adapters=adapters,
    )


class ResidentRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``PUT /mural/v1/resident``; answered with an `AdapterStatus`."""

    name: str
    digest: str | None = None
    """The content that is meant: another one is a conflict (409)."""
    level: AdapterResidency = "host"
    """``disk``: its files are fetched into the disk cache, and what is resident stays as it is."""
    pinned: bool = False
    source: str | None = None
    """The one source that is asked; None: all, in their order."""


class Freed(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes given back, by tier; ``kv_blocks`` counts blocks."""

    slot: int = 0
    host: int = 0
    kv_blocks: int = 0
    disk: int = 0


class FreedAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """``DELETE /mural/v1/resident/{name}``: nothing is freed while another name shares it."""

    name: str
    freed: Freed


class DeclaredRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``PUT /mural/v1/declared``: names that must be resident before the server is ready."""

    names: tuple[str, ...]


class DeclaredAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """Which of the declared names are resident, and which are not yet."""

    resident: tuple[str, ...]
    missing: tuple[str, ...]


class DrainAnswer(msgspec.Struct, kw_only=True, frozen=True):
    """``POST /mural/v1/drain``: no new requests from now on; how many sequences are still open."""

    accepting: bool
    open_sequences: int
