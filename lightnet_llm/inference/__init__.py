"""Inference: loading a checkpoint, reading prompts into states, generating from them (``inference.generate.generate``)."""

from .cache import StateCache, read
from .completion import Completion, complete
from .generate import TextStream, after_document_end
from .load import Loaded, load_model
from .sampling import Sampling

__all__ = [
    "Completion",
    "Loaded",
    "Sampling",
    "StateCache",
    "TextStream",
    "after_document_end",
    "complete",
    "load_model",
    "read",
]
