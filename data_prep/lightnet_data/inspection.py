"""``lightnet data inspect``: what is in a prepared data set of tokens. Pictures: ``inspection_picture``."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import manifest
from lightnet_data.documents import DocumentReader
from lightnet_data.errors import DataError
from lightnet_data.storage import TokenStore
from lightnet_data.stream import shards_of
from lightnet_data.tokenizer import Tokenizer

BINS = 40  # powers of two: documents of 1 token to 2^39


@dataclass
class Lengths:
    """Documents of one data set by length.

    ``documents`` and ``tokens`` [BINS]: of documents of [2^i, 2^(i+1)) tokens, the end-of-document token counted.
    """

    documents: list[int]
    tokens: list[int]
    shortest: int
    longest: int
    mean: float
    median: float


@dataclass
class Shown:
    """One document, decoded."""

    split: str
    index: int
    tokens: int
    bytes: int
    text: str


def inspect(
    folder: str | Path,
    split: str = "train",
    first: int = 0,
    drawn: int = 0,
    seed: int = 0,
    indices: Sequence[int] = (),
) -> dict[str, Any]:
    """Facts and documents of a folder made by ``lightnet prep``.

    Args:
        folder: the folder, or one of its outputs.
        split: whose documents are shown and counted by length.
        first: how many documents from the first on are shown.
        drawn: how many more, drawn with ``seed``.
        indices: and these.

    Returns:
        documents, bytes, tokens, bytes_per_token; ``splits`` and ``subsets`` with the same by name; ``tokenizer``; ``lengths`` by
        data set ("" for the folder's own, names of its outputs), as in ``Lengths``; ``shown``, as in ``Shown``.

    Raises:
        DataError: not such a folder, no such split or document.
    """
    folder = Path(folder)
    try:
        return _inspect(folder, split, first, drawn, seed, indices)
    except (KeyError, TypeError, AttributeError) as error:
        where = folder / manifest.FILE_NAME
        raise DataError(f"{where}: an entry is missing or of another kind ({error!r}); run lightnet prep") from None


def _inspect(folder: Path, split: str, first: int, drawn: int, seed: int, indices: Sequence[int]) -> dict[str, Any]:
    written = manifest.load(folder)
    outputs: dict[str, dict[str, Any]] = written.get("outputs") or {}
    if split not in written["splits"] and not outputs:
        raise DataError(f"{folder}: no split {split!r}; it holds {', '.join(written['splits'])}")
    # With an output a subset, the manifest of the whole has no splits of its own.
    subsets = written.get("subsets") or {entry["name"]: entry for entry in outputs.values()}
    stores = {entry["name"]: folder / place for place, entry in outputs.items()} or {"": folder}
    lengths = {}
    for name, place in stores.items():
        found = _all_lengths(place, split)
        if len(found):
            lengths[name] = asdict(by_length(found))
    shown: list[dict[str, Any]] = []
    if not outputs:
        shown = [asdict(item) for item in _shown(folder, split, first, drawn, seed, indices)]
    elif indices or drawn or first:
        place = next(iter(stores.values()))
        shown = [asdict(item) for item in _shown(place, split, first, drawn, seed, indices)]
    return {
        "folder": str(folder),
        "split": split,
        **_rates(written),
        "splits": {name: _rates(entry) for name, entry in written["splits"].items()},
        "subsets": {name: _rates(entry) for name, entry in sorted(subsets.items())},
        "tokenizer": written["tokenizer"],
        "lengths": lengths,
        "shown": shown,
    }


def _rates(entry: dict[str, Any]) -> dict[str, Any]:
    found = {name: int(entry[name]) for name in ("documents", "bytes", "tokens")}
    return {**found, "bytes_per_token": found["bytes"] / found["tokens"] if found["tokens"] else None}


def by_length(lengths: NDArray[np.int32]) -> Lengths:
    """Count documents of ``lengths`` tokens, int32 [documents], at least one of them.

    Memory: a few bytes a document.
    """
    bins = np.frexp(lengths.astype(np.float64))[1] - 1  # exact: 2^(e-1) <= n < 2^e
    counts = np.bincount(bins, minlength=BINS)
    tokens = np.bincount(bins, weights=lengths, minlength=BINS)  # exact below 2^53
    return Lengths(
        documents=counts.tolist(),
        tokens=tokens.astype(np.int64).tolist(),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
    )


def _documents_apart(folder: Path, split: str) -> bool:
    """Whether a split has documents that can be told from one another: packed samples have not."""
    entry = manifest.load(folder)["splits"].get(split, {})
    packed = "webdataset" in entry and not entry.get("shards") and not (folder / f"{split}.idx").is_file()
    return not packed and entry.get("documents") != 0


def _all_lengths(folder: Path, split: str) -> NDArray[np.int32]:
    """Of each document in tokens, int32; a shard is open at a time."""
    found = [np.zeros(0, dtype=np.int32)]
    if _documents_apart(folder, split):
        eod_id = int(manifest.load(folder)["tokenizer"]["eod_id"])
        for prefix in shards_of(folder / split):
            found.append(np.diff(TokenStore(prefix, eod_id, checked=0).starts).astype(np.int32))
    return np.concatenate(found)


def _shown(folder: Path, split: str, first: int, drawn: int, seed: int, indices: Sequence[int]) -> list[Shown]:
    if not (first or drawn or indices):
        return []
    reader = DocumentReader(folder / split) if _documents_apart(folder, split) else None
    total = 0 if reader is None else len(reader)
    for index in indices:
        if not 0 <= index < total:
            raise DataError(f"{folder}: no document {index} in {split}; it has {total}, the first is 0")
    chosen = [*range(min(first, total)), *random.Random(seed).sample(range(total), min(drawn, total)), *indices]
    if reader is None or not chosen:
        return []
    tokenizer = Tokenizer.load(folder)
    shown = []
    for index in dict.fromkeys(chosen):
        ids = reader[index].tokens
        data = tokenizer.decode_bytes(ids[:-1].tolist())
        shown.append(Shown(split, int(index), len(ids), len(data), data.decode("utf-8", "replace")))
    return shown
