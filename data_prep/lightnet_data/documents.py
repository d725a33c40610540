"""Stored documents one at a time, for exact held-out scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightnet_data.errors import DataError
from lightnet_data.storage import TokenStore
from lightnet_data.stream import shards_of


class Document(NamedTuple):
    """One stored document.

    ``tokens`` int64 [n], the last one the end-of-document token; ``byte_length`` the UTF-8 bytes of the text.
    """

    tokens: NDArray[np.int64]
    byte_length: int


class DocumentReader:
    """Documents of ``prefix`` in stored order over all its shards, by index or by iteration.

    Exact bits per byte of a document: feed the end-of-document token and then the document's tokens but its last,
    sum the losses of all its tokens, divide by ``byte_length`` (and by log 2).

    Raises:
        DataError: a file is missing, cut or damaged, or the byte lengths (``PREFIX.bytes.npy``) are not there, as in
            shards of another stack.
    """

    def __init__(self, prefix: str | Path, eod_id: int | None = None) -> None:
        self._shards, counts, lengths = shards_of(prefix), [0], []
        for shard in self._shards:
            store = self._open(shard, eod_id)
            eod_id = self.eod_id = store.eod_id
            counts.append(len(store))
            lengths.append(_byte_lengths(shard, len(store)))
        self.byte_lengths: NDArray[Any] = np.concatenate(lengths)
        self._firsts = np.cumsum(counts)  # number of each shard's first document

    def _open(self, shard: str, eod_id: int | None) -> TokenStore:
        """One shard is open at a time: there may be more than a process may have open files."""
        self._opened = shard, TokenStore(shard, eod_id)
        return self._opened[1]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = int(np.searchsorted(self._firsts, index, side="right")) - 1
        shard, store = self._opened
        if shard != self._shards[number]:
            store = self._open(self._shards[number], self.eod_id)
        tokens = store.document(index - int(self._firsts[number])).astype(np.int64)
        return Document(tokens, int(self.byte_lengths[index]))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))


def _byte_lengths(shard: str, documents: int) -> NDArray[Any]:
    """UTF-8 bytes of each document of a shard."""
    path = Path(f"{shard}.bytes.npy")
    try:
        lengths: NDArray[Any] = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: no byte lengths beside the tokens; run lightnet prep to write them") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged byte lengths ({error}); copy it again or run lightnet prep") from None
    if lengths.shape != (documents,):
        raise DataError(
            f"{path}: {len(lengths)} byte lengths for {documents} documents; copy the data set again or run lightnet prep"
        )
    return lengths
