"""Typed configuration: schema, YAML loading, presets."""

from .load import dump_config, find_config, load_config, preset_names, validate
from .model import ModelConfig
from .run import RunConfig

__all__ = ["ModelConfig", "RunConfig", "dump_config", "find_config", "load_config", "preset_names", "validate"]
