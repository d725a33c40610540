"""Token shards on disk. The format (.bin/.idx) is megatron-core's; this module opens it with checks.

Importing megatron-core takes some seconds and prints warnings about optional packages, so it is imported inside the
functions that need it.
"""

import mmap
import os
import warnings
from functools import cached_property
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
        checked: how many documents are looked at to see that they end with ``eod_id``.

    Attributes:
        starts: int64 [documents + 1], position of each document's first token; the last entry is ``tokens``. Made when
            it is asked for: it takes 8 bytes a document, and the rest of the index is only mapped.
        dtype: how tokens are stored.
        tokens: number of stored tokens.
        eod_id: the end-of-document token.

    Raises:
        DataError: a file is missing, cut or damaged, or documents do not end with ``eod_id``.
    """

    def __init__(self, prefix: str | Path, eod_id: int | None = None, checked: int = EOD_CHECK_DOCUMENTS) -> None:
        self.prefix = str(prefix)
        self._eod_argument, self._checked = eod_id, checked
        self._open()

    def _open(self) -> None:
        self._data = _open_checked(self.prefix)
        index = self._data.index
        self.dtype: np.dtype[Any] = np.dtype(index.dtype)
        self.tokens = _bytes_described(index) // self.dtype.itemsize
        self.eod_id = self._find_eod()

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Position of each document's first token."""
        index = self._data.index
        # A document of another stack may be several sequences; ours is always one.
        pointers = np.append(index.sequence_pointers // self.dtype.itemsize, self.tokens)
        starts = pointers[index.document_indices]
        filled = np.append(np.diff(starts) > 0, True)
        return starts[filled].astype(np.int64, copy=False)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens [start, start + count) of the stored order, in the stored dtype, read-only."""
        tokens: NDArray[Any] = self._data.bin_reader.read(self.dtype, count, start * self.dtype.itemsize)
        return tokens

    def document(self, index: int) -> NDArray[Any]:
        """Tokens of one document with its end-of-document token, in the stored dtype, read-only."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.read(start, end - start)

    def _find_eod(self) -> int:
        index, eod_id = self._data.index, self._eod_argument
        documents = len(index.document_indices) - 1
        if eod_id is None:
            written = manifest.find(self.prefix)
            eod_id = int(written["tokenizer"]["eod_id"]) if written else None
        chosen = np.unique(np.linspace(0, documents - 1, min(documents, self._checked)).astype(np.int64))
        for document, last in zip(chosen, self._last_tokens(chosen), strict=True):
            if last is None:
                continue
            eod_id = last if eod_id is None else eod_id
            if last != eod_id:
                raise DataError(
                    f"{self.prefix}.bin: document {document} ends with token {last}, not with the end-of-document "
                    f"token {eod_id}; write the data with one appended to each document (lightnet prep does so, and "
                    "megatron's preprocess_data.py with --append-eod)"
                )
        if eod_id is None:
            raise DataError(f"{self.prefix}.idx: no document to take the end-of-document token from; give eod_id")
        return eod_id

    def _last_tokens(self, documents: NDArray[np.int64]) -> list[int | None]:
        """The last token of some documents; None for one without tokens."""
        index, size, found = self._data.index, self.dtype.itemsize, list[int | None]()
        mapped: mmap.mmap = index.bin_buffer_mmap._mmap
        mapped.madvise(
            mmap.MADV_RANDOM
        )  # else each look reads as much ahead as the device is set to, some of them 8 MB
        with Path(f"{self.prefix}.bin").open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for document in documents:
                first, end = (int(number) for number in index.document_indices[document : document + 2])
                begin = int(index.sequence_pointers[first]) if first < len(index) else self.tokens * size
                stop = int(index.sequence_pointers[end]) if end < len(index) else self.tokens * size
                if stop == begin:
                    found.append(None)
                else:
                    found.append(int(np.frombuffer(os.pread(file.fileno(), size, stop - size), self.dtype)[0]))
        mapped.madvise(mmap.MADV_NORMAL)
        return found

    def __getstate__(self) -> tuple[str, int | None, int]:
        return self.prefix, self._eod_argument, self._checked

    def __setstate__(self, state: tuple[str, int | None, int]) -> None:
        self.prefix, self._eod_argument, self._checked = state
        self._open()


def _bytes_described(index: Any) -> int:
    """Bytes of the .bin that an index describes, from its last entry: no walk over all documents."""
    if not len(index):
        return 0
    return int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * int(np.dtype(index.dtype).itemsize)


def missing_hint(prefix: str, otherwise: str = "run lightnet prep") -> str:
    """A way out where no .idx has this prefix; ``otherwise`` where the manifest tells nothing of it."""
    if prefix.endswith((".bin", ".idx")):
        return "give the path without .bin or .idx"
    splits, name = (manifest.find(prefix) or {}).get("splits", {}), Path(prefix).name
    if splits.get(name, {}).get("documents") == 0:
        return "lightnet prep held out no document for it; use a larger --holdout or more documents"
    if "webdataset" in splits.get(name, {}):
        return "the folder holds packed samples, without documents; name the .bin/.idx that they were made from"
    if any(name in split.get("shards", []) for split in splits.values()):
        return "the manifest lists it: copy the data set again or run lightnet prep"
    return otherwise


def _open_checked(prefix: str) -> Any:
    """megatron-core's IndexedDataset, after checks that a cut or missing file cannot pass."""
    bin_path, idx_path = Path(prefix + ".bin"), Path(prefix + ".idx")
    for path in (idx_path, bin_path):
        try:
            path.open("rb").close()  # megatron-core's reader that cannot open it fails once more when it is collected
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise DataError(f"{path}: no such file; {missing_hint(prefix)}") from None
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}); give this user the right to read it, or copy it again"
            ) from None
    if bin_path.stat().st_size == 0:
        raise DataError(f"{bin_path}: the data set holds no tokens; run lightnet prep again")
    kind = indexed_dataset().IndexedDataset
    data = kind.__new__(kind)
    try:
        # The index first: IndexedDataset maps .bin before it reads .idx, and fails later on a cut index.
        data.__init__(prefix, mmap=True)
    except Exception as error:  # struct.error of a header that is too short has no common base with the others
        for part in ("bin_reader", "index"):
            data.__dict__.setdefault(part, None)  # its finalizer, which may run at any time, deletes both
        detail = str(error) or type(error).__name__
        raise DataError(f"{idx_path}: damaged or cut index ({detail}); copy it again or run lightnet prep") from None
    expected, actual = _bytes_described(data.index), bin_path.stat().st_size
    if expected != actual:
        raise DataError(
            f"{bin_path}: {actual} bytes, but {idx_path.name} describes {expected}; the file is cut or belongs to "
            "another index: copy it again or run lightnet prep"
        )
    return data
