"""What vLLM's exposition text tells of a pod, of both metric families of adapters.

``vllm:lora_requests_info`` names what runs or waits: activity, not residency. The proposed
``vllm:lora_adapter_loaded`` names what is resident; where a pod has it, it reports its adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mural_router.fleet.report import exact_name
from mural_router.placement import Residency
from mural_server.protocol.caution import MAX_ADAPTERS, count, rate, ratio

__all__ = ["PodMetrics", "read_metrics"]

MAX_LABEL_CHARS = 1 << 18

# The text is 100 kB and more, nearly all of it histograms: only lines of use are looked into.
_SAMPLE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|gpu_cache_usage_perc"
    rb"|generation_tokens_total|lora_requests_info|lora_adapter_loaded|max_gpu_lora_adapters"
    rb"|num_gpu_loaded_lora_adapters)(?:\{([^\n]*)\})? +([^ \n]+)",
    re.MULTILINE,
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(slots=True)
class PodMetrics:
    """One reading. ``generated`` counts tokens since the pod's start."""

    model_name: str = ""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generated: float = 0.0
    slots: int = 0
    reports: bool = False
    """Whether ``adapters`` is all that is resident; else it is what runs or waits just now."""
    adapters: dict[str, Residency] = field(default_factory=dict)
    """By exact name."""
    dropped: int = 0


def read_metrics(text: bytes) -> PodMetrics:
    """Read what is of use. What is malformed is passed over; numbers are made sane."""
    found = PodMetrics()
    newest, activity = float("-inf"), b""
    for sample in _SAMPLE.finditer(text):
        name, labels = sample[1], sample[2] or b""
        value = _number(sample[3])
        match name:
            case b"lora_requests_info":
                # Series of earlier moments stay there: the largest time is now.
                if value > newest:
                    newest, activity = value, labels
            case b"lora_adapter_loaded":
                found.reports = True
                if value > 0:
                    _add_loaded(found, _labels(labels))
            case b"num_gpu_loaded_lora_adapters":
                found.reports = True
            case b"max_gpu_lora_adapters":
                found.slots = count(int(rate(value)))
            case _:
                _add_load(found, name, labels, value)
    if activity:
        _add_activity(found, _labels(activity))
    return found


def _add_load(found: PodMetrics, name: bytes, labels: bytes, value: float) -> None:
    """Engines of one pod (data parallel) have a series each: their sums, and the fullest cache."""
    match name:
        case b"num_requests_running":
            found.running = count(found.running + int(rate(value)))
            found.model_name = found.model_name or _labels(labels).get("model_name", "")
        case b"num_requests_waiting":
            found.waiting = count(found.waiting + int(rate(value)))
        case b"generation_tokens_total":
            found.generated += rate(value)
        case _:
            found.kv_usage = max(found.kv_usage, ratio(value))


def _add_activity(found: PodMetrics, labels: Mapping[str, str]) -> None:
    if labels.get("max_lora", "").isdecimal():
        found.slots = found.slots or count(int(labels["max_lora"][:18]))
    if found.reports:
        return
    for name in _names(labels.get("running_lora_adapters", "")):
        _keep(found, name, Residency(level="slot"))
    for name in _names(labels.get("waiting_lora_adapters", "")):
        exact = exact_name(name)
        if exact not in found.adapters:
            _keep(found, name, Residency(level="disk", loading=True))


def _add_loaded(found: PodMetrics, labels: Mapping[str, str]) -> None:
    rank = labels.get("rank", "")
    _keep(
        found,
        labels.get("adapter_name", ""),
        Residency(
            level="slot" if labels.get("level") == "gpu" else "host",
            pinned=labels.get("pinned", "").lower() in ("true", "1"),
            rank=count(int(rank[:9])) if rank.isdecimal() else 0,
        ),
    )


def _keep(found: PodMetrics, name: str, residency: Residency) -> None:
    exact = exact_name(name)
    if exact is None or (len(found.adapters) >= MAX_ADAPTERS and exact not in found.adapters):
        found.dropped += 1
        return
    known = found.adapters.get(exact)
    # A name may be told once a level: the better one counts.
    if known is None or known.level != "slot":
        found.adapters[exact] = residency


def _names(text: str) -> Iterator[str]:
    return (name for part in text.split(",") if (name := part.strip()))


def _labels(text: bytes) -> dict[str, str]:
    decoded = text[:MAX_LABEL_CHARS].decode("utf-8", "replace")
    return {name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(decoded)}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
