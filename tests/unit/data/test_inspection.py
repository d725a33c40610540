"""``lightnet data inspect``: documents decoded, counts, lengths, and pictures that can be opened."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import inspection, inspection_picture, manifest

from lightnet_llm.cli import main

TEXTS = [f"Text {i}: naïve café 東京 😀 " + "and so on. " * (3**i) for i in range(6)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("inspected")
    rows = [{"text": text, "set": "even" if i % 2 == 0 else "odd"} for i, text in enumerate(TEXTS)]
    (where / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = ["--tokenizer", tokenizer_file, "--subset-field", "set", "--holdout", "0", "--shard-tokens", "300"]
    for name, more in (("out", []), ("by", ["--by-subset"])):
        arguments = ["prep", where / "c.jsonl", "--output", where / name, *common, *more]
        made = CliRunner().invoke(main, list(map(str, arguments)))
        assert made.exit_code == 0, made.output
    return where


def test_documents_are_the_texts(folder: Path) -> None:
    chosen = ["--documents", 2, "--index", 5, "--random", 3, "--characters", 10**6]
    facts = json.loads(run("inspect", folder / "out", "--json", *chosen).stdout)
    assert len(list((folder / "out").glob("train_*.bin"))) > 1
    assert [document["index"] for document in facts["shown"]][:2] == [0, 1]
    assert 4 <= len(facts["shown"]) <= 6 and 5 in [document["index"] for document in facts["shown"]]
    for document in facts["shown"]:
        assert document["text"] == TEXTS[document["index"]] and not document["shortened"]
        assert document["bytes"] == len(document["text"].encode())
    assert json.loads(run("inspect", folder / "out", "--json", *chosen).stdout) == facts


@pytest.mark.parametrize("name", ["out", "by"])
def test_counts_and_lengths(name: str, folder: Path) -> None:
    facts = json.loads(run("inspect", folder / name, "--json").stdout)
    written = manifest.load(folder / name)
    sizes = [len(text.encode()) for text in TEXTS]
    assert (facts["documents"], facts["bytes"], facts["tokens"]) == (6, sum(sizes), written["tokens"])
    assert facts["subsets"]["even"]["bytes"] == sum(sizes[::2]) and facts["subsets"]["odd"]["documents"] == 3
    assert facts["bytes_per_token"] == pytest.approx(sum(sizes) / written["tokens"])
    assert set(facts["lengths"]) == ({""} if name == "out" else {"even", "odd"})
    assert sum(sum(entry["documents"]) for entry in facts["lengths"].values()) == 6
    assert sum(sum(entry["tokens"]) for entry in facts["lengths"].values()) == written["tokens"]


@given(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_by_length(lengths: list[int]) -> None:
    found = inspection.by_length(np.array(lengths, dtype=np.int32))
    for power in range(inspection.BINS):
        inside = [length for length in lengths if 2**power <= length < 2 ** (power + 1)]
        assert (found.documents[power], found.tokens[power]) == (len(inside), sum(inside))
    assert (found.shortest, found.longest, found.median) == (min(lengths), max(lengths), float(np.median(lengths)))


def test_terminal_picture() -> None:
    entry = {"documents": [0] * 12, "tokens": [0] * 12}
    entry["documents"][3], entry["tokens"][3] = 10, 100
    entry["documents"][10], entry["tokens"][10] = 1, 1100
    lines = inspection_picture.terminal({"": entry}, width=22)
    assert len(lines) == 9
    assert lines[1].split() == ["8-16", "10", "8.3%", "█" * 2]
    assert lines[-1].split() == ["1k-2k", "1", "91.7%", "█" * 22]
    assert lines[2].rstrip().endswith("0.0%")


@pytest.mark.parametrize("name", ["out", "by"])
def test_picture(name: str, folder: Path, tmp_path: Path) -> None:
    from PIL import Image

    result = run("inspect", folder / name, "--output", tmp_path / "p.png")
    assert result.exit_code == 0 and str(tmp_path / "p.png") in result.stdout and TEXTS[0][:20] in result.stdout
    picture = np.asarray(Image.open(tmp_path / "p.png").convert("RGB"))
    assert picture.shape[0] > 300 and picture.shape[1] > 1000
    for color in ((0x0D, 0x80, 0xC9), (0xE0, 0x7B, 0x00), (0x0A, 0xA0, 0x6E)):  # documents, tokens, fertility
        assert (picture == np.array(color)).all(axis=2).sum() > 500


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--split", "test"], "no split 'test'; it holds train, validation"),
        (["--index", "6"], "no document 6 in train; it has 6"),
        (["--output", "x.jpg"], "name it x.png"),
        (["--output", "nowhere/x.png"], "--output nowhere/x.png: cannot be written"),
        (["--output", "."], "--output .: cannot be written"),
    ],
)
def test_what_cannot_be_shown(arguments: list[str], what: str, folder: Path) -> None:
    result = run("inspect", folder / "out", *arguments)
    assert result.exit_code == 1 and what in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_picture_is_whole_or_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "p.png"

    def full(figure: object, path: Path, **options: object) -> None:
        path.write_bytes(b"cut")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", full)
        result = run("inspect", folder / "out", "--output", picture)
    assert result.exit_code == 1 and f"{picture}: cannot be written (No space left" in result.stderr
    assert result.stdout == "" and not list(tmp_path.iterdir())
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    monkeypatch.setattr(inspection, "inspect", lambda *_: pytest.fail("work before the refusal"))
    result = run("inspect", folder / "out", "--output", picture)
    assert result.exit_code == 1 and f"--output {picture}: cannot be written" in result.stderr


def test_nothing_held_out(folder: Path, tmp_path: Path) -> None:
    result = run("inspect", folder / "out", "--split", "validation", "--output", tmp_path / "p.png")
    assert result.exit_code == 0 and (tmp_path / "p.png").is_file()


def test_a_manifest_that_lacks_something(folder: Path, tmp_path: Path) -> None:
    written = manifest.load(folder / "out")
    manifest.save(tmp_path, {name: value for name, value in written.items() if name != "splits"})
    result = run("inspect", tmp_path)
    assert result.exit_code == 1 and "an entry is missing" in result.stderr and len(result.stderr.splitlines()) == 1
