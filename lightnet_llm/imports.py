"""How processes of a run import torch, DeepSpeed and megatron-core sooner. Needs the standard library alone."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


def without_compiler() -> None:
    """For this process and those it starts, unless the user says otherwise: no run compiles anything by torch.compile, and
    megatron-core's functions under it import the whole of TorchInductor."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@contextmanager
def uncollected() -> Iterator[None]:
    """While modules are imported (a million objects that stay), do not look through them for garbage over and over.

    That takes a sixth of the time. Also a decorator of functions that import.
    """
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()
