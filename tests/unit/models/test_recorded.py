"""Blocks of which parts are recorded, beside the same blocks run by their modules.

Whole blocks need the kernels: see tests/unit/kernels/test_kernels_replay.py and tests/gpu/test_recorded.py.
"""

import sys
from dataclasses import replace

import pytest
import torch
from lightnet_kernels import identity_state

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.models import recorded as module
from lightnet_llm.models.block import Block
from lightnet_llm.models.context import ForwardContext
from lightnet_llm.models.layers import PlainLayers


def tiny_model_config(**changes):
    return ModelConfig(layers=2, width=24, heads=2, glu_width=20, vocab_size=9, gate_rank=4, **changes)


class Exchange:
    """Of one rank: nothing arrives."""

    def again(self):
        return self

    def scan(self, theta, meanwhile):
        self.meanwhile = meanwhile
        return self

    def prefix(self, state):
        self.meanwhile()
        rows, heads, width, value = *state.max.shape, state.kv.shape[3]
        return identity_state(rows, heads, width, value, lrpe=state.kv.shape[2] > width, dtype=state.kv.dtype)


@pytest.fixture
def recordings():
    found = sys.modules["lightnet_kernels.recorded"]._recordings
    found.clear()
    return found


def run(blocks, context, seed):
    generator = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(1, 9, blocks[0].glu.gate.in_features, generator=generator) for _ in range(2))
    output = leaf = x.requires_grad_()
    leaves = [leaf, *(x for block in blocks for x in block.parameters() if x.requires_grad)]
    if blocks[0].table is not None:  # three samples of three tokens
        leaves.append(torch.randn(3, 6, x.shape[-1], generator=generator).requires_grad_())
        context = replace(context, modulation=leaves[-1].tanh())
    for block in blocks:
        output, _ = block(output, context)
    return [output, *torch.autograd.grad(output, leaves, grad, allow_unused=True)]


def same(one, two, exact):
    """Around an exchange PyTorch's norms give gradients in several terms, which are summed in another order then."""
    bound = 0.0 if exact else 1e-5
    return all(x is y is None or (x - y).norm() <= bound * y.norm() for x, y in zip(one, two, strict=True))


@pytest.mark.parametrize("exchange", [False, True], ids=["whole", "around an exchange"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("conditioning", ["tokens", "adaln_single"])
def test_outputs_and_gradients(conditioning, exchange, again, recordings, monkeypatch):
    config = tiny_model_config().model_copy(update={"conditioning": conditioning})
    torch.manual_seed(0)
    blocks = [Block(config, PlainLayers(), index) for index in range(2)]
    for block in blocks:
        block.recompute = again
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    context = ForwardContext(exchange=Exchange() if exchange else None)
    wanted = [run(blocks, context, seed) for seed in range(4)]
    monkeypatch.setattr(module, "recordable", lambda x, decided=None: True)
    assert all(same(run(blocks, context, seed), wanted[seed], not exchange) for seed in range(4))
    kinds = [type(x).__name__ for x in recordings.values()]
    assert kinds == (["_Pair"] * 3 if exchange else ["str"])  # PyTorch's scan keeps tensors of its own


def test_a_hook_on_a_layer_is_called(recordings, monkeypatch):
    block, seen = Block(tiny_model_config(), PlainLayers(), 0), []
    monkeypatch.setattr(module, "recordable", lambda x, decided=None: True)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for seed in range(3):
        run([block], ForwardContext(), seed)
    assert len(recordings) == 1
    block.glu.down.register_forward_hook(lambda *_: seen.append(1))
    run([block], ForwardContext(), 0)
    assert seen == [1]


class Adapter(torch.nn.Module):
    """Of another library: what it does is not in its type."""

    def __init__(self, base, scaling):
        super().__init__()
        self.base, self.scaling = base, scaling

    def forward(self, x):
        return self.base(x) * self.scaling


def test_a_norm_from_elsewhere_is_called():
    """One in the block's norm's place, and one with a forward of its own."""
    block = Block(tiny_model_config(), PlainLayers(), 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    whole = run([block], ForwardContext(), 0)[0]
    norm = block.attention_norm
    block.attention_norm = Adapter(norm, 0.0)
    silent = run([block], ForwardContext(), 0)[0]
    assert not torch.equal(silent, whole)
    block.attention_norm = norm
    norm.forward = torch.zeros_like
    assert torch.equal(run([block], ForwardContext(), 0)[0], silent)


def test_layers_from_elsewhere_are_called(recordings, monkeypatch):
    monkeypatch.setattr(module, "recordable", lambda x, decided=None: True)
    block = Block(tiny_model_config(), PlainLayers(), 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    context = ForwardContext(exchange=Exchange())
    block.glu.down = Adapter(block.glu.down, 0.0)
    for scaling in (1.0, 1.0, 1.0, 0.0):
        block.glu.down.scaling = scaling
        output = run([block], context, 0)[0]
    monkeypatch.setattr(module, "recordable", lambda x, decided=None: False)
    assert torch.equal(output, run([block], context, 0)[0])
    monkeypatch.setattr(module, "recordable", lambda x, decided=None: True)
    block.glu.down = block.glu.down.base
    for _ in range(3):
        whole = run([block], context, 0)[0]
    block.glu.down.forward = lambda x: torch.zeros(*x.shape[:-1], 24)
    assert not torch.equal(run([block], context, 0)[0], whole)
    del block.glu.down.forward
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        run([block], context, 0)
    finally:
        handle.remove()
    assert len(seen) > 5


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_both_passes_of_a_recomputed_block_decide_alike(where, recordings, monkeypatch):
    """Though anomalies are looked for in one of them, which alone would run the modules."""
    monkeypatch.setattr(sys.modules["lightnet_kernels.recorded"], "GPU", "cpu")
    block = Block(tiny_model_config(), PlainLayers(), 0)
    block.recompute = True
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    context = ForwardContext(exchange=Exchange())
    for _ in range(4):
        x = torch.randn(1, 9, 24, requires_grad=True)
        with torch.autograd.set_detect_anomaly(where == "forward"):
            output, _ = block(x, context)
        with torch.autograd.set_detect_anomaly(where == "backward"):
            output.sum().backward()


def test_dropout_is_drawn_anew(recordings, monkeypatch):
    from lightnet_llm.models.dropout import DropoutKey

    monkeypatch.setattr(module, "recordable", lambda x, decided=None: True)
    config = tiny_model_config(dropout=0.5)
    block = Block(config, PlainLayers(), 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    outputs = [
        run([block], ForwardContext(dropout=DropoutKey(1, step, torch.tensor([0]), 9)), 0)[0] for step in range(4)
    ]
    assert not any(torch.equal(outputs[0], other) for other in outputs[1:]) and not recordings


def test_checkpointing_from_outside_sees_the_same_steps_twice(recordings, monkeypatch):
    """Between its two passes a block's recording is made: neither takes it."""
    from torch.utils.checkpoint import checkpoint

    block = Block(tiny_model_config(), PlainLayers(), 0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    found = sys.modules["lightnet_kernels.recorded"]
    monkeypatch.setattr(found, "GPU", "cpu")
    context = ForwardContext(exchange=Exchange())
    for _ in range(3):
        x = torch.randn(1, 9, 24, requires_grad=True)
        output = checkpoint(lambda x: block(x, context)[0], x, use_reentrant=False)
        run([block], context, 0)  # records
        output.sum().backward()
