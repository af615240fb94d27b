"""An adapter in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from mural_resolvers.base_spec import BaseSpec
from mural_server.lora.checkpoint import (
    BaseDigest,
    CheckpointHeader,
    LoadOptions,
    no_base_digest,
    read_checkpoint,
)
from mural_server.lora.weights import LoRALayerWeights, PackedLoRALayerWeights

__all__ = ["LoRAModel"]


@dataclass(frozen=True, slots=True, eq=False)
class LoRAModel:
    """A whole adapter, checked and converted, under the id that slots and prefix blocks key on."""

    id: int
    rank: int
    """The largest rank of its modules: what it takes up in a slot."""
    loras: Mapping[str, LoRALayerWeights]
    """By the base's module name (the members, not the fused layers)."""
    nbytes: int
    """Host memory of the weights."""
    digest: str = ""
    storage: object = field(default_factory=object)
    """What a clone shares: models of one storage take host memory once."""

    def clone(self, lora_model_id: int) -> LoRAModel:
        """The same tensors under another id."""
        return replace(self, id=lora_model_id)

    def packed(
        self, packed_modules_mapping: Mapping[str, tuple[str, ...]]
    ) -> dict[str, LoRALayerWeights | PackedLoRALayerWeights]:
        """Give the weights by layer: members of a fused layer side by side, nothing copied."""
        fused_of = {
            member: (fused, members)
            for fused, members in packed_modules_mapping.items()
            for member in members
        }
        layers: dict[str, LoRALayerWeights | PackedLoRALayerWeights] = {}
        for name, weights in self.loras.items():
            parent, dot, last = name.rpartition(".")
            if last not in fused_of:
                layers[name] = weights
                continue
            fused, members = fused_of[last]
            layer = f"{parent}{dot}{fused}"
            if layer not in layers:
                layers[layer] = PackedLoRALayerWeights.pack(
                    layer, [self.loras.get(f"{parent}{dot}{member}") for member in members]
                )
        return layers

    @classmethod
    def from_local_checkpoint(
        cls,
        path: str | Path,
        base_spec: BaseSpec,
        options: LoadOptions,
        *,
        lora_model_id: int,
        expected_digest: str = "",
        base_digest: BaseDigest = no_base_digest,
    ) -> LoRAModel:
        """Read a PEFT folder in this process and thread (`AdapterLoader` does it beside the steps).

        Raises ``UnusableAdapter`` with the reason, ``TooLarge``, ``ManifestMismatch``.
        """
        header, payload = read_checkpoint(
            Path(path), base_spec, options, expected_digest, base_digest
        )
        return cls.from_payload(header, torch.from_numpy(payload), lora_model_id)

    @classmethod
    def from_payload(
        cls, header: CheckpointHeader, payload: torch.Tensor, lora_model_id: int
    ) -> LoRAModel:
        """Build the model over ``payload`` (uint8, `CheckpointHeader.num_bytes`): all are views."""
        dtype = getattr(torch, header.dtype)
        loras = {}
        for module in header.modules:
            lora_a = _view(payload, module.offset_a, (module.rank, module.in_features), dtype)
            lora_b = _view(payload, module.offset_b, (module.rank, module.out_features), dtype)
            loras[module.module] = LoRALayerWeights(
                module.module, module.rank, module.scale, lora_a, lora_b
            )
        return cls(
            id=lora_model_id,
            rank=max(module.rank for module in header.modules),
            loras=loras,
            nbytes=header.num_bytes,
            digest=header.digest,
        )


def _view(
    payload: torch.Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    num_bytes = shape[0] * shape[1] * dtype.itemsize
    return payload[offset : offset + num_bytes].view(dtype).view(shape)
