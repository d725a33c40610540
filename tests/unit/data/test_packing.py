"""Packing and sampling: each token once, segments at documents, nothing that depends on the layout."""

import gc
import io
import pickle
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data.dataset import PackedTokens, collate
from lightnet_data.documents import DocumentReader
from lightnet_data.errors import DataError
from lightnet_data.sampler import GlobalBatchSampler
from lightnet_data.storage import TokenStore, indexed_dataset

from .conftest import EOD, write_shards

# Lengths without the end-of-document token: empty, short, around a window's edge, several windows.
LENGTHS = [0, 1, 7, 8, 9, 15, 16, 17, 3, 40, 2, 100, 5, 0, 31]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of distinct tokens, so that a token's place can be told from its value."""
    documents, first = [], EOD + 1
    for length in LENGTHS:
        documents.append(list(range(first, first + length)))
        first += length
    return write_shards(tmp_path_factory.mktemp("shards") / "train", documents)


def stored_documents(prefix: Path) -> list[list[int]]:
    documents, first = [], EOD + 1
    for length in LENGTHS:
        documents.append([*range(first, first + length), EOD])
        first += length
    return documents


def test_stored_order_without_shuffle(prefix: Path) -> None:
    data = PackedTokens(prefix, 8, shuffle=False)
    stream = [token for document in stored_documents(prefix) for token in document]
    assert data.tokens == len(stream) and data.samples_per_epoch == (len(stream) - 1) // 8
    assert data.dropped_tokens == (len(stream) - 1) % 8
    for index, sample in enumerate(data):
        assert sample["input_ids"].tolist() == stream[index * 8 : index * 8 + 8]
        assert sample["labels"].tolist() == stream[index * 8 + 1 : index * 8 + 9]
        assert sample["sample_id"] == index
    later = data[len(data) + 3]
    assert later["input_ids"].tolist() == data[3]["input_ids"].tolist() and later["sample_id"] == len(data) + 3


@pytest.mark.parametrize("length", [1, 2, 8, 13, 64, 200])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_token_is_a_target_once(prefix: Path, length: int, epoch: int) -> None:
    data = PackedTokens(prefix, length, seed=3)
    samples = [data[epoch * len(data) + index] for index in range(len(data))]
    targets = sorted(token for sample in samples for token in sample["labels"].tolist() if token != EOD)
    tokens = [token for document in stored_documents(prefix) for token in document]
    assert len(set(targets)) == len(targets)
    assert sum(sample["labels"].size for sample in samples) == data.tokens - 1 - data.dropped_tokens
    assert set(targets) <= set(tokens)
    # The first token of the stream and the tail are what is missing.
    ends = sum((sample["labels"] == EOD).sum() for sample in samples)
    assert len(tokens) - len(targets) - ends == 1 + data.dropped_tokens


def test_an_epoch_is_every_window_once(prefix: Path) -> None:
    """Put back in their order, the windows of an epoch are the stored stream; each epoch has an order of its own."""
    data = PackedTokens(prefix, 8, seed=1)
    stream = [token for document in stored_documents(prefix) for token in document]
    windows = [tuple(stream[start : start + 8]) for start in range(0, len(data) * 8, 8)]
    orders = []
    for epoch in range(3):
        samples = [tuple(data[epoch * len(data) + index]["input_ids"]) for index in range(len(data))]
        orders.append(tuple(data.window_at(epoch * len(data) + index) for index in range(len(data))))
        assert samples == [windows[index] for index in orders[-1]]
        assert sorted(orders[-1]) == list(range(len(data))) != list(orders[-1])
    assert len(set(orders)) == 3


def test_segments_begin_at_rows_and_at_end_of_document_inputs(prefix: Path) -> None:
    data = PackedTokens(prefix, 8, seed=0)
    for sample in data:
        starts = sample["segment_starts"]
        assert starts.dtype == bool and starts[0]
        assert (starts[1:] == (sample["input_ids"][1:] == EOD)).all()
        assert (sample["input_ids"][1:] == sample["labels"][:-1]).all()
        # Tokens of a document are consecutive numbers: within a segment no other document shows.
        bounds = [*np.flatnonzero(starts), 8]
        for begin, end in pairwise(bounds):
            tokens = sample["input_ids"][begin:end]
            tokens = tokens[tokens != EOD]
            assert (np.diff(tokens) == 1).all()
            assert (sample["labels"][begin:end][:-1] != EOD).all()  # it ends a segment


