"""What the scan's companions share: which backend serves a call, and the guard around a launch.

A companion is a function of ordinary tensors with a PyTorch form, its definition, and Triton kernels that read and write
each tensor once. `backend="auto"` is Triton on a GPU that has it, PyTorch elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .checks import check_backend
from .compiling import constant_result

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


TRITON = (3, 6)  # and later; 3.6 ran on cards, of 3.7 to 3.9 interpreter and compiler were tried


@functools.cache
def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return str(importlib.import_module("triton").__version__)
    except (ImportError, AttributeError):
        return "that does not import"


@functools.cache
def kernels(module: str) -> Any:
    """A module of Triton kernels or None, imported on first use: Triton is not a core dependency."""
    if (_numbers(_triton_version()) or (0,)) < TRITON:
        return None
    try:
        return importlib.import_module(f".{module}", __package__)
    except (ImportError, AttributeError):  # a Triton that this code does not know
        return None


def _numbers(version: str | None) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return tuple(map(int, found.groups())) if found else ()


@constant_result
def without_triton() -> str:
    """What `backend` "triton" does not take where `kernels` are None, for messages."""
    version = _triton_version()
    wanted = "machines without triton " + ".".join(map(str, TRITON)) + " or later"
    return wanted if version is None else f"{wanted} (triton {version} is installed)"


@functools.cache
def _say_once(name: str, reason: str) -> None:
    warnings.warn(
        f"{name}: Triton kernels do not take {reason}; PyTorch serves this call, slower (backend='torch' says that it is meant)",
        stacklevel=2,
    )


@constant_result
def fallen_back(name: str, reason: str) -> None:
    """Warn, once for each reason, that "auto" is not Triton on a GPU."""
    _say_once(name, reason)


def choose_triton(name: str, backend: str, module: str, *tensors: Tensor | None, limit: str | None = None) -> bool:
    """Whether Triton serves this call.

    Args:
        name: the public function, for messages.
        backend: auto, torch or triton.
        module: the module that holds the kernels.
        tensors: the inputs.
        limit: what of the arguments the kernels do not do, if anything.

    Raises:
        ValueError: unknown backend, or "triton" where it cannot serve.
    """
    backend = check_backend(name, backend, ("auto", "torch", "triton"))
    given = [x for x in tensors if x is not None]
    if backend == "torch" or (backend == "auto" and given[0].device.type != "cuda"):
        return False
    reason = limit or _unsupported(given, module)
    if reason and backend == "triton":
        raise ValueError(
            f"{name}: backend 'triton' does not take {reason}; use backend='auto', which falls back to 'torch' there"
        )
    if reason:
        fallen_back(name, reason)
    return reason is None


def _unsupported(tensors: list[Tensor], module: str) -> str | None:
    device = tensors[0].device
    for x in tensors:
        if x.dtype not in DTYPES:
            return f"dtype {x.dtype}"
        if x.device != device:
            return f"tensors on {device} and {x.device}"
    return unsupported_device(module, device.type, device.index)


@constant_result
def unsupported_device(module: str, kind: str, index: int | None) -> str | None:
    """Why a module of Triton kernels does not run on such a device, or None."""
    found = kernels(module)
    if found is None:
        return without_triton()
    if kind == "cpu":
        return None if found.triton.knobs.runtime.interpret else "tensors on a CPU (except under TRITON_INTERPRET=1)"
    if kind != "cuda" or torch.version.hip is not None:
        return f"tensors on {kind}"
    if torch.cuda.get_device_capability(index)[0] < 8:
        return f"the card {torch.cuda.get_device_name(index)}, older than sm_80"
    return None


_HERE = contextlib.nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[None]:
    """Launches go to the device of `x`, whatever the current one is."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)
