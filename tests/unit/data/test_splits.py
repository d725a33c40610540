"""Splits by the hash of a document's text: disjoint, whole, and the same whatever else the corpus holds."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightnet_data import manifest, merging
from lightnet_data.documents import DocumentReader

from .test_shards import Run


def documents(folder: Path, split: str) -> list[tuple[int, ...]]:
    return [tuple(document.tokens.tolist()) for document in DocumentReader(folder / split)]


@pytest.mark.parametrize("workers", [1, 2])
def test_three_splits_hold_every_document_once(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, workers: int
) -> None:
    given_ = ["--tokenizer", tokenizer_file, "--workers", workers]
    assert run_prep(corpus, "--output", tmp_path / "all", *given_, "--holdout", 0).exit_code == 0
    assert run_prep(corpus, "--output", tmp_path / "two", *given_, "--holdout", 0.2).exit_code == 0
    assert run_prep(corpus, "--output", tmp_path / "three", *given_, "--holdout", 0.2, "--test", 0.3).exit_code == 0
    splits = {name: documents(tmp_path / "three", name) for name in ("train", "validation", "test")}
    whole = documents(tmp_path / "all", "train")
    assert sorted(itertools.chain(*splits.values())) == sorted(whole) and all(splits.values())
    assert splits["validation"] == documents(tmp_path / "two", "validation"), "a test split takes of train alone"
    kinds = [set(split) for split in splits.values()]
    assert not (kinds[0] & kinds[1] or kinds[0] & kinds[2] or kinds[1] & kinds[2]), "copies stay together"
    for name, split in splits.items():
        assert split == [document for document in whole if document in set(split)], f"{name}: the corpus' order"
    written = manifest.load(tmp_path / "three")
    assert {name: entry["documents"] for name, entry in written["splits"].items()} == {
        name: len(split) for name, split in splits.items()
    }
    assert "test" not in manifest.load(tmp_path / "two")["splits"]


KEY = st.integers(0, 2**64 - 1)


@given(keys=st.lists(KEY, min_size=1, max_size=20), holdout=st.floats(0, 0.99), test=st.floats(0, 0.99))
def test_train_and_validation_are_never_empty_for_nothing(keys: list[int], holdout: float, test: float) -> None:
    first, second = merging.bounded_limits(holdout, test, min(keys), max(keys))
    assert 0 <= first <= second
    assert any(key >= second for key in keys), "train has a document"
    if holdout > 0 and len(set(keys)) > 1:
        assert any(key < first for key in keys)
    if test == 0:
        assert first == second


def test_shares_that_leave_nothing(tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path) -> None:
    result = run_prep(
        corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--holdout", 0.4, "--test", 0.6
    )
    assert result.exit_code == 1 and "--test 0.6: a share of the documents" in result.stderr
    assert not (tmp_path / "out").exists()
