"""A differentiable function of tensors, recorded forward and backward: a model's block without its Python.

PyTorch's modules, autograd's nodes and the arguments' checks cost the host more time a block than a card needs to compute
one of a small model. All of it depends on the inputs' layout alone. `recorded` runs the function and autograd's backward
pass of it once more under a tape each, and from then on repeats their steps as one autograd node. Operators of this
package stand on the tape as they are: they look at bounds of packed segments themselves, and have recordings of their own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .companions import kernels
from .operators import FULL, PLAIN, SIMPLE
from .recording import Recording, Slot, Tape, on_tape, roots

RECORDINGS = 64  # layouts remembered
_recordings: OrderedDict[Any, Any] = OrderedDict()


class _GradTape(Tape):
    """A tape that knows tensors by their memory too: autograd wraps what it saved anew. It keeps all of them alive.

    Args:
        opaque: of the inputs, how many of the last only this package's operators may read.
    """

    def __init__(self, inputs: Sequence[Any], opaque: int = 0):
        self.tensors: dict[int, Tensor] = {}
        self.places: dict[Any, int] = {}
        super().__init__(inputs)
        self.opaque = range(len(inputs) - opaque, len(inputs))

    def slot(self, x: Tensor | None) -> int:
        slot = super().slot(x)
        if x is not None:
            self.tensors[slot] = x
            self.places.setdefault(_place(x), slot)
        return slot

    def known(self, x: Tensor) -> int | None:
        slot = super().known(x)
        return slot if slot is not None else self.places.get(_place(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SIMPLE:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self, on_tape(self):
            return FULL[func](*args)

    def viewed(self, slot: int, base: int, x: Tensor, of: Tensor) -> None:
        self.failed |= base in self.opaque
        super().viewed(slot, base, x, of)

    def step(self, func: Any, templates: tuple[Any, Any], out: Any, slots: int | list[int]) -> tuple[Any, ...]:
        full = FULL.get(func)
        if full is not None:
            return "op", full, *templates, slots
        arguments = [*templates[0], *templates[1].values()]
        if any(isinstance(x, Slot) and x in self.opaque for x in arguments):
            self.failed = True
        return super().step(func, templates, out, slots)

    def finish(self, output: Any) -> Recording | None:
        if any(isinstance(x, Tensor) for x in self.constants.values()):
            return None  # what of another call would be read in its place?
        return super().finish(output)


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype


class _Pair(NamedTuple):
    """``forward`` gives the output and what ``backward`` needs before the output's gradient; ``alone`` the output."""

    alone: Recording
    forward: Recording | None
    backward: Recording | None
    wanted: tuple[int, ...]  # inputs that ``backward`` gives gradients of, in its order
    stride: tuple[int, ...]  # of the gradient


class _Replay(torch.autograd.Function):
    """One node for the whole function."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, again: bool, *inputs: Any) -> Tensor:
        device = inputs[0].device
        ctx.pair, ctx.again, ctx.count = pair, again, len(inputs)
        with torch._C._AutoDispatchBelowAutograd():
            if again:
                ctx.save_for_backward(*inputs)
                output: Tensor = pair.alone([*inputs], device)
                return output
            assert pair.forward is not None
            output, *saved = pair.forward([*inputs], device)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError("a recorded function has no second derivative; call the function itself")
        pair, device = ctx.pair, grad.device
        with torch._C._AutoDispatchBelowAutograd():
            saved = [None, *ctx.saved_tensors] if not ctx.again else [*pair.forward([*ctx.saved_tensors], device)]
            if grad.stride() != pair.stride:
                grad = torch.empty_strided(grad.shape, pair.stride, dtype=grad.dtype, device=device).copy_(grad)
            saved[0] = grad
            found = pair.backward(saved, device)
        grads: list[Tensor | None] = [None] * ctx.count
        for place, one in zip(pair.wanted, found, strict=True):
            grads[place] = one
        return None, None, *grads


def recordable(x: Tensor) -> bool:
    """Whether a function of such a tensor may be recorded: on a GPU with this package's kernels."""
    return x.device.type == "cuda" and kernels("triton_norms") is not None and not _busy()


