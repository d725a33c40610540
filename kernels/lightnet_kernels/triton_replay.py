"""What a function of tensors did is done again without its Python: allocations, torch operators and kernel launches.

A call of the scan makes some 20 tensors and starts 13 kernels; working out their shapes, strides and compiled forms takes
the host longer than the card takes to run them. All that depends on the inputs' layout alone. `replayed` notes it the
second time a layout is met (the first may compile, and fill caches), other bounds of segments at once, and from then on
only repeats the steps.

Unlike a CUDA graph a recording holds no memory and no addresses: every replay allocates anew, frees each tensor after its
last use, and reads whatever tensors it is given.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from .companions import on_device

RECORDINGS = 512  # layouts remembered; packed documents bring new ones with every batch

_local = threading.local()
_recordings: OrderedDict[Any, Any] = OrderedDict()
_layouts: set[Any] = set()  # met so far, but for bounds of segments


def active() -> Tape | None:
    """The tape that records what this thread does, if any."""
    return getattr(_local, "tape", None)


class Tape(TorchDispatchMode):
    """The steps of one call. A slot is a value of a call: an input, a constant, or what a step makes.

    During a replay ``slots`` holds tensors and ``values`` what launches are given for them: addresses on a card, the
    tensors themselves under the interpreter.
    """

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.inputs = len(inputs)
        self.of: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which another tensor may get later
        self.constants: dict[int, Any] = {}
        self.numbers: dict[Any, int] = {}  # of constants that are no tensors
        self.count = 0
        self.steps: list[tuple[Any, ...]] = []
        self.uses: dict[int, int] = {}  # slot -> last step that reads it
        self.failed = False
        for x in inputs:
            self._slot(x)

    def _slot(self, x: Tensor) -> int:
        self.of[id(x)] = weakref.ref(x), self.count
        self.count += 1
        return self.count - 1

    def _known(self, x: Tensor) -> int | None:
        found = self.of.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def _reads(self, x: Any) -> int:
        """Slot of a value that the next step reads. A tensor not seen so far is a constant, kept by the recording."""
        slot = self._known(x) if isinstance(x, Tensor) else self.numbers.get((type(x), x))
        if slot is None:
            if isinstance(x, Tensor):
                slot = self._slot(x)
            else:
                slot = self.numbers[type(x), x] = self.count
                self.count += 1
            self.constants[slot] = x
        self.uses[slot] = len(self.steps)
        return slot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        template = self._template((args, kwargs))
        out = func(*args, **kwargs)
        several = isinstance(out, tuple | list)
        outs = list(out) if several else [out]
        if not all(isinstance(x, Tensor) for x in outs):
            self.failed = True  # a number that Python goes on with
            return out
        if any(x.device.type == "cpu" and y.device.type != "cpu" for x in outs for y in args if isinstance(y, Tensor)):
            self.failed = True  # on its way to a list
        known = [self._known(x) for x in outs]
        written = [any(x is y for y in args) for x in outs]  # in place
        slots = [
            slot if slot is not None and same else self._slot(x)
            for x, slot, same in zip(outs, known, written, strict=True)
        ]
        for slot in slots:
            self.uses.setdefault(slot, len(self.steps))
        quick = None if several or kwargs.get("pin_memory") else _quick(func, args, out)
        if quick is None:
            self.steps.append(("op", func, template, slots if several else slots[0]))
        else:
            do, reads = quick
            self.steps.append(("op", do, (tuple(_Slot(self._reads(x)) for x in reads), {}), slots[0]))
        return out

    def _template(self, x: Any) -> Any:
        """Arguments with tensors as slots: (None, value), (slot,) or a structure of these."""
        if isinstance(x, Tensor):
            return _Slot(self._reads(x))
        if isinstance(x, tuple | list):
            parts = [self._template(y) for y in x]
            return type(x)(parts) if type(x) in (tuple, list) else x
        if isinstance(x, dict):
            return {name: self._template(y) for name, y in x.items()}
        return x

    def launched(self, run: Any, grid: tuple[int, ...], arguments: Sequence[Any], rest: Any) -> None:
        """`run`: what starts the compiled kernel, given the values of `arguments`, see `start`."""
        slots = [self._reads(x) for x in arguments]
        self.steps.append(("launch", run, (*grid, 1, 1)[:3], slots, rest))

    def finish(self, output: Tensor | tuple[Any, ...]) -> Recording | None:
        if self.failed:
            return None
        places: list[int | None] = []
        for x in (output,) if isinstance(output, Tensor) else output:
            slot = self._known(x) if isinstance(x, Tensor) else None
            if x is not None and slot is None:
                return None
            places.append(slot)
        return Recording(self, places, isinstance(output, Tensor))


_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}
_ZERO = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}


def _quick(func: Any, args: Any, out: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]] | None:
    """What gives the same as an operator that allocates or views, in a few microseconds less, and the tensors it takes."""
    if func in _EMPTY:
        return functools.partial(
            torch.empty_strided, tuple(out.shape), out.stride(), dtype=out.dtype, device=out.device
        ), ()
    if func in _ZERO and out.is_contiguous():
        return functools.partial(torch.zeros, tuple(out.shape), dtype=out.dtype, device=out.device), ()
    base = args[0] if args else None
    if func.is_view and isinstance(base, Tensor) and out.dtype == base.dtype and out.layout == torch.strided:
        if out.untyped_storage()._cdata != base.untyped_storage()._cdata:
            return None  # may be a view, and is not: x.to(x.dtype, copy=True)
        size, stride, further = tuple(out.shape), out.stride(), out.storage_offset() - base.storage_offset()

        def view(x: Tensor) -> Tensor:
            return x.as_strided(size, stride, x.storage_offset() + further)

        return view, (base,)
    return None


class _Slot(int):
    """A place in an operator's arguments."""


