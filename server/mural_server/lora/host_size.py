"""What an adapter takes in host memory, told before its weights are read.

Without numpy: the API process, which tells it to routers, loads none.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from mural_resolvers.digest import WEIGHTS_FILE
from mural_resolvers.errors import MuralError
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.peft import read_safetensors_header

__all__ = ["ITEM_BYTES", "aligned", "host_bytes_of_files"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""By the dtype that adapters are served in."""

_ALIGNMENT = 64


def aligned(offset: int) -> int:
    """Where the next tensor may begin in host memory."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def host_bytes_of_files(folder: Path, dtype: str, limits: AdapterLimits) -> int | None:
    """What a folder's weights will take where they are served in ``dtype``.

    None where a header does not tell: it is a pickle, or the files have gone or are unusable, of
    which the load then says why. Reads the header alone; not for an event loop.
    """
    try:
        header = read_safetensors_header(folder / WEIGHTS_FILE, limits)
    except (MuralError, OSError):
        return None
    # A copy of a base's table, the only other tensor that is taken, is compared and not kept.
    return sum(
        aligned(prod(info.shape) * ITEM_BYTES[dtype])
        for key, info in header.items()
        if ".lora_" in key
    )
