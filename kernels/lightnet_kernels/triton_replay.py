"""What a function of tensors does is done again without its Python: see `recording`.

A call of the scan makes some 20 tensors and starts 13 kernels; working out their shapes, strides and compiled forms takes
the host longer than the card takes to run them. All that depends on the inputs' layout alone. `replayed` notes it the
second time a layout is met (the first may compile, and fill caches), other bounds of segments at once, and from then on
only repeats the steps.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence  # noqa: F401  (torch.library looks up wrapped functions' annotations here)
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from .checks import check_cu_seqlens
from .companions import on_device
from .recording import Tape, active, on_tape
from .triton_launch import only_compiled

RECORDINGS = 512  # layouts remembered; packed documents bring new ones with every batch

_recordings: OrderedDict[Any, Any] = OrderedDict()
_layouts: set[Any] = set()  # met so far, but for bounds of segments


def by_bounds(name: str, run: Callable[..., Any], at: int, like: int = 0) -> Callable[..., Any]:
    """An operator's function whose argument `at` is cu_seqlens, from one that takes the boundaries as a list.

    They are checked inside, where torch.compile does not look: free where cu_seqlens is on the CPU or was met in the call
    before, else the one thing that waits for the device.

    Args:
        name: the public function, for messages.
        like: place of a tensor [B, N, ..].
    """

    def call(*arguments: Any) -> Any:
        bounds = check_cu_seqlens(name, arguments[at], *arguments[like].shape[:2])
        return run(*arguments[:at], bounds, *arguments[at + 1 :])

    return call


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
            if len({id(x) for x in inputs}) < len(inputs) or only_compiled():
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
            with on_tape(tape), tape:
                output = run(*arguments)
            _recordings[name] = tape.finish(output) or "plain"
            return output

    return call
