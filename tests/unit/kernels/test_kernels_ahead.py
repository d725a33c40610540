"""`compile_ahead` where a launch is a call of PyTorch: it changes nothing, and what fails in it leaves nothing behind.

What it compiles: test_kernels_recompiled.py, and on a card tests/gpu/test_ahead.py.
"""

import logging
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightnet_kernels import ahead
from torch.multiprocessing.reductions import StorageWeakRef


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("no more")


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(ahead, "GPU", "cpu")
    monkeypatch.setattr(ahead, "unsupported_device", lambda *_: None)
    monkeypatch.setattr(ahead, "kernels", lambda _: SimpleNamespace(compile_only=lambda _: nullcontext()))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("not here"))


def test_no_gradient_is_kept_and_no_hook_runs():
    weight, idle = (torch.ones(3, requires_grad=True) for _ in range(2))
    weight.register_post_accumulate_grad_hook(lambda _: pytest.fail("accumulated"))
    calls = []
    assert ahead.compile_ahead(lambda: calls.append(1) or (weight * 2).sum(), [weight, idle])
    assert calls == [1] and weight.grad is None and idle.grad is None


@pytest.mark.parametrize("where", ["backward", "forward"])
def test_what_fails_is_told_and_leaves_nothing(where, caplog):
    weight, kept = torch.ones(1000, requires_grad=True), []

    def run():
        x = weight
        for _ in range(3):
            x = (x * 2).exp()  # whose result is saved
            kept.append(StorageWeakRef(x.untyped_storage()))
        if where == "forward":
            raise torch.OutOfMemoryError("no more")
        other = x.sum()  # older than what fails, so that it waits in autograd's queue
        return Fails.apply((x * 2).exp()).sum() + other

    with caplog.at_level(logging.INFO, logger="lightnet_kernels.ahead"):
        assert not ahead.compile_ahead(run, [weight])
    assert "when they are met: OutOfMemoryError: no more" in caplog.text
    assert [x.expired() for x in kept] == [True] * 3
    assert torch.is_grad_enabled() and torch._C._is_multithreading_enabled()


def test_where_it_does_nothing(monkeypatch):
    weight = torch.ones(3, requires_grad=True)
    assert not ahead.compile_ahead(pytest.fail, [torch.ones(3)])
    monkeypatch.setattr(ahead, "only_torch", lambda: True)
    assert not ahead.compile_ahead(pytest.fail, [weight])
    monkeypatch.undo()
    assert not ahead.compile_ahead(pytest.fail, [weight])