def test_a_sample_is_a_function_of_seed_and_position(prefix: Path) -> None:
    first, second = PackedTokens(prefix, 8, seed=7), PackedTokens(prefix, 8, seed=7)
    positions = [0, 5, 3 * len(first) + 1, 2, 10_000, 5]
    forward = [first[position]["input_ids"].tolist() for position in positions]
    backward = [second[position]["input_ids"].tolist() for position in reversed(positions)]
    assert forward == backward[::-1]
    assert len(first._epochs) <= 2
    other = PackedTokens(prefix, 8, seed=8)
    assert any(first[index]["input_ids"].tolist() != other[index]["input_ids"].tolist() for index in range(5))
    copied = pickle.loads(pickle.dumps(first))
    assert copied[10_000]["input_ids"].tolist() == forward[4]
    assert first[np.int64(5)]["sample_id"] == 5
    with pytest.raises(IndexError):
        first[-1]
    with pytest.raises(TypeError):
        first[1.5]  # type: ignore[index]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40), st.integers(0, 2**63))
@settings(max_examples=60, deadline=None)
def test_packing_of_any_lengths(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], window: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    documents = [[EOD + 1 + number] * length for number, length in enumerate(lengths)]
    write_shards(folder / "data", documents)
    total = sum(lengths) + len(lengths)
    if total < window + 1:
        with pytest.raises(DataError, match=f"largest sequence_length for it is {total - 1}"):
            PackedTokens(folder / "data", window)
    else:
        data = PackedTokens(folder / "data", window, seed=seed)
        labels = np.concatenate([sample["labels"] for sample in data])
        assert len(labels) == (total - 1) // window * window
        counts = np.bincount(labels, minlength=EOD + 1 + len(lengths))[EOD + 1 :]
        assert (counts <= lengths).all() and sum(lengths) - counts.sum() <= 1 + data.dropped_tokens
    shutil.rmtree(folder)


def test_collate(prefix: Path) -> None:
    data = PackedTokens(prefix, 8, seed=0)
    batch = collate([data[4], data[9], data[2]])
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 8)
    assert batch["input_ids"].dtype == batch["labels"].dtype == batch["sample_ids"].dtype == torch.int64
    assert batch["sample_ids"].tolist() == [4, 9, 2]
    bounds = batch["cu_seqlens"]
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == 24 and (bounds.diff() > 0).all()
    starts = torch.cat([torch.from_numpy(data[index]["segment_starts"]) for index in (4, 9, 2)])
    assert bounds[:-1].tolist() == starts.nonzero().flatten().tolist()
    assert {0, 8, 16} <= set(bounds.tolist())


RAMP: Callable[[int], int] = lambda step: 8 if step < 3 else 16  # noqa: E731


