"""The compiled library: found, checked and loaded once.

It is built with the package where a compiler is at hand (server/native/build.py), exports a plain
C ABI, and every kernel once per instruction set: ``mural_gemm_avx512fp16`` and the like.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

# The kernels run on torch's OpenMP team, whose runtime must be in the process before the library.
import torch  # noqa: F401

from mural_server.ops.native.source_digest import source_digest

__all__ = ["ISAS", "Isa", "Kernel", "NativeLibrary", "NativeUnavailable", "available", "load"]

Isa = Literal["avx2", "avx512", "avx512fp16"]
ISAS: tuple[Isa, ...] = ("avx512fp16", "avx512", "avx2")
"""Best first."""

ISA_BITS = {"avx2": 1, "avx512": 2, "avx512fp16": 4}
LIBRARY = Path(__file__).with_name("libmural_native.so")
SOURCES = Path(__file__).parents[3] / "native"
"""In a checkout; an installed package has the library alone."""

Kernel = Any
"""A foreign function; ctypes has no type for one that says what it takes."""


class NativeUnavailable(Exception):
    """There is no library that can be used here; says why and what to do."""


class NativeLibrary:
    """The kernels for one instruction set."""

    def __init__(self, handle: ctypes.CDLL, isa: Isa) -> None:
        self._handle = handle
        self.isa = isa

    def kernel(self, name: str, argtypes: Sequence[Any]) -> Kernel:
        """The kernel ``name``, which gives nothing back; ``argtypes`` are ctypes' own.

        Pass tensors as ``tensor.data_ptr()`` for ``c_void_p``, and keep them alive over the call.
        """
        function = self._handle[f"{name}_{self.isa}"]
        function.argtypes = list(argtypes)
        function.restype = None
        return function


@cache
def load(isa: Isa | None = None) -> NativeLibrary:
    """The library with the kernels for ``isa``; None: for the best set that this CPU has.

    Raises NativeUnavailable.
    """
    handle = _open()
    usable = _usable(handle)
    if isa is None:
        if not usable:
            raise NativeUnavailable(f"this CPU has none of {', '.join(reversed(ISAS))}")
        isa = usable[0]
    if isa not in usable:
        raise NativeUnavailable(f"this CPU or the compiler of the library lacks {isa}")
    return NativeLibrary(handle, isa)


def available() -> tuple[Isa, ...]:
    """Instruction sets that `load` takes here, best first; none where there is no library."""
    try:
        return _usable(_open())
    except NativeUnavailable:
        return ()


@cache
def _open() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise NativeUnavailable(
            "the native operators were not built with this installation; "
            "install a C++ compiler and reinstall (in a checkout: make native)"
        )
    try:
        handle = ctypes.CDLL(str(LIBRARY))
        handle.mural_isa.restype = ctypes.c_int
        handle.mural_source_digest.restype = ctypes.c_char_p
        built_from = handle.mural_source_digest().decode()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the native operators cannot be loaded: {error}") from error
    if SOURCES.is_dir() and built_from != source_digest(SOURCES):
        raise NativeUnavailable(
            "the native operators were built from other sources than those that stand here; "
            "run make native"
        )
    return handle


def _usable(handle: ctypes.CDLL) -> tuple[Isa, ...]:
    bits = handle.mural_isa()
    return tuple(
        isa for isa in ISAS if bits & ISA_BITS[isa] and hasattr(handle, f"mural_gemm_{isa}")
    )
