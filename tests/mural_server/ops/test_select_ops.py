from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mural_server.ops import (
    NativeOps,
    OpsUnavailable,
    PackedOps,
    ReferenceOps,
    packed_linear,
    select,
    select_ops,
)
from mural_server.ops.native.library import NativeUnavailable, available, load
from mural_server.ops.packed_linear import fastest_form

native_here = pytest.mark.skipif(not available(), reason="no native operators here")


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""

    def refuse() -> None:
        raise NativeUnavailable("the native operators were not built")

    monkeypatch.setattr(select, "load", refuse)


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_without_a_library_gets_the_packed_operators_and_a_reason(
    dtype: torch.dtype,
) -> None:
    ops, reason = select_ops(dtype)
    assert type(ops) is PackedOps
    assert reason.startswith("packed: ")
    assert reason.endswith("; the native operators were not built")
    assert str(dtype).removeprefix("torch.") in reason


@native_here
@pytest.mark.parametrize(
    ("ratio", "backend", "reason"),
    [
        (0.4, NativeOps, "native: bfloat16 weights packed once as float16 for products in"),
        (0.4, NativeOps, "(took 0.40 of packed's time here)"),
        (1.2, PackedOps, "; native products took 1.20 of their time here"),
    ],
)
def test_native_products_are_taken_unless_they_lose_the_race(
    ratio: float, backend: type[PackedOps], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "_native_over_packed", lambda library, form: ratio)
    selected = select_ops(torch.bfloat16)
    assert type(selected.ops) is backend
    assert reason in selected.reason


@native_here
def test_the_race_gives_the_native_products_share_of_the_packed_ones_time() -> None:
    form = fastest_form(torch.bfloat16).form
    select._native_over_packed.cache_clear()
    assert 0 < select._native_over_packed(load(), form) < 10


@native_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_operators_keep_hidden_states_in_float32(dtype: torch.dtype) -> None:
    ops, reason = select_ops(dtype, wanted="native")
    assert isinstance(ops, NativeOps)
    assert reason.startswith("native: ")
    assert reason.endswith(f" with {available()[0]}")
    assert ops.activation_dtype(dtype) == torch.float32


@pytest.mark.usefixtures("no_native")
def test_native_operators_that_are_asked_for_and_absent_are_refused() -> None:
    with pytest.raises(OpsUnavailable, match="were not built; or leave the backend open"):
        select_ops(torch.bfloat16, wanted="native")


@pytest.fixture
def measured_anew() -> Iterator[None]:
    """Choices are kept for the process."""
    fastest_form.cache_clear()
    yield
    fastest_form.cache_clear()


@pytest.mark.usefixtures("measured_anew", "no_native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_onednns_private_operators_weights_stay_plain(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_can_prepack", lambda dtype: False)
    ops, reason = select_ops(dtype)
    assert "F.linear on plain weights" in reason
    assert ops.activation_dtype(dtype) == dtype


@pytest.mark.usefixtures("measured_anew", "no_native")
@pytest.mark.parametrize(
    ("ratio", "activations", "reason"),
    [
        (0.7, torch.float32, "as float16 for products in float32 on the CPU (float16 took 0.70"),
        (0.95, torch.bfloat16, "packed once by oneDNN for bfloat16 on the CPU (float16 took 0.95"),
    ],
)
def test_bfloat16_is_multiplied_in_float32_only_where_that_is_clearly_faster(
    ratio: float, activations: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_can_prepack", lambda dtype: True)
    monkeypatch.setattr(packed_linear, "_can_halve", lambda: True)
    monkeypatch.setattr(packed_linear, "_half_over_prepacked", lambda rows: ratio)
    selected = select_ops(torch.bfloat16)
    assert selected.ops.activation_dtype(torch.bfloat16) == activations
    assert reason in selected.reason


@pytest.mark.usefixtures("measured_anew", "no_native")
def test_without_fbgemm_nothing_is_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "_can_prepack", lambda dtype: True)
    monkeypatch.setattr(packed_linear, "_can_halve", lambda: False)
    selected = select_ops(torch.bfloat16)
    assert selected.reason.startswith(
        "packed: weights packed once by oneDNN for bfloat16 on the CPU; "
    )


def test_the_reference_can_be_asked_for() -> None:
    ops, reason = select_ops(torch.bfloat16, wanted="reference")
    assert isinstance(ops, ReferenceOps)
    assert reason == "reference: plain PyTorch for bfloat16 on cpu"


def test_another_device_gets_the_reference() -> None:
    assert isinstance(select_ops(torch.bfloat16, "cuda").ops, ReferenceOps)


@pytest.mark.parametrize(
    ("dtype", "device", "wanted", "reason"),
    [
        (torch.float32, "cpu", "triton", "no operator backend 'triton'; choose one of reference"),
        (torch.float32, "cuda", "packed", "run on the CPU only, not on cuda"),
        (torch.float32, "cuda", "native", "run on the CPU only, not on cuda"),
        (torch.int8, "cpu", None, "no operator backend computes in torch.int8"),
    ],
)
def test_what_cannot_run_is_refused_with_a_sentence(
    dtype: torch.dtype, device: str, wanted: str | None, reason: str
) -> None:
    with pytest.raises(OpsUnavailable, match=reason):
        select_ops(dtype, device, wanted)
