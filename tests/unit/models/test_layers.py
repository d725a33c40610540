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


@pytest.mark.parametrize(("wanted", "count"), [(("x",), 2), (("one", "two"), 1), (("x", "two"), 3)], ids=str)
def test_saved_is_what_gradients_need(wanted, count):
    """Frozen weights, under adapters elsewhere, hold no activations."""
    leaves, layers = run(torch.randn(3, 6), torch.randn(4, 6), torch.randn(9, 6), wanted)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        PlainLayers().pair(leaves["x"], *layers)
    assert len(saved) == count


def test_derivatives_of_other_kinds():
    """Second ones, those of torch.func, and forward mode."""
    torch.manual_seed(0)
    x, one, two = torch.randn(3, 6).double(), torch.randn(4, 6).double(), torch.randn(9, 6).double()
    leaves, layers = run(x, one, two, NAMES)
    assert torch.autograd.gradgradcheck(_TwoProducts.apply, tuple(leaves.values()))

    def joined(x):
        outputs = PlainLayers().pair(x, *layers)
        return outputs[0].square().sum() + outputs[1].sin().sum()

    def apart(x):
        return layers[0](x).square().sum() + layers[1](x).sin().sum()

    def forward_mode(function):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x.cos())
            return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent

    for way in (
        lambda function: torch.func.grad(function)(x),
        lambda function: torch.func.vmap(function)(x),
        lambda function: torch.func.jvp(function, (x,), (x.cos(),))[1],
        forward_mode,
    ):
        torch.testing.assert_close(way(joined), way(apart), rtol=1e-12, atol=1e-12)


def test_backward_under_autocast():
    leaves, layers = run(torch.randn(3, 6), torch.randn(4, 6), torch.randn(9, 6), NAMES)
    outputs = PlainLayers().pair(leaves["x"], *layers)
    with torch.autocast("cpu", torch.bfloat16):
        (outputs[0].sum() + outputs[1].sum()).backward()
    torch.testing.assert_close(leaves["x"].grad, (leaves["one"].sum(0) + leaves["two"].sum(0)).expand(3, 6))


class _Watched(dict):
    """As ZeRO-3's, which gathers a parameter when it is looked up outside its own layer."""

    def __getitem__(self, name):
        assert self.inside or super().__getitem__(name) is None, "looked up outside"
        return super().__getitem__(name)


def test_a_layer_that_gathers_its_weight_in_a_hook():
    layers = [nn.Linear(6, width, bias=False) for width in (4, 9)]
    for layer in layers:
        layer._parameters = _Watched(layer._parameters)
        layer._parameters.inside = False
        layer.register_forward_pre_hook(lambda layer, _: setattr(layer._parameters, "inside", True))
    assert [x.shape for x in PlainLayers().pair(torch.randn(3, 6), *layers)] == [(3, 4), (3, 9)]
