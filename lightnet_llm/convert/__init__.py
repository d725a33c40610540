"""Conversion of weights between training's checkpoints, Hugging Face folders and plain safetensors."""

from .convert import Report, convert
from .source import open_source

__all__ = ["Report", "convert", "open_source"]
