"""Folders of encoded sentences: nothing is lost but what is cut, and a batch holds exactly its samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import sentences
from lightnet_data.errors import DataError
from lightnet_data.sentences import Row, Sentences, collate, encode, write
from lightnet_data.tokenizer import Tokenizer


class Letters:
    """A token a letter; 0 ends a document."""

    eod_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def longest_first(first: list[int], second: list[int], room: int) -> tuple[int, int]:
    """The rule as it is told: one token at a time off the longer one."""
    a, b = len(first), len(second)
    while a + b > room:
        if a > b:
            a -= 1
        else:
            b -= 1
    return a, b


@settings(deadline=None)
@given(st.text("abc", max_size=12), st.none() | st.text("abc", max_size=12), st.integers(2, 20))
def test_samples_are_cut_off_the_longer_sentence(first: str, second: str | None, length: int) -> None:
    ids, cut = encode(Letters(), first, second, length)  # type: ignore[arg-type]
    assert len(ids) <= length and ids[0] == 0 and ids.count(0) == (1 if second is None else 2)
    parts = "".join(map(chr, ids[1:])).split(chr(0))
    whole = [first] if second is None else [first, second]
    assert all(text.startswith(part) for text, part in zip(whole, parts, strict=True))
    assert cut == (parts != whole)
    if second is None:
        assert len(parts[0]) == min(len(first), length - 1)
        return
    kept = longest_first(Letters().encode(first), Letters().encode(second), length - 2)
    assert sorted(map(len, parts)) == sorted(kept) and sum(map(len, parts)) == min(len(first + second), length - 2)
    if len(first) != len(second):  # the longer one has not become the shorter one
        assert (len(parts[0]) >= len(parts[1])) == (len(first) > len(second)) or len(parts[0]) == len(parts[1])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["some words and some more words, of which a few"] * 20, 280)


ROWS = [Row("some words", "and more", 1), Row("", None, 0), Row("a few of which " * 9, None, 2)]


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    facts = write(tmp_path / "data", {"train": ROWS * 7, "dev": ROWS}, tokenizer, 16, ["no", "yes", "so"])
    assert facts["splits"]["train"]["samples"] == 21 and facts["splits"]["dev"]["cut"] == 1
    return tmp_path / "data"


def test_what_is_written_is_read(folder: Path, tokenizer: Tokenizer) -> None:
    stored = Sentences(f"{folder}/dev", 16, shuffle=False)
    assert len(stored) == 3 and [stored[i]["label"] for i in range(3)] == [1, 0, 2]
    for i, row in enumerate(ROWS):
        assert stored[i]["input_ids"].tolist() == encode(tokenizer, row.first, row.second, 16)[0]
        assert stored[i + 3]["input_ids"].tolist() == stored[i]["input_ids"].tolist()  # the next pass
    shuffled = Sentences(f"{folder}/train", 16, seed=3)
    for epoch in (0, 1):
        seen = [shuffled[epoch * 21 + i] for i in range(21)]
        assert sorted(sample["label"] for sample in seen) == sorted([0, 1, 2] * 7)
    first, second = ([shuffled[start + i]["label"] for i in range(21)] for start in (0, 21))
    assert first != second and first == [Sentences(f"{folder}/train", 16, seed=3)[i]["label"] for i in range(21)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.booleans())
def test_a_batch_holds_its_samples_and_padding_apart(lengths: list[int], regression: bool) -> None:
    samples: list[dict[str, Any]] = [
        {"input_ids": np.arange(1, n + 1), "label": n / 7 if regression else n % 3, "sample_id": 100 + n}
        for n in lengths
    ]
    batch = collate(samples, padding=99)
    rows, width = batch["input_ids"].shape
    assert rows == len(lengths) and width % 8 == 0 and width - 8 < max(lengths) <= width
    bounds = batch["cu_seqlens"].tolist()
    assert bounds[0] == 0 and bounds[-1] == rows * width and bounds == sorted(set(bounds))
    for i, n in enumerate(lengths):
        assert batch["input_ids"][i].tolist() == [*range(1, n + 1), *[99] * (width - n)]
        assert batch["mask"][i].tolist() == [True] * n + [False] * (width - n)
        at = bounds.index(i * width)
        assert bounds[at + 1] == i * width + n
    assert batch["labels"].is_floating_point() == regression
    np.testing.assert_allclose(batch["labels"].numpy(), [sample["label"] for sample in samples], rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "classes", "words"),
    [
        ([Row("a", None, 0), Row("b", None, 3)], ["x", "y", "z"], "label of sample 1 is 3, not a class, 0 to 2"),
        ([Row("a", None, 0.5)], ["x", "y"], "label of sample 0 is 0.5"),
        ([Row("a", None, float("nan"))], None, "label of sample 0 is nan, not a finite number"),
        ([], ["x", "y"], "holds no samples"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, tokenizer: Tokenizer, rows: list[Row], classes: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        write(tmp_path, {"train": rows}, tokenizer, 16, classes)
    assert not (tmp_path / "manifest.json").exists()


def test_folders_that_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train: sample 2 has 16 tokens, more than sequence_length 12"):
        Sentences(f"{folder}/train", 12)
    with pytest.raises(DataError, match=r"no such split; .* has train, dev"):
        Sentences(f"{folder}/test", 16)
    with pytest.raises(DataError, match="no manifest"):
        sentences.load(tmp_path)
    whole = (folder / "dev.npz").read_bytes()
    with np.load(folder / "dev.npz") as arrays:
        np.savez(folder / "dev.npz", **{**arrays, "labels": np.array([0.0, 3.0, 1.0])})
    with pytest.raises(DataError, match=r"dev: the label of sample 1 is 3\.0, not a class, 0 to 2"):
        Sentences(f"{folder}/dev", 16)
    (folder / "dev.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"dev.npz: not readable .*write the folder again"):
        Sentences(f"{folder}/dev", 16)
    (folder / "dev.npz").write_bytes((folder / "train.npz").read_bytes())
    with pytest.raises(DataError, match="belongs to another manifest"):
        Sentences(f"{folder}/dev", 16)
