"""Token shards on disk. The format (.bin/.idx) is megatron-core's; this module opens it with checks.

Importing megatron-core takes some seconds and prints warnings about optional packages, so it is imported inside the
functions that need it.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import manifest
from lightnet_data.errors import DataError

# How many documents are looked at to see that a data set ends its documents with one token. All of them would mean
# one random read a document before training starts.
EOD_CHECK_DOCUMENTS = 1000


def indexed_dataset() -> Any:
    """The module ``megatron.core.datasets.indexed_dataset``, imported without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset

    return indexed_dataset


class TokenStore:
    """The documents of one .bin/.idx pair as one long array of tokens, in stored order.

    Args:
        prefix: path without ``.bin``/``.idx``.
        eod_id: the end-of-document token. Left out, it is taken from the manifest in the same folder, else it is the
            last token of the first document.

    Attributes:
        starts: int64 [documents + 1], position of each document's first token; the last entry is ``tokens``.
        tokens: number of stored tokens.
        eod_id: the end-of-document token.

    Raises:
        DataError: a file is missing, cut or damaged, or documents do not end with ``eod_id``.
    """

    def __init__(self, prefix: str | Path, eod_id: int | None = None) -> None:
        self.prefix = str(prefix)
        self._eod_argument = eod_id
        self._open()

    def _open(self) -> None:
        self._data = _open_checked(self.prefix)
        index = self._data.index
        self._dtype: type[np.number[Any]] = index.dtype
        self._itemsize = int(np.dtype(index.dtype).itemsize)
        self.tokens = int(index.sequence_lengths.sum(dtype=np.int64))
        # A document of another stack may be several sequences; ours is always one.
        pointers = np.append(index.sequence_pointers // self._itemsize, self.tokens)
        starts = pointers[index.document_indices]
        filled = np.append(np.diff(starts) > 0, True)
        self.starts: NDArray[np.int64] = starts[filled].astype(np.int64, copy=False)
        self.eod_id = self._find_eod()

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens [start, start + count) of the stored order, in the stored dtype, read-only."""
        tokens: NDArray[Any] = self._data.bin_reader.read(self._dtype, count, start * self._itemsize)
        return tokens

    def document(self, index: int) -> NDArray[Any]:
        """Tokens of one document with its end-of-document token, in the stored dtype, read-only."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.read(start, end - start)

    def _find_eod(self) -> int:
        eod_id = self._eod_argument
        if eod_id is None:
            written = manifest.find(self.prefix)
            eod_id = int(written["tokenizer"]["eod_id"]) if written else int(self.read(int(self.starts[1]) - 1, 1)[0])
        sample = np.unique(np.linspace(0, len(self) - 1, min(len(self), EOD_CHECK_DOCUMENTS)).astype(np.int64))
        for document in sample:
            last = int(self.read(int(self.starts[document + 1]) - 1, 1)[0])
            if last != eod_id:
                raise DataError(
                    f"{self.prefix}.bin: document {document} ends with token {last}, not with the end-of-document "
                    f"token {eod_id}; write the data with one appended to each document (lightnet prep does so, and "
                    "megatron's preprocess_data.py with --append-eod)"
                )
        return eod_id

    def __getstate__(self) -> tuple[str, int | None]:
        return self.prefix, self._eod_argument

    def __setstate__(self, state: tuple[str, int | None]) -> None:
        self.prefix, self._eod_argument = state
        self._open()


def _missing_hint(prefix: str) -> str:
    if prefix.endswith((".bin", ".idx")):
        return "give the path without .bin or .idx"
    written = manifest.find(prefix) or {}
    if written.get("splits", {}).get(Path(prefix).name, {}).get("documents") == 0:
        return "lightnet prep held out no document for it; use a larger --holdout or more documents"
    return "run lightnet prep"


def _open_checked(prefix: str) -> Any:
    """megatron-core's IndexedDataset, after checks that a cut or missing file cannot pass."""
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    for path in (idx_path, bin_path):
        if not path.is_file():
            raise DataError(f"{path}: no such file; {_missing_hint(prefix)}")
    if bin_path.stat().st_size == 0:
        raise DataError(f"{bin_path}: the data set holds no tokens; run lightnet prep again")
    module = indexed_dataset()
    try:
        # The index first: IndexedDataset maps .bin before it reads .idx, and fails later on a cut index.
        data = module.IndexedDataset(prefix, mmap=True)
    except (AssertionError, ValueError, OSError, IndexError, KeyError, AttributeError, SystemError) as error:
        detail = str(error) or type(error).__name__
        raise DataError(f"{idx_path}: damaged or cut index ({detail}); copy it again or run lightnet prep") from None
    except Exception as error:  # struct.error of a header that is too short has no common base with the above
        raise DataError(f"{idx_path}: damaged or cut index ({error}); copy it again or run lightnet prep") from None
    lengths, itemsize = data.index.sequence_lengths, int(np.dtype(data.index.dtype).itemsize)
    expected, actual = int(lengths.sum(dtype=np.int64)) * itemsize, bin_path.stat().st_size
    if expected != actual:
        raise DataError(
            f"{bin_path}: {actual} bytes, but {idx_path.name} describes {expected}; the file is cut or belongs to "
            "another index: copy it again or run lightnet prep"
        )
    return data
