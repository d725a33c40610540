"""Parameter groups: who decays, who stays fp32, who learns at another rate."""

from lightnet_llm.config import ModelConfig
from lightnet_llm.models import CausalLM
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
    trained = sum(len(group["params"]) for group in parameter_groups(model, 0.1, 1e-3))  # type: ignore[arg-type]
    assert trained == len(list(model.parameters())) - 1
