"""Output shards: megatron-core's ``.bin`` and ``.idx`` and our ``.bytes.npy``, written document by document in bounded memory.

megatron-core's own builder goes through lists of Python integers, which take 20 GB for the Pile's 210 million documents.
"""

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

_HEADER = b"MMIDIDX\x00\x00"  # megatron-core's index, version 1
_CODES = {"uint16": 8, "int32": 4}
_CHUNK = 1 << 22


class Cutter:
    """Documents, in order, to shards of at most ``limit`` tokens each; a longer document has a shard of its own."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit or 2**62
        self._shard = self._used = 0

    def pieces(self, lengths: NDArray[np.int32]) -> Iterator[tuple[int, int, int]]:
        """The next documents as (shard, first, behind the last)."""
        ends = np.append(0, np.cumsum(lengths, dtype=np.int64))
        first = 0
        while first < len(lengths):
            last = int(np.searchsorted(ends, ends[first] + self._limit - self._used, side="right")) - 1
            if last <= first and self._used:
                self._shard, self._used = self._shard + 1, 0
                continue
            last = max(last, first + 1)
            yield self._shard, first, last
            self._used += int(ends[last] - ends[first])
            first = last


class ShardWriter:
    """A context that writes ``PREFIX.bin``, ``.idx`` and ``.bytes.npy`` of documents of one sequence each.

    The three arrays of the index grow side by side, so nothing is held in memory but what is being added.

    Args:
        prefix: path without suffix.
        documents: how many will be added.
        dtype: of the stored tokens.
    """

    def __init__(self, prefix: Path, documents: int, dtype: Any) -> None:
        self.prefix, self.documents, self.dtype = prefix, documents, np.dtype(dtype)
        self._position = self._added = 0
        self._hash = hashlib.sha256()
        self._files: list[BinaryIO] = []

    def __enter__(self) -> "ShardWriter":
        self._bin = self._open(Path(f"{self.prefix}.bin"))
        self._sizes = self._open(Path(f"{self.prefix}.bytes.npy"))
        np.lib.format.write_array_header_1_0(
            self._sizes, {"descr": "<i8", "fortran_order": False, "shape": (self.documents,)}
        )
        index = Path(f"{self.prefix}.idx")
        self._lengths = self._open(index)
        header = _HEADER + struct.pack("<QBQQ", 1, _CODES[self.dtype.name], self.documents, self.documents + 1)
        self._lengths.write(header)
        self._lengths.flush()
        self._pointers = self._open(index, len(header) + 4 * self.documents)
        self._ends = self._open(index, len(header) + 12 * self.documents)
        return self

    def _open(self, path: Path, position: int | None = None) -> BinaryIO:
        file = path.open("wb" if position is None else "r+b", buffering=1 << 20)
        file.seek(position or 0)
        self._files.append(file)
        return file

    def add(self, lengths: NDArray[np.int32], byte_lengths: NDArray[np.int64]) -> None:
        """Enter documents, int32 and int64 [n], whose tokens ``write`` brings."""
        ends = self._position + np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        self._lengths.write(lengths.astype("<i4", copy=False).tobytes())
        self._pointers.write(np.append(self._position, ends)[: len(lengths)].astype("<i8").tobytes())
        self._ends.write(np.arange(self._added, self._added + len(lengths), dtype="<i8").tobytes())
        self._sizes.write(byte_lengths.astype("<i8", copy=False).tobytes())
        self._added += len(lengths)
        self._position = int(ends[-1]) if len(lengths) else self._position

    def write(self, tokens: bytes) -> None:
        """Tokens of the documents, as they are stored."""
        self._hash.update(tokens)
        self._bin.write(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert self._added == self.documents, f"{self._added} documents of {self.documents}"
            self._ends.write(struct.pack("<q", self.documents))
        for file in self._files:
            try:
                file.close()
            except OSError:  # a full disk, met again at each flush
                if kind is None:
                    raise

    def checksums(self) -> dict[str, dict[str, Any]]:
        """Bytes and SHA-256 of each file, by name, once it is closed."""
        found = {f"{self.prefix.name}.bin": self._hash.hexdigest()}
        for suffix in (".idx", ".bytes.npy"):
            found[self.prefix.name + suffix] = sha256(Path(f"{self.prefix}{suffix}"))
        return {
            name: {"bytes": self.prefix.with_name(name).stat().st_size, "sha256": value}
            for name, value in found.items()
        }


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy(source: BinaryIO, start: int, end: int, target: ShardWriter) -> None:
    """Bytes [start, end) of a part to a shard, in pieces of a few megabytes."""
    source.seek(start)
    while start < end:
        data = source.read(min(end - start, _CHUNK))
        if not data:
            raise OSError(5, "cut while it was read", getattr(source, "name", None))
        target.write(data)
        start += len(data)


def names(split: str, count: int) -> list[str]:
    """File stems of a split's shards: its own name where there is one shard."""
    return [split] if count < 2 else [f"{split}_{number:05d}-of-{count:05d}" for number in range(count)]
