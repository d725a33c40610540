"""Shards read as one stream: any number of them, of any size, by any number of ranks and loader workers."""

import gc
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import manifest
from lightnet_data.dataset import PackedTokens, collate
from lightnet_data.documents import DocumentReader
from lightnet_data.errors import DataError
from lightnet_data.mixture import Mixture, Stage
from lightnet_data.sampler import GlobalBatchSampler
from lightnet_data.storage import TokenStore
from lightnet_data.stream import TokenStream, _open_files, _OpenFiles

from .conftest import EOD, write_shards


def write_split(folder: Path, documents: list[list[int]], cuts: list[int], **facts: Any) -> list[str]:
    """Shards of documents cut at ``cuts``, and a manifest that lists them."""
    bounds = [0, *cuts, len(documents)]
    stems = [f"train_{number:05d}-of-{len(bounds) - 1:05d}" for number in range(len(bounds) - 1)]
    for stem, first, end in zip(stems, bounds, bounds[1:], strict=False):
        write_shards(folder / stem, documents[first:end])
        np.save(folder / f"{stem}.bytes.npy", np.array([len(document) for document in documents[first:end]]))
    tokens = sum(len(document) + 1 for document in documents)
    manifest.save(
        folder,
        {
            "format": manifest.FORMAT,
            "format_version": manifest.FORMAT_VERSION,
            "tokenizer": {"eod_id": EOD, "vocab_size": 65536},
            "splits": {"train": {"documents": len(documents), "tokens": tokens, "shards": stems, **facts}},
        },
    )
    return stems


