"""A differentiable function of tensors, recorded forward and backward: a model's block without its Python.

PyTorch's modules, autograd's nodes and the arguments' checks cost the host more time a block than a card needs to compute
one of a small model. All of it depends on the inputs' layout alone. `recorded` runs the function and autograd's backward
pass of it once more under a tape each, and from then on repeats their steps as one autograd node. Operators of this
package stand on the tape as they are: they look at bounds of packed segments themselves, and have recordings of their own.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .checks import only_torch
from .companions import kernels, on_device
from .operators import FULL, PLAIN, SIMPLE
from .recording import Recording, Slot, Tape, on_tape, roots

RECORDINGS = 64  # layouts remembered
GPU = "cuda"
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
    """``forward`` gives the outputs and what ``backward`` needs after the outputs' gradients; ``alone`` the outputs."""

    alone: Recording
    forward: Recording | None
    backward: Recording | None
    wanted: tuple[int, ...]  # inputs that ``backward`` gives gradients of, in its order
    strides: tuple[tuple[int, ...], ...]  # of the outputs' gradients


class _Replay(torch.autograd.Function):
    """One node for the whole function."""

    @staticmethod
    def forward(ctx: Any, pair: _Pair, again: bool, *inputs: Any) -> Any:
        device, outputs = inputs[0].device, len(pair.strides)
        ctx.pair, ctx.again, ctx.count = pair, again, len(inputs)
        with on_device(inputs[0]), torch._C._AutoDispatchBelowAutograd():
            if again:
                ctx.save_for_backward(*inputs)
                return pair.alone([*inputs], device)
            assert pair.forward is not None
            found = pair.forward([*inputs], device)
        ctx.save_for_backward(*found[outputs:])
        return found[0] if outputs == 1 else found[:outputs]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError("a recorded function has no second derivative; call the function itself")
        pair, device, outputs = ctx.pair, upstream[0].device, len(upstream)
        saved = [*ctx.saved_tensors]  # which may compute them, and needs autograd for it
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept: the backward pass lets go of each after its last use
        with on_device(upstream[0]), torch._C._AutoDispatchBelowAutograd():
            saved = [*pair.forward(saved, device)] if ctx.again else [*upstream, *saved]
            saved[:outputs] = [_laid_out(x, stride) for x, stride in zip(upstream, pair.strides, strict=True)]
            found = pair.backward(saved, device)
        grads: list[Tensor | None] = [None] * ctx.count
        for place, one in zip(pair.wanted, found, strict=True):
            grads[place] = one
        return None, None, *grads


