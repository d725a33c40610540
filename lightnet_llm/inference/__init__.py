"""Inference: loading a checkpoint, reading a prompt, generating from the state."""

from .generate import Reading, TextStream, after_document_end, generate, read
from .load import Loaded, load_model
from .sampling import Sampling

__all__ = ["Loaded", "Reading", "Sampling", "TextStream", "after_document_end", "generate", "load_model", "read"]
