"""What torch.compile has to know of functions, said without importing the compiler, which takes as long as torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def constant_result(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result`: called while the compiler looks, whose result then stands."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable`, at the first call."""
    return _disable_dynamo(function)
