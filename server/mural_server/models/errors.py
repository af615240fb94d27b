"""Why a base model is refused. Both are told to whoever starts the server."""

from __future__ import annotations

__all__ = ["CheckpointError", "ModelError", "UnsupportedModel"]


class ModelError(ValueError):
    """Base of what can be wrong with a base model."""


class UnsupportedModel(ModelError):
    """The model asks for something that is not implemented; the message names it."""


class CheckpointError(ModelError):
    """The model's files are missing, damaged or do not fit each other; the message names them."""
