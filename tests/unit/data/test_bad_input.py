"""What bad input gets: one line that names file and line or field, a failing exit, and nothing that looks finished."""

import gzip
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from click.testing import Result
from lightnet_data.tokenizer import Tokenizer

Run = Callable[..., Result]

GOOD = b'{"text": "a good line"}\n'
TEXT = b"some plain text\n" * 400
NOISE = json.dumps({"text": os.urandom(3000).hex()}).encode()  # hardly compresses, so a cut is inside the data


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


# file name, contents, kind, pieces of the message
BAD_FILES = [
    ("empty.txt", b"", "empty", ["no text in it"]),
    ("blank.txt", b" \n\t\n", "empty", ["no text in it"]),
    ("empty.jsonl", b"", "empty", ["no line in it"]),
    ("blank.jsonl", b"\n\n", "no document", ["no document in it"]),
    ("nothing.jsonl", GOOD + b'{"text": ""}\n', "empty", ["line 2", "no text"]),
    ("spaces.jsonl", b'{"text": " \\u200b\\ufeff\\t"}\n' + GOOD, "empty", ["line 1", "no text"]),
    ("empty.jsonl.gz", gzip.compress(b""), "empty", ["no line in it"]),
    ("empty.txt.zst", zst(b""), "empty", ["no text in it"]),
    ("shy.txt", "\u00ad\u200e\u034f\ufe0f".encode(), "empty", ["no text in it"]),
    ("some.parquet.zst", zst(b"PAR1"), "unknown extension", ["Parquet is compressed inside"]),
    ("hollow.parquet", b"", "corrupt", ["not a whole Parquet file"]),
    ("hollow.tar", b"", "cut", ["not a whole tar"]),
    ("some.xyz", TEXT, "unknown extension", ["--read-as"]),
    ("nul.txt", b"abc\0def", "binary", ["zero byte at byte 3"]),
    ("image.png", b"\x89PNG\r\n\x1a\n\0\0\0", "unknown extension", ["--read-as"]),
    ("latin.txt", "café".encode("latin-1"), "invalid UTF-8", ["not UTF-8", "byte 3", "0xe9"]),
    ("cut.txt", "né".encode()[:-1], "invalid UTF-8", ["not UTF-8", "byte 1"]),
    ("utf16.txt", "text".encode("utf-16-le"), "binary", ["zero byte at byte 1"]),
    ("surrogate.txt", b"\xed\xa0\x80", "invalid UTF-8", ["not UTF-8"]),
    ("latin.jsonl", GOOD + '{"text": "é"}'.encode("latin-1"), "invalid UTF-8", ["line 2", "not UTF-8"]),
    ("null.jsonl", GOOD + b'{"text": null}\n', "not a string", ["line 2", "'text' is null"]),
    ("number.jsonl", GOOD * 2 + b'{"text": 3.5}\n', "not a string", ["line 3", "'text' is a number"]),
    ("bool.jsonl", b'{"text": true}\n', "not a string", ["line 1", "'text' is true or false"]),
    ("list.jsonl", b'{"text": ["a"]}\n', "not a string", ["line 1", "'text' is a list"]),
    ("missing.jsonl", b'{"body": "a", "id": 1}\n', "missing field", ["line 1", "'text'", "'body', 'id'", "--field"]),
    ("bare.jsonl", b'"text"\n', "not an object", ["line 1", "a string, not an object"]),
    ("array.jsonl", b"[1]\n", "not an object", ["line 1", "a list, not an object"]),
    ("broken.jsonl", GOOD + b'{"text": "a}\n' + GOOD, "broken JSON", ["line 2", "broken JSON"]),
    ("plain.jsonl", b"plain text\n", "broken JSON", ["line 1", "broken JSON"]),
    ("two.jsonl", b'{"text": "a"} {"text": "b"}\n', "broken JSON", ["line 1", "second value", "column 15"]),
    ("lastcut.jsonl", GOOD + b'{"text": "a lin', "broken JSON", ["line 2", "is the file cut?"]),
    ("control.jsonl", b'{"text": "a\tb"}\n', "broken JSON", ["line 1", "broken JSON"]),
    ("pretty.jsonl", b'{\n  "text": "a"\n}\n', "broken JSON", ["line 1", "broken JSON"]),
    ("deep.jsonl", b"[" * 200_000 + b"\n", "broken JSON", ["line 1"]),
    ("digits.jsonl", b'{"text": ' + b"9" * 6000 + b"}\n", "broken JSON", ["line 1"]),
    ("lone.jsonl", b'{"text": "a\\ud800b"}\n', "invalid text", ["line 1", "'text'", "\\ud800"]),
    ("cut.jsonl.gz", gzip.compress(GOOD + NOISE)[:-900], "cut", ["gzip", "cut"]),
    ("cut.jsonl.zst", zst(GOOD + NOISE)[:-900], "cut", ["zstd", "cut"]),
    ("cut.txt.zst", zst(NOISE)[:-1], "cut", ["zstd", f"at byte {len(zst(NOISE)) - 1}"]),
    ("second.jsonl.zst", zst(GOOD) + zst(NOISE)[:-4], "cut", ["zstd", f"at byte {len(zst(GOOD) + zst(NOISE)) - 4}"]),
    ("second.jsonl.gz", gzip.compress(GOOD) + gzip.compress(NOISE)[:-8], "cut", ["gzip", "cut"]),
    ("nodata.jsonl.gz", b"", "cut", ["empty", "gzip"]),
    ("header.jsonl.gz", gzip.compress(GOOD)[:5], "cut", ["cut"]),
    ("flipped.jsonl.gz", gzip.compress(GOOD)[:-8] + bytes(8), "corrupt", ["damaged gzip"]),
    ("flipped.jsonl.zst", zst(GOOD * 9)[:8] + b"\xff" * 12, "corrupt", ["damaged zstd"]),
    ("tail.jsonl.gz", gzip.compress(GOOD) + b"tail", "corrupt", ["damaged gzip"]),
    ("plain.jsonl.gz", GOOD, "mislabelled", ["ends in .gz but is not gzip"]),
    ("plain.txt.zst", TEXT, "mislabelled", ["ends in .zst but is not zstd"]),
    ("gzip.jsonl.zst", gzip.compress(GOOD), "mislabelled", ["gzip data", "end in .gz"]),
    ("gzip.jsonl", gzip.compress(GOOD), "mislabelled", ["gzip data", "end in .gz"]),
    ("zstd.txt", zst(TEXT), "mislabelled", ["zstd data", "end in .zst"]),
]
IDS = [f"{name}" for name, *_ in BAD_FILES]