def numbered(lengths: list[int]) -> list[list[int]]:
    """Documents of tokens that are all different."""
    ends = np.cumsum([EOD + 1, *lengths])
    return [list(range(first, end)) for first, end in pairwise(ends)]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same documents in three shards and in one."""
    folder = tmp_path_factory.mktemp("stream")
    documents = numbered(np.random.default_rng(3).integers(0, 60, size=150).tolist())
    (folder / "three").mkdir()
    (folder / "one").mkdir()
    write_split(folder / "three", documents, [40, 41])
    write_shards(folder / "one" / "train", documents)
    return folder / "three" / "train", folder / "one" / "train"


def test_shards_are_one_stream(sharded: tuple[Path, Path]) -> None:
    three, one = (PackedTokens(prefix, 16, seed=2) for prefix in sharded)
    assert three.tokens == one.tokens and len(three) == len(one)
    for position in range(3 * len(one)):
        left, right = three[position], one[position]
        assert all(np.array_equal(left[key], right[key]) for key in left)
    spawned = pickle.loads(pickle.dumps(three))
    assert np.array_equal(spawned[5]["labels"], one[5]["labels"])


def test_documents_of_all_shards(sharded: tuple[Path, Path]) -> None:
    store, reader = TokenStore(sharded[1]), DocumentReader(sharded[0])
    assert len(reader) == len(store) == 150
    for index in (*range(150), 3, 149, 40):
        assert reader[index].tokens.tolist() == store.document(index).tolist()
        assert reader[index].byte_length == len(reader[index].tokens) - 1


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=20),
    st.sets(st.integers(1, 19), max_size=6),
    st.integers(1, 50),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_any_cut_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cuts: set[int], count: int, start: int
) -> None:
    folder, documents = tmp_path_factory.mktemp("cut"), numbered(lengths)
    write_split(folder, documents, sorted(cut for cut in cuts if cut < len(documents)))
    stream = TokenStream(folder / "train")
    tokens = [token for document in documents for token in (*document, EOD)]
    assert stream.tokens == len(tokens)
    start = start % len(tokens)
    count = min(count, len(tokens) - start)
    assert stream.read(start, count).tolist() == tokens[start : start + count]


@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks_of_two_workers_over_three_shards(sharded: tuple[Path, Path], size: int) -> None:
    """Every sample of an epoch once, over the ranks; as many steps on each; the same samples without workers."""
    data = PackedTokens(sharded[0], 16, seed=9)
    batch = 8
    steps = -(-len(data) // batch) + 1
    read: dict[int, list[tuple[int, list[int]]]] = {}
    for workers in (0, 2):
        counts, read[workers] = [], []
        for rank in range(size):
            sampler = GlobalBatchSampler(batch, 2, rank, size, end_step=steps)
            loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=workers)
            batches = list(loader)
            counts.append(len(batches))
            for micro in batches:
                read[workers] += zip(micro["sample_ids"].tolist(), micro["input_ids"].tolist(), strict=True)
        assert counts == [steps * batch // 2 // size] * size
    assert read[0] == read[2]
    ids = sorted(position for position, _ in read[2])
    assert ids == list(range(steps * batch))
    first = [tokens for position, tokens in read[2] if position < len(data)]
    assert sorted(first) == sorted(
        sample["input_ids"].tolist() for sample in PackedTokens(sharded[1], 16, shuffle=False)
    )


def test_a_mixture_by_two_ranks_of_two_workers(sharded: tuple[Path, Path]) -> None:
    sources = {"three": PackedTokens(sharded[0], 16, 1), "one": PackedTokens(sharded[1], 16, 1)}
    mixed = Mixture(sources, [Stage(0, {"three": 0.25, "one": 0.75}), Stage(100, {"three": 1})])
    found: list[tuple[int, list[int]]] = []
    for rank in range(2):
        sampler = GlobalBatchSampler(8, 2, rank, 2, end_step=25)
        loader = torch.utils.data.DataLoader(mixed, batch_sampler=sampler, collate_fn=collate, num_workers=2)
        for micro in loader:
            found += zip(micro["sample_ids"].tolist(), micro["labels"].tolist(), strict=True)
    assert sorted(found) == [(position, mixed[position]["labels"].tolist()) for position in range(200)]


def test_more_shards_than_open_files(tmp_path: Path) -> None:
    documents = numbered([7] * 90)
    write_split(tmp_path, documents, list(range(1, 90)))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, _open_files.limit = _open_files.limit, 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(list(Path("/proc/self/fd").iterdir())) + 24), hard))
    try:
        data = PackedTokens(tmp_path / "train", 8)
        reader = DocumentReader(tmp_path / "train")
        labels = sorted(token for sample in data for token in sample["labels"].tolist() if token != EOD)
        assert labels == list(
            range(EOD + 2, EOD + 1 + 7 * 90 - (data.dropped_tokens - 1 if data.dropped_tokens else 0))
        )
        assert [len(document.tokens) for document in reader] == [8] * 90
    finally:
        _open_files.limit = limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stream_that_is_collected_within_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are closed in the thread that holds the lock."""

    class Stream:
        def __init__(self, owner: int) -> None:
            self.itself = self  # a cycle: only the garbage collector finds it
            weakref.finalize(self, files.close, owner)

    files, found, pread = _OpenFiles(), [], os.pread
    (tmp_path / "a").write_bytes(b"tokens")
    files.read(1, str(tmp_path / "a"), 6, 0)
    gc.disable()
    Stream(1)

    def collected(*arguments: int) -> bytes:
        gc.collect()
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", collected)
    thread = threading.Thread(target=lambda: found.append(files.read(2, str(tmp_path / "a"), 6, 0)), daemon=True)
    try:
        thread.start()
        thread.join(20)  # of a millisecond
    finally:
        gc.enable()
    assert found == [b"tokens"]
    assert list(files._files) == [(2, str(tmp_path / "a"))]
    files.close(2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "train_00001-of-00003.bin").unlink(),
            r"00001-of-00003\.bin: no such file; the manifest",
        ),
        (
            lambda folder: (folder / "train_00002-of-00003.idx").unlink(),
            r"00002-of-00003\.idx: no such file; the manifest",
        ),
        (
            lambda folder: cut(folder / "train_00000-of-00003.bin", 2),
            r"00000-of-00003\.bin: \d+ bytes, but .* describes",
        ),
        (
            lambda folder: write_shards(folder / "train_00001-of-00003", [[7, 8]]),
            r"train: its 3 shards hold \d+ tokens, the m",
        ),
        (
            lambda folder: foreign(folder / "train_00001-of-00003"),
            r"tokens of type int32, those of the shards before it are",
        ),
    ],
)
def test_damaged_shards(tmp_path: Path, damage: Any, message: str) -> None:
    write_split(tmp_path, numbered([5] * 30), [10, 20])
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        PackedTokens(tmp_path / "train", 4)
    assert "\n" not in str(caught.value)


