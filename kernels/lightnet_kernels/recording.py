"""What a function of tensors did, noted step by step and done again without its Python: allocations, views, operators, kernels.

Unlike a CUDA graph a recording holds no memory and no addresses: every replay allocates anew, frees each tensor after its
last use, and reads whatever tensors it is given.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

_local = threading.local()


def active() -> Tape | None:
    """The tape that records this thread's launches of kernels, if any."""
    return getattr(_local, "tape", None)


@contextlib.contextmanager
def on_tape(tape: Tape) -> Iterator[None]:
    """Kernels that are launched inside are steps of this tape."""
    before, _local.tape = active(), tape
    try:
        yield
    finally:
        _local.tape = before


def python_looks() -> None:
    """Said where Python takes numbers out of a tensor's memory: steps that follow from them are not those of others."""
    tape = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    if isinstance(tape, Tape):
        tape.failed = True


class Slot(int):
    """A place in an operator's arguments: the value of that number."""


class Tape(TorchDispatchMode):
    """The steps of one call. A slot is a value of a call: an input, a constant, or what a step makes.

    Steps: ("op", function, arguments, keywords, slot, slots or None), ("view", slot, base, size, stride, further elements)
    and ("launch", what starts a kernel, grid, slots, constants).
    """

    def __init__(self, inputs: Sequence[Any]):
        super().__init__()
        self.inputs = len(inputs)
        self.of: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id, which another tensor may get later
        self.constants: dict[int, Any] = {}
        self.numbers: dict[Any, int] = {}  # of constants that are no tensors
        self.count = 0
        self.steps: list[tuple[Any, ...]] = []
        self.layouts: dict[int, tuple[Any, ...]] = {}  # (size, stride) of a slot
        self.failed = False
        for x in inputs:
            self.slot(x)

    def slot(self, x: Tensor | None) -> int:
        """A new one."""
        if x is not None:
            self.of[id(x)] = weakref.ref(x), self.count
            self.layouts[self.count] = tuple(x.shape), x.stride()
        self.count += 1
        return self.count - 1

    def known(self, x: Tensor) -> int | None:
        """The slot of a tensor."""
        found = self.of.get(id(x))
        return found[1] if found is not None and found[0]() is x else None

    def reads(self, x: Any) -> int:
        """Slot of a value that the next step reads. A tensor not seen so far is a constant, kept by the recording."""
        slot = self.known(x) if isinstance(x, Tensor) else self.numbers.get((type(x), x))
        if slot is None:
            if isinstance(x, Tensor):
                slot = self.slot(x)
            else:
                slot = self.numbers[type(x), x] = self.count
                self.count += 1
            self.constants[slot] = x
        return slot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        templates = self._template(args), self._template(kwargs)
        if func.namespace == "c10d":  # a collective, which writes what it was given
            run = func if _on_callers_stream(func, args, kwargs) else _waited_for(func)
            self.steps.append(("op", run, *templates, None))
            return run(*args, **kwargs)
        out = func(*args, **kwargs)
        several = isinstance(out, tuple | list)
        outs = list(out) if several else [out]
        if not all(isinstance(x, Tensor) for x in outs):
            # A number that Python goes on with; that of promote_types follows from the layouts.
            self.failed |= func is not _aten.promote_types.default
            return out
        if any(x.device.type == "cpu" and y.device.type != "cpu" for x in outs for y in args if isinstance(y, Tensor)):
            self.failed = True  # on its way to a list
        self.failed |= torch.Tag.dynamic_output_shape in func.tags  # a shape that follows from values
        known = [self.known(x) for x in outs]
        written = [any(x is y for y in args) for x in outs]  # in place
        slots = [
            slot if slot is not None and same else self.slot(x)
            for x, slot, same in zip(outs, known, written, strict=True)
        ]
        if not kwargs.get("pin_memory") and args and all(_is_view(func, args[0], x) for x in outs):
            base = self.reads(args[0])
            for slot, x in zip(slots, outs, strict=True):
                self.viewed(slot, base, x, args[0])
            return out
        self.steps.append(self.step(func, templates, out, slots if several else slots[0]))
        return out

    def viewed(self, slot: int, base: int, x: Tensor, of: Tensor) -> None:
        """`x` is a view of the tensor in slot `base`."""
        further = x.storage_offset() - of.storage_offset()
        self.steps.append(("view", slot, base, tuple(x.shape), x.stride(), further))

    def step(self, func: Any, templates: tuple[Any, Any], out: Any, slots: int | list[int]) -> tuple[Any, ...]:
        """What is repeated of an operator's call."""
        make = None if isinstance(slots, list) or templates[1].get("pin_memory") else _maker(func, out)
        return ("op", make, (), {}, slots) if make is not None else ("op", func, *templates, slots)

    def _template(self, x: Any) -> Any:
        """Arguments with tensors as slots."""
        if isinstance(x, Tensor):
            return Slot(self.reads(x))
        if isinstance(x, tuple | list):
            parts = [self._template(y) for y in x]
            return type(x)(parts) if type(x) in (tuple, list) else x
        if isinstance(x, dict):
            return {name: self._template(y) for name, y in x.items()}
        return x

    def launched(self, run: Any, grid: tuple[int, ...], arguments: Sequence[Any], rest: Any) -> None:
        """`run`: what starts the compiled kernel, called with (grid, stream, values of `arguments`, rest)."""
        self.steps.append(("launch", run, (*grid, 1, 1)[:3], [self.reads(x) for x in arguments], rest))

    def finish(self, output: Tensor | tuple[Any, ...]) -> Recording | None:
        """The recording of a call that returned `output`; None where it cannot be repeated."""
        if self.failed:
            return None
        places: list[int | None] = []
        for x in (output,) if isinstance(output, Tensor) else output:
            slot = self.known(x) if isinstance(x, Tensor) else None
            if x is not None and slot is None:
                return None
            places.append(slot)
        return Recording(self, places, isinstance(output, Tensor))


