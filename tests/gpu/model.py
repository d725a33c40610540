"""A language model as training holds it on a card."""

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import CausalLM, initialize
from lightnet_llm.models.parameters import spec_of


def bf16_model(config: ModelConfig) -> CausalLM:
    """Initialised on the GPU, in bf16 but for the parameters that stay fp32."""
    model = CausalLM(config)
    initialize(model, 1)
    model.cuda().train()
    for parameter in model.parameters():
        if not spec_of(parameter).keep_fp32:
            parameter.data = parameter.data.bfloat16()
    return model
