"""Parameter groups: who decays, who stays fp32, who learns at another rate."""

import pytest
import torch
from torch import Tensor, nn

from lightnet_llm.checkpoint.native import EMA
from lightnet_llm.config import ModelConfig
from lightnet_llm.models import CausalLM
from lightnet_llm.training import ema
from lightnet_llm.training.optimizer import parameter_groups


def test_groups() -> None:
    config = ModelConfig(layers=2, width=16, heads=2, glu_width=16, vocab_size=20, norm="layer", lrpe_rate=0.01)
    model = CausalLM(config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, weight_decay=0.1, learning_rate=1e-3)
    found = {}
    for group in groups:
        for parameter in group["params"]:  # type: ignore[attr-defined]
            found[names[id(parameter)]] = (group["weight_decay"], group["lr"])
    assert len(found) == len(names)
    for name, (decay, rate) in found.items():
        matrix = name.endswith("weight") and "norm" not in name
        assert decay == (0.1 if matrix else 0.0), name
        assert rate == (1e-5 if "theta" in name else 1e-3), name


def test_a_frozen_theta_is_in_no_group() -> None:
    config = ModelConfig(layers=1, width=16, heads=2, glu_width=16, vocab_size=20, lrpe_learnable=False)
    model = CausalLM(config)
    trained = sum(len(group["params"]) for group in parameter_groups(model, 0.1, 1e-3))  # type: ignore[arg-type, misc]
    assert trained == len(list(model.parameters())) - 1


@pytest.mark.parametrize("skipped", [(), (0,), (2,), (0, 1, 4)], ids=str)
def test_the_average_where_only_the_device_knows_what_was_skipped(skipped: tuple[int, ...]) -> None:
    """As found_inf of a fused step says; it begins as the weights after the first step that was made."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    ema.follow(optimizer, 0.8)
    average: list[Tensor] = []
    for step in range(6):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.found_inf = torch.tensor(float(step in skipped))
        before = [weight.detach().clone() for weight in weights]
        optimizer.step()
        if step in skipped:
            assert all(torch.equal(x, y) for x, y in zip(weights, before, strict=True))
        else:
            after = [weight.detach().double() for weight in weights]
            average = [0.8 * a + 0.2 * w for a, w in zip(average, after, strict=True)] if average else after
        for weight, wanted in zip(weights, average, strict=False):
            torch.testing.assert_close(optimizer.state[weight][EMA].double(), wanted, rtol=1e-6, atol=1e-6)
