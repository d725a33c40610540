"""Which documents are kept: length, language, exact and near duplicates; what is dropped is counted and named."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from lightnet_data import manifest, selection
from lightnet_data.documents import DocumentReader
from lightnet_data.tokenizer import Tokenizer

Run = Callable[..., Result]


def write(folder: Path, files: list[list[str]]) -> Path:
    folder.mkdir()
    for number, texts in enumerate(files):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))  # is not cut into ranges
    return folder


def texts_of(folder: Path) -> list[str]:
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.decode(document.tokens) for document in DocumentReader(folder / "train")]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part a file."""
    monkeypatch.setattr("lightnet_data.parts.PART_BYTES", 10)


def test_length(tmp_path: Path, run_prep: Run, tokenizer_file: Path, small_parts: None) -> None:
    source = write(tmp_path / "in", [["a", "four", "東京都内", "longer", "😀😀😀"], ["three", "x" * 9]])
    given = [source, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--holdout", 0]
    result = run_prep(*given, "--min-chars", 3, "--max-chars", 5)
    assert texts_of(tmp_path / "out") == ["four", "東京都内", "😀😀😀", "three"]
    dropped = manifest.load(tmp_path / "out")["dropped"]
    assert dropped == {"length": {"count": 3, "first": f"{source}/0.jsonl.gz, line 1"}}
    assert "dropped, length: 3 (first: " in result.stdout
    assert run_prep(*given, "--min-chars", 5, "--max-chars", 3).stderr.startswith("error: --min-chars 5 is above")
    none = run_prep(source, "--output", tmp_path / "none", "--tokenizer", tokenizer_file, "--min-chars", 100)
    assert none.exit_code == 1 and "no document" in none.stderr and not (tmp_path / "none").exists()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("train", [False, True])
def test_exact_duplicates_keep_the_first(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, small_parts: None, workers: int, train: bool
) -> None:
    """The first in canonical order stays, whatever its place in its file; filters before it do not shift places."""
    draw = random.Random(1)
    pool = [f"document {number} " * 5 for number in range(30)]
    files = [[draw.choice(pool) for _ in range(12)] + ["tiny"] for _ in range(6)]
    source = write(tmp_path / "in", files)
    tokenizer = ["--vocab-size", 280] if train else ["--tokenizer", tokenizer_file]
    more = ["--dedup", "exact", "--min-chars", 5, "--holdout", 0, "--workers", workers]
    result = run_prep(source, "--output", tmp_path / "out", *tokenizer, *more)
    assert result.exit_code == 0, result.stderr
    kept = list(dict.fromkeys(text for texts in files for text in texts if text != "tiny"))
    assert texts_of(tmp_path / "out") == kept
    dropped = manifest.load(tmp_path / "out")["dropped"]
    assert {kind: entry["count"] for kind, entry in dropped.items()} == {"length": 6, "duplicate": 72 - len(kept)}


def test_near_duplicates(tmp_path: Path, run_prep: Run, tokenizer_file: Path, small_parts: None) -> None:
    draw = random.Random(2)
    words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(400)]  # datatrove reads every number as 0
    originals = [" ".join(draw.choices(words, k=150)) for _ in range(8)]
    near = [text.replace(text.split()[70], "changed", 1) for text in originals[:4]]
    source = write(tmp_path / "in", [originals, ["one of its own", *near]])
    given = [source, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--holdout", 0, "--dedup", "minhash"]
    outputs = []
    for workers in (1, 2):
        result = run_prep(*given, "--workers", workers, "--overwrite")
        assert result.exit_code == 0, result.stderr
        outputs.append((tmp_path / "out" / "train.bin").read_bytes())
    assert outputs[0] == outputs[1]
    kept = texts_of(tmp_path / "out")
    assert len(kept) == 9 and "one of its own" in kept and set(originals[4:]) < set(kept)
    assert all((original in kept) != (other in kept) for original, other in zip(originals, near, strict=False))
    assert manifest.load(tmp_path / "out")["dropped"]["duplicate"]["count"] == 4


def test_a_new_duplicate_elsewhere_redoes_the_part(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in", [["first"], ["second"], ["third"]])
    given = [source, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--holdout", 0, "--dedup", "exact"]
    with monkeypatch.context() as patch:
        patch.setattr("lightnet_data.merging.write", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space")))
        assert run_prep(*given).exit_code == 1
    (source / "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "third"}'))
    assert run_prep(*given).exit_code == 0
    assert texts_of(tmp_path / "out") == ["third", "second"]


def test_words_of_any_script() -> None:
    words = selection.Words().word_tokenize("Hello, wörld_1! 東京 한국 हिन्दी 12.5")
    assert words == ["Hello", "wörld_1", "東", "京", "한", "국", *words[6:]] and words[-2:] == ["12", "5"]


def test_refusals(tmp_path: Path, run_prep: Run, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "in", [["text"]])
    given = [source, "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    fields = run_prep(*given, "--dedup", "exact", "--field", "text", "--field", "title")
    assert "--dedup goes with one --field" in fields.stderr
    monkeypatch.setattr("datatrove.utils._import_utils._is_package_available", lambda name: name != "fasttext")
    language = run_prep(*given, "--language", "en")
    assert language.exit_code == 1 and language.stderr.count("\n") == 1
    assert "--language needs fastText: pip install fasttext-numpy2-wheel" in language.stderr
    assert not (tmp_path / "out").exists()


class _Model:
    """A stand-in for fastText's model: German where there is an umlaut."""

    def predict(self, text: str, k: int = 1) -> tuple[list[str], list[object]]:
        german = 0.9 if "ü" in text else 0.1
        return ["__label__de", "__label__en"], [_Score(german), _Score(1 - german)]


class _Score(float):
    def item(self) -> float:
        return float(self)


def test_language_by_a_given_model(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datatrove's block with a model that is no download."""
    from datatrove.utils import lid

    monkeypatch.setattr("datatrove.pipeline.base.check_required_dependencies", lambda *arguments: None)
    monkeypatch.setattr(lid.FastTextLID, "model", property(lambda self: _Model()))
    source = write(tmp_path / "in", [["for them", "für sie", "über alles", "over all"]])
    given = [source, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--holdout", 0]
    assert run_prep(*given, "--language", "de").exit_code == 0
    assert texts_of(tmp_path / "out") == ["für sie", "über alles"]
    assert manifest.load(tmp_path / "out")["dropped"]["not de"]["count"] == 2
