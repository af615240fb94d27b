from __future__ import annotations

import pytest
import torch

from mural_server.ops import OpsUnavailable, PackedOps, ReferenceOps, packed, select_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_gets_the_packed_operators_and_a_reason(dtype: torch.dtype) -> None:
    ops, reason = select_ops(dtype)
    assert isinstance(ops, PackedOps)
    assert reason.startswith("packed: ")
    assert str(dtype).removeprefix("torch.") in reason


def test_the_reason_says_when_weights_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_can_prepack", lambda dtype: False)
    assert "F.linear on plain weights" in select_ops(torch.bfloat16).reason


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
        (torch.int8, "cpu", None, "no operator backend computes in torch.int8"),
    ],
)
def test_what_cannot_run_is_refused_with_a_sentence(
    dtype: torch.dtype, device: str, wanted: str | None, reason: str
) -> None:
    with pytest.raises(OpsUnavailable, match=reason):
        select_ops(dtype, device, wanted)
