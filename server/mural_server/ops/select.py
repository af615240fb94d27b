"""Which operators this machine gets: decided once at start, with the reason for the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from mural_server.ops.base import Ops
from mural_server.ops.packed import PackedOps
from mural_server.ops.packed_linear import fastest_form
from mural_server.ops.reference import ReferenceOps

BACKENDS = ("reference", "packed")


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
        None: _packed if place.type == "cpu" else _reference,
        "packed": _packed,
        "reference": _reference,
    }
    if wanted not in choose:
        raise OpsUnavailable(
            f"there is no operator backend {wanted!r}; choose one of {', '.join(BACKENDS)}"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise OpsUnavailable(f"no operator backend computes in {dtype}; choose bfloat16 or float32")
    return choose[wanted](dtype, place)


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