@pytest.mark.parametrize("batch", [16, RAMP])
@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (4, 1)])
def test_every_layout_reads_the_same_samples(batch: int | Callable[[int], int], size: int, micro: int) -> None:
    reference = iter(GlobalBatchSampler(batch, 8, end_step=6))
    ranks = [iter(GlobalBatchSampler(batch, micro, rank, size, end_step=6)) for rank in range(size)]
    for step in range(6):
        count = batch if isinstance(batch, int) else batch(step)
        expected = [position for _ in range(count // 8) for position in next(reference)]
        seen = [position for _ in range(count // micro // size) for rank in ranks for position in next(rank)]
        assert seen == expected == sorted(expected)
    assert all(next(rank, None) is None for rank in [*ranks, reference])


@pytest.mark.parametrize("batch", [16, RAMP])
def test_resume_continues(batch: int | Callable[[int], int]) -> None:
    whole = list(GlobalBatchSampler(batch, 4, 1, 2, end_step=9))
    resumed = GlobalBatchSampler(batch, 4, 1, 2, start_step=5, end_step=9)
    assert list(resumed) == whole[-len(resumed) :]
    first, second = list(GlobalBatchSampler(batch, 4, 0, 2, 0, 5)), list(GlobalBatchSampler(batch, 8, 0, 1, 5, 9))
    assert first[0][0] == 0 and second[0][0] == resumed.start_at(5)
    endless = iter(GlobalBatchSampler(batch, 4, 1, 2, start_step=5))
    assert [next(endless) for _ in range(len(resumed))] == list(resumed)
    with pytest.raises(TypeError):
        len(GlobalBatchSampler(batch, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 8), "batch size 12 at step 0 is not a multiple of micro_batch 8"),
        ((8, 4, 0, 3), "data-parallel size 3 = 12; nearest: 12"),
        ((RAMP, 16, 0, 1, 3), None),
        ((RAMP, 16), "batch size 8 at step 0"),
        ((lambda step: 8 - 4 * (step == 7), 8, 0, 1, 0, 9), "batch size 4 at step 7"),
        ((0, 1), "batch size 0"),
        ((8, 0), "micro_batch 0"),
        ((8, 1, 2, 2), "rank 2 of 2"),
        ((8, 1, 0, 1, 5, 4), "steps 5 to 4"),
    ],
)
def test_sampler_refusals(arguments: tuple, message: str | None) -> None:
    if message is None:
        GlobalBatchSampler(*arguments)
        return
    with pytest.raises(DataError, match=message):
        GlobalBatchSampler(*arguments)


@pytest.mark.parametrize(("context", "count"), [("fork", 2), ("spawn", 1)])
def test_loader_workers_change_nothing(prefix: Path, context: str, count: int) -> None:
    data = PackedTokens(prefix, 8, seed=5)
    batches = []
    for workers in (0, count):
        sampler = GlobalBatchSampler(16, 4, 1, 2, start_step=1, end_step=6)
        options = {"multiprocessing_context": context} if workers else {}
        loader = torch.utils.data.DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            **options,  # type: ignore[arg-type]
        )
        batches.append(list(loader))
    for left, right in zip(*batches, strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_foreign_shard_needs_its_end_of_document_token(tmp_path: Path) -> None:
    builder = indexed_dataset().IndexedDatasetBuilder(f"{tmp_path / 'a'}.bin", dtype=np.int32)
    builder.add_document(np.array([5, 6, 7, 9, 70000, 9]), [3, 3])  # one document of two sequences
    builder.add_document(np.array([8, 9]), [2])
    builder.finalize(f"{tmp_path / 'a'}.idx")
    data = PackedTokens(tmp_path / "a", 3, shuffle=False)
    assert data.tokens == 8 and data.eod_id == 9
    assert data[0]["labels"].tolist() == [6, 7, 9] and data[1]["labels"].tolist() == [70000, 9, 8]
    (tmp_path / "manifest.json").write_text('{"of": "somebody else"}')
    assert PackedTokens(tmp_path / "a", 3).eod_id == 9
    with pytest.raises(DataError, match="document 0 ends with token 9, not with the end-of-document token 3"):
        PackedTokens(tmp_path / "a", 3, eod_id=3)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_file_that_cannot_be_read_is_named(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(tmp_path / "data", [[5, 6, 7]])
    original = io.open

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:  # root reads everything
        if str(path).endswith(f".{suffix}"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr("io.open", opened)
    monkeypatch.setattr("builtins.open", opened)
    with pytest.raises(DataError, match=rf"data\.{suffix}: cannot be read \(Permission denied\); give this user"):
        TokenStore(tmp_path / "data")
    gc.collect()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.with_suffix(".bin").unlink(), r"data\.bin: no such file"),
        (lambda path: path.with_suffix(".idx").unlink(), r"data\.idx: no such file"),
        (lambda path: path.with_suffix(".bin").write_bytes(b""), r"data\.bin: the data set holds no tokens"),
        (lambda path: cut(path.with_suffix(".bin"), 2), r"data\.bin: \d+ bytes, but data.idx describes \d+"),
        (
            lambda path: path.with_suffix(".bin").open("ab").write(b"xx"),
            r"data\.bin: \d+ bytes, but data.idx describes",
        ),
        (lambda path: cut(path.with_suffix(".idx"), 1), r"data\.idx: damaged or cut index"),
        (lambda path: path.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0"), r"data\.idx: damaged or cut index"),
        (lambda path: path.with_suffix(".idx").write_bytes(b""), r"data\.idx: damaged or cut index"),
        (lambda path: path.with_suffix(".idx").write_bytes(b"something else"), r"data\.idx: damaged or cut index"),
    ],
)
def test_damaged_shards_are_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    write_shards(tmp_path / "data", [[5, 6, 7]] * 10)
    damage(tmp_path / "data")
    with pytest.raises(DataError, match=message) as caught:
        PackedTokens(tmp_path / "data", 4)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def test_prefix_with_a_suffix_gets_a_hint(prefix: Path) -> None:
    with pytest.raises(DataError, match=r"without \.bin or \.idx"):
        PackedTokens(f"{prefix}.bin", 8)


def test_documents(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", [[5, 6], [], [7]])
    with pytest.raises(DataError, match=r"data\.bytes\.npy: no byte lengths"):
        DocumentReader(tmp_path / "data")
    np.save(tmp_path / "data.bytes.npy", np.array([9, 0]))
    with pytest.raises(DataError, match="2 byte lengths for 3 documents"):
        DocumentReader(tmp_path / "data")
    (tmp_path / "data.bytes.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(DataError, match="damaged byte lengths"):
        DocumentReader(tmp_path / "data")
    np.save(tmp_path / "data.bytes.npy", np.array([9, 0, 4]))
    reader = DocumentReader(tmp_path / "data")
    assert [(tokens.tolist(), length) for tokens, length in reader] == [([5, 6, EOD], 9), ([EOD], 0), ([7, EOD], 4)]
    assert len(reader) == 3 and reader.eod_id == EOD and reader[2].byte_length == 4
