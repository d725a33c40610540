"""Finished parts to the data sets of an output folder, in canonical order, part by part: few open files, bounded memory."""

import itertools
import json
import re
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import shards
from lightnet_data.parts import Plan

Limits = tuple[int, int]  # documents with a hash below the first are validation's, others below the second the test's


def limits(folder: Path, plan: Plan, holdout: float, test: float) -> Limits:
    """Where splits end, by the hash of a document's text.

    Shares ``holdout`` and ``test`` of all possible texts are held out, whatever else the corpus holds. Only where that
    leaves train or validation without any document, the one of lowest hash is validation's or the one of highest hash
    train's; copies of one text are never divided.
    """
    low, high = 2**64, -1
    for part in columns(folder, plan):
        if len(part["key"]):
            low, high = min(low, int(part["key"].min())), max(high, int(part["key"].max()))
    return bounded_limits(holdout, test, low, high)


def bounded_limits(holdout: float, test: float, low: int, high: int) -> Limits:
    """As ``limits``, from the lowest and the highest hash."""
    limit = int(holdout * 2**64)
    if holdout > 0 and low < high:
        limit = min(max(limit, low + 1), high)
    elif low == high:
        limit = 0
    return limit, max(limit, min(limit + int(test * 2**64), max(high, 0)))


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
    folder: Path,
    plan: Plan,
    target: Path,
    limits: Limits,
    dtype: Any,
    wanted: tuple[int | None, str | None],
    shard_tokens: int | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Write ``train``, ``validation`` and, if any is asked for, ``test`` (``.bin``, ``.idx``, ``.bytes.npy``) of one field and
    one subset, None for all.

    Args:
        folder: where the finished parts are.
        plan: their plan.
        target: folder to write in.
        limits: of the splits, see ``limits``.
        dtype: of the parts' tokens.
        wanted: field and subset.
        shard_tokens: of a shard at most; see ``shards.Cutter``.

    Returns:
        The manifest's entry of each split, and of each file.
    """
    dtype = np.dtype(dtype)
    subsets = [item["subsets"] for item in facts(folder, plan)]

    def selected(split: str) -> Iterator[tuple[int, dict[str, NDArray[Any]], NDArray[np.int64]]]:
        """Rank, columns and the wanted documents of each part."""
        for rank, part in enumerate(columns(folder, plan)):
            below = [_below(part["key"], limit) for limit in limits]
            mask = {"validation": below[0], "test": below[1] & ~below[0], "train": ~below[1]}[split]
            if wanted[0] is not None:
                mask = mask & (part["field"] == wanted[0])
            if wanted[1] is not None:
                here = subsets[rank].index(wanted[1]) if wanted[1] in subsets[rank] else 2**16 - 1
                mask = mask & (part["subset"] == here)
            yield rank, part, np.flatnonzero(mask)

    entries: dict[str, dict[str, Any]] = {}
    files: dict[str, dict[str, Any]] = {}
    for split in ("train", "validation", *(["test"] if limits[1] > limits[0] else [])):
        cutter, sizes = shards.Cutter(shard_tokens), list[int]()  # documents of each shard
        entry: dict[str, Any] = {"documents": 0, "bytes": 0, "tokens": 0, "dtype": dtype.name}
        for _, part, chosen in selected(split):
            entry["documents"] += len(chosen)
            entry["bytes"] += int(part["bytes"][chosen].sum())
            entry["tokens"] += int(part["tokens"][chosen].sum(dtype=np.int64))
            for shard, first, last in cutter.pieces(part["tokens"][chosen]):
                sizes += [0] * (shard + 1 - len(sizes))
                sizes[shard] += last - first
        entries[split] = entry
        stems = shards.names(split, len(sizes))
        if len(sizes) > 1:
            entry["shards"] = stems
        for shard, group in itertools.groupby(_pieces(selected(split), shards.Cutter(shard_tokens)), itemgetter(0)):
            with shards.ShardWriter(target / stems[shard], sizes[shard], dtype) as writer:
                for _, rank, part, chosen in group:
                    _copy(folder / f"{rank:05d}.bin", part, chosen, writer)
            files.update(writer.checksums())
    return entries, files


def _below(keys: NDArray[np.uint64], limit: int) -> NDArray[np.bool_]:
    return keys < np.uint64(limit) if limit < 2**64 else np.ones(len(keys), dtype=bool)


def _pieces(
    selected: Iterator[tuple[int, dict[str, NDArray[Any]], NDArray[np.int64]]], cutter: shards.Cutter
) -> Iterator[tuple[int, int, dict[str, NDArray[Any]], NDArray[np.int64]]]:
    """Shard, rank, columns and documents of what goes from a part to a shard."""
    for rank, part, chosen in selected:
        for shard, first, last in cutter.pieces(part["tokens"][chosen]):
            yield shard, rank, part, chosen[first:last]


def _copy(path: Path, part: dict[str, NDArray[Any]], chosen: NDArray[np.int64], writer: shards.ShardWriter) -> None:
    """Documents of a part, run by run."""
    writer.add(part["tokens"][chosen], part["bytes"][chosen])
    bounds = np.append(0, np.cumsum(part["tokens"], dtype=np.int64)) * writer.dtype.itemsize
    with path.open("rb", buffering=0) as source:
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            shards.copy(source, int(bounds[run[0]]), int(bounds[run[-1] + 1]), writer)
