"""The tokens of one split, over all its .bin/.idx shards, as one long array; and the windows training cuts from it."""

import itertools
import os
import resource
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.storage import EOD_CHECK_DOCUMENTS, TokenStore

Window = tuple[NDArray[np.int64], NDArray[np.bool_]]


def shards_of(prefix: str | Path) -> list[str]:
    """Prefixes of the shards of a split, in order: those its manifest lists, or ``prefix`` itself."""
    path = Path(prefix)
    split = ((manifest.find(prefix) or {}).get("splits") or {}).get(path.name, {})
    return [str(path.with_name(stem)) for stem in split.get("shards") or [path.name]]


class _OpenFiles:
    """Files that streams read, kept open: a quarter of what this process may have, the least recently used closed first."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._lock = RLock()  # the garbage collector may close a stream's files within a read of the same thread
        self.limit = max(4, min(256, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))

    def read(self, owner: int, path: str, count: int, offset: int) -> bytes:
        """``count`` bytes from ``offset``, or fewer at the end of the file."""
        key = (owner, path)
        with self._lock:
            file = self._files.get(key)
            if file is None:
                while len(self._files) >= self.limit:
                    os.close(self._files.popitem(last=False)[1])
                file = self._files[key] = os.open(path, os.O_RDONLY)
                # Windows lie anywhere: reading ahead would read what nobody asks for.
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            self._files.move_to_end(key)
            return os.pread(file, count, offset)

    def close(self, owner: int) -> None:
        """Close all files of an owner."""
        with self._lock:
            for key in list(self._files):  # another close may come within this one
                if key[0] == owner:
                    os.close(self._files.pop(key))


_open_files = _OpenFiles()
_owners = itertools.count()
os.register_at_fork(after_in_child=lambda: setattr(_open_files, "_lock", RLock()))


class TokenStream:
    """The documents of all shards of a split, one after the other in stored order.

    Opening reads each shard's header and a sample of its documents, not its index: 100 billion tokens open in less than
    a second, and nothing is built. How many files are open at a time does not depend on the number of shards.

    Args:
        prefix: path without ``.bin``/``.idx`` (and without a shard's number).
        eod_id: end-of-document token; left out, from the manifest, else the last token of the first document.

    Attributes:
        shards: prefix of each shard.
        starts: int64 [shards + 1], position of each shard's first token; the last entry is ``tokens``.
        tokens: stored tokens of all shards.
        eod_id: the end-of-document token.
        dtype: how tokens are stored.

    Raises:
        DataError: a file is missing, cut or damaged, or the shards do not add up to the manifest.
    """

    def __init__(self, prefix: str | Path, eod_id: int | None = None) -> None:
        self.prefix = str(prefix)
        self.shards = shards_of(prefix)
        sizes, self.dtype = [], np.dtype(np.uint16)
        for number, shard in enumerate(self.shards):
            store = TokenStore(shard, eod_id, -(-EOD_CHECK_DOCUMENTS // len(self.shards)))
            eod_id = store.eod_id
            if number and store.dtype != self.dtype:
                raise DataError(
                    f"{shard}.idx: tokens of type {store.dtype}, those of the shards before it are {self.dtype}; copy "
                    "the data set again or run lightnet prep"
                )
            sizes.append(store.tokens)
            self.dtype = store.dtype
        assert eod_id is not None
        self.eod_id = eod_id
        self.starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self.tokens = int(self.starts[-1])
        self._check_total()
        self._own()

    def _check_total(self) -> None:
        split = ((manifest.find(self.prefix) or {}).get("splits") or {}).get(Path(self.prefix).name, {})
        if len(self.shards) > 1 and split.get("tokens", self.tokens) != self.tokens:
            raise DataError(
                f"{self.prefix}: its {len(self.shards)} shards hold {self.tokens} tokens, the manifest says "
                f"{split['tokens']}; copy the data set again or run lightnet prep"
            )

    def _own(self) -> None:
        self._owner = next(_owners)
        weakref.finalize(self, _open_files.close, self._owner)

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens [start, start + count) of the stream, int64 [count].

        Raises:
            DataError: the file has gone or has been cut since it was opened.
        """
        out = np.empty(count, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        while filled < count:
            skip = start + filled - int(self.starts[shard])
            take = min(count - filled, int(self.starts[shard + 1] - self.starts[shard]) - skip)
            path, size = f"{self.shards[shard]}.bin", self.dtype.itemsize
            try:
                data = _open_files.read(self._owner, path, take * size, skip * size)
            except OSError as error:
                raise DataError(f"{path}: cannot read it ({error.strerror}); restore it and resume") from None
            if len(data) != take * size:
                raise DataError(f"{path}: cut since it was opened; copy the data set again and resume")
            out[filled : filled + take] = np.frombuffer(data, dtype=self.dtype)
            filled, shard = filled + take, shard + 1
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_owner"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._own()


class StreamWindows:
    """Windows of ``sequence_length`` + 1 tokens of a stream, each beginning with the last token of the one before.

    Attributes:
        samples: windows; what is left over at the end of the stream is in none.
        tokens: tokens of the stream.
    """

    def __init__(self, prefix: str | Path, sequence_length: int, eod_id: int | None = None) -> None:
        self.stream = TokenStream(prefix, eod_id)
        self.sequence_length = sequence_length
        self.tokens, self.eod_id, self.dtype = self.stream.tokens, self.stream.eod_id, self.stream.dtype
        self.samples = (self.tokens - 1) // sequence_length

    def check(self) -> None:
        """Nothing more: opening has looked at every shard."""

    def read(self, indices: Sequence[int]) -> list[Window]:
        """Tokens int64 [N + 1] of each window, and where a segment begins among its inputs, bool [N]."""
        windows = []
        for index in indices:
            tokens = self.stream.read(index * self.sequence_length, self.sequence_length + 1)
            starts = tokens[:-1] == self.eod_id
            starts[0] = True
            windows.append((tokens, starts))
        return windows
