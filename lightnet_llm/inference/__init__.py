"""Inference: loading a checkpoint, reading a prompt, generating from the state (``inference.generate.generate``)."""

from .generate import Reading, TextStream, after_document_end, read
from .load import Loaded, load_model
from .sampling import Sampling

__all__ = ["Loaded", "Reading", "Sampling", "TextStream", "after_document_end", "load_model", "read"]
