"""The mathematics of LightNet. Nothing here imports megatron or deepspeed, and nothing communicates."""

from .causal_lm import CausalLM, CausalLMOutput
from .context import ForwardContext, ModelState
from .layers import PlainLayers
from .parameters import count_parameters, initialize

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "ForwardContext",
    "ModelState",
    "PlainLayers",
    "count_parameters",
    "initialize",
]
