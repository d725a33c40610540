"""A small model under Hugging Face's interface."""

from typing import Any

import pytest
import torch

from lightnet_llm import LightNetConfig, LightNetForCausalLM

SMALL = {
    "layers": 3,
    "width": 64,
    "heads": 4,
    "glu_width": 90,
    "vocab_size": 251,
    "gate_rank": 8,
    "tpe_rank": 8,
    "tpe_init_length": 64,
    "norm_eps": 1e-2,  # of small activations, so that norms do not magnify rounding
}


def build(**fields: Any) -> LightNetForCausalLM:
    """With logits that differ, as after training: larger weights than at the start, and a head of its own."""
    torch.manual_seed(0)
    model = LightNetForCausalLM(LightNetConfig(**{**SMALL, "initializer_std": 0.1, "tie_embeddings": False, **fields}))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> LightNetForCausalLM:
    return build()