_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}
_ZERO = {_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default}
# The same, called with less work.
_DIRECT = {_aten.mm.default: torch.mm, _aten.add.Tensor: torch.add, _aten.mul.Tensor: torch.mul}


def _on_callers_stream(collective: Any, args: Any, kwargs: Any) -> bool:
    """Whether a collective is a synchronous one of NCCL: it is in order with all else, and its work is a null pointer."""
    names = [argument.name for argument in collective._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = [y for x in given.values() for y in (x if isinstance(x, list | tuple) else [x]) if isinstance(y, Tensor)]
    return given.get("async_op", True) is False and all(x.device.type == "cuda" for x in tensors)


def _waited_for(collective: Any) -> Callable[..., Any]:
    """A collective that is over, for the caller's stream, when the next step begins."""

    def call(*args: Any, **kwargs: Any) -> Any:
        out = collective(*args, **kwargs)
        (out[-1] if isinstance(out, tuple) else out).wait()  # the work, beside tensors or alone
        return out

    return call


def _maker(func: Any, out: Tensor) -> Callable[..., Tensor] | None:
    """What gives the same as an operator that only allocates, in a few microseconds less."""
    if func in _EMPTY:
        return functools.partial(
            torch.empty_strided, tuple(out.shape), out.stride(), dtype=out.dtype, device=out.device
        )
    if func in _ZERO and out.is_contiguous():
        return functools.partial(torch.zeros, tuple(out.shape), dtype=out.dtype, device=out.device)
    return None


def _is_view(func: Any, base: Any, out: Tensor) -> bool:
    """Whether the result is the base's memory under another shape; x.to(x.dtype, copy=True) may be a view, and is not."""
    if not (func.is_view or func is _aten._unsafe_view.default) or not isinstance(base, Tensor):
        return False
    same = out.dtype == base.dtype and out.layout == base.layout == torch.strided
    return same and out.untyped_storage()._cdata == base.untyped_storage()._cdata


def _reads(step: tuple[Any, ...]) -> list[int]:
    if step[0] == "view":
        return [step[2]]
    if step[0] == "launch":
        return list(step[3])
    return _slots(step[2:4])


def _slots(template: Any) -> list[int]:
    if isinstance(template, Slot):
        return [template]
    parts = template.values() if isinstance(template, dict) else template if isinstance(template, tuple | list) else ()
    return [slot for part in parts for slot in _slots(part)]


class Recording:
    """A finished tape as a Python function of straight lines.

    Attributes:
        source: its text; `names` are the values that it mentions.
        makes: number of operators, views and launches.
    """

    def __init__(self, tape: Tape, output: list[int | None], single: bool):
        steps = _straightened(tape, {slot for slot in output if slot is not None})
        self.names: dict[str, Any] = {"stream_of": getattr(torch._C, "_cuda_getCurrentRawStream", None)}
        for slot, value in tape.constants.items():
            self.names[f"v{slot}"] = value
            if isinstance(value, Tensor):
                self.names[f"p{slot}"] = value.data_ptr()
        fixed = {*tape.constants, *(slot for slot in output if slot is not None)}
        last = {slot: number for number, step in enumerate(steps) for slot in _reads(step)}
        on_card = any(step[0] == "launch" and step[4] is not None for step in steps)
        lines = ["stream = stream_of(device.index)"] if on_card else []
        self.pointers: set[int] = set()
        for number, step in enumerate(steps):
            lines += self._lines(step, tape, number)
            made = step[4] if step[0] == "op" else step[1] if step[0] == "view" else ()
            here = {*_reads(step), *(made if isinstance(made, list) else [made] if isinstance(made, int) else [])}
            free = sorted(s for s in here if last.get(s, number) == number and s not in fixed)
            if free:
                lines.append(f"del {', '.join(f'v{slot}' for slot in free)}")
        results = ["None" if slot is None else f"v{slot}" for slot in output]
        lines.append(f"return {results[0] if single else '(' + ', '.join(results) + ',)'}")
        inputs = ", ".join(["device", "given", *(f"v{slot}=v{slot}" for slot in tape.constants)])
        lines = ["".join(f"v{slot}, " for slot in range(tape.inputs)) + "= given", "given.clear()", *lines]
        self.source = "\n    ".join([f"def replay({inputs}):", *lines])
        self.makes = len(steps)
        exec(self.source, self.names)
        self.replay: Callable[..., Any] = self.names["replay"]

    def __call__(self, inputs: list[Any], device: torch.device) -> Any:
        """The function's results. The list is emptied, so that an input nobody else holds goes after its last use."""
        return self.replay(device, inputs)

    def _name(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _text(self, template: Any) -> str:
        if isinstance(template, Slot):
            return f"v{int(template)}"
        if template is None or type(template) in (int, bool):
            return repr(template)
        if type(template) in (tuple, list) and _slots(template):
            inner = ", ".join(map(self._text, template))
            return f"[{inner}]" if type(template) is list else f"({inner},)"
        return self._name(template)

    def _lines(self, step: tuple[Any, ...], tape: Tape, number: int) -> list[str]:
        if step[0] == "view":
            _, slot, base, size, stride, further = step
            more = f"v{base}.storage_offset(){f' + {further}' if further else ''}"
            return [f"v{slot} = v{base}.as_strided({size}, {stride}, {more})"]
        if step[0] == "op":
            _, func, args, kwargs, slots = step
            text = [*map(self._text, args), *(f"{name}={self._text(x)}" for name, x in kwargs.items())]
            to = ", ".join(f"v{slot}" for slot in slots) + "," if isinstance(slots, list) else f"v{slots}"
            call = f"{self._name(_DIRECT.get(func, func))}({', '.join(text)})"
            return [call if slots is None else f"{to} = {call}"]
        _, run, grid, slots, rest = step
        tensors = [x for x in dict.fromkeys(slots) if x not in tape.constants or isinstance(tape.constants[x], Tensor)]
        names, lines = dict.fromkeys(slots, "v"), []
        if rest is not None:  # addresses; under the interpreter the tensors themselves
            for slot in tensors:
                names[slot] = "p"
                if slot not in tape.constants and slot not in self.pointers:
                    self.pointers.add(slot)
                    lines.append(f"p{slot} = v{slot}.data_ptr()")
        values = "".join(f"{names[slot]}{slot}, " for slot in slots)
        stream = "stream" if rest is not None else "None"
        return [*lines, f"{self._name(run)}({grid}, {stream}, ({values}), {self._name(rest)})"]


def roots(steps: list[tuple[Any, ...]]) -> dict[int, tuple[int, int]]:
    """Of each view, the slot below that is none, and how many elements further it starts."""
    below: dict[int, tuple[int, int]] = {}
    for step in steps:
        if step[0] == "view":
            root, offset = below.get(step[2], (step[2], 0))
            below[step[1]] = root, offset + step[5]
    return below


def _straightened(tape: Tape, wanted: set[int]) -> list[tuple[Any, ...]]:
    """Views of views as views of what lies below, each taken once, and nothing that nobody reads."""
    below, same, found, steps = roots(tape.steps), dict[int, int](), dict[Any, int](), []
    for step in tape.steps:
        if step[0] == "view":
            _, slot, _, size, stride, _ = step
            root, offset = below[slot]
            first = root if offset == 0 and tape.layouts[root] == (size, stride) else None
            first = found.setdefault((root, offset, size, stride), slot) if first is None else first
            if first != slot and slot not in wanted:
                same[slot] = first
                continue
            step = ("view", slot, root, size, stride, offset)
        elif step[0] == "op":
            step = (*step[:2], *_renamed(step[2:4], same), step[4])
        else:
            step = (*step[:3], [same.get(slot, slot) for slot in step[3]], step[4])
        steps.append(step)
    kept, needed = [], set(wanted)
    for step in reversed(steps):
        unread = isinstance(step[1], int) and step[1] not in needed  # a view
        unread = unread or (isinstance(step[1], functools.partial) and step[4] not in needed)  # an allocation
        if not unread:
            needed.update(_reads(step))
            kept.append(step)
    return kept[::-1]


def _renamed(template: Any, same: dict[int, int]) -> Any:
    if isinstance(template, Slot):
        return Slot(same.get(template, template))
    if isinstance(template, dict):
        return {name: _renamed(x, same) for name, x in template.items()}
    return type(template)(_renamed(x, same) for x in template) if type(template) in (tuple, list) else template