def test_a_shard_cut_under_a_run(tmp_path: Path) -> None:
    write_split(tmp_path, numbered([50] * 30), [10, 20])
    data = PackedTokens(tmp_path / "train", 4, shuffle=False)
    cut(tmp_path / "train_00002-of-00003.bin", 100)
    assert data[0]["labels"].size == 4
    with pytest.raises(DataError, match=r"00002-of-00003\.bin: cut since it was opened"):
        data[len(data) - 1]
    (tmp_path / "train_00001-of-00003.bin").unlink()
    with pytest.raises(DataError, match=r"00001-of-00003\.bin: cannot read it"):
        data[len(data) // 2]


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def foreign(prefix: Path) -> None:
    from lightnet_data.storage import indexed_dataset

    builder = indexed_dataset().IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    builder.add_document(np.array([70000, EOD]), [2])
    builder.finalize(f"{prefix}.idx")


MEASURE = """
import json, resource, sys, time
from lightnet_data.storage import indexed_dataset
indexed_dataset()
from lightnet_data.dataset import PackedTokens

def resident():  # of this process's own memory: pages of a mapped file are the page cache's
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10

before, start = resident(), time.perf_counter()
data = PackedTokens(sys.argv[1], 2048, seed=1)
opened = time.perf_counter() - start
sample = [data[position] for position in (0, 1, 10**7, 10**9)]
last = data.windows.read([len(data) - 1])[0][0]
print(json.dumps({"tokens": data.tokens, "samples": len(data), "seconds": opened, "bytes": resident() - before,
    "last": last.tolist()[-3:], "shapes": [s["input_ids"].size for s in sample]}))
"""


def sparse(prefix: Path, documents: int, length: int) -> None:
    """An index of ``documents`` documents of ``length`` tokens, over a .bin that is all hole but its last window."""
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + (8).to_bytes(1, "little"))
        file.write(documents.to_bytes(8, "little") + (documents + 1).to_bytes(8, "little"))
        step = 1 << 22
        ranges = [(first, min(first + step, documents)) for first in range(0, documents, step)]
        for first, end in ranges:
            np.full(end - first, length, dtype=np.int32).tofile(file)
        for first, end in ranges:
            (np.arange(first, end, dtype=np.int64) * length * 2).tofile(file)
        for first, end in ranges:
            np.arange(first, end, dtype=np.int64).tofile(file)
        file.write(documents.to_bytes(8, "little"))
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(documents * length * 2)
        file.seek(documents * length * 2 - 5000)
        file.write(np.append(np.arange(1, 2500, dtype=np.uint16), np.uint16(0)).tobytes())


@pytest.mark.parametrize("documents", [3_000_000, pytest.param(50_000_000, marks=pytest.mark.slow)])
def test_an_index_of_billions_of_tokens(tmp_path: Path, documents: int) -> None:
    """Past 2^31 tokens and 2^32 bytes: opened at once, in no memory, and read to its end."""
    length = 2000
    try:
        sparse(tmp_path / "train", documents, length)
        if (tmp_path / "train.bin").stat().st_blocks * 512 > 1 << 20:
            pytest.skip("this file system makes no sparse files")
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / "train")], capture_output=True, text=True, check=True
        )
    finally:
        for path in tmp_path.iterdir():
            path.unlink()
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == documents * length > 2**31
    assert found["samples"] == (documents * length - 1) // 2048
    assert found["seconds"] < 10 and found["bytes"] < 64 << 20  # measured: 0.25 s and 0.6 MB for 100 billion tokens
    assert found["shapes"] == [2048] * 4
    place = found["samples"] * 2048 - (
        documents * length - 2500
    )  # of the last window's last token, in what was written
    assert found["last"] == list(range(place - 1, place + 2))
