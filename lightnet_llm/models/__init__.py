"""The mathematics of LightNet. Nothing here imports megatron or deepspeed, and nothing communicates."""

from .causal_lm import CausalLM, CausalLMOutput
from .classifier import ImageClassifier
from .context import ForwardContext, ModelState
from .denoiser import Denoiser
from .layers import PlainLayers
from .parameters import count_parameters, initialize

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "Denoiser",
    "ForwardContext",
    "ImageClassifier",
    "ModelState",
    "PlainLayers",
    "count_parameters",
    "initialize",
]
