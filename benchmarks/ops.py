"""Milliseconds of each operator over all layers of a SmolLM2-135M step.

Compares the packed operators with the native ones where they were built, with the naive form that
comes to mind first and with the reference. Forms run interleaved, in one process; the figures are
medians. On a busy machine use one thread and ``--cpu-time``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from mural_server.ops import (
    AttentionBatch,
    AttentionSpec,
    KVLayer,
    LoRABatch,
    LoRASegment,
    NativeOps,
    Ops,
    PackedOps,
    PrefillChunk,
    ReferenceOps,
    build_lora_batch,
    segments_of,
)
from mural_server.ops.native.library import available, load
from mural_server.ops.packed_linear import LinearForm

Form = Callable[[], object]
SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=64**-0.5)
BLOCK_SIZE = 16
LINEARS = ((576, (576, 192, 192)), (576, (576,)), (576, (1536, 1536)), (1536, (576,)))
"""In features and the slices of the out features of qkv, o, gate_up and down."""


def with_native(
    forms: dict[str, Form], dtype: torch.dtype, make: Callable[[Ops], Form]
) -> dict[str, Form]:
    """Add the native operators' form where there is a library for this CPU."""
    return {**forms, "native": make(NativeOps(dtype, load()))} if available() else forms


def linear_forms(rows: int, layers: int, dtype: torch.dtype) -> dict[str, Form]:
    weights = [
        torch.randn(sum(outs), inner).to(dtype) for _ in range(layers) for inner, outs in LINEARS
    ]
    inputs = {inner: torch.randn(rows, inner).to(dtype) for inner, _ in LINEARS}

    def through(ops: Ops) -> Form:
        packed = [ops.pack_linear(weight) for weight in weights]
        return lambda: [ops.linear(inputs[weight.in_features], weight) for weight in packed]

    forms = {
        "packed": through(PackedOps(dtype)),
        "naive": lambda: [F.linear(inputs[weight.shape[1]], weight) for weight in weights],
        "reference": through(ReferenceOps()),
    }
    return with_native(forms, dtype, through)


def form_forms(rows: int, layers: int, dtype: torch.dtype) -> dict[str, Form]:
    """Float16 weights in float32 products against oneDNN's; each in the activations it goes with.

    The norms and the gate between the products are part of it: they run in that dtype too.
    """

    def through(form: LinearForm) -> Form:
        ops = PackedOps(dtype, form)
        wide = ops.activation_dtype(dtype)
        packed = [
            [
                ops.pack_linear(torch.randn(sum(outs), inner).div(24).to(dtype))
                for inner, outs in LINEARS
            ]
            for _ in range(layers)
        ]
        hidden, norm = torch.randn(rows, 576).to(wide), torch.ones(576, dtype=wide)

        def step() -> None:
            for qkv, output, gate_up, down in packed:
                mixed = ops.linear(ops.rms_norm(hidden, norm, 1e-5), qkv)[:, :576]
                residual = ops.linear(mixed, output, hidden)
                both = ops.linear(ops.rms_norm(residual, norm, 1e-5), gate_up)
                ops.linear(ops.gated(both, "silu"), down, residual)

        return step

    return {"packed": through("half"), "naive": through("prepacked"), "reference": through("plain")}


def small_forms(rows: int, layers: int, dtype: torch.dtype) -> dict[str, Form]:
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + rows)
    shape = (rows // BLOCK_SIZE + 2, 3, BLOCK_SIZE, 64)
    kv = KVLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))

    def each(ops: Ops) -> Form:
        wide = ops.activation_dtype(dtype)
        hidden, weight = torch.randn(rows, 576).to(wide), torch.ones(576, dtype=wide)
        qkv, gate_up = torch.randn(rows, 15, 64).to(wide), torch.randn(rows, 3072).to(wide)
        cos, sin = torch.randn(2, rows, 64).to(wide)

        def step() -> None:
            for _ in range(layers):
                ops.rms_norm(hidden, weight, 1e-5)
                ops.rotary(qkv[:, :12], cos, sin)
                ops.write_kv(kv, qkv[:, 9:12], qkv[:, 12:], slots)
                ops.rms_norm(hidden, weight, 1e-5)
                ops.gated(gate_up, "silu")

        return step

    forms = {
        "packed": each(PackedOps(dtype)),
        "naive": each(PackedOps(dtype, "prepacked")),
        "reference": each(ReferenceOps()),
    }
    return with_native(forms, dtype, each)