def recorded(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], opaque: Sequence[Tensor | None], key: Any, again: bool = False
) -> Tensor:
    """``run(inputs[0], *opaque)``, from a recording where one is there.

    Args:
        run: a function of these tensors that returns a new one and changes none. It must do the same steps whenever the
            key, the inputs' layouts and which of the opaque ones are None are the same.
        inputs: the first is an argument of ``run``; the others it reads itself: parameters and buffers.
        opaque: tensors that reach only operators of this package (cu_seqlens), of any shape and values.
        key: hashable; what else decides the steps.
        again: keep the inputs only, and compute the rest again in the backward pass (activation checkpointing).

    To be called where `recordable`.

    Returns:
        The output, differentiable in every input that requires a gradient; bits are those of ``run``.
    """
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    layout = tuple([(x.shape, x.stride(), x.dtype, x.requires_grad) for x in inputs])
    first = inputs[0]
    name = (key, layout, tuple([x is None for x in opaque]), grad, first.device, torch.get_default_dtype())
    known: Any = _recordings.get(name)
    if known == "met":
        known = _recordings[name] = _record(run, inputs, opaque, grad) or "plain"
    elif known is None:
        while len(_recordings) >= RECORDINGS:
            _recordings.popitem(last=False)
        _recordings[name] = "met"
    if not isinstance(known, _Pair):
        if again and grad:
            output: Tensor = checkpoint(run, first, *opaque, use_reentrant=False)
            return output
        return run(first, *opaque)
    _recordings.move_to_end(name)
    if grad:
        output = _Replay.apply(known, again, *inputs, *opaque)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            output = known.alone([*inputs, *opaque], first.device)
    return output


def _busy() -> bool:
    """Whether something else than the inputs decides what PyTorch's operators do now."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.is_autocast_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_anomaly_enabled()
    )


def _record(run: Callable[..., Tensor], inputs: Sequence[Tensor], opaque: Sequence[Any], grad: bool) -> _Pair | None:
    """The function's steps and those of its gradients; None where they cannot be repeated.

    The function runs once more for it, on the same tensors, and its backward pass on a gradient of zeros.
    """
    if any(type(x) not in PLAIN or x._backward_hooks for x in inputs):
        return None
    first = inputs[0].detach().requires_grad_(grad and inputs[0].requires_grad)
    given = [first, *inputs[1:], *opaque]
    if len({id(x) for x in given if x is not None}) < sum(x is not None for x in given):
        return None
    forward, kept = _GradTape(given, len(opaque)), _Kept()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        with kept.hooks(forward), forward:
            output = run(first, *opaque)
        if forward.known(output) is None or any(output is x for x in given):
            return None
        alone = forward.finish(output)
        if alone is None or not grad:
            return None if alone is None else _Pair(alone, None, None, (), output.stride())
        wanted = tuple(place for place, x in enumerate(given) if x is not None and x.requires_grad)
        upstream, saved = torch.zeros_like(output), kept.roots(forward)
        backward = _GradTape([upstream, *saved.values()])
        for x, base in kept.views(forward):
            backward.viewed(backward.slot(x), backward.reads(base), x, base)
        with backward:
            found = torch.autograd.grad(output, [given[place] for place in wanted], upstream, allow_unused=True)
    whole, back = forward.finish((output, *saved.values())), backward.finish(tuple(found))
    if kept.failed or whole is None or back is None:
        return None
    return _Pair(alone, whole, back, wanted, output.stride())


class _Kept:
    """What autograd saves of a forward pass: each tensor once, by its slot on the tape."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.failed = False

    def roots(self, tape: _GradTape) -> dict[int, Tensor]:
        """What must be kept for them: no views of one another."""
        below = roots(tape.steps)
        slots = [below[slot][0] if slot in below else slot for slot in self.tensors]
        return {slot: tape.tensors[slot] for slot in slots}

    def views(self, tape: _GradTape) -> list[tuple[Tensor, Tensor]]:
        """Those that are views, each with what it is a view of."""
        below = roots(tape.steps)
        return [(x, tape.tensors[below[slot][0]]) for slot, x in self.tensors.items() if slot in below]

    def hooks(self, tape: Tape) -> Any:
        def pack(x: Tensor) -> Any:
            slot = tape.known(x)
            if slot is None:
                self.failed = True
                return x
            self.tensors.setdefault(slot, x)
            return slot

        def unpack(x: Any) -> Tensor:
            return x if isinstance(x, Tensor) else self.tensors[x]

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
