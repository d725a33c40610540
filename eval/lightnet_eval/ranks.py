"""Processes that share an evaluation: every one of them prepares all of it, does its part, and learns all results.

So a rank without any work is no special case, and what is measured does not depend on how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightnet_llm.errors import UserError

T = TypeVar("T")


class Ranks:
    """This process among those of a launcher (torchrun, accelerate, the deepspeed launcher), or alone."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None):
        self.rank, self.size, self.group = rank, size, group

    @classmethod
    def join(cls) -> Ranks:
        """Meet the other processes where a launcher started several; uses gloo, as only results travel."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 or "RANK" not in os.environ:
            return cls()
        dist.init_process_group("gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def device(self) -> str | None:
        """A CUDA device of this process's own, where there are several processes; None: the default one."""
        if self.size == 1 or not torch.cuda.is_available():
            return None
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"

    def gather(self, part: Any) -> list[Any]:
        """Every rank's object, in rank order, on every rank."""
        if self.size == 1:
            return [part]
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part, group=self.group)
        return parts

    def share(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result of its part, in rank order, on every rank.

        Raises:
            what ``work`` raised here; UserError: another rank's failed, so that nobody waits for it.
        """
        if self.size == 1:
            return [work()]
        try:
            done: tuple[Any, str] = work(), ""
        except Exception as error:
            self.gather((None, f"{type(error).__name__}: {error}"))
            raise
        parts = self.gather(done)
        for rank, (_, problem) in enumerate(parts):
            if problem:
                raise UserError(f"process {rank}: {problem.splitlines()[0]}")
        return [part for part, _ in parts]

    def first(self, value: Any) -> Any:
        """Rank 0's object, on every rank."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.barrier(group=self.group)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Rank 0 goes first and fills caches on disk; the others find them filled."""
        if self.rank:
            self.barrier()
        try:
            yield
        finally:
            if not self.rank:
                self.barrier()
