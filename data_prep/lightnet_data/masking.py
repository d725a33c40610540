"""Masked language modelling: which tokens a sample hides, as a function of (seed, position) alone (model-spec 7).

The recipe is that of BERT, with a share to choose: of the hidden tokens 80 % become the mask, 10 % another token, 10 % stay.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data import philox
from lightnet_data.errors import DataError

IGNORED = -1  # label of a token that is not asked for
_STREAM = 0x6D61736B  # a stream of its own beside the order of samples


@dataclass(frozen=True)
class Masking:
    """The rule.

    Attributes:
        vocab_size: ids of the tokenizer; the mask may be the first one beyond them.
        mask_id: what stands in a hidden token's place.
        special_ids: tokens that are never hidden and never drawn (padding, ends of documents, ...); the mask is one of them.
        share: of a sample's other tokens, how many are hidden: that many exactly, rounded to the nearest.
        masked, drawn: shares of the hidden ones that become the mask, or a token drawn from all but the special ones.
        seed: with a sample's position all that its masks depend on.
    """

    vocab_size: int
    mask_id: int
    special_ids: Collection[int] = ()
    share: float = 0.25
    masked: float = 0.8
    drawn: float = 0.1
    seed: int = 0
    _ordinary: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0 or self.masked < 0 or self.drawn < 0 or self.masked + self.drawn > 1.0:
            raise DataError(
                f"masking: share {self.share} must lie in (0, 1], masked {self.masked} and drawn {self.drawn} in [0, 1] together"
            )
        special = {*self.special_ids, self.mask_id}
        ordinary = np.setdiff1d(np.arange(self.vocab_size), np.array(sorted(special)))
        if not len(ordinary):
            raise DataError(f"masking: all {self.vocab_size} tokens are special; none is left to hide")
        object.__setattr__(self, "_ordinary", ordinary)

    def __call__(self, tokens: NDArray[np.int64], position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of the sample at a position, int64 [N] each.

        Labels are the tokens that were hidden, and :data:`IGNORED` everywhere else: everywhere in a sample of special
        tokens alone.
        """
        words = philox.stream((self.seed, _STREAM), (0, position, 0, 0))
        order, kinds, draws = words.random_raw(3 * len(tokens)).reshape(3, -1)
        places = np.flatnonzero(np.isin(tokens, self._ordinary))
        count = int(np.floor(self.share * len(places) + 0.5))
        hidden = places[np.argsort(order[places], kind="stable")[:count]]
        labels = np.full_like(tokens, IGNORED)
        labels[hidden] = tokens[hidden]
        inputs = tokens.copy()
        kind = philox.uniform(kinds[hidden])
        inputs[hidden[kind < self.masked]] = self.mask_id
        drawn = hidden[(kind >= self.masked) & (kind < self.masked + self.drawn)]
        inputs[drawn] = self._ordinary[draws[drawn] % np.uint64(len(self._ordinary))]
        return inputs, labels


class MaskedTokens(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style data set of token windows (such as ``PackedTokens``), masked.

    The samples are the data set's, with masked ``input_ids`` and with ``labels`` of the hidden tokens; segments as they were.
    """

    def __init__(self, samples: Any, masking: Masking) -> None:
        self.samples, self.masking = samples, masking

    @property
    def samples_per_epoch(self) -> int:
        """As the data set's."""
        return int(self.samples.samples_per_epoch)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return self._masked(self.samples[position], position)

    def __getitems__(self, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples at once, fetched together where the data set can."""
        together = getattr(self.samples, "__getitems__", None)
        samples = together(positions) if together else [self.samples[position] for position in positions]
        return [self._masked(sample, position) for sample, position in zip(samples, positions, strict=True)]

    def _masked(self, sample: dict[str, Any], position: int) -> dict[str, Any]:
        inputs, labels = self.masking(sample["input_ids"], position)
        return {**sample, "input_ids": inputs, "labels": labels}
