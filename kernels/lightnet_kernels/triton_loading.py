"""Triton's launchers in several threads.

A launcher is an extension module, and all have one name. Python gives one that the process has loaded before as the module of
that name, with the functions of whichever was asked for last: until Triton looks at it, another thread may have asked for
another one, and a kernel is started with arguments that are not its own. Here every load gives a module of its own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import ModuleType

from triton.runtime import build

_lock = threading.RLock()


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)  # a thread that held it is not there


def apart(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """`load` one after the other, and what it gives as a module that no later load changes."""

    @functools.wraps(load)
    def loaded(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with _lock:
            own.__dict__.update(vars(load(name, path)))
        return own

    return loaded


def load_apart() -> None:
    """Make Triton do so; not since 3.7, whose launchers are no modules."""
    load = getattr(build, "_load_module_from_path", None)
    if load is not None and not hasattr(load, "__wrapped__"):
        build._load_module_from_path = apart(load)
