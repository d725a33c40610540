"""Operators that torch.compile and activation checkpointing see as one node, and that cost plain calls little.

torch.library's dispatch takes the host 100 microseconds and more a call with its backward pass, longer than some of these
kernels run. Called from plain Python an operator goes past it, through an autograd.Function of the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)
FULL: dict[Any, Callable[..., Any]] = {}  # what each operator's node computes, called without the dispatcher
SIMPLE: set[Any] = set()


class Operator:
    """One operator.

    Args:
        name: namespace::name.
        schema: of torch.library, "(Tensor x, ..) -> (Tensor, ..)"; None where `run`'s annotations say it.
        run: the computation. Where the schema's results are tensors it may return None for one that nobody asked for:
            torch.library's callers get an empty tensor there.
        fake: gives results' shapes and dtypes from fake arguments.
        simple: its kernels follow from the arguments' layouts alone, and it keeps no tensors of its own.
    """

    def __init__(
        self, name: str, schema: str | None, run: Callable[..., Any], fake: Callable[..., Any], simple: bool = False
    ):
        self.run = run
        self.eager: Callable[..., Any] = run

        def full(*arguments: Any) -> Any:
            return _without_none(run(*arguments), arguments)

        def full_fake(*arguments: Any) -> Any:
            return _without_none(fake(*arguments), arguments)

        schema = schema or torch.library.infer_schema(run, mutates_args=())
        self.library = torch.library.custom_op(name, full, mutates_args=(), schema=schema)
        self.library.register_fake(full_fake)
        self.node = self.library._opoverload
        FULL[self.node] = full
        if simple:
            SIMPLE.add(self.node)

    def differentiable(self, backward: Callable[..., Any], setup: Callable[..., Any]) -> None:
        """`setup(ctx, inputs, output)` and `backward(ctx, *grads)` as for torch.library's register_autograd."""
        self.library.register_autograd(backward, setup_context=setup)
        run, gradients, name = self.run, backward, self.node.name()

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = run(*inputs)
                setup(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                if torch.is_grad_enabled():  # create_graph
                    raise RuntimeError(f"{name} has no second derivative; use backend='torch', which has")
                return gradients(ctx, *grads)

        self.eager = Eager.apply

    def __call__(self, *arguments: Any) -> Any:
        # Modes: fake tensors, selective checkpointing, counters of operations. Other kinds of tensors know what to do.
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.node(*arguments)
        if any(isinstance(x, Tensor) and type(x) not in PLAIN for x in arguments):
            return self.node(*arguments)
        return self.eager(*arguments)


def _without_none(output: Any, arguments: tuple[Any, ...]) -> Any:
    if isinstance(output, Tensor):
        return output
    like = next(x for x in arguments if isinstance(x, Tensor))
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in output)
