"""Functions made of PyTorch's operators as single operators, for torch.compile alone.

The scans of backend "torch" cut sequences into chunks by what tensors hold (boundaries, masks, how far keys grow), which a
compiler does not know. It sees such a scan as one node. Plain calls go past all of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality  # off inside an operator


def composed(
    name: str,
    inputs: str,
    results: int,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    constants: Sequence[int] = (),
) -> Any:
    """The operator of a differentiable function.

    Nothing but the inputs is kept for the backward pass, which computes the rest again.

    Args:
        name: namespace::name.
        inputs: of torch.library's schema, "Tensor x, Tensor? y, bool z".
        results: number of tensors that `run` returns, in a tuple; it may return None for one that nobody asked for, and the
            operator then an empty tensor.
        fake: gives their shapes and dtypes from fake arguments; all are contiguous.
        constants: results without a gradient, by place.
    """

    def forward(*given: Any) -> tuple[Tensor, ...]:
        with _without_autocast(given):
            return _filled(run(*given), given)

    def fake_forward(*given: Any) -> tuple[Tensor, ...]:
        return _filled(fake(*given), given)

    def gradients(grads: Sequence[Tensor | None], asked: Sequence[int], *given: Any) -> list[Tensor]:
        with _without_autocast(given), torch._C._SetExcludeDispatchKeyGuard(AUTOGRAD, False), torch.enable_grad():
            leaves = [x.detach() if isinstance(x, Tensor) else x for x in given]
            wanted = [leaves[place].requires_grad_() for place in asked]
            pairs = zip(run(*leaves), grads, strict=True)
            reached = [(x, grad) for x, grad in pairs if x is not None and grad is not None and x.requires_grad]
            if not reached:
                return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wanted]
            outputs, upstream = zip(*reached, strict=True)
            found = torch.autograd.grad(outputs, wanted, upstream, materialize_grads=True)
        return [x.contiguous() for x in found]

    def fake_gradients(_grads: Any, asked: Sequence[int], *given: Any) -> list[Tensor]:
        return [given[place].new_empty(given[place].shape) for place in asked]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*[inputs[place] for place in ctx.places])
        ctx.mark_non_differentiable(*[output[place] for place in constants])
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given, asked = list(ctx.others), [place for place in ctx.places if ctx.needs_input_grad[place]]
        for place, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            given[place] = x
        found: list[Tensor | None] = [None] * len(given)
        for place, grad in zip(asked, backward_op(list(grads), asked, *given), strict=True):
            found[place] = grad
        return tuple(found)

    outputs = ", ".join(["Tensor"] * results)
    op = torch.library.custom_op(name, forward, mutates_args=(), schema=f"({inputs}) -> ({outputs})")
    op.register_fake(fake_forward)
    schema = f"(Tensor?[] grads, int[] asked, {inputs}) -> Tensor[]"
    backward_op = torch.library.custom_op(f"{name}_backward", gradients, mutates_args=(), schema=schema)
    backward_op.register_fake(fake_gradients)
    op.register_autograd(backward, setup_context=setup)
    return op._opoverload


def _without_autocast(given: Sequence[Any]) -> torch.autocast:
    return torch.autocast(next(x for x in given if isinstance(x, Tensor)).device.type, enabled=False)


def _filled(output: Sequence[Tensor | None], given: Sequence[Any]) -> tuple[Tensor, ...]:
    like = next(x for x in given if isinstance(x, Tensor))
    return tuple(like.new_empty(0) if x is None else x.contiguous() for x in output)
