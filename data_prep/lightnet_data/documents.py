"""Stored documents one at a time, for exact held-out scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightnet_data.errors import DataError
from lightnet_data.storage import TokenStore


class Document(NamedTuple):
    """One stored document.

    ``tokens`` int64 [n], the last one the end-of-document token; ``byte_length`` the UTF-8 bytes of the text.
    """

    tokens: NDArray[np.int64]
    byte_length: int


class DocumentReader:
    """Documents of ``prefix`` in stored order, by index or by iteration.

    Exact bits per byte of a document: feed the end-of-document token and then the document's tokens but its last,
    sum the losses of all its tokens, divide by ``byte_length`` (and by log 2).

    Raises:
        DataError: a file is missing, cut or damaged, or the byte lengths (``PREFIX.bytes.npy``) are not there, as in
            shards of another stack.
    """

    def __init__(self, prefix: str | Path, eod_id: int | None = None) -> None:
        self._store = TokenStore(prefix, eod_id)
        self.eod_id = self._store.eod_id
        path = Path(f"{prefix}.bytes.npy")
        try:
            self.byte_lengths: NDArray[Any] = np.load(path, allow_pickle=False)
        except FileNotFoundError:
            raise DataError(f"{path}: no byte lengths beside the tokens; run lightnet prep to write them") from None
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: damaged byte lengths ({error}); copy it again or run lightnet prep") from None
        if self.byte_lengths.shape != (len(self._store),):
            raise DataError(
                f"{path}: {len(self.byte_lengths)} byte lengths for {len(self._store)} documents; copy the data set "
                "again or run lightnet prep"
            )

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return Document(self._store.document(index).astype(np.int64), int(self.byte_lengths[index]))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))
