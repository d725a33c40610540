"""Averages of a run's checkpoints, for export: the last k, or all that are kept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from . import store


def chosen(run: Path, which: str) -> list[Path]:
    """The checkpoints of a run that are to be averaged, oldest first; damaged ones are passed over with a warning.

    Args:
        run: a run folder or its ``checkpoints``.
        which: ``last:K`` or ``all``.

    Raises:
        UserError: not of that form, or the run has not so many whole checkpoints.
    """
    kind, _, number = which.partition(":")
    count = int(number) if kind == "last" and number.isdigit() else 0
    if which != "all" and count < 1:
        raise UserError(f"--average {which}: give last:K with K of 1 or more, or all")
    root = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    whole: list[Path] = []
    for folder in reversed(store.listed(root)):
        if count and len(whole) == count:
            break
        try:
            store.verify(folder)
            whole.insert(0, folder)
        except ValueError as error:
            print(f"warning: passing over a damaged checkpoint: {error}", file=sys.stderr)
    if len(whole) < max(count, 1):
        raise UserError(
            f"{run}: holds {len(whole)} whole checkpoints, {count or 'at least 1'} are to be averaged; ask for fewer, and "
            "keep more with checkpoint.keep_last"
        )
    return whole


class Average:
    """Means of tensors over several sources of the same names and shapes; one tensor at a time.

    Args:
        parts: each gives a full tensor with ``read(name)``.
        shapes: of the tensors, by name.
    """

    def __init__(self, parts: Sequence[Any], shapes: dict[str, tuple[int, ...]]):
        self.parts, self.shapes = parts, shapes
        self.as_trained = parts[0]

    def read(self, name: str) -> Tensor:
        """The mean, summed in fp64, fp32 (fp64 stays): rounding to a run's bf16 is for whoever writes it."""
        first = self.parts[0].read(name)
        total = first.double()
        for part in self.parts[1:]:
            total += part.read(name)
        return (total / len(self.parts)).to(torch.promote_types(first.dtype, torch.float32))
