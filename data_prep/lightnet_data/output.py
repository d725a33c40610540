"""The output folder of a preparation: whole, or not there."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.sources import shown
from lightnet_data.storage import indexed_dataset

_LOCK = ".lightnet-prep.lock"  # marks a folder as an unfinished one of ours, and is held while one is written
_LONGEST_DOCUMENT = 2**31 - 1  # .idx counts a document's tokens in int32


def check_free(output: Path, overwrite: bool = False) -> bool:
    """Whether ``output`` can be written (True) or holds a finished data set that may not be replaced (False).

    Raises:
        DataError: it is a file, or a folder with something else in it, which is never replaced.
    """
    if not os.path.lexists(output):
        return True
    if not output.is_dir():
        raise DataError(f"{shown(output)}: exists and is not a folder; choose another --output")
    if not any(output.iterdir()):
        return True
    if not (output / manifest.FILE_NAME).is_file():
        raise DataError(f"{shown(output)}: the folder holds files that lightnet prep did not write; choose another")
    manifest.load(output)  # ours, or an error
    return overwrite


class OutputFolder:
    """A context that gives a folder ``OUTPUT.partial`` to write in; ``finish`` moves it to ``OUTPUT`` in one step.

    Left without ``finish`` the partial folder is removed. One that a killed run left behind is replaced (``note`` is
    called with a line that says so).

    Raises:
        DataError: another process is writing the same output, or the partial folder's name is taken.
    """

    def __init__(self, output: Path, note: Callable[[str], None]) -> None:
        self.output = Path(os.path.realpath(output))  # a link stays a link, and what it points to is made beside itself
        self.partial = self.output.with_name(self.output.name + ".partial")
        self._note = note
        self._lock: Any = None
        self._finished = False

    def __enter__(self) -> Path:
        partial = self.partial
        partial.parent.mkdir(parents=True, exist_ok=True)
        stale = os.path.lexists(partial)
        if stale and not (partial / _LOCK).is_file():
            raise DataError(f"{shown(partial)}: in the way, and not an unfinished output of lightnet prep; move it")
        partial.mkdir(exist_ok=True)
        self._lock = (partial / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DataError(
                f"{shown(self.output)}: another lightnet prep is writing it; wait or choose another"
            ) from None
        if stale:
            self._note(f"{shown(partial)}: left behind by a run that was stopped; replaced")
            for entry in partial.iterdir():
                if entry.name != _LOCK:
                    entry.unlink()
        return partial

    def finish(self) -> None:
        """Flush everything to disk and rename, replacing an earlier data set only now."""
        (self.partial / _LOCK).unlink()
        for entry in self.partial.iterdir():
            _flush(entry)
        _flush(self.partial)
        old = self.output.with_name(self.output.name + ".replaced")
        replacing = self.output.is_dir() and any(self.output.iterdir())
        if replacing:
            self.output.rename(old)
        self.partial.rename(self.output)
        _flush(self.output.parent)
        if replacing:
            shutil.rmtree(old)
        self._finished = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            shutil.rmtree(self.partial, ignore_errors=True)
        self._lock.close()


class ShardWriter:
    """Writes one split: ``NAME.bin``, ``NAME.idx`` and ``NAME.bytes.npy``. Without a document it leaves no file."""

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        module = indexed_dataset()
        self._prefix = folder / name
        self._dtype = module.DType.optimal_dtype(vocab_size)
        self._builder = module.IndexedDatasetBuilder(f"{self._prefix}.bin", dtype=self._dtype)
        self._byte_lengths: list[int] = []
        self.tokens = 0

    def add(self, tokens: NDArray[np.int64], byte_length: int, place: str) -> None:
        """Append a document: tokens int64 [n], the last its end-of-document token, of ``byte_length`` bytes of text."""
        if len(tokens) > _LONGEST_DOCUMENT:
            raise DataError(
                f"{place}: {len(tokens)} tokens, a document holds at most {_LONGEST_DOCUMENT}; split the file"
            )
        self._builder.add_document(tokens, [len(tokens)])
        self._byte_lengths.append(byte_length)
        self.tokens += len(tokens)

    def finish(self) -> dict[str, Any]:
        """Close the files; the split's entry in the manifest."""
        self._builder.finalize(f"{self._prefix}.idx")
        if self._byte_lengths:
            np.save(f"{self._prefix}.bytes.npy", np.array(self._byte_lengths, dtype=np.int64))
        else:
            for suffix in (".bin", ".idx"):
                Path(f"{self._prefix}{suffix}").unlink()
        return {
            "documents": len(self._byte_lengths),
            "bytes": sum(self._byte_lengths),
            "tokens": self.tokens,
            "dtype": np.dtype(self._dtype).name,
        }


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
