"""Tests of kernels under Triton's interpreter, on CPU tensors.

TRITON_INTERPRET must be set before triton is imported, which other tests of a process may have done: such a file runs
itself again in another process, a fork of one that has imported Triton and the kernels for all such files.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.forks import Forks

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="run by test_table_under_the_interpreter")
outside = pytest.mark.skipif(INSIDE, reason="this is the inner run")
if INSIDE:
    from . import quick_interpreter

    quick_interpreter.install()

# Another test of this process may have turned torch.compile off.
FORKS = Forks("lightnet_kernels.triton_ops", TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="0")


def run_inside(file: str, *options: str) -> None:
    """Run a file's tests again, those marked `inside` too; they must pass.

    Args:
        options: of pytest; without -m slow ones are left out.
    """
    pytest.importorskip("triton")
    options = options if "-m" in options else ("-m", "not slow", *options)
    arguments = ["-q", "-p", "no:cacheprovider", *options, file]
    done = FORKS.run("tests.unit.kernels.interpreter:main", *arguments, timeout=280)
    assert done.code == 0, done.output[-4000:]


def kernels_on_cpu(replace: Callable[..., Any]) -> None:
    """Have operators of a block use Triton's kernels for CPU tensors, too.

    Args:
        replace: as ``setattr``.
    """
    for name, choice, at in (("scan", "choose_backend", 0), ("companions", "choose_triton", 1)):
        choose = getattr(sys.modules[f"lightnet_kernels.{name}"], choice)

        def by(*given: Any, choose: Callable[..., Any] = choose, at: int = at, **options: Any) -> Any:
            return choose(*given[:at], "triton", *given[at + 1 :], **options)

        for user in (sys.modules[f"lightnet_kernels.{user}"] for user in ("scan", "norms", "swiglu", "modulation")):
            if getattr(user, choice, None) is choose:
                replace(user, choice, by)


def main() -> int:
    """Of the fork."""
    return int(pytest.main(sys.argv[1:]))
