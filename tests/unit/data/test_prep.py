"""``lightnet prep`` end to end: what it reads, what it writes, and that the result depends on nothing else."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import zstandard
from click.testing import Result
from lightnet_data import manifest, output, shards, sources
from lightnet_data.dataset import PackedTokens
from lightnet_data.documents import DocumentReader
from lightnet_data.errors import DataError
from lightnet_data.prepare import prepare
from lightnet_data.storage import TokenStore, indexed_dataset
from lightnet_data.tokenizer import Tokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

Run = Callable[..., Result]
SPLIT_FILES = {f"{name}.{end}" for name in ("train", "validation") for end in ("bin", "idx", "bytes.npy")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts_of(folder: Path, split: str) -> list[str]:
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.decode(document.tokens) for document in DocumentReader(folder / split)]


def test_end_to_end(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    result = run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    summary = json.loads(result.stdout)
    written = manifest.load(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == SPLIT_FILES | {"tokenizer.model", "manifest.json"}
    assert summary["sources"] == {"files": 1, "bytes": corpus.stat().st_size}
    assert {key: value for key, value in summary.items() if key not in ("sources", "output")} == {
        key: value for key, value in written.items() if key != "sources"
    }

    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    train, validation = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "validation")
    assert sorted(train + validation) == sorted(texts) and train and validation
    assert train == [text for text in texts if text in set(train)]  # corpus order
    for split, split_texts in (("train", train), ("validation", validation)):
        reader, entry = DocumentReader(tmp_path / "out" / split), written["splits"][split]
        lengths = [len(text.encode()) for text in split_texts]
        assert reader.byte_lengths.tolist() == lengths
        assert (entry["documents"], entry["bytes"]) == (len(split_texts), sum(lengths))
        assert entry["tokens"] == sum(len(document.tokens) for document in reader)
        assert (tmp_path / "out" / f"{split}.bin").stat().st_size == 2 * entry["tokens"]
    assert written["documents"] == 60 and written["tokens"] == sum(s["tokens"] for s in written["splits"].values())
    model = (tmp_path / "out" / "tokenizer.model").read_bytes()
    assert written["tokenizer"] == {
        "file": "tokenizer.model",
        "kind": "sentencepiece",
        "vocab_size": 512,
        "eod_id": 1,
        "eod_token": "<|endofdocument|>",
        "fingerprint": hashlib.sha256(model).hexdigest(),
        "trained": True,
    }
    assert written["round_trip"] == {"checked": 60, "differ": 0, "first": None}
    source = written["sources"][0]
    assert source["sha256"] == hashlib.sha256(corpus.read_bytes()).hexdigest() and source["documents"] == 60
    assert len(PackedTokens(tmp_path / "out" / "train", 32)) > 10


def test_other_stacks_can_read_the_shards(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512")
    data = indexed_dataset().IndexedDataset(str(tmp_path / "out" / "train"))
    assert len(data) == len(data.document_indices) - 1 and all(document[-1] == 1 for document in data)


@pytest.mark.parametrize("given", [True, False])
def test_workers_change_nothing(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightnet_data.parts.PART_BYTES", 7000)  # many parts
    options = ["--tokenizer", tokenizer_file] if given else ["--vocab-size", "600"]
    for workers in (1, 2, 3):
        result = run_prep(corpus, "--output", tmp_path / f"out{workers}", "--workers", workers, *options)
        assert result.exit_code == 0, result.stderr
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")


def test_an_error_in_a_later_pass_leaves_nothing(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Tokenizer, text: str) -> list[int]:
        raise DataError("cannot encode")

    monkeypatch.setattr(Tokenizer, "encode_array", refuse)
    for workers in (1, 2):
        arguments = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--workers", workers]
        result = run_prep(*arguments)
        assert result.exit_code == 1 and f"{corpus}, line 1: cannot encode" in result.stderr
        assert {path.name for path in tmp_path.iterdir()} == {corpus.name}


def test_a_worker_that_dies_is_an_error(
    tmp_path: Path, corpus: Path, run_prep: Run, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode_array", lambda self, text: os._exit(9))
    arguments = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--workers", 2]
    result = run_prep(*arguments)
    assert result.exit_code == 1 and "a worker process died" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name}


def test_a_file_that_changes_is_an_error(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightnet_data import prepare as module

    original = module._fit

    def train_and_append(*arguments: object) -> bytes:
        with corpus.open("a") as file:
            file.write('{"text": "one more"}\n')
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_fit", train_and_append)
    with pytest.raises(DataError, match="changed while it was being read"):
        prepare([corpus], tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out.partial"}
    monkeypatch.undo()
    assert prepare([corpus], tmp_path / "out")["documents"] == 61
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out"}


def test_kinds_of_files_in_a_folder(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    (folder / ".git").mkdir()
    (folder / "linked").symlink_to(folder / "b")
    line = json.dumps({"text": "json line é"}).encode() + b"\r\n"
    files = {
        "a.txt": b"plain\r\n text\n",
        "b/c.py": b"def f():\n\treturn 1\n",
        "b/d.jsonl": b"\xef\xbb\xbf" + line + b"\n" + line,
        "e.jsonl.gz": gzip.compress(line) + gzip.compress(line) + bytes(512),
        "f.jsonl.zst": zstandard.ZstdCompressor().compress(line) + b"\x50\x2a\x4d\x18\x02\0\0\0ab"
        + zstandard.ZstdCompressor().compress(line),
        "g.md.zst": zstandard.ZstdCompressor().compress(b"# title\n"),
        "h.RST": b"upper case suffix",
        "empty.py": b"",
        "image.png": b"\x89PNG",
        "Makefile": b"all:\n",
        ".hidden.txt": b"x",
        "__pycache__/x.py": b"x",
        ".git/y.txt": b"y",
    }  # fmt: skip
    for name, data in files.items():
        (folder / name).write_bytes(data)
    options = ["--tokenizer", tokenizer_file, "--holdout", "0", "--json"]
    result = run_prep(folder, "--output", tmp_path / "out", *options)
    assert result.exit_code == 0, result.stderr
    expected = ["plain\r\n text\n", "def f():\n\treturn 1\n", *["json line é"] * 6, "# title\n", "upper case suffix"]
    assert texts_of(tmp_path / "out", "train") == expected
    summary = json.loads(result.stdout)
    assert {kind: entry["count"] for kind, entry in summary["skipped"].items()} == {"blank": 2}
    assert summary["ignored_files"] == {
        ".png": 1, "__pycache__": 1, "hidden": 2, "linked folder": 1, "no suffix": 1
    }  # fmt: skip
    # Named files and patterns: any suffix, in the order given, a file once.
    arguments = [
        folder / "Makefile",
        f"{folder}/*.txt",
        f"{folder}/**/*.py",
        folder / "a.txt",
        "--skip-bad",
        "--read-as",
        "text",
    ]
    summary = json.loads(run_prep(*arguments, "--output", tmp_path / "named", *options).stdout)
    assert texts_of(tmp_path / "named", "train") == ["all:\n", "plain\r\n text\n", "x", "def f():\n\treturn 1\n"]
    assert summary["ignored_files"] == {"named twice": 2}  # a.txt, and b/c.py behind the link


def test_order_of_a_folder_is_sorted_by_path(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b.txt", "a/y.txt", "B.txt", "b/a/k.txt", "10.txt", "9.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [str(source.path.relative_to(tmp_path)) for source in sources.find([tmp_path]).files]
    assert found == ["10.txt", "9.txt", "B.txt", "a/y.txt", "b/a/k.txt", "b/z.txt", "b.txt"]


def test_a_file_named_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    (tmp_path / "a1.txt").write_text("x")
    assert [source.path.name for source in sources.find([tmp_path / "a[1].txt"]).files] == ["a[1].txt"]


def test_undecodable_file_name(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path / "in"))).mkdir()
    with open(os.fsencode(tmp_path / "in") + b"/n\xe9.txt", "wb") as file:  # noqa: PTH123
        file.write(b"text")
    result = run_prep(tmp_path / "in", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--json")
    assert result.exit_code == 0 and manifest.load(tmp_path / "out")["sources"][0]["path"].endswith("n\\xe9.txt")


def test_u2581_is_counted(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x\u2581y\\u2581"}\n{"text": "none"}\n{"text": "\u2581"}\n')
    arguments = [tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    result = run_prep(*arguments)
    assert "U+2581, which decodes to a space: 3 in 2 documents" in result.stdout
    written = manifest.load(tmp_path / "out")
    assert written["space_symbols"] == {"count": 3, "documents": 2} and written["round_trip"]["differ"] == 0


def test_holdout_follows_the_text(tmp_path: Path, python_texts: list[str], tokenizer_file: Path) -> None:
    """A document is on the same side whatever else the corpus holds, and wherever it stands."""
    texts = [f"document {number} " + python_texts[0][number * 50 : number * 50 + 50] for number in range(400)]

    def split(name: str, chosen: list[str]) -> set[str]:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
        written = prepare([tmp_path / f"{name}.jsonl"], tmp_path / name, tokenizer_file)
        assert written["splits"]["train"]["documents"] + written["splits"]["validation"]["documents"] == len(chosen)
        return set(texts_of(tmp_path / name, "validation"))

    whole = split("whole", texts)
    assert 8 <= len(whole) <= 40
    assert split("reversed", texts[::-1]) == whole
    assert split("half", texts[::2]) == whole & set(texts[::2])
    assert split("doubled", texts + texts) == whole


@pytest.mark.parametrize(
    ("texts", "holdout", "documents"),
    [
        (["a", "b"], 0.01, (1, 1)),
        (["a", "b", "c"], 0.999, (1, 2)),
        (["a", "b", "c"], 0.0, (3, 0)),
        (["a"], 0.5, (1, 0)),
        (["a"], 0.999, (1, 0)),
        (["a", "a", "a"], 0.5, (3, 0)),
    ],
)
def test_holdout_of_few_documents(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, texts: list[str], holdout: float, documents: tuple[int, int]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--tokenizer", tokenizer_file, "--holdout", holdout, "--json"]
    summary = json.loads(run_prep(tmp_path / "a.jsonl", "--output", tmp_path / "out", *options).stdout)
    assert tuple(summary["splits"][name]["documents"] for name in ("train", "validation")) == documents
    assert (tmp_path / "out" / "validation.bin").exists() == (documents[1] > 0)
    if not documents[1]:
        with pytest.raises(DataError, match="held out no document"):
            TokenStore(tmp_path / "out" / "validation")


def test_seed_moves_the_holdout(tmp_path: Path, corpus: Path, tokenizer_file: Path, run_prep: Run) -> None:
    held = []
    for seed in (0, 1):
        options = ["--tokenizer", tokenizer_file, "--seed", seed, "--holdout", 0.3]
        run_prep(corpus, "--output", tmp_path / f"out{seed}", *options)
        held.append(texts_of(tmp_path / f"out{seed}", "validation"))
    assert held[0] != held[1]


def test_the_same_work_again_is_left_alone(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    arguments = [corpus, "--output", tmp_path / "out", "--vocab-size", "512"]
    run_prep(*arguments)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = run_prep(*arguments)
    assert again.exit_code == 0 and "nothing to do" in again.stderr
    assert json.loads(run_prep(*arguments, "--json").stdout)["reused"] is True
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    other = run_prep(*arguments, "--seed", "1")
    assert other.exit_code == 1 and "made with another seed" in other.stderr and "--overwrite" in other.stderr
    with corpus.open("a") as file:
        file.write('{"text": "one more"}\n')
    changed = run_prep(*arguments)
    assert changed.exit_code == 1 and "made from other files" in changed.stderr
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert run_prep(*arguments, "--overwrite").exit_code == 0
    assert manifest.load(tmp_path / "out")["documents"] == 61
    (tmp_path / "out" / "train.bin").write_bytes(b"")
    damaged = run_prep(*arguments)
    assert damaged.exit_code == 1 and "train.bin: 0 bytes" in damaged.stderr
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out"}


def test_a_failed_overwrite_keeps_the_old(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512")
    before = contents(tmp_path / "out")
    corpus.write_text("broken\n")
    assert run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512", "--overwrite").exit_code == 1
    assert contents(tmp_path / "out") == before


def test_what_is_in_the_way_is_left_alone(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "mine.txt").write_text("mine")
    for name, message in (("file", "not a folder"), ("folder", "holds files"), ("new", "in the way")):
        result = run_prep(corpus, "--output", tmp_path / name, "--vocab-size", "512", "--overwrite")
        assert result.exit_code == 1 and message in result.stderr
    assert (tmp_path / "file").read_text() == (tmp_path / "folder" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "new.partial" / "mine.txt").exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for link in (tmp_path / "link", f"{tmp_path}/link/../dots/"):
        assert run_prep(corpus, "--output", link, "--vocab-size", "512").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    for name in ("empty", "dots"):
        assert (tmp_path / name / "manifest.json").is_file()


def test_a_killed_run_is_replaced(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    code = (
        "import os, sys; from lightnet_data import prepare as p; p._merge = lambda *a: os.kill(os.getpid(), 9);"
        "p.prepare([sys.argv[1]], sys.argv[2])"
    )
    killed = subprocess.run([sys.executable, "-c", code, corpus, tmp_path / "out"], check=False)
    assert killed.returncode == -9
    assert (tmp_path / "out.partial").is_dir() and not (tmp_path / "out").exists()
    result = run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512")
    assert (
        result.exit_code == 0 and "left behind by a run that was stopped; its finished parts are used" in result.stderr
    )
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out"}


def test_two_writers_of_one_output(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    with output.OutputFolder(tmp_path / "out", print):
        result = run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512")
        assert result.exit_code == 1 and "another lightnet prep is writing it" in result.stderr
        assert (tmp_path / "out.partial").is_dir()
    assert not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_one_line(tmp_path: Path, corpus: Path, run_prep: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightnet_data.shards.ShardWriter.add", full)
    result = run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512")
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "No space left" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out.partial"}  # the finished parts
    monkeypatch.undo()
    assert run_prep(corpus, "--output", tmp_path / "out", "--vocab-size", "512").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out"}


def test_vocabulary_that_suits_a_small_corpus(tmp_path: Path, run_prep: Run) -> None:
    (tmp_path / "a.txt").write_text("a few words of text")
    result = run_prep(tmp_path / "a.txt", "--output", tmp_path / "out")
    size = manifest.load(tmp_path / "out")["tokenizer"]["vocab_size"]
    assert result.exit_code == 0 and 258 < size < 512 and f"a vocabulary of {size}" in result.stderr


def test_tokenizer_of_an_earlier_output(tmp_path: Path, corpus: Path, run_prep: Run) -> None:
    run_prep(corpus, "--output", tmp_path / "first", "--vocab-size", "512")
    result = run_prep(corpus, "--output", tmp_path / "second", "--tokenizer", tmp_path / "first")
    assert result.exit_code == 0
    for name in ("train.bin", "validation.bin", "tokenizer.model"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert manifest.load(tmp_path / "second")["tokenizer"]["trained"] is False


def test_hugging_face_tokenizer_that_loses_text(tmp_path: Path, run_prep: Run) -> None:
    built = tokenizers.Tokenizer(models.BPE())
    built.normalizer = normalizers.Lowercase()
    built.pre_tokenizer, built.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(["ab"], trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet))
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "kept"}\n{"text": "Lost"}\n')
    arguments = [tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer.json"]
    assert "--eod-token" in run_prep(*arguments).stderr
    result = run_prep(*arguments, "--eod-token", "<end>")
    assert result.exit_code == 0 and "not lossless: 1 of 2" in result.stdout and "line 2" in result.stdout
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert Tokenizer.load(tmp_path / "out").eod_token == "<end>"  # from the manifest
    assert TokenStore(tmp_path / "out" / "train").eod_id == Tokenizer.load(tmp_path / "out").eod_id


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(4096, np.uint16), (65499, np.uint16), (65536, np.uint16), (65537, np.int32)]
)
def test_token_width_and_index(tmp_path: Path, vocab_size: int, dtype: type) -> None:
    """65,536 ids fit 16 bits, and the index is byte for byte what megatron-core writes."""
    assert output.token_dtype(vocab_size) is dtype
    documents = [np.array([vocab_size - 1, 1]), np.array([1]), np.array([3, 2, 1])]
    builder = indexed_dataset().IndexedDatasetBuilder(str(tmp_path / "train.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "train.idx"))
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    with shards.ShardWriter(tmp_path / "ours", 3, dtype) as writer:
        for number, document in enumerate(documents):
            writer.add(lengths[number : number + 1], np.array([number]))
            writer.write(document.astype(dtype).tobytes())
    for suffix in (".idx", ".bin"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"train{suffix}").read_bytes()
    assert TokenStore(tmp_path / "train").document(0).tolist() == [vocab_size - 1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no manifest"),
        ("{", "not a readable manifest"),
        ("[]", "not a manifest of lightnet prep"),
        ('{"format": "lightnet-data", "format_version": 99}', "format_version 99"),
    ],
)
def test_manifest_refusals(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=message):
        manifest.load(tmp_path)


def test_part_of_the_standard_library(tmp_path: Path, run_prep: Run) -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    result = run_prep(library / "json", library / "pydoc_data", "--output", tmp_path / "out", "--workers", 2, "--json")
    summary = json.loads(result.stdout)
    assert result.exit_code == 0 and summary["round_trip"]["differ"] == 0
    assert summary["bytes"] / summary["tokens"] > 2
