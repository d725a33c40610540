"""Which global sample positions a data-parallel rank reads at each step."""

from collections.abc import Callable, Iterator

from lightnet_data.errors import DataError


class GlobalBatchSampler:
    """Micro-batches of global sample positions for one data-parallel rank; a ``batch_sampler`` for a DataLoader.

    A step with batch size b consumes the positions [start, start + b), where start is the sum of the batch sizes of
    all earlier steps. Micro-batch m of rank r takes ``start + (m * data_parallel_size + r) * micro_batch`` and the
    ``micro_batch - 1`` positions after it, so the positions of a step, over all ranks, are the same for every layout
    and a restart at step s continues where a run that was not stopped would be.

    Args:
        batch_size_at: global batch size in samples, constant or as a function of the step (a batch ramp).
        micro_batch: samples per rank and forward pass.
        data_parallel_rank, data_parallel_size: this rank's place among the ranks that read different samples.
        start_step: first step to yield.
        end_step: one past the last step, or None for endless.

    Raises:
        DataError: a batch size does not divide into micro-batches over the ranks. Every step is checked at once when
            ``end_step`` is given, otherwise when the step is reached.
    """

    def __init__(
        self,
        batch_size_at: int | Callable[[int], int],
        micro_batch: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        start_step: int = 0,
        end_step: int | None = None,
    ) -> None:
        if micro_batch < 1 or data_parallel_size < 1 or not 0 <= data_parallel_rank < data_parallel_size:
            raise DataError(
                f"micro_batch {micro_batch}, data-parallel rank {data_parallel_rank} of {data_parallel_size}: "
                "micro_batch and size must be at least 1 and the rank below the size"
            )
        if start_step < 0 or (end_step is not None and end_step < start_step):
            raise DataError(f"steps {start_step} to {end_step}: need 0 <= start_step <= end_step")
        self.batch_size_at = batch_size_at if callable(batch_size_at) else _Constant(batch_size_at)
        self.micro_batch = micro_batch
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.start_step = start_step
        self.end_step = end_step
        for step in range(start_step, start_step + 1 if end_step is None else end_step):
            self.micro_batches_at(step)

    def micro_batches_at(self, step: int) -> int:
        """Number of micro-batches of this rank (gradient accumulation) at ``step``."""
        batch, unit = self.batch_size_at(step), self.micro_batch * self.data_parallel_size
        if batch < unit or batch % unit:
            nearest = max(unit, round(batch / unit) * unit)
            raise DataError(
                f"batch size {batch} at step {step} is not a multiple of micro_batch {self.micro_batch} x "
                f"data-parallel size {self.data_parallel_size} = {unit}; nearest: {nearest}"
            )
        return batch // unit

    def start_at(self, step: int) -> int:
        """First global sample position of ``step``: the number of samples that all earlier steps consumed."""
        if isinstance(self.batch_size_at, _Constant):
            return step * self.batch_size_at.value
        return sum(map(self.batch_size_at, range(step)))

    def __iter__(self) -> Iterator[list[int]]:
        step, start = self.start_step, self.start_at(self.start_step)
        while self.end_step is None or step < self.end_step:
            for micro in range(self.micro_batches_at(step)):
                first = start + (micro * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch
                yield list(range(first, first + self.micro_batch))
            start += self.batch_size_at(step)
            step += 1

    def __len__(self) -> int:
        """Number of micro-batches until ``end_step``."""
        if self.end_step is None:
            raise TypeError("an endless GlobalBatchSampler has no length")
        return sum(map(self.micro_batches_at, range(self.start_step, self.end_step)))


class _Constant:
    """A constant batch size as a picklable function of the step."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, step: int) -> int:
        return self.value
