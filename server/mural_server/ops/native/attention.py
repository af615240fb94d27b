"""Paged attention by the compiled kernel; a step's batch is laid out for it once."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer
from mural_server.ops.native.library import NativeLibrary

__all__ = ["DTYPE_CODES", "NativeAttention"]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``DType`` of simd.h."""


class _Shape(ctypes.Structure):
    """``MuralAttentionShape`` of attention.h."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("sliding_window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("logit_softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class _Chunk(ctypes.Structure):
    """``MuralPrefillChunk``."""

    _fields_ = (
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("context", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    """``MuralAttentionStep``."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_decodes", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("table_step", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("num_chunks", ctypes.c_int64),
        ("chunks", ctypes.POINTER(_Chunk)),
    )


class _Plan:
    """A batch as the kernel wants it, and the tensors whose memory it points into."""

    def __init__(self, batch: AttentionBatch) -> None:
        tables = batch.decode_tables.contiguous()
        lengths = batch.decode_lengths.contiguous()
        blocks = [chunk.blocks.contiguous() for chunk in batch.prefills]
        chunks = (_Chunk * len(blocks))(
            *(
                _Chunk(chunk.start, chunk.end, chunk.context, own.data_ptr())
                for chunk, own in zip(batch.prefills, blocks, strict=True)
            )
        )
        self._kept = (tables, lengths, blocks)
        self.step = _Step(
            batch.num_rows,
            batch.num_decodes,
            tables.data_ptr(),
            tables.shape[1] if tables.dim() == 2 else 0,
            lengths.data_ptr(),
            len(blocks),
            chunks,
        )
        self.address = ctypes.addressof(self.step)


class NativeAttention:
    """`Ops.attention`."""

    def __init__(self, library: NativeLibrary) -> None:
        pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._kernel = library.kernel(
            "mural_attention", (pointer, pointer, pointer, size, pointer, pointer, pointer, flag)
        )

    def attend(
        self, queries: torch.Tensor, kv: KVLayer, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """``queries`` [rows, heads, head_dim] → [rows, heads * head_dim] in their dtype."""
        wide = _dense_heads(queries if queries.dtype == torch.float32 else queries.float())
        keys, values = kv
        _, shape = _shape(spec, keys.shape[2], keys.dtype)
        plan = batch.plans.get("native")
        if not isinstance(plan, _Plan):
            plan = batch.plans["native"] = _Plan(batch)
        output = torch.empty(wide.shape[0], spec.num_heads * spec.head_dim)
        self._kernel(
            shape,
            plan.address,
            wide.data_ptr(),
            wide.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output if queries.dtype == torch.float32 else output.to(queries.dtype)


@cache
def _shape(spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> tuple[_Shape, int]:
    """The struct, which is kept alive here, and its address."""
    shape = _Shape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        block_size,
        spec.sliding_window or 0,
        spec.scale,
        spec.logit_softcap or 0.0,
        DTYPE_CODES[dtype],
    )
    return shape, ctypes.addressof(shape)


def _dense_heads(queries: torch.Tensor) -> torch.Tensor:
    """Rows may be apart, as slices of a fused projection are; a row's numbers may not."""
    if queries.stride(2) == 1 and queries.stride(1) == queries.shape[2]:
        return queries
    return queries.contiguous()
