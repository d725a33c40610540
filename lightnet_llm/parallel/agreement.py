"""Decisions that all ranks take alike (law 6 of a run)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import UserError

T = TypeVar("T")


class Agreement:
    """Small exchanges on the CPU between all ranks.

    Args:
        group: a process group of all ranks whose backend takes CPU tensors.
    """

    def __init__(self, group: Any):
        self.group, self.rank = group, dist.get_rank()

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 and give its result to all; its user-facing error is raised on all."""
        box: list[Any] = [None, None]
        if self.rank == 0:
            try:
                box[0] = action()
            except (UserError, OSError, ValueError) as error:
                box[1] = str(error)
        dist.broadcast_object_list(box, src=0, group=self.group)
        if box[1] is not None:
            raise UserError(box[1], shared=True)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether any rank raised its flag."""
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return bool(value)

    def sum(self, number: int) -> int:
        """Sum of a number over all ranks."""
        value = torch.tensor(number)
        dist.all_reduce(value, group=self.group)
        return int(value)

    def gather(self, value: T) -> list[T]:
        """What every rank gave, in the order of ranks, on all of them."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def log(self, message: str) -> None:
        """A line on stderr, from rank 0 alone."""
        if self.rank == 0:
            print(message, file=sys.stderr, flush=True)