def assert_refused(result: Result, output: Path, *pieces: str, kept: bool = False) -> None:
    assert result.exit_code == 1
    assert result.stdout == ""
    line = result.stderr
    assert line.startswith("error: ") and line.count("\n") == 1 and line.endswith("\n")
    for piece in pieces:
        assert piece in line
    assert not output.exists()
    assert bool(list(output.parent.glob("*.partial"))) == kept


@pytest.mark.parametrize(("name", "data", "kind", "pieces"), BAD_FILES, ids=IDS)
def test_bad_file_is_refused(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, name: str, data: bytes, kind: str, pieces: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    output = tmp_path / "out"
    for more in ([], ["--tokenizer", tokenizer_file], ["--json"]):
        result = run_prep(tmp_path / name, "--output", output, *more)
        assert_refused(result, output, str(tmp_path / name), *pieces)


@pytest.mark.parametrize(("name", "data", "kind", "pieces"), BAD_FILES, ids=IDS)
def test_skip_bad_counts_and_reports(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, name: str, data: bytes, kind: str, pieces: list[str]
) -> None:
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.txt").write_bytes(TEXT)
    output = tmp_path / "out"
    arguments = [
        tmp_path / "good.txt",
        tmp_path / name,
        "--output",
        output,
        "--tokenizer",
        tokenizer_file,
        "--skip-bad",
    ]
    result = run_prep(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    skipped = json.loads(result.stdout)["skipped"]
    entry = skipped[kind]
    if name != "pretty.jsonl":  # three broken lines
        assert entry["count"] == 1
    assert str(tmp_path / name) in entry["first"]
    assert all(piece in entry["first"] for piece in pieces)
    assert (output / "manifest.json").is_file()
    assert f"skipped, {kind}: {entry['count']}" in run_prep(*arguments, "--overwrite").stdout


def parquet(rows: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": rows}), out)
    return out.getvalue()


def mixed(*rows: bytes) -> bytes:
    """A column of strings, not all of them UTF-8."""
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(rows), pyarrow.array(rows, pyarrow.binary()).buffers())
    return parquet(texts)


def tar(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


# as BAD_FILES, and options
BAD_RECORDS = [
    ("empty.parquet", parquet(["a", "", "b"]), "empty", ["row 2", "no text"], []),
    ("null.parquet", parquet(["a", "b", None]), "not a string", ["row 3", "'text' is null"], []),
    ("number.parquet", parquet([1]), "not a string", ["row 1", "'text' is a number"], []),
    ("latin.parquet", mixed(b"a", b"caf\xe9", b"b"), "invalid UTF-8", ["row 2", "byte 3 is 0xe9"], []),
    ("cut.parquet", parquet(["a"])[:-4], "corrupt", ["not a whole Parquet file"], []),
    ("none.parquet", parquet([])[:], "empty", ["no row in it"], []),
    ("other.parquet", parquet(["a"]), "missing field", ["no column 'body'", "'text'", "--field"], ["--field", "body"]),
    ("set.parquet", parquet(["a"]), "missing field", ["'meta'", "with --subset-field"], ["--subset-field", "meta.set"]),
    ("empty.tar", tar(("a.txt", b"x"), ("b.txt", b"")), "empty", ["member b.txt", "no text"], []),
    ("latin.tar", tar(("a.txt", b"caf\xe9")), "invalid UTF-8", ["member a.txt", "byte 3 is 0xe9"], []),
    ("broken.tar", tar(("a.json", b"{"), ("b.txt", b"x")), "broken JSON", ["member a.json"], []),
    ("list.tar", tar(("a.json", b"[]"), ("b.txt", b"x")), "not an object", ["member a.json"], []),
    ("cut.tar.gz", gzip.compress(tar(("a.txt", b"x")))[:-5], "cut", ["gzip", "cut"], []),
    ("flipped.tar.gz", gzip.compress(tar(("a.txt", b"x")))[:-8] + bytes(8), "corrupt", ["damaged gzip"], []),
    ("long.tar.zst", zst(tar(("a.txt", b"x")) + bytes(3 << 20))[:-1], "cut", ["zstd", "cut"], []),
    ("joined.tar", tar(("a.txt", b"x")) + tar(("b.txt", b"y")), "corrupt", ["more follows the end", "byte 1024"], []),
    ("endless.tar", tar(("a.txt", b"x"))[:1024], "cut", ["the tar has no end"], []),
    ("hollow.tar.gz", gzip.compress(tar()), "empty", ["no member in it"], []),
    ("pictures.tar", tar(("a.png", b"x")), "empty", ["no member in it", ".txt"], []),
    ("half.tar", tar(("a.json", b'{"id": 1}'), ("a.txt", b"\xe9"), ("b.txt", b"x")), "invalid UTF-8", ["a.txt"], []),
    ("cut.tar", tar(("a.txt", b"x"), ("b.txt", b"x" * 3000))[:2000], "cut", ["tar"], []),
    ("gap.txt", b"one|| two", "empty", ["document 2", "no text"], ["--separator", "|"]),
    ("first.txt", b"|one", "empty", ["document 1", "no text"], ["--separator", "|"]),
    ("latin.txt", b"one|caf\xe9", "invalid UTF-8", ["document 2", "byte 7 is 0xe9"], ["--separator", "|"]),
]


@pytest.mark.parametrize(
    ("name", "data", "kind", "pieces", "options"), BAD_RECORDS, ids=[case[0] for case in BAD_RECORDS]
)
def test_bad_records_of_other_formats(
    tmp_path: Path,
    run_prep: Run,
    tokenizer_file: Path,
    name: str,
    data: bytes,
    kind: str,
    pieces: list[str],
    options: list[str],
) -> None:
    (tmp_path / name).write_bytes(data)
    field = "body" if "body" in options else "text"
    (tmp_path / "good.jsonl").write_text(json.dumps({field: "good", "meta": {"set": "a"}}) + "\n")
    given = [
        tmp_path / "good.jsonl",
        tmp_path / name,
        "--output",
        tmp_path / "out",
        "--tokenizer",
        tokenizer_file,
        *options,
    ]
    assert_refused(run_prep(*given), tmp_path / "out", str(tmp_path / name), *pieces)
    result = run_prep(*given, "--skip-bad", "--json")
    assert result.exit_code == 0, result.stderr
    skipped = json.loads(result.stdout)["skipped"]
    assert set(skipped) == {kind} and skipped[kind]["count"] == 1
    assert all(piece in skipped[kind]["first"] for piece in pieces)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("text", ["", " \t\n", "\u200b\u200c\u200d\u2060\ufeff", "\u3000\u2028\x85\u00a0"])
def test_a_hollow_document_at_any_place(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, place: str, text: str
) -> None:
    lines = [json.dumps({"text": f"document {number}"}) for number in range(4)]
    number = {"first": 0, "middle": 2, "last": 4}[place]
    lines.insert(number, json.dumps({"text": text}))
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    given = [tmp_path / "in.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    assert_refused(run_prep(*given), tmp_path / "out", f"in.jsonl, line {number + 1}: no text in field 'text'")
    kept = json.loads(run_prep(*given, "--skip-bad", "--json").stdout)
    assert kept["documents"] == 4 and kept["skipped"]["empty"]["count"] == 1


@pytest.mark.parametrize("form", ["*.jsonl", ""])
def test_an_empty_file_among_others(tmp_path: Path, run_prep: Run, tokenizer_file: Path, form: str) -> None:
    """A part that did not arrive is not passed over, whether a pattern or a folder names it."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in {"0.jsonl": GOOD, "1.jsonl": b"", "2.jsonl": GOOD}.items():
        (folder / name).write_bytes(data)
    given = [folder / form, "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    assert_refused(run_prep(*given), tmp_path / "out", "1.jsonl: no line in it")
    kept = json.loads(run_prep(*given, "--skip-bad", "--json").stdout)
    assert kept["documents"] == 2 and kept["skipped"]["empty"]["count"] == 1


def test_white_space_behind_the_last_separator_is_counted(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    (tmp_path / "a.txt").write_text("one---two---\n")
    given = [tmp_path / "a.txt", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--separator", "---"]
    kept = json.loads(run_prep(*given, "--json").stdout)
    assert kept["documents"] == 2 and kept["skipped"]["blank"]["count"] == 1


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("change", ["appended", "rewritten", "removed"])
def test_an_input_that_changes_under_the_run(
    tmp_path: Path,
    corpus: Path,
    run_prep: Run,
    tokenizer_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    skip: bool,
) -> None:
    """Even with --skip-bad: nobody knows what was read."""
    original = Tokenizer.encode_array
    data = corpus.read_bytes()

    def encode(self: Tokenizer, text: str) -> object:
        if change == "removed":
            corpus.unlink(missing_ok=True)
        else:
            corpus.write_bytes(data + GOOD if change == "appended" else data.replace(b"def", b"fed", 1))
            os.utime(corpus, ns=(1, 1))
        return original(self, text)

    monkeypatch.setattr(Tokenizer, "encode_array", encode)
    given = [corpus, "--output", tmp_path / "out", "--tokenizer", tokenizer_file, *["--skip-bad"] * skip]
    assert_refused(run_prep(*given), tmp_path / "out", f"{corpus}: the file changed while it was being read")


def test_skip_bad_keeps_the_good_lines(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    lines = [GOOD, b'{"text": null}\n', b'{"text": 1}\n', b"\n", b'{"text": "another"}\n', b'{"text": "cut']
    (tmp_path / "mixed.jsonl").write_bytes(b"".join(lines))
    arguments = [tmp_path / "mixed.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--skip-bad"]
    manifest = json.loads(run_prep(*arguments, "--json").stdout)
    assert manifest["documents"] == 2 and manifest["bytes"] == len("a good line") + len("another")
    counts = {kind: entry["count"] for kind, entry in manifest["skipped"].items()}
    assert counts == {"not a string": 2, "blank": 1, "broken JSON": 1}
    assert "line 2" in manifest["skipped"]["not a string"]["first"]


def test_skip_bad_keeps_what_comes_before_a_cut(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    lines = b"".join(json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(2000))
    (tmp_path / "cut.jsonl.zst").write_bytes(zst(lines)[:-20000])
    arguments = [tmp_path / "cut.jsonl.zst", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--skip-bad"]
    manifest = json.loads(run_prep(*arguments, "--json").stdout)
    assert 0 < manifest["documents"] < 2000 and manifest["skipped"]["cut"]["count"] == 1
    assert set(manifest["skipped"]) == {"cut"}


def test_all_bad_is_an_error_even_when_skipped(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": 1}\n' * 3)
    arguments = [tmp_path / "bad.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--skip-bad"]
    assert_refused(run_prep(*arguments), tmp_path / "out", "bad.jsonl", "no document")


@pytest.mark.parametrize(
    ("argument", "pieces"),
    [
        ("missing.txt", ["missing.txt", "no such file or folder"]),
        ("*.jsonl", ["*.jsonl", "matches no file"]),
        ("**/*.none", ["matches no file"]),
        ("pictures", ["pictures", "no text file", "2 .png", "1 hidden", "1 __pycache__"]),
        ("hollow", ["hollow", "no text file"]),
        ("blanks", ["blanks/a.txt", "no text in it"]),
        ("modules", ["modules", "no document in it"]),
        ("loop", ["loop"]),
        ("pipe", ["pipe", "not a regular file"]),
        ("dangling.txt", ["dangling.txt"]),
        ("two\nlines", ["no such file"]),
        ("", ["empty string"]),
    ],
)
def test_bad_argument_is_refused(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, argument: str, pieces: list[str]
) -> None:
    (tmp_path / "pictures" / "__pycache__").mkdir(parents=True)
    for name in ("a.png", "b.png", ".hidden.txt", "__pycache__/x.txt"):
        (tmp_path / "pictures" / name).write_bytes(b"x")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "blanks").mkdir()
    (tmp_path / "blanks" / "a.txt").write_text("\n")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "a.py").write_text("\n")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "good.txt").write_bytes(TEXT)
    output = tmp_path / "out"
    given = str(tmp_path / argument) if argument else ""
    result = run_prep(tmp_path / "good.txt", given, "--output", output, "--tokenizer", tokenizer_file)
    assert_refused(result, output, *pieces, kept=argument == "modules")  # the finished part of the other


def test_no_input_is_refused(tmp_path: Path, run_prep: Run) -> None:
    assert_refused(run_prep("--output", tmp_path / "out"), tmp_path / "out", "no INPUT given")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_and_folder(tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "good.txt").write_bytes(TEXT)
    for path in (tmp_path / "in" / "closed.txt", tmp_path / "in" / "sub"):
        path.touch()
        path.chmod(0)
        result = run_prep(tmp_path / "in", "--output", tmp_path / "out", "--tokenizer", tokenizer_file)
        assert_refused(result, tmp_path / "out", str(path), "Permission denied")
        path.chmod(stat.S_IRWXU)


def test_unreadable_file_is_reported(
    tmp_path: Path, run_prep: Run, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above for root, whom permissions do not stop."""
    (tmp_path / "closed.txt").write_bytes(TEXT)
    original = Path.open

    def opened(path: Path, *arguments: object, **options: object) -> object:
        if path.name == "closed.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", opened)
    result = run_prep(tmp_path / "closed.txt", "--output", tmp_path / "out", "--tokenizer", tokenizer_file)
    assert_refused(result, tmp_path / "out", "closed.txt", "Permission denied")


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--workers", "0"], ["--workers 0"]),
        (["--holdout", "1"], ["--holdout 1.0"]),
        (["--holdout", "-0.1"], ["--holdout -0.1"]),
        (["--holdout", "nan"], ["--holdout nan"]),
        (["--vocab-size", "100"], ["vocabulary size 100"]),
        (["--vocab-size", "90000"], ["vocabulary size 90000", "largest that works"]),
        (["--tokenizer", "x", "--vocab-size", "512"], ["--tokenizer and --vocab-size"]),
        (["--tokenizer", "no/such"], ["no/such", "cannot read"]),
        (["--eod-token", "</s>"], ["--eod-token goes with --tokenizer"]),
        (["--field", "body"], ["line 1", "'body'", "(fields: 'text')", "with --field"]),
        (["--subset-field", "meta.nope"], ["line 1", "'meta.nope'", "with --subset-field"]),
        (["--set", "foo=bar"], ["--set foo=bar", "--executor slurm or ray"]),
    ],
)
def test_bad_option_is_refused(
    tmp_path: Path, corpus: Path, run_prep: Run, options: list[str], pieces: list[str]
) -> None:
    kept = options[0] == "--vocab-size"  # found out after the corpus was read, which need not be done again
    assert_refused(run_prep(corpus, "--output", tmp_path / "out", *options), tmp_path / "out", *pieces, kept=kept)
