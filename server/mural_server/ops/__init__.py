"""All hot operators, behind one interface: `select_ops` picks the backend at start."""

from mural_server.ops.base import Activation, LoRABatch, LoRABuckets, LoRAGroup, Ops, PackedLinear
from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer, PrefillChunk
from mural_server.ops.lora_batch import LoRASegment, build_lora_batch, segments_of
from mural_server.ops.native.ops import NativeOps
from mural_server.ops.packed import PackedOps
from mural_server.ops.reference import ReferenceOps
from mural_server.ops.select import OpsUnavailable, SelectedOps, select_ops

__all__ = [
    "Activation",
    "AttentionBatch",
    "AttentionSpec",
    "KVLayer",
    "LoRABatch",
    "LoRABuckets",
    "LoRAGroup",
    "LoRASegment",
    "NativeOps",
    "Ops",
    "OpsUnavailable",
    "PackedLinear",
    "PackedOps",
    "PrefillChunk",
    "ReferenceOps",
    "SelectedOps",
    "build_lora_batch",
    "segments_of",
    "select_ops",
]
