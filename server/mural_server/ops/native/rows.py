"""Norm, rotation, gate and the writing of keys and values by the compiled kernels.

The kernels take and give float32; what is narrower is widened before and rounded once behind.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from mural_server.ops.base import Activation
from mural_server.ops.batch import KVLayer
from mural_server.ops.native.attention import DTYPE_CODES
from mural_server.ops.native.library import NativeLibrary
from mural_server.ops.native.linear import ACTIVATION_CODES

__all__ = ["NativeRows"]


class _Pool(ctypes.Structure):
    """``MuralPool`` of rows.h."""

    _fields_ = (
        ("kv_heads", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class NativeRows:
    """The operators of `Ops` that take rows one by one, by the same names."""

    def __init__(self, library: NativeLibrary) -> None:
        pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._rms_norm = library.kernel(
            "mural_rms_norm",
            (pointer, size, size, size, size, pointer, ctypes.c_float, pointer, flag),
        )
        self._gated = library.kernel(
            "mural_gated", (pointer, size, size, size, flag, pointer, flag)
        )
        self._rotary = library.kernel(
            "mural_rotary", (pointer, *(size,) * 4, *(pointer,) * 3, flag)
        )
        self._write_kv = library.kernel(
            "mural_write_kv",
            (pointer, pointer, size, pointer, size, pointer, size, pointer, pointer, flag),
        )
        self._rotary_and_write_kv = library.kernel(
            "mural_rotary_and_write_kv",
            (pointer, pointer, size, size, *(pointer,) * 3, size, *(pointer,) * 3, flag),
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = _dense_tail(_wide(x), 2)
        own_weight = _wide(weight)
        size = own_weight.shape[0]
        inner = wide.shape[1] if wide.dim() == 3 else 1
        output = torch.empty(x.shape)
        self._rms_norm(
            wide.data_ptr(),
            output.numel() // (inner * size),
            wide.stride(0) if inner > 1 else size,
            inner,
            size,
            own_weight.data_ptr(),
            eps,
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output if x.dtype == torch.float32 else output.to(x.dtype)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        wide = _dense_tail(_wide(gate_up), 1)
        rows, size = wide.shape[0], wide.shape[1] // 2
        output = torch.empty(rows, size)
        self._gated(
            wide.data_ptr(),
            rows,
            wide.stride(0),
            size,
            ACTIVATION_CODES[activation],
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output if gate_up.dtype == torch.float32 else output.to(gate_up.dtype)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        wide = _dense_tail(_wide(x), 2)
        own_cos, own_sin = _wide(cos).contiguous(), _wide(sin).contiguous()
        output = torch.empty(x.shape)
        self._rotary(
            wide.data_ptr(),
            wide.shape[0],
            wide.stride(0),
            wide.shape[1],
            wide.shape[2],
            own_cos.data_ptr(),
            own_sin.data_ptr(),
            output.data_ptr(),
            torch.get_num_threads(),
        )
        return output if x.dtype == torch.float32 else output.to(x.dtype)

    def write_kv(
        self, kv: KVLayer, keys: torch.Tensor, values: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        own_slots = kv_slots.contiguous()
        wide_keys, wide_values = (_dense_tail(_wide(new), 2) for new in (keys, values))
        self._write_kv(
            _pool_address(kv.keys),
            wide_keys.data_ptr(),
            wide_keys.stride(0),
            wide_values.data_ptr(),
            wide_values.stride(0),
            own_slots.data_ptr(),
            own_slots.shape[0],
            kv.keys.data_ptr(),
            kv.values.data_ptr(),
            torch.get_num_threads(),
        )

    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayer,
        kv_slots: torch.Tensor,
    ) -> torch.Tensor:
        key_pool, value_pool = kv
        wide = _dense_tail(_wide(qkv), 2)
        own_cos, own_sin = _wide(cos).contiguous(), _wide(sin).contiguous()
        own_slots = kv_slots.contiguous()
        rows, all_heads, head_dim = wide.shape
        heads = all_heads - 2 * key_pool.shape[1]
        queries = torch.empty(rows, heads, head_dim)
        self._rotary_and_write_kv(
            _pool_address(key_pool),
            wide.data_ptr(),
            wide.stride(0),
            heads,
            own_cos.data_ptr(),
            own_sin.data_ptr(),
            own_slots.data_ptr(),
            rows,
            key_pool.data_ptr(),
            value_pool.data_ptr(),
            queries.data_ptr(),
            torch.get_num_threads(),
        )
        return queries if qkv.dtype == torch.float32 else queries.to(qkv.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float32 else x.float()


def _dense_tail(x: torch.Tensor, axes: int) -> torch.Tensor:
    """Give ``x`` with its last ``axes`` axes dense; rows of a matrix or of heads may be apart."""
    if x.is_contiguous():
        return x
    apart = x.dim() == axes + 1 and x.stride(-1) == 1
    if apart and (axes == 1 or x.stride(-2) == x.shape[-1]):
        return x
    return x.contiguous()


def _pool_address(pool: torch.Tensor) -> int:
    _, kv_heads, block_size, head_dim = pool.shape
    return _pool(kv_heads, block_size, head_dim, pool.dtype)[1]


@cache
def _pool(kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[_Pool, int]:
    """The struct, which is kept alive here, and its address."""
    pool = _Pool(kv_heads, block_size, head_dim, DTYPE_CODES[dtype])
    return pool, ctypes.addressof(pool)