def _filled(template: Any, slots: list[Any]) -> Any:
    kind = type(template)
    if kind is _Slot:
        return slots[template]
    if kind is tuple or kind is list:
        return kind([_filled(x, slots) for x in template])
    return template


def _has_slots(template: Any) -> bool:
    if isinstance(template, dict):
        return any(map(_has_slots, template.values()))
    return isinstance(template, _Slot) or (isinstance(template, tuple | list) and any(map(_has_slots, template)))


class Recording:
    """A finished tape."""

    def __init__(self, tape: Tape, output: list[int | None], single: bool):
        self.output, self.single = output, single
        self.slots: list[Any] = [None] * tape.count
        for slot, value in tape.constants.items():
            self.slots[slot] = value
        self.values = [x.data_ptr() if isinstance(x, Tensor) else x for x in self.slots]
        kept = {*tape.constants, *(slot for slot in output if slot is not None), *range(tape.inputs)}
        self.on_card = False
        self.steps: list[tuple[Any, ...]] = []
        frees: list[list[int]] = [[] for _ in tape.steps]
        for slot, last in tape.uses.items():
            if slot not in kept:
                frees[last].append(slot)
        for step, free in zip(tape.steps, frees, strict=True):
            if step[0] == "launch":
                _, run, grid, slots, rest = step
                self.on_card = rest is not None
                pick = itemgetter(*slots) if len(slots) > 1 else lambda values, one=slots[0]: (values[one],)
                self.steps.append((run, grid, pick, rest, free))
            else:
                _, func, (args, kwargs), slots = step
                fixed = not _has_slots(args) and not _has_slots(kwargs)
                self.steps.append((func, None, (args, kwargs, fixed), slots, free))

    def __call__(self, inputs: list[Tensor], device: torch.device) -> Any:
        slots, on_card = self.slots.copy(), self.on_card
        slots[: len(inputs)] = inputs
        values = slots
        if on_card:
            values = self.values.copy()
            values[: len(inputs)] = [x.data_ptr() for x in inputs]
        stream = torch._C._cuda_getCurrentRawStream(device.index) if on_card else None
        for do, grid, how, what, free in self.steps:
            if grid is not None:
                do(grid, stream, how(values), what)
            else:
                args, kwargs, fixed = how
                if not fixed:
                    args = _filled(args, slots)
                    kwargs = {name: _filled(x, slots) for name, x in kwargs.items()}
                out = do(*args, **kwargs)
                if type(what) is int:
                    slots[what] = out
                    if on_card:
                        values[what] = out.data_ptr()
                else:
                    for slot, x in zip(what, out, strict=True):
                        slots[slot] = x
                        if on_card:
                            values[slot] = x.data_ptr()
            for slot in free:
                slots[slot] = None
        output = tuple([None if slot is None else slots[slot] for slot in self.output])
        return output[0] if self.single else output


def replayed(
    run: Callable[..., Any], prepare: Callable[..., None] | None = None, shared: bool = False
) -> Callable[..., Any]:
    """A function of tensors, None, numbers and tuples of numbers that returns a new tensor or a tuple of new
    tensors and None. The first is a tensor; its device becomes the current one.

    What it does must follow from its arguments other than tensors, and from the tensors' shapes, strides and dtypes: all
    tensors it reads are arguments or do not change. Where it takes a number out of a tensor (``item``, ``int``, ``bool``)
    or a tensor off the card it is simply run; it must not read a CPU tensor's memory (``tolist``, ``numpy``).

    Args:
        prepare: of the same arguments; fills the caches that ``run`` looks into, which must not happen in a recording.
        shared: whether many calls have the same bounds of segments (the layers of a model, with a batch of packed
            documents): then other bounds of a layout that was met are recorded at once.
    """

    @functools.wraps(run)
    def call(*arguments: Any) -> Any:
        inputs: list[Tensor] = []
        key: list[Any] = [run]
        for x in arguments:
            if isinstance(x, Tensor):
                inputs.append(x)
                key += (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
            else:
                key.append(tuple(x) if type(x) is list else x)
        device = inputs[0].device
        with on_device(inputs[0]):
            if len({id(x) for x in inputs}) < len(inputs):
                return run(*arguments)  # a recording could not tell which of the two a step reads
            name = (*key, device, torch.get_default_dtype())
            known: Any = _recordings.get(name)
            if known is None:
                while len(_recordings) >= RECORDINGS:
                    _recordings.popitem(last=False)
                _recordings[name] = known = "met"
                layout = tuple(x for x in name if type(x) is not tuple)
                if not shared or layout not in _layouts:
                    if len(_layouts) >= RECORDINGS:
                        _layouts.clear()
                    _layouts.add(layout)
                    return run(*arguments)
            if known == "plain" or active() is not None or getattr(knobs.runtime.launch_enter_hook, "calls", None):
                return run(*arguments)
            if known != "met":
                _recordings.move_to_end(name)
                return known(inputs, device)
            if prepare is not None:
                prepare(*arguments)
            tape = Tape(inputs)
            _local.tape = tape
            try:
                with tape:
                    output = run(*arguments)
            finally:
                _local.tape = None
            _recordings[name] = tape.finish(output) or "plain"
            return output

    return call
