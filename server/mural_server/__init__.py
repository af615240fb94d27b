"""Mural's LoRA engine and its OpenAI-compatible server."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mural_server.llm import LLM
    from mural_server.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> object:
    # Lazy, so that `mural_server.protocol` can be imported where torch is not installed.
    if name == "LLM":
        from mural_server.llm import LLM

        return LLM
    if name == "SamplingParams":
        from mural_server.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
