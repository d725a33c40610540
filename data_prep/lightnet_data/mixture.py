"""Several data sets mixed by weight; which one a sample comes from is a function of its position alone.

A stage of constant weights is cut into blocks of 1,000 samples. After n samples at the end of a block, source s has given
``floor(W[s] * n) - floor(W[s - 1] * n)`` of them, W the cumulative shares as exact fractions: the floor or the ceiling of its
share of n, and never less than a block before, as every share of a block is 0 or at least one sample. Within a block the
samples of a source are spread evenly; a stage that ends within one leaves the rest of it out. So the source at any
position, and which of its samples it is, are computed without a walk from the start.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data.dataset import PackedTokens, Sample
from lightnet_data.errors import DataError

BLOCK = 1000  # samples; a source with a smaller share than one in so many makes blocks longer
SMALLEST_SHARE = Fraction(1, 100_000)
_KEPT_BLOCKS = 4


@dataclass(frozen=True)
class Stage:
    """Weights in force from the sample at position ``start`` on, until the next stage's start."""

    start: int
    weights: Mapping[str, float]


@lru_cache(maxsize=32)
def spread(counts: tuple[int, ...]) -> NDArray[np.int64]:
    """An even order of ``counts[s]`` samples of each source s: the source of each place, int64 [sum(counts)].

    Each source's count is within one of its share of every prefix. The next sample of a source may come once its share
    has begun and must before its share is over; the earliest deadline goes first, which keeps all of them (Baruah et al.,
    "Proportionate progress", 1996, for one resource).
    """
    length, given = sum(counts), [0] * len(counts)
    active = [source for source, count in enumerate(counts) if count]
    order = np.empty(length, dtype=np.int64)
    for place in range(length):
        _, source = min(
            (-(-(given[source] + 1) * length // counts[source]), source)
            for source in active
            if given[source] * length < counts[source] * (place + 1)
        )
        order[place] = source
        given[source] += 1
    order.flags.writeable = False  # it is shared
    return order


class Schedule:
    """Which source, and which of its samples, each position takes.

    Weights are shares of the samples, and so of the tokens, as all samples have the same length. They are taken as the
    decimal numbers they are written as, and divided by their sum. A later stage goes on where each source stands:
    nothing is repeated or left out.

    Args:
        names: the sources.
        stages: ascending by start, the first at 0; a source that a stage does not name has weight 0 in it.

    Raises:
        DataError: an unknown name, a weight that is negative, not finite or too small, none above 0, stages out of order.
    """

    def __init__(self, names: Sequence[str], stages: Sequence[Stage]) -> None:
        self.names = list(names)
        if not stages or stages[0].start != 0:
            raise DataError("a mixture needs weights from the first sample on")
        for before, after in pairwise(stages):
            if after.start <= before.start:
                raise DataError(
                    f"stages of a mixture begin at samples {before.start} and {after.start}: each must begin after the "
                    "one before, by a sample at least"
                )
        ends = [stage.start for stage in stages[1:]]
        self._stages = [_Stage(self.names, stage) for stage in stages]
        self._base = [np.zeros(len(self.names), dtype=np.int64)]  # samples each source gave before each stage
        for stage, end in zip(self._stages, ends, strict=False):
            self._base.append(self._base[-1] + stage.given(end - stage.start))

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(source, position within the source) of the sample at ``position``."""
        number = self._stage_at(position)
        source, place = self._stages[number].at(position - self._stages[number].start)
        return source, int(self._base[number][source]) + place

    def given(self, position: int) -> dict[str, int]:
        """Samples of each source among the first ``position`` samples."""
        number = self._stage_at(position)
        counts = self._base[number] + self._stages[number].given(position - self._stages[number].start)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def _stage_at(self, position: int) -> int:
        return max(number for number, stage in enumerate(self._stages) if stage.start <= position)


class _Stage:
    """One stage, its positions counted from its start."""

    def __init__(self, names: list[str], stage: Stage) -> None:
        self.start = stage.start
        shares = _shares(names, stage)
        self._whole = lcm(*(share.denominator for share in shares))
        self._bounds = [0]  # cumulative shares times the common denominator
        for share in shares:
            self._bounds.append(self._bounds[-1] + int(share * self._whole))
        smallest = min(share for share in shares if share)
        self._block = BLOCK * -(-1 // (BLOCK * smallest))
        self._kept: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def at(self, place: int) -> tuple[int, int]:
        """(source, samples of it before this one in the stage)."""
        block, rest = divmod(place, self._block)
        sources, ranks = self._order(block)
        return int(sources[rest]), int(ranks[rest])

    def given(self, count: int) -> NDArray[np.int64]:
        """Samples of each source among the first ``count``, int64 [sources]."""
        block, rest = divmod(count, self._block)
        before = self._given_at_bound(block * self._block)
        return before + np.bincount(self._order(block)[0][:rest], minlength=len(before)) if rest else before

    def _given_at_bound(self, count: int) -> NDArray[np.int64]:
        return np.diff([bound * count // self._whole for bound in self._bounds]).astype(np.int64)

    def _order(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each place of a block, and samples of it before that place in the stage, int64 [block] each."""
        if block not in self._kept:
            while len(self._kept) >= _KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]
            before = self._given_at_bound(block * self._block)
            sources = spread(tuple((self._given_at_bound((block + 1) * self._block) - before).tolist()))
            ranks = np.empty(len(sources), dtype=np.int64)
            for source, count in enumerate(before):
                own = np.flatnonzero(sources == source)
                ranks[own] = count + np.arange(len(own))
            self._kept[block] = sources, ranks
        return self._kept[block]


def _shares(names: list[str], stage: Stage) -> list[Fraction]:
    unknown = [name for name in stage.weights if name not in names]
    if unknown:
        raise DataError(f"a stage of the mixture gives a weight to {unknown[0]!r}; its sources are {', '.join(names)}")
    for name, weight in stage.weights.items():
        if not 0 <= weight < float("inf"):
            raise DataError(f"weight of {name!r} in the mixture is {weight}; it must be a number of at least 0")
    weights = [Fraction(str(stage.weights.get(name, 0))) for name in names]
    total = sum(weights)
    if not total:
        raise DataError(f"all weights of the mixture are 0 from sample {stage.start} on; give one source more")
    shares = [weight / total for weight in weights]
    for name, share in zip(names, shares, strict=True):
        if 0 < share < SMALLEST_SHARE:
            raise DataError(
                f"weight of {name!r} is a share of {float(share):.3g} of the mixture; below {float(SMALLEST_SHARE)} none is "
                "kept to: raise it, set it to 0, or join small sources"
            )
    return shares


class Mixture(torch.utils.data.Dataset[Sample]):
    """Samples of several packed data sets in the order of a :class:`Schedule`; map-style, positions without an end.

    Args:
        sources: by name; all of one ``sequence_length``. Their order does not matter.
        stages: see :class:`Schedule`.
    """

    def __init__(self, sources: Mapping[str, PackedTokens], stages: Sequence[Stage]) -> None:
        names = sorted(sources)
        self.schedule = Schedule(names, stages)
        self.sources = [sources[name] for name in names]

    def __getitem__(self, position: int) -> Sample:
        """The sample at a global position, as :class:`PackedTokens` gives it."""
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Sample]:
        """Several samples at once, which one request a source may fetch."""
        places: dict[int, list[tuple[int, int]]] = {}
        for slot, position in enumerate(map(operator.index, positions)):
            if position < 0:
                raise IndexError(f"sample position {position} is negative")
            source, place = self.schedule[position]
            places.setdefault(source, []).append((slot, place))
        samples: list[Sample] = [{}] * len(positions)
        for source, wanted in places.items():
            read = self.sources[source].__getitems__([place for _, place in wanted])
            for (slot, _), sample in zip(wanted, read, strict=True):
                samples[slot] = {**sample, "sample_id": operator.index(positions[slot])}
        return samples