def attention_forms(
    batch: AttentionBatch, tables: torch.Tensor, layers: int, dtype: torch.dtype
) -> dict[str, Form]:
    """``tables`` [sequences, blocks]: what the naive form gathers, all lengths being equal."""
    shape = (int(tables.max()) + 1, 3, BLOCK_SIZE, 64)
    pools = [
        KVLayer(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(layers)
    ]
    queries = torch.randn(batch.num_rows, 9, 64).to(dtype)
    count = batch.num_rows // tables.shape[0]
    length = tables.shape[1] * BLOCK_SIZE
    mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)

    def naive(kv: KVLayer) -> torch.Tensor:
        keys, values = (
            pool[tables].permute(0, 2, 1, 3, 4).reshape(len(tables), 3, length, 64) for pool in kv
        )
        folded = queries.view(len(tables), count, 9, 64).transpose(1, 2)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, enable_gqa=True)

    def through(ops: Ops) -> Form:
        return lambda: [ops.attention(queries, kv, batch, SPEC) for kv in pools]

    forms = {
        "packed": through(PackedOps(dtype)),
        "naive": lambda: [naive(kv) for kv in pools],
        "reference": through(ReferenceOps()),
    }
    return with_native(forms, dtype, through)


def decode_forms(rows: int, layers: int, dtype: torch.dtype) -> dict[str, Form]:
    length = 208
    tables = (torch.randperm(rows * length // BLOCK_SIZE) + 1).view(rows, -1)
    lengths = torch.full((rows,), length)
    batch = AttentionBatch(torch.zeros(rows, dtype=torch.int64), rows, tables, lengths, ())
    return attention_forms(batch, tables, layers, dtype)


def prefill_forms(rows: int, layers: int, dtype: torch.dtype) -> dict[str, Form]:
    table = torch.randperm(-(-rows // BLOCK_SIZE)) + 1
    none = torch.zeros(0, dtype=torch.int64)
    slots = torch.zeros(rows, dtype=torch.int64)
    batch = AttentionBatch(slots, 0, none.view(0, 0), none, (PrefillChunk(0, rows, 0, table),))
    return attention_forms(batch, table.unsqueeze(0), layers, dtype)


def lora_forms(
    segments: list[LoRASegment], layers: int, dtype: torch.dtype, rank: int = 16, slots: int = 8
) -> dict[str, Form]:
    rank_rows = [(rank * slot, rank * (slot + 1)) for slot in range(slots)]
    batch = build_lora_batch(segments, rank_rows)
    grouped = build_lora_batch(segments, rank_rows, min_buckets=slots + 1)
    rows = batch.row_slots.shape[0]

    def each(add: Callable[..., None], batch: LoRABatch, wide: torch.dtype) -> Form:
        inputs = {inner: torch.randn(rows, inner).to(wide) for inner, _ in LINEARS}
        outputs: dict[tuple[int, ...], torch.Tensor] = {
            outs: torch.randn(rows, sum(outs)).to(wide) for _, outs in LINEARS
        }
        stacks = [
            (
                torch.randn(len(outs), rank * slots, inner).to(wide),
                [torch.randn(rank * slots, out).to(wide) for out in outs],
            )
            for _ in range(layers)
            for inner, outs in LINEARS
        ]

        def step() -> None:
            for a, b in stacks:
                outs = tuple(expand.shape[1] for expand in b)
                add(outputs[outs], inputs[a.shape[2]], a, b, batch)

        return step

    served = PackedOps(dtype)
    wide = served.activation_dtype(dtype)
    forms = {
        "packed": each(served.lora, batch, wide),
        "naive": each(loop_over_adapters, batch, dtype),
        "reference": each(ReferenceOps().lora, batch, dtype),
    }
    if available():
        native = NativeOps(dtype, load())
        forms["native"] = each(native.lora, batch, native.activation_dtype(dtype))
    if batch.buckets:
        forms["groups"] = each(served.lora, grouped, wide)
    if wide != dtype:
        forms["narrow groups"] = each(PackedOps(dtype, "prepacked").lora, grouped, dtype)
    return forms


def loop_over_adapters(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: list[torch.Tensor], batch: LoRABatch
) -> None:
    for slot in sorted(set(batch.row_slots.tolist())):
        rows = (batch.row_slots == slot).nonzero().flatten()
        lo, hi = batch.rank_rows[slot]
        deltas = [x[rows] @ a[i, lo:hi].t() @ expand[lo:hi] for i, expand in enumerate(b)]
        y.index_add_(0, rows, torch.cat(deltas, dim=1))


def race(forms: dict[str, Form], seconds: float, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds of each form, run in turns for ``seconds`` and at least 3 rounds."""
    for form in forms.values():
        form()
    samples: dict[str, list[float]] = {name: [] for name in forms}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples["packed"]) < 3:
        for name, form in forms.items():
            start = clock()
            form()
            samples[name].append(1e3 * (clock() - start))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def cases(layers: int, dtype: torch.dtype) -> dict[str, Callable[[], dict[str, Form]]]:
    chunks = [LoRASegment(128 * i, 128 * (i + 1), i) for i in range(4)]
    made: dict[str, Callable[[], dict[str, Form]]] = {}
    for rows in (1, 16, 128):
        made[f"linear        M={rows}"] = partial(linear_forms, rows, layers, dtype)
        made[f"linear forms  M={rows}"] = partial(form_forms, rows, layers, dtype)
        made[f"small         M={rows}"] = partial(small_forms, rows, layers, dtype)
    for rows in (1, 16):
        made[f"decode        M={rows}"] = partial(decode_forms, rows, layers, dtype)
        made[f"lora 1        M={rows}"] = partial(
            lora_forms, segments_of([3] * rows), layers, dtype
        )
    for slots in (2, 4, 8):
        mixed = segments_of([row % slots for row in range(16)])
        made[f"lora {slots}        M=16"] = partial(lora_forms, mixed, layers, dtype)
    made["lora 4 chunks M=512"] = partial(lora_forms, chunks, layers, dtype)
    for rows in (128, 512):
        made[f"prefill       M={rows}"] = partial(prefill_forms, rows, layers, dtype)
    return made


DEFINITIONS = """\
Columns: the packed operators; the native ones; the naive form; the reference. In "linear forms"
packed, naive and reference are the three layouts of a weight: float16 in float32 products,
oneDNN's own, plain. In "small" naive has the packed operators on activations of the weights'
dtype. In "lora" "groups" has one product over all adapters' rank rows, and "narrow" activations
and stacks of the weights' dtype.
"""
SHOWN = ("packed", "native", "naive", "reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=3.0, help="per line (default 3)")
    parser.add_argument("--only", default="", help="run the lines that begin with this")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="this thread's CPU time in place of wall time; right with --threads 1 only",
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print(DEFINITIONS)
    print(f"{'':22}{'packed ms':>10}{'native':>10}{'naive':>10}{'reference':>11}   packed / naive")
    with torch.inference_mode():
        for name, make in cases(options.layers, getattr(torch, options.dtype)).items():
            if not name.startswith(options.only):
                continue
            took = race(make(), options.seconds, clock)
            naive = f"{took['naive']:10.2f}" if "naive" in took else f"{'-':>10}"
            ratio = f"{took['packed'] / took['naive']:14.2f}" if "naive" in took else ""
            native = f"{took['native']:10.2f}" if "native" in took else f"{'-':>10}"
            others = "".join(f"  {form} {took[form]:.2f}" for form in took if form not in SHOWN)
            print(
                f"{name:22}{took['packed']:10.2f}{native}{naive}"
                f"{took['reference']:11.2f}{ratio}{others}"
            )


if __name__ == "__main__":
    main()
