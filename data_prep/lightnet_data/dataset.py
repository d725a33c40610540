"""Packed training windows: the sample at a global position is a function of (seed, position) alone."""

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from lightnet_data import webdataset_tokens
from lightnet_data.errors import DataError
from lightnet_data.shuffle import Permutation
from lightnet_data.stream import StreamWindows, Window

Sample = dict[str, Any]

# How positions become samples. Runs record it, so that none is continued in another order; 1 shuffled documents too.
ORDER_VERSION = 2
_KEPT_EPOCHS = 2  # a loader's workers straddle at most two epochs


class Windows(Protocol):
    """Fixed windows in stored order: of .bin/.idx shards or of packed tar shards."""

    samples: int
    tokens: int
    eod_id: int

    def check(self) -> None:
        """Look at every shard, as far as opening has not.

        Raises:
            DataError: one is missing or cut.
        """
        ...

    def read(self, indices: Sequence[int]) -> list[Window]:
        """Tokens int64 [N + 1] of each window, and where a segment begins among its inputs, bool [N]."""
        ...


def open_windows(location: str | Path, sequence_length: int, eod_id: int | None = None) -> Windows:
    """The windows at a prefix (``DIR/train``) or URL, in whichever format it holds."""
    if webdataset_tokens.is_packed(location):
        return webdataset_tokens.ShardWindows(location, sequence_length, eod_id)
    return StreamWindows(location, sequence_length, eod_id)


class PackedTokens(torch.utils.data.Dataset[Sample]):
    """Windows of ``sequence_length`` inputs and their next tokens over a prepared data set; map-style.

    All documents, in stored order over all shards, each followed by its stored end-of-document token, are one stream. It
    is cut into windows of ``sequence_length`` + 1 tokens that overlap by one, so that the last target of a window is the
    first input of the next one. An epoch is every window once, in an order drawn from (seed, epoch) over all of them.
    What is left over at the end of the stream is dropped (``dropped_tokens``). Every other token of the stream but its
    first is the target of exactly one window; no target is masked.

    No state may cross a document: a segment begins at position 0 of every window and at every input that is the
    end-of-document token. That token is the last target of the document before it and the first input of the next.

    Args:
        prefix: path without ``.bin``/``.idx`` (and a shard's number), or the folder or URL of packed tar shards and the
            split's name.
        sequence_length: inputs of a window, N.
        seed: with the position, all that a sample depends on.
        shuffle: False gives windows in stored order, in every epoch (validation).
        eod_id: end-of-document token; left out, from the manifest, else the last token of the first document.

    Attributes:
        samples_per_epoch: windows of one pass.
        dropped_tokens: tokens at the end of an epoch's stream that are in no window as a target.

    Raises:
        DataError: the files are missing or damaged, or hold fewer than ``sequence_length`` + 1 tokens.
    """

    def __init__(
        self,
        prefix: str | Path,
        sequence_length: int,
        seed: int = 0,
        shuffle: bool = True,
        eod_id: int | None = None,
    ) -> None:
        if sequence_length < 1:
            raise DataError(f"sequence_length {sequence_length}: must be at least 1")
        self.windows = open_windows(prefix, sequence_length, eod_id)
        self.prefix = str(prefix)
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.eod_id = self.windows.eod_id
        self.tokens = self.windows.tokens
        self.samples_per_epoch = self.windows.samples
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{prefix}: {self.tokens} tokens are fewer than sequence_length {sequence_length} + 1; "
                f"the largest sequence_length for it is {self.tokens - 1}"
            )
        self.dropped_tokens = self.tokens - 1 - self.samples_per_epoch * sequence_length
        self._epochs: dict[int, Permutation] = {}

    def __len__(self) -> int:
        """Samples of one epoch. Positions beyond it are valid: they belong to later epochs."""
        return self.samples_per_epoch

    def __iter__(self) -> Iterator[Sample]:
        """The samples of the first epoch, in order of position."""
        return (self[position] for position in range(self.samples_per_epoch))

    def __getitem__(self, position: int) -> Sample:
        """The sample at a global position.

        Args:
            position: 0, 1, 2, ... without an upper bound.

        Returns:
            input_ids: int64 [N]. labels: int64 [N], the token after each input. segment_starts: bool [N], True where
            a segment begins (always at 0). sample_id: the position. Arrays are numpy's.
        """
        return self.__getitems__([position])[0]

    def __getitems__(self, positions: Sequence[int]) -> list[Sample]:
        """Several samples at once; where they come from elsewhere they are fetched together."""
        positions = [operator.index(position) for position in positions]
        windows = self.windows.read([self.window_at(position) for position in positions])
        return [
            {"input_ids": tokens[:-1], "labels": tokens[1:], "segment_starts": starts, "sample_id": position}
            for position, (tokens, starts) in zip(positions, windows, strict=True)
        ]

    def window_at(self, position: int) -> int:
        """Which window, in stored order, is the sample at a global position."""
        if position < 0:
            raise IndexError(f"sample position {position} is negative")
        epoch, place = divmod(position, self.samples_per_epoch)
        if not self.shuffle:
            return place
        if epoch not in self._epochs:
            while len(self._epochs) >= _KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = Permutation(self.samples_per_epoch, self.seed, epoch)
        return self._epochs[epoch](place)


def collate(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """One micro-batch of samples as tensors.

    Args:
        samples: B samples of the same length N.

    Returns:
        input_ids: int64 [B, N]. labels: int64 [B, N]. cu_seqlens: int32 [S + 1], bounds of the S segments over the
        B * N flattened tokens, from 0 to B * N; a row's edge is always one. sample_ids: int64 [B].
    """
    starts = np.concatenate([sample["segment_starts"] for sample in samples])
    bounds = np.append(np.flatnonzero(starts), len(starts)).astype(np.int32)
    return {
        "input_ids": torch.from_numpy(np.stack([sample["input_ids"] for sample in samples])),
        "labels": torch.from_numpy(np.stack([sample["labels"] for sample in samples])),
        "cu_seqlens": torch.from_numpy(bounds),
        "sample_ids": torch.tensor([sample["sample_id"] for sample in samples], dtype=torch.int64),
    }
