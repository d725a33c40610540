"""Finished parts to the data sets of an output folder, in canonical order, one file open at a time."""

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data.parts import Plan

SPLITS = ("train", "validation")
_HEADER = b"MMIDIDX\x00\x00"  # megatron-core's index, version 1
_CODES = {"uint16": 8, "int32": 4}
_DOCUMENTS = 1 << 20  # written at once


def threshold(folder: Path, plan: Plan, holdout: float) -> int:
    """Documents with a hash below this are held out.

    A share ``holdout`` of all possible texts is, whatever else the corpus holds. Only where that leaves one side
    without any document, the one of lowest hash is held out or the one of highest hash is not; copies of one text are
    never divided.
    """
    keys = [part["key"] for part in columns(folder, plan)]
    low = min((int(key.min()) for key in keys if len(key)), default=2**64)
    high = max((int(key.max()) for key in keys if len(key)), default=-1)
    return bounded_threshold(holdout, low, high)


def bounded_threshold(holdout: float, low: int, high: int) -> int:
    """As ``threshold``, from the lowest and the highest hash."""
    limit = int(holdout * 2**64)
    if holdout > 0 and low < high:
        limit = min(max(limit, low + 1), high)
    elif low == high:
        limit = 0
    return limit


def columns(folder: Path, plan: Plan) -> Iterator[dict[str, NDArray[Any]]]:
    """The columns of each part, in order, one at a time."""
    for rank in range(len(plan.spans)):
        with np.load(folder / f"{rank:05d}.npz", allow_pickle=False) as file:
            yield {name: file[name] for name in file.files}


def facts(folder: Path, plan: Plan) -> Iterator[dict[str, Any]]:
    """What each part tells of itself."""
    for rank in range(len(plan.spans)):
        yield json.loads((folder / f"{rank:05d}.json").read_text(encoding="utf-8"))


def slug(name: str, taken: set[str]) -> str:
    """A folder name for a subset or field, unlike those taken."""
    base = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "other"
    result, number = base, 2
    while result in taken:
        result, number = f"{base}-{number}", number + 1
    return result


def write(
    folder: Path, plan: Plan, target: Path, limit: int, dtype: Any, wanted: tuple[int | None, str | None]
) -> dict[str, dict[str, Any]]:
    """Write ``train`` and ``validation`` (``.bin``, ``.idx``, ``.bytes.npy``) of one field and one subset, None for all.

    Returns:
        The manifest's entry of each split.
    """
    dtype = np.dtype(dtype)
    names = [item["subsets"] for item in facts(folder, plan)]

    def selected(split: str) -> Iterator[tuple[int, dict[str, NDArray[Any]], NDArray[np.bool_]]]:
        for rank, part in enumerate(columns(folder, plan)):
            held = part["key"] < np.uint64(limit) if limit < 2**64 else np.ones(len(part["key"]), dtype=bool)
            mask = held if split == "validation" else ~held
            if wanted[0] is not None:
                mask = mask & (part["field"] == wanted[0])
            if wanted[1] is not None:
                mask = mask & (
                    part["subset"] == (names[rank].index(wanted[1]) if wanted[1] in names[rank] else 2**16 - 1)
                )
            yield rank, part, mask

    entries = {}
    for split in SPLITS:
        tokens, sizes = [], []
        for _, part, mask in selected(split):
            tokens.append(part["tokens"][mask])
            sizes.append(part["bytes"][mask])
        lengths, byte_lengths = np.concatenate(tokens), np.concatenate(sizes)
        entries[split] = {
            "documents": len(lengths),
            "bytes": int(byte_lengths.sum()),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "dtype": dtype.name,
        }
        if not len(lengths):
            continue
        with (target / f"{split}.bin").open("wb", buffering=1 << 20) as file:
            for rank, part, mask in selected(split):
                if mask.any():
                    _copy(folder / f"{rank:05d}.bin", part["tokens"], mask, dtype, file)
        write_index(target / f"{split}.idx", lengths, dtype)
        np.save(target / f"{split}.bytes.npy", byte_lengths)
    return entries


def _copy(path: Path, lengths: NDArray[np.int32], mask: NDArray[np.bool_], dtype: Any, file: Any) -> None:
    """Append the tokens of chosen documents, run by run."""
    bounds = np.append(0, np.cumsum(lengths, dtype=np.int64))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    data = np.memmap(path, dtype=dtype, mode="r")
    for first, last in edges.reshape(-1, 2):
        file.write(data[bounds[first] : bounds[last]])


def write_index(path: Path, lengths: NDArray[np.int32], dtype: Any) -> None:
    """Write megatron-core's ``.idx`` of documents of one sequence each.

    Its own writer goes through lists of Python integers, which take 20 GB for the Pile's 210 million documents.

    Args:
        path: the file.
        lengths: int32 [documents], tokens of each.
        dtype: of the stored tokens.
    """
    dtype, count = np.dtype(dtype), len(lengths)
    with path.open("wb") as file:
        file.write(_HEADER + struct.pack("<QBQQ", 1, _CODES[dtype.name], count, count + 1))
        file.write(lengths.astype(np.int32, copy=False).tobytes())
        position = 0
        for start in range(0, count, _DOCUMENTS):
            ends = position + np.cumsum(lengths[start : start + _DOCUMENTS], dtype=np.int64) * dtype.itemsize
            file.write(np.append(position, ends[:-1]).astype(np.int64).tobytes())
            position = int(ends[-1])
        for start in range(0, count + 1, _DOCUMENTS):
            file.write(np.arange(start, min(start + _DOCUMENTS, count + 1), dtype=np.int64).tobytes())
