"""From files to a model that runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import InvalidInput
from mural_server.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from mural_server.layers.linear import LinearBase
from mural_server.layers.norm import RMSNorm
from mural_server.models.base import CausalLM
from mural_server.models.checkpoint import Checkpoint, Shape
from mural_server.models.errors import CheckpointError, ModelError
from mural_server.models.location import model_name
from mural_server.models.registry import model_class
from mural_server.models.source import load_config, open_checkpoint
from mural_server.ops.base import Ops
from mural_server.ops.reference import ReferenceOps

__all__ = ["load_model", "read_base_spec"]

_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

# What older conversions wrote beside the weights; computed here from the configuration.
_DERIVED = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rope_freqs\.weight)")

_NAMED = 5  # tensors named in an error; a wrong checkpoint has thousands

logger = logging.getLogger(__name__)


@torch.no_grad()
def load_model(path: str, *, dtype: torch.dtype, ops: Ops) -> CausalLM:
    """Load the Hugging Face directory or GGUF file at ``path``, weights converted to ``dtype``.

    One fused weight at a time is read, converted and packed, so the peak lies little above the
    packed model. Raises `UnsupportedModel` for an architecture or a setting that is not
    implemented and `CheckpointError` naming tensors that are missing, of another shape, or left
    over. Nothing is downloaded and no code of the model's is run.
    """
    config = load_config(path)
    model = model_class(config)(model_class(config).describe(config), ops, dtype)
    checkpoint = _open_checked(path, model)
    for name, module in model.named_modules():
        _fill(model, name, module, checkpoint)
    return model.eval()


def read_base_spec(path: str, max_lora_rank: int) -> BaseSpec:
    """What an adapter may target on the model at ``path``, from its configuration and headers.

    No weight is read, but for the two tables of a model that is said to be tied and ships both.
    Raises `InvalidInput` with the reason for which `load_model` would refuse the model.
    """
    try:
        config = load_config(path)
        # Positions have tables that are computed; the shapes do not depend on them.
        architecture = replace(model_class(config).describe(config), max_position=1)
        model = model_class(config)(architecture, ReferenceOps(), torch.float32)
        _open_checked(path, model)
    except ModelError as error:
        raise InvalidInput(f"{error}.") from None
    return model.base_spec((model_name(path),), max_lora_rank)


def _open_checked(path: str, model: CausalLM) -> Checkpoint:
    """The tensors at ``path``, once they are known to be what the model wants."""
    wanted = dict(_wanted(model))
    checkpoint = open_checkpoint(path, model.num_layers, wanted)
    _settle_tie(model, checkpoint, wanted)
    _check(checkpoint, wanted)
    return checkpoint


def _wanted(model: CausalLM) -> Iterator[tuple[str, Shape]]:
    """Every tensor that the model reads, with its shape."""
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            yield f"{name}.weight", (module.size,)
        elif isinstance(module, VocabParallelEmbedding):
            yield f"{name}.weight", (module.num_embeddings, module.embedding_dim)
        elif isinstance(module, LinearBase):
            members = model.member_names(name)
            for member, size in zip(members, module.output_slices, strict=True):
                yield f"{member}.weight", (size, module.in_features)
                if module.has_bias:
                    yield f"{member}.bias", (size,)


def _settle_tie(model: CausalLM, checkpoint: Checkpoint, wanted: dict[str, Shape]) -> None:
    """Drop ``lm_head`` from what is wanted where it is the token table.

    A tied model may ship both; where they differ they are not tied, as transformers has it.
    """
    if not model.tie_word_embeddings:
        return
    if _HEAD in checkpoint.shapes and _TABLE in checkpoint.shapes:
        model.tie_word_embeddings = torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_TABLE))
        if not model.tie_word_embeddings:
            logger.warning("tie_word_embeddings is set, but lm_head differs: it is not tied")
    else:
        del wanted[_HEAD]


def _check(checkpoint: Checkpoint, wanted: dict[str, Shape]) -> None:
    held = {
        name: shape for name, shape in checkpoint.shapes.items() if not _DERIVED.fullmatch(name)
    }
    missing = [name for name in wanted if name not in held]
    extra = [name for name in held if name not in wanted]
    wrong = [
        f"{name} is {list(held[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in held and held[name] != shape
    ]
    problems = (("is missing", missing), ("has unexpected", extra), ("has other shapes:", wrong))
    for problem, names in problems:
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise CheckpointError(f"the checkpoint {problem} {', '.join(names[:_NAMED])}{more}")


def _fill(model: CausalLM, name: str, module: torch.nn.Module, checkpoint: Checkpoint) -> None:
    def read(tensor: str) -> Tensor:
        return checkpoint.tensor(tensor).to(model.dtype)

    if isinstance(module, RMSNorm | VocabParallelEmbedding):
        module.load(read(f"{name}.weight"))
    elif isinstance(module, ParallelLMHead) and model.tie_word_embeddings:
        module.load_tied(model.model.embed_tokens)
    elif isinstance(module, LinearBase):
        members = model.member_names(name)
        biases = [read(f"{member}.bias") for member in members] if module.has_bias else []
        module.load([read(f"{member}.weight") for member in members], biases)
