"""Which operators this machine gets: decided once at start, with the reason for the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch

from mural_server.ops.base import Ops
from mural_server.ops.native.library import NativeLibrary, NativeUnavailable, load
from mural_server.ops.native.ops import NativeOps
from mural_server.ops.packed import PackedOps
from mural_server.ops.packed_linear import (
    TRIAL_ROWS,
    TRIAL_SHAPE,
    LinearForm,
    fastest_form,
    time_ratio,
)
from mural_server.ops.reference import ReferenceOps

BACKENDS = ("reference", "packed", "native")

NATIVE_TRIALS = 20
"""The winner is mostly clear, but a busy neighbour at start must not hide it."""

NO_SLOWER = 1.0
"""What of packed's time the native products may take at most: the other operators gain more."""


class OpsUnavailable(ValueError):
    """The wanted backend does not exist or cannot run here; says what to do instead."""


class SelectedOps(NamedTuple):
    ops: Ops
    reason: str
    """One sentence without a full stop."""


def select_ops(
    dtype: torch.dtype, device: torch.device | str = "cpu", wanted: str | None = None
) -> SelectedOps:
    """The fastest operators for ``dtype`` on ``device``, or the ones that are ``wanted``.

    Raises OpsUnavailable with a sentence for the operator of the server.
    """
    place = torch.device(device)
    choose: dict[str | None, Callable[[torch.dtype, torch.device], SelectedOps]] = {
        None: _fastest if place.type == "cpu" else _reference,
        "packed": _packed,
        "native": _native,
        "reference": _reference,
    }
    if wanted not in choose:
        raise OpsUnavailable(
            f"there is no operator backend {wanted!r}; choose one of {', '.join(BACKENDS)}"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise OpsUnavailable(f"no operator backend computes in {dtype}; choose bfloat16 or float32")
    return choose[wanted](dtype, place)


def _fastest(dtype: torch.dtype, device: torch.device) -> SelectedOps:
    """Native where there is a library and its products win a short race, else packed."""
    packed = _packed(dtype, device)
    try:
        library = load()
    except NativeUnavailable as reason:
        return SelectedOps(packed.ops, f"{packed.reason}; {reason}")
    if dtype != torch.bfloat16:
        return _native(dtype, device)
    ratio = _native_over_packed(library, fastest_form(dtype).form)
    if ratio > NO_SLOWER:
        lost = f"native products took {ratio:.2f} of their time here"
        return SelectedOps(packed.ops, f"{packed.reason}; {lost}")
    native = _native(dtype, device)
    return SelectedOps(native.ops, f"{native.reason} (took {ratio:.2f} of packed's time here)")


@cache
def _native_over_packed(library: NativeLibrary, form: LinearForm) -> float:
    """Mean ratio of the products' times, over a decode step's rows and a prefill chunk's."""
    native, packed = NativeOps(torch.bfloat16, library), PackedOps(torch.bfloat16, form)
    weight = torch.linspace(-1, 1, TRIAL_SHAPE[0] * TRIAL_SHAPE[1]).view(TRIAL_SHAPE).bfloat16()
    mine, theirs = native.pack_linear(weight), packed.pack_linear(weight)
    ratios = []
    for rows in TRIAL_ROWS:
        wide = torch.linspace(-1, 1, rows * TRIAL_SHAPE[1]).view(rows, -1)
        x = wide.to(packed.activation_dtype(torch.bfloat16))
        ratios.append(
            time_ratio(
                partial(native.linear, wide, mine),
                partial(packed.linear, x, theirs),
                NATIVE_TRIALS,
            )
        )
    return sum(ratios) / len(ratios)


def _native(dtype: torch.dtype, device: torch.device) -> SelectedOps:
    if device.type != "cpu":
        raise OpsUnavailable(
            f"the native operators run on the CPU only, not on {device}; leave the backend open"
        )
    try:
        library = load()
    except NativeUnavailable as reason:
        raise OpsUnavailable(f"{reason}; or leave the backend open") from reason
    products = "float16" if library.isa == "avx512fp16" else "float32"
    linear = (
        f"{_name(dtype)} weights packed once as float16 for products in {products}"
        if dtype == torch.bfloat16
        else f"weights packed once by oneDNN for {_name(dtype)}"
    )
    return SelectedOps(NativeOps(dtype, library), f"native: {linear} with {library.isa}")


def _packed(dtype: torch.dtype, device: torch.device) -> SelectedOps:
    if device.type != "cpu":
        raise OpsUnavailable(
            f"the packed operators run on the CPU only, not on {device}; leave the backend open"
        )
    form, ratio = fastest_form(dtype)
    linear = {
        "plain": f"F.linear on plain weights for {_name(dtype)}",
        "prepacked": f"weights packed once by oneDNN for {_name(dtype)}",
        "half": f"{_name(dtype)} weights packed once as float16 for products in float32",
    }[form]
    raced = "" if ratio is None else f" (float16 took {ratio:.2f} of bfloat16's time here)"
    return SelectedOps(PackedOps(dtype, form), f"packed: {linear} on the CPU{raced}")


def _reference(dtype: torch.dtype, device: torch.device) -> SelectedOps:
    return SelectedOps(ReferenceOps(), f"reference: plain PyTorch for {_name(dtype)} on {device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
