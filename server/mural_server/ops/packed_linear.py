"""Three layouts of a linear layer's weight on a CPU, and the measurement that picks one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from mural_server.ops.base import PackedLinear

__all__ = [
    "TRIAL_ROWS",
    "TRIAL_SHAPE",
    "LinearForm",
    "MeasuredForm",
    "fastest_form",
    "multiply",
    "pack",
    "prepacked_form",
    "time_ratio",
]

LinearForm = Literal["plain", "prepacked", "half"]
"""``plain``: `F.linear`. ``prepacked``: oneDNN's own layout. ``half``: the weight in float16, in
FBGEMM's layout; it is widened inside the product, which is computed in float32."""

PREPACK_DTYPES = frozenset({torch.bfloat16, torch.float32})
"""Packed takes 0.7 of F.linear's time at 4 to 16 rows in both, and 1.1 at a single row."""

HALF_RANGE = (2.0**-12, 65504.0)
"""Where a weight's largest number must lie for float16 to lose less of it than bfloat16 did."""

TRIAL_ROWS = (16, 128)
"""A decode step's rows and a prefill chunk's."""

TRIAL_SHAPE = (1024, 576)
TRIALS = 5
CLEARLY_FASTER = 0.9
"""A tie goes to oneDNN, so that the choice is the same at every start."""


class MeasuredForm(NamedTuple):
    form: LinearForm
    ratio: float | None
    """Time of ``half`` over time of ``prepacked``; None where there was nothing to compare."""


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, form: LinearForm, *, exact: bool = False
) -> PackedLinear:
    """Lay out ``weight`` [out, in]; ``exact``, or numbers beyond float16, forgo ``half``."""
    out_features, in_features = weight.shape
    laid_out: torch.Tensor | torch.ScriptObject = weight
    if form == "half" and weight.dtype == torch.bfloat16 and not exact and _fits_half(weight):
        wide_bias = None if bias is None else bias.float()
        laid_out = torch.ops.quantized.linear_prepack_fp16(weight.float(), wide_bias)
    elif weight.dtype in PREPACK_DTYPES and (
        # Whoever asks for ``half`` need not know that the CPU packs what that cannot hold.
        form == "prepacked" or (form == "half" and _can_prepack(weight.dtype))
    ):
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return PackedLinear(laid_out, bias, in_features, out_features)


def multiply(
    x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` [rows, in] → ``x Wᵀ (+ bias) (+ residual)`` [rows, out] in ``x``'s dtype."""
    weight = packed.weight
    y: torch.Tensor
    if not isinstance(weight, torch.Tensor):
        y = torch.ops.quantized.linear_dynamic_fp16(x.float(), weight)
    elif not weight.is_mkldnn:
        y = F.linear(x.to(weight.dtype), weight, packed.bias)
    elif residual is None or residual.dtype != weight.dtype:
        narrow = x.to(weight.dtype)
        y = torch.ops.mkldnn._linear_pointwise(narrow, weight, packed.bias, "none", [], "")
    else:
        # The residual is added inside the product.
        y = torch.ops.mkldnn._linear_pointwise.binary(
            x.to(weight.dtype), residual, weight, packed.bias, "add"
        )
        residual = None
    return y.to(x.dtype) if residual is None else y.add_(residual).to(x.dtype)


@cache
def fastest_form(dtype: torch.dtype) -> MeasuredForm:
    """What this machine multiplies fastest, by a race of a few milliseconds, once a process.

    A CPU without units for bfloat16 (AMX, or two dot-product ports) multiplies it no faster than
    float32, and oneDNN's large products in it are then slower than float32's.
    """
    if prepacked_form(dtype) == "plain":
        return MeasuredForm("plain", None)
    if dtype != torch.bfloat16 or not _can_halve():
        return MeasuredForm("prepacked", None)
    ratio = sum(_half_over_prepacked(rows) for rows in TRIAL_ROWS) / len(TRIAL_ROWS)
    return MeasuredForm("half" if ratio < CLEARLY_FASTER else "prepacked", ratio)


def prepacked_form(dtype: torch.dtype) -> LinearForm:
    """``prepacked`` where oneDNN's operators are what they were, else ``plain``."""
    return "prepacked" if dtype in PREPACK_DTYPES and _can_prepack(dtype) else "plain"


def time_ratio(
    first: Callable[[], object], second: Callable[[], object], trials: int = TRIALS
) -> float:
    """Time of the ``first`` call over the ``second``'s: the best of ``trials``, run in turns."""
    times = [(_seconds(first), _seconds(second)) for _ in range(trials + 1)][1:]
    return min(time for time, _ in times) / min(time for _, time in times)


def _half_over_prepacked(rows: int) -> float:
    weight = torch.linspace(-1, 1, TRIAL_SHAPE[0] * TRIAL_SHAPE[1]).view(TRIAL_SHAPE).bfloat16()
    x = torch.linspace(-1, 1, rows * TRIAL_SHAPE[1]).view(rows, -1)
    half, prepacked = pack(weight, None, "half"), pack(weight, None, "prepacked")
    narrow = x.bfloat16()
    return time_ratio(lambda: multiply(x, half), lambda: multiply(narrow, prepacked))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _fits_half(weight: torch.Tensor) -> bool:
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    return HALF_RANGE[0] <= largest <= HALF_RANGE[1]


@cache
def _can_prepack(dtype: torch.dtype) -> bool:
    """Try oneDNN's private operators on a small product: they may go or change in any release."""
    weight = torch.linspace(-1, 1, 32 * 16).view(32, 16).to(dtype)
    x = torch.linspace(1, -1, 4 * 16).view(4, 16).to(dtype)
    other = torch.ones(4, 32, dtype=dtype)
    try:
        packed = pack(weight, None, "prepacked")
        plain, added = multiply(x, packed), multiply(x, packed, other)
    except (AttributeError, RuntimeError, TypeError):
        return False
    expected = F.linear(x.float(), weight.float())
    return torch.allclose(plain.float(), expected, rtol=2e-2, atol=2e-2) and torch.allclose(
        added.float(), expected + 1, rtol=2e-2, atol=2e-2
    )


def _can_halve() -> bool:
    """The same for FBGEMM's, which are not built for every CPU."""
    weight = torch.linspace(-1, 1, 32 * 16).view(32, 16).bfloat16()
    x, bias = torch.linspace(1, -1, 4 * 16).view(4, 16), torch.ones(32)
    try:
        y = multiply(x, pack(weight, bias, "half"))
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(y, F.linear(x, weight.float(), bias), rtol=1e-3, atol=1e-3)
