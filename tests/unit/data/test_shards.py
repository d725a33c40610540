"""Output shards: cut at documents, equal to the one file when joined, described by the manifest, in bounded memory."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from lightnet_data import manifest, shards
from lightnet_data.documents import DocumentReader
from lightnet_data.storage import indexed_dataset

Run = Callable[..., Result]


def twin(lengths: list[int], limit: int) -> list[int]:
    """The shard of each document, one at a time."""
    shard, used, found = 0, 0, []
    for length in lengths:
        if used and used + length > limit:
            shard, used = shard + 1, 0
        used += length
        found.append(shard)
    return found


@given(parts=st.lists(st.lists(st.integers(1, 30), max_size=12), max_size=5), limit=st.integers(1, 60))
def test_cutter_equals_its_twin(parts: list[list[int]], limit: int) -> None:
    cutter, found = shards.Cutter(limit), []
    for part in parts:
        pieces = list(cutter.pieces(np.array(part, dtype=np.int32)))
        assert [first for _, first, _ in pieces] == [0, *(last for _, _, last in pieces)][:-1] if pieces else not part
        found += [shard for shard, first, last in pieces for _ in range(first, last)]
    assert found == twin([length for part in parts for length in part], limit)


@pytest.mark.parametrize("workers", [1, 3])
def test_shards_joined_are_the_one_file(
    tmp_path: Path,
    corpus: Path,
    run_prep: Run,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    monkeypatch.setattr("lightnet_data.parts.PART_BYTES", 7000)
    options = ["--tokenizer", tokenizer_file, "--holdout", 0.2]
    assert run_prep(corpus, "--output", tmp_path / "one", *options).exit_code == 0
    more = ["--shard-tokens", 2000, "--workers", workers]
    assert run_prep(corpus, "--output", tmp_path / "many", *options, *more).exit_code == 0
    one, many = manifest.load(tmp_path / "one"), manifest.load(tmp_path / "many")
    for split in ("train", "validation"):
        stems = many["splits"][split]["shards"]
        count = len(stems)
        assert stems == [f"{split}_{number:05d}-of-{count:05d}" for number in range(count)] and count > 1
        joined = b"".join((tmp_path / "many" / f"{stem}.bin").read_bytes() for stem in stems)
        assert joined == (tmp_path / "one" / f"{split}.bin").read_bytes()
        whole = DocumentReader(tmp_path / "one" / split)
        documents = [document for stem in stems for document in _documents(tmp_path / "many" / stem)]
        assert documents == [(document.tokens.tolist(), document.byte_length) for document in whole]
        assert all((tmp_path / "many" / f"{stem}.bin").stat().st_size <= 4000 for stem in stems)
        assert {**many["splits"][split], "shards": None} == {**one["splits"][split], "shards": None}
        assert "shards" not in one["splits"][split]
    assert set(many["files"]) == {path.name for path in (tmp_path / "many").iterdir()} - {"manifest.json"}
    for name, entry in many["files"].items():
        data = (tmp_path / "many" / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _documents(prefix: Path) -> list[tuple[list[int], int]]:
    data = indexed_dataset().IndexedDataset(str(prefix))
    sizes = np.load(f"{prefix}.bytes.npy")
    assert len(data) == len(sizes) == len(data.document_indices) - 1
    return [(data[number].tolist(), int(sizes[number])) for number in range(len(data))]


def test_outputs_of_subsets_are_sharded_and_checked(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    lines = (json.dumps({"text": f"document {number} " * 9, "set": "ab"[number % 2]}) + "\n" for number in range(40))
    (tmp_path / "in.jsonl").write_text("".join(lines))
    options = [
        "--subset-field",
        "set",
        "--by-subset",
        "--shard-tokens",
        500,
        "--holdout",
        0,
        "--tokenizer",
        tokenizer_file,
    ]
    given = [tmp_path / "in.jsonl", "--output", tmp_path / "out", *options]
    assert run_prep(*given).exit_code == 0
    for name in "ab":
        written = manifest.load(tmp_path / "out" / name)
        assert len(written["splits"]["train"]["shards"]) > 1
        assert set(written["files"]) == {path.name for path in (tmp_path / "out" / name).iterdir()} - {"manifest.json"}
    (tmp_path / "out" / "b" / f"{written['splits']['train']['shards'][1]}.bin").unlink()
    again = run_prep(*given)
    assert again.exit_code == 1 and "0 bytes, the manifest says" in again.stderr


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Documents of 2^31 - 2 tokens, not written: the pointers in the index are 64 bits wide."""
    largest = 2**31 - 2
    with shards.ShardWriter(tmp_path / "big", 3, np.uint16) as writer:
        for _ in range(3):
            writer.add(np.array([largest], dtype=np.int32), np.array([5 * largest]))
    data = (tmp_path / "big.idx").read_bytes()
    pointers = struct.unpack("<3q", data[34 + 12 : 34 + 36])
    assert pointers == (0, 2 * largest, 4 * largest) and pointers[-1] > 2**32
    assert np.load(tmp_path / "big.bytes.npy").tolist() == [5 * largest] * 3


def test_a_shard_of_no_tokens_is_refused(tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path) -> None:
    given = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--shard-tokens", 0]
    assert "--shard-tokens 0: must be at least 1" in run_prep(*given).stderr
