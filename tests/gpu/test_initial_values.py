"""Initial values on their way to a card: the bits of the CPU's, by any number of threads."""

import pytest
import torch

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import CausalLM, initialize
from lightnet_llm.models.parameters import Undrawn, spec_of
from tests.initial_values import drawn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("card", [0, -1])
def test_the_definition(card: int, dtype: torch.dtype | None) -> None:
    """Also on the last card, which is not the one that a new thread begins at."""
    device = torch.device("cuda", torch.cuda.device_count() - 1 if card else 0)
    config = ModelConfig(layers=4, width=512, heads=4, glu_width=1344, vocab_size=5000)
    with Undrawn():
        model = CausalLM(config)
    initialize(model, 7, 0, device, dtype, threads=4)
    for name, parameter in model.named_parameters():
        wanted = drawn(config, 7, name, spec_of(parameter).shape)
        beyond, found = parameter[len(wanted) :], parameter[: len(wanted)]  # the vocabulary's padding
        assert parameter.device == device and not beyond.any()
        wide = dtype is None or spec_of(parameter).keep_fp32
        assert torch.equal(found.cpu(), wanted.to(torch.float32 if wide else dtype)), name
