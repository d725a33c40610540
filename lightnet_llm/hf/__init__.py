"""LightNet for Hugging Face Transformers. Importing this registers it with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from .cache_lightnet import LightNetCache
from .configuration_lightnet import LightNetConfig
from .heads_lightnet import (
    LightNetForImageClassification,
    LightNetForMaskedLM,
    LightNetForSequenceClassification,
)
from .modeling_lightnet import LightNetForCausalLM, LightNetModel

AutoConfig.register(LightNetConfig.model_type, LightNetConfig, exist_ok=True)
AutoModel.register(LightNetConfig, LightNetModel, exist_ok=True)
AutoModelForCausalLM.register(LightNetConfig, LightNetForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LightNetConfig, LightNetForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(LightNetConfig, LightNetForSequenceClassification, exist_ok=True)
AutoModelForImageClassification.register(LightNetConfig, LightNetForImageClassification, exist_ok=True)

__all__ = [
    "LightNetCache",
    "LightNetConfig",
    "LightNetForCausalLM",
    "LightNetForImageClassification",
    "LightNetForMaskedLM",
    "LightNetForSequenceClassification",
    "LightNetModel",
]
