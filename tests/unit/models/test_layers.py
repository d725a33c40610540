"""Two linear layers of one input."""

import pytest
import torch
from torch import nn

from lightnet_llm.models.layers import PlainLayers, _TwoProducts

NAMES = ("x", "one", "two")


def run(x, one, two, wanted):
    """Outputs, and gradients of those of x and the weights that are wanted."""
    layers = [nn.Linear(*reversed(w.shape), bias=False) for w in (one, two)]
    for layer, weight in zip(layers, (one, two), strict=True):
        layer.weight = nn.Parameter(weight.clone())
    leaves = dict(zip(NAMES, (x.clone(), layers[0].weight, layers[1].weight), strict=True))
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in wanted)
    return leaves, layers


@pytest.mark.parametrize("wanted", [("x",), ("one",), ("x", "two"), ("one", "two"), NAMES], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 6), (7, 6), (0, 6)], ids=str)
def test_a_pair_is_its_two_layers(shape, wanted):
    torch.manual_seed(0)
    x, one, two = torch.randn(*shape).double(), torch.randn(4, 6).double(), torch.randn(9, 6).double()
    found = []
    for joined in (True, False):
        leaves, layers = run(x, one, two, wanted)
        outputs = PlainLayers().pair(leaves["x"], *layers) if joined else [layer(leaves["x"]) for layer in layers]
        assert (type(outputs[0].grad_fn).__name__ == f"{_TwoProducts.__name__}Backward") == joined
        given = [leaves[name] for name in NAMES if name in wanted]
        total = outputs[0].square().sum() + outputs[1].sin().sum()
        grads = torch.autograd.grad(total, given, allow_unused=True)
        found.append([*outputs, *(torch.zeros(()) if x is None else x for x in grads)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_layers_that_do_more_are_called():
    x = torch.randn(3, 6)
    plain, seen = nn.Linear(6, 4, bias=False), []
    others = {
        "bias": nn.Linear(6, 4),
        "hook": nn.Linear(6, 4, bias=False),
        "forward": nn.Linear(6, 4, bias=False),
        "adapter": nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU()),
        "dtype": nn.Linear(6, 4, bias=False).bfloat16(),
    }
    others["hook"].register_forward_hook(lambda *_: seen.append(1))
    others["forward"].forward = lambda x: torch.zeros(3, 4)
    for name, other in others.items():
        if name == "dtype":
            with torch.autocast("cpu", torch.bfloat16):  # where the layers take it
                assert PlainLayers().pair(x, plain, other)[1].dtype == torch.bfloat16
            continue
        assert torch.equal(PlainLayers().pair(x, plain, other)[1], other(x)), name
    assert len(seen) == 2