def _laid_out(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A gradient as it was when recorded; kernels on the tape are those of aligned memory."""
    if x.stride() == stride and x.data_ptr() & 15 == 0:
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def recordable(x: Tensor, decided: dict[Any, Any] | None = None) -> bool:
    """Whether a function of such a tensor may be recorded: on a GPU with this package's kernels; and where activation
    checkpointing, which counts the tensors that both of its passes save, makes sure that both decide alike."""
    if torch.compiler.is_compiling() or x.device.type != GPU or type(x) not in PLAIN:
        return False
    hooks = decided is None and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    if only_torch() or hooks or _busy():
        return False
    launches = kernels("triton_launch")
    return launches is not None and not launches.only_compiled()


def recorded(
    run: Callable[..., Any],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    opaque: Sequence[Tensor | None],
    key: Any,
    again: bool = False,
    decided: dict[Any, Any] | None = None,
    store: OrderedDict[Any, Any] | None = None,
) -> Any:
    """``run(*inputs, *opaque)``, from a recording where one is there.

    Args:
        run: a function of these tensors that returns a new tensor, or a tuple of some, and changes none. It must do the
            same steps whenever the key, the layouts of inputs and weights, and which of the opaque ones are None are the
            same.
        inputs: at least one.
        weights: all other tensors that ``run`` reads: parameters and buffers.
        opaque: tensors that reach only operators of this package (cu_seqlens), of any shape and values.
        key: hashable; what else decides the steps.
        again: keep the inputs only, and compute the rest again in the backward pass (activation checkpointing).
        decided: where something else calls all this again in the backward pass, a dictionary of the first pass: what was
            done then, by key, is done again.
        store: recordings known, where not those of all functions of the process: of a function with collectives, all of
            whose ranks must record or repeat at the same calls. They do where inputs are laid out and aligned alike.

    While it records, hooks that wait for gradients of ``weights`` are lifted, for other threads as well.

    To be called where `recordable`.

    Returns:
        The outputs, differentiable in every tensor that requires a gradient; bits are those of ``run``.
    """
    tensors = [*inputs, *weights]
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    layout = tuple([(type(x), x.shape, x.stride(), x.dtype, x.requires_grad, x.data_ptr() & 15) for x in tensors])
    device = tensors[0].device
    name = (key, len(inputs), layout, tuple([x is None for x in opaque]), grad, device, torch.get_default_dtype())
    store = _recordings if store is None else store
    known: Any = store.get(name)
    if decided is not None and key in decided:
        known = decided[key]
    elif known == "met":
        known = store[name] = _record(run, inputs, weights, opaque, grad) or "plain"
    elif known is None:
        while len(store) >= RECORDINGS:
            store.popitem(last=False)
        store[name] = known = "met"
    else:
        with contextlib.suppress(KeyError):  # another thread's
            store.move_to_end(name)
    if decided is not None:
        decided[key] = known
    if not isinstance(known, _Pair):
        if again and grad:
            return checkpoint(run, *inputs, *opaque, use_reentrant=False)
        return run(*inputs, *opaque)
    if grad:
        return _Replay.apply(known, again, *tensors, *opaque)
    with on_device(tensors[0]), torch._C._AutoDispatchBelowAutograd():
        return known.alone([*tensors, *opaque], device)


def _busy() -> bool:
    """Whether something else than the inputs decides what PyTorch's operators do now."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch.is_autocast_enabled()
        or torch.is_inference_mode_enabled()
        or torch.is_anomaly_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _record(
    run: Callable[..., Any],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    opaque: Sequence[Any],
    grad: bool,
) -> _Pair | None:
    """The function's steps and those of its gradients; None where they cannot be repeated.

    The function runs once more for it, on the same tensors, and its backward pass on gradients of zeros.
    """
    if any(type(x) not in PLAIN for x in (*inputs, *weights)) or any(x._backward_hooks for x in inputs):
        return None
    if any(x._backward_hooks and x.grad_fn is not None for x in weights):  # a computed weight's, which its node keeps
        return None
    leaves = [x.detach().requires_grad_(grad and x.requires_grad) for x in inputs]
    given = [*leaves, *weights, *opaque]
    present = [x for x in given if x is not None]
    if len({id(x) for x in present}) < len(present):
        return None
    forward, kept = _GradTape(given, len(opaque)), _Kept()
    try:
        with _without_hooks(weights):
            return _noted(run, leaves, opaque, given, forward, kept, grad)
    finally:  # autograd's saved tensors hold the hooks, and those the tape, where nothing collects garbage
        forward.tensors.clear()
        kept.tensors.clear()


@contextlib.contextmanager
def _without_hooks(weights: Sequence[Tensor]) -> Iterator[None]:
    """What waits for weights' gradients gets those of replays, and is no step of them."""
    waiting = [(x, x._backward_hooks) for x in weights if x._backward_hooks]
    try:
        for x, _ in waiting:
            x._backward_hooks = None
        yield
    finally:
        for x, hooks in waiting:
            x._backward_hooks = hooks


def _noted(
    run: Callable[..., Any],
    leaves: Sequence[Tensor],
    opaque: Sequence[Any],
    given: Sequence[Any],
    forward: _GradTape,
    kept: _Kept,
    grad: bool,
) -> _Pair | None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        with kept.hooks(forward), forward:
            result = run(*leaves, *opaque)
        outputs = (result,) if isinstance(result, Tensor) else tuple(result)
        if any(forward.known(x) is None or any(x is y for y in given) for x in outputs):
            return None
        alone = forward.finish(result)
        if alone is None or not grad:
            return None if alone is None else _Pair(alone, None, None, (), tuple(x.stride() for x in outputs))
        if not all(x.requires_grad for x in outputs):
            return None
        wanted = tuple(place for place, x in enumerate(given) if x is not None and x.requires_grad)
        upstream, saved = [torch.zeros_like(x) for x in outputs], kept.roots(forward)
        backward = _GradTape([*upstream, *saved.values()])
        for x, base in kept.views(forward):
            backward.viewed(backward.slot(x), backward.reads(base), x, base)
        with backward:
            found = torch.autograd.grad(outputs, [given[place] for place in wanted], upstream, allow_unused=True)
    whole, back = forward.finish((*outputs, *saved.values())), backward.finish(tuple(found))
    if kept.failed or whole is None or back is None:
        return None
    return _Pair(alone, whole, back, wanted, tuple(x.stride() for x in upstream))


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
