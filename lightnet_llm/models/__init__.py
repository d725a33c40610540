"""The mathematics of LightNet. Nothing here imports megatron or deepspeed, and nothing communicates."""

from ..config.model import ModelConfig
from .backbone import Backbone
from .causal_lm import CausalLM, CausalLMOutput
from .classifier import ImageClassifier
from .context import ForwardContext, ModelState
from .denoiser import Denoiser
from .layers import PlainLayers
from .parameters import count_parameters, initialize
from .sequence_classifier import SequenceClassifier

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "Denoiser",
    "ForwardContext",
    "ImageClassifier",
    "ModelState",
    "PlainLayers",
    "SequenceClassifier",
    "build_model",
    "count_parameters",
    "initialize",
]

HEADS = {
    "causal_lm": CausalLM,
    "masked_lm": CausalLM,
    "sequence_classifier": SequenceClassifier,
    "classifier": ImageClassifier,
    "denoiser": Denoiser,
}


def build_model(config: ModelConfig, layers: PlainLayers | None = None) -> Backbone:
    """The model that ``config.head`` names, without initial values (see :func:`initialize`)."""
    return HEADS[config.head](config, layers)
