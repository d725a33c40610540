"""The progress bar of commands that read or write a lot."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def bar(stage: str, total: int, quiet: bool, unit: str = "B") -> Iterator[Callable[[int], Any]]:
    """A bar on stderr, on a terminal or once the work has lasted a while; gives a function to call with each amount done."""
    from tqdm import tqdm

    interactive = sys.stderr.isatty()
    with tqdm(
        desc=stage,
        total=total,
        unit=unit,
        unit_scale=True,
        disable=quiet,
        delay=1 if interactive else 10,
        mininterval=0.2 if interactive else 30,
        leave=False,
        file=sys.stderr,
    ) as shown:
        yield shown.update
