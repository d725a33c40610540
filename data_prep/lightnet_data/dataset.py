"""Packed training windows: the sample at a global position is a function of (seed, position) alone."""

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightnet_data.errors import DataError
from lightnet_data.storage import TokenStore

Sample = dict[str, Any]

_DOCUMENTS, _WINDOWS = 0, 1  # what a permutation of an epoch is of
_KEPT_EPOCHS = 2  # a loader's workers straddle at most two epochs


def permutation(count: int, seed: int, epoch: int, purpose: int) -> NDArray[np.int64]:
    """A permutation of ``range(count)``, int64 [count], that no version of numpy changes.

    numpy promises the raw stream of a bit generator and nothing about ``Generator.permutation``; so the order is the
    stable order of the raw 64-bit words of Philox4x64 with the key (seed, 2 * epoch + purpose).
    """
    words = np.random.Philox(key=np.array([seed & (2**64 - 1), 2 * epoch + purpose], dtype=np.uint64)).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


class _Epoch:
    """The order of one pass over the documents."""

    def __init__(self, store: TokenStore, samples: int, seed: int, epoch: int, shuffle: bool) -> None:
        self.order: NDArray[np.int64] | None = None
        self.windows: NDArray[np.int64] | None = None
        self.starts = store.starts  # position of each document in this epoch's stream, int64 [documents + 1]
        if shuffle:
            self.order = permutation(len(store), seed, epoch, _DOCUMENTS)
            self.windows = permutation(samples, seed, epoch, _WINDOWS)
            self.starts = np.concatenate([[0], np.cumsum(np.diff(store.starts)[self.order])])


class PackedTokens(torch.utils.data.Dataset[Sample]):
    """Windows of ``sequence_length`` inputs and their next tokens over a prepared data set; map-style.

    An epoch is a stream: all documents, in an order drawn from (seed, epoch), each followed by its stored
    end-of-document token. The stream is cut into windows of ``sequence_length`` + 1 tokens that overlap by one, so
    that the last target of a window is the first input of the next one, and the windows are put in an order drawn
    from (seed, epoch). What is left over at the end of the stream is dropped (``dropped_tokens``). Every other token of
    the stream but its first is the target of exactly one window; no target is masked.

    No state may cross a document: a segment begins at position 0 of every window and at every input that is the
    end-of-document token. That token is the last target of the document before it and the first input of the next.

    Args:
        prefix: path without ``.bin``/``.idx``.
        sequence_length: inputs of a window, N.
        seed: with the position, all that a sample depends on.
        shuffle: False gives documents and windows in stored order, in every epoch (validation).
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
        self.store = TokenStore(prefix, eod_id)
        self.prefix = str(prefix)
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.eod_id = self.store.eod_id
        self.tokens = self.store.tokens
        self.samples_per_epoch = (self.tokens - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{prefix}.bin: {self.tokens} tokens are fewer than sequence_length {sequence_length} + 1; "
                f"the largest sequence_length for it is {self.tokens - 1}"
            )
        self.dropped_tokens = self.tokens - 1 - self.samples_per_epoch * sequence_length
        self._epochs: dict[int, _Epoch] = {}

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
        position = operator.index(position)
        if position < 0:
            raise IndexError(f"sample position {position} is negative")
        number, place = divmod(position, self.samples_per_epoch)
        epoch = self._epoch(number)
        window = place if epoch.windows is None else int(epoch.windows[place])
        tokens = self._stream(epoch, window * self.sequence_length, self.sequence_length + 1)
        inputs = tokens[:-1]
        segment_starts = inputs == self.eod_id
        segment_starts[0] = True
        return {"input_ids": inputs, "labels": tokens[1:], "segment_starts": segment_starts, "sample_id": position}

    def _epoch(self, number: int) -> _Epoch:
        key = number if self.shuffle else 0
        if key not in self._epochs:
            while len(self._epochs) >= _KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[key] = _Epoch(self.store, self.samples_per_epoch, self.seed, key, self.shuffle)
        return self._epochs[key]

    def _stream(self, epoch: _Epoch, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) of an epoch's stream, int64 [count]."""
        if epoch.order is None:
            return self.store.read(start, count).astype(np.int64)
        out = np.empty(count, dtype=np.int64)
        slot = int(np.searchsorted(epoch.starts, start, side="right")) - 1
        filled = 0
        while filled < count:
            document = epoch.order[slot]
            skip = start + filled - int(epoch.starts[slot])
            take = min(count - filled, int(epoch.starts[slot + 1] - epoch.starts[slot]) - skip)
            out[filled : filled + take] = self.store.read(int(self.store.starts[document]) + skip, take)
            filled += take
            slot += 1
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epochs": {}}  # a spawned worker draws its own


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
