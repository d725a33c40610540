"""``lightnet data verify``: a whole folder passes, and each kind of damage is found, named and placed."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from lightnet_data import manifest, verify, webdataset_tokens

from lightnet_llm.cli.data import data
from lightnet_llm.cli.prep import prep

SHARD = "train_00001-of-"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(data, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def whole(python_texts: list[str], tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 documents of two subsets in several shards, and "packed" beside: its training split as packed tar shards."""
    folder = tmp_path_factory.mktemp("whole")
    texts = [text[start : start + 900] for text in python_texts for start in range(0, 18000, 2000)][:60]
    rows = [{"text": text, "set": "ab"[i % 2]} for i, text in enumerate(texts)]
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--tokenizer", tokenizer_file, "--subset-field", "set", "--holdout", "0.2", "--shard-tokens", "4000"]
    for name, more in (("out", []), ("by", ["--by-subset"])):
        made = CliRunner().invoke(
            prep, [str(a) for a in [folder / "c.jsonl", "--output", folder / name, *arguments, *more]]
        )
        assert made.exit_code == 0, made.output
    packed = folder / "packed"
    packed.mkdir()
    shutil.copy(folder / "out" / "tokenizer.model", packed)
    entry = webdataset_tokens.write(folder / "out" / "train", packed, 64, 100)
    written = manifest.load(folder / "out")
    train = {**written["splits"]["train"], "webdataset": entry}
    train.pop("shards")
    files = {"tokenizer.model": written["files"]["tokenizer.model"]}
    rest = {name: train[name] for name in ("documents", "bytes", "tokens")}
    manifest.save(packed, {**written, **rest, "splits": {"train": train}, "subsets": {}, "files": files})
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the folders, to damage."""
    return lambda name: Path(shutil.copytree(whole / name, tmp_path / name))


@pytest.mark.parametrize("name", ["out", "by", "packed"])
def test_whole_folder(name: str, whole: Path) -> None:
    result = run("verify", whole / name)
    assert result.exit_code == 0, result.output
    assert "no problems" in result.output
    facts = json.loads(run("verify", whole / name, "--json").stdout)
    assert facts["ok"] and not facts["problems"] and not facts["notes"]
    written = manifest.load(whole / name)
    if name == "packed":
        assert facts["checked"]["samples"] == written["splits"]["train"]["webdataset"]["samples"]
    else:
        assert facts["checked"]["documents"] == 60 and facts["checked"]["tokens"] == written["tokens"]
        assert len(list((whole / name).rglob("*.bin"))) >= 4


def rehash(folder: Path, path: Path) -> None:
    """Give a file's entry its new size and checksum, so that only its contents tell."""
    written = manifest.load(folder)
    entry = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    written["files"][path.name] = entry
    manifest.save(folder, written)


def change_tokens(path: Path, change: Callable[[np.ndarray, int], None]) -> None:
    """Change the tokens of a .bin; the function gets them and the position of the end-of-document token at 1/3."""
    tokens = np.fromfile(path, dtype=np.uint16)
    ends = np.flatnonzero(tokens == EOD)
    change(tokens, int(ends[len(ends) // 3]))
    tokens.tofile(path)


EOD = 1


def at(position: int | None, value: int) -> Callable[[np.ndarray, int], None]:
    def change(tokens: np.ndarray, end: int) -> None:
        tokens[end if position is None else end + position] = value

    return change


def field(name: str, value: object) -> Callable[[Path, Path], None]:
    def change(folder: Path, shard: Path) -> None:
        written = manifest.load(folder)
        written[name] = {**written[name], **value} if isinstance(value, dict) else value
        manifest.save(folder, written)

    return change


def drop_byte(suffix: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, shard: Path) -> None:
        path = Path(f"{shard}{suffix}")
        path.write_bytes(path.read_bytes()[:-2])

    return change


def tokens(change: Callable[[np.ndarray, int], None]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, shard: Path) -> None:
        change_tokens(Path(f"{shard}.bin"), change)
        rehash(folder, Path(f"{shard}.bin"))

    return damage


def longer_document(folder: Path, shard: Path) -> None:
    """The first two documents of an index meet one token later."""
    path = Path(f"{shard}.idx")
    content = bytearray(path.read_bytes())
    lengths = np.frombuffer(content, dtype="<i4", offset=34, count=2).copy()
    content[34:42] = (lengths + np.array([1, -1])).astype("<i4").tobytes()
    path.write_bytes(content)
    rehash(folder, path)


def fewer_sizes(folder: Path, shard: Path) -> None:
    path = Path(f"{shard}.bytes.npy")
    np.save(path, np.load(path)[:-1])
    rehash(folder, path)


def other_tokenizer(folder: Path, shard: Path) -> None:
    (folder / "tokenizer.model").write_bytes(b"no model")


DAMAGES = {
    "flipped bit": (lambda f, s: change_tokens(Path(f"{s}.bin"), at(-1, 7)), ".bin", "sha256"),
    "cut tokens": (drop_byte(".bin"), ".bin", "bytes"),
    "missing tokens": (lambda f, s: Path(f"{s}.bin").unlink(), ".bin", "no such file"),
    "cut index": (drop_byte(".idx"), ".idx", "cut index"),
    "missing index": (lambda f, s: Path(f"{s}.idx").unlink(), ".idx", "no such file"),
    "index and tokens disagree": (longer_document, ".idx", "does not begin where"),
    "id beyond the vocabulary": (tokens(at(-1, 60000)), ".bin", "is 60000, the vocabulary has 700 ids"),
    "no end of document": (tokens(at(None, 7)), ".bin", "does not end with the end-of-document token 1"),
    "end of document inside": (tokens(at(-2, EOD)), ".bin", "inside"),
    "sizes of another number": (fewer_sizes, ".bytes.npy", "documents, the index"),
    "missing sizes": (lambda f, s: Path(f"{s}.bytes.npy").unlink(), ".bytes.npy", "No such file"),
    "not the tokenizer": (other_tokenizer, "tokenizer.model", "not the tokenizer"),
    "documents": (field("documents", 61), "manifest.json", "the whole 61"),
    "subset": (field("subsets", {"a": {"documents": 9, "bytes": 9, "tokens": 9}}), "manifest.json", "subsets hold"),
    "vocabulary": (field("tokenizer", {"vocab_size": 701}), "tokenizer.model", "700 vocab size"),
    "manifest without splits": (field("splits", 3), "manifest.json", "of another kind"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_folder(kind: str, copy: Callable[[str], Path]) -> None:
    folder = copy("out")
    damage, place, what = DAMAGES[kind]
    shard = next(folder.glob(f"{SHARD}*.bin")).with_suffix("")
    damage(folder, shard)
    result = run("verify", folder)
    assert result.exit_code == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    name = place if place[0] != "." else shard.name + place
    assert any(f"/{name}: " in line and what in line and "; " in line for line in lines), lines
    facts = json.loads(run("verify", folder, "--json").stdout)
    assert not facts["ok"] and len(facts["problems"]) == len(lines)
    # Damage to one shard says nothing of the others.
    others = [p for p in facts["problems"] if ".bin" in p["where"] and shard.name not in p["where"]]
    assert not others


def test_all_damage_is_told(copy: Callable[[str], Path]) -> None:
    folder = copy("out")
    for path in folder.glob("train_*.bin"):
        path.write_bytes(path.read_bytes()[:-2])
    told = [problem.where for problem in verify.verify(folder).problems if "bytes" in problem.what]
    assert {Path(where).name for where in told} == {path.name for path in folder.glob("train_*.bin")}


def test_strangers_are_noted(copy: Callable[[str], Path]) -> None:
    folder = copy("out")
    (folder / "mine.txt").touch()
    result = run("verify", folder)
    assert result.exit_code == 0 and "note: " in result.stderr and "mine.txt" in result.stderr


def test_output_of_a_subset(copy: Callable[[str], Path]) -> None:
    folder = copy("by")
    next((folder / "b").glob("train*.idx")).unlink()
    result = run("verify", folder)
    assert result.exit_code == 1 and f"{folder}/b/train" in result.stderr


@pytest.mark.parametrize("kind", ["flipped", "cut", "missing"])
def test_damaged_packed_shard(kind: str, copy: Callable[[str], Path]) -> None:
    folder = copy("packed")
    path = folder / "train-000001.tar"
    content = bytearray(path.read_bytes())
    if kind == "flipped":
        content[512 + 128 + 40] ^= 1  # in the tokens of its first sample
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    result = run("verify", folder)
    assert result.exit_code == 1 and f"error: {path}: " in result.stderr
    assert {"flipped": "sample 100 is not", "cut": "bytes", "missing": "no such file"}[kind] in result.stderr


def test_progress_counts_every_byte(whole: Path) -> None:
    done: list[int] = []
    verify.verify(whole / "out", progress=done.append)
    total = verify.total_bytes(whole / "out")
    assert sum(done) == total - (whole / "out" / manifest.FILE_NAME).stat().st_size


@pytest.mark.parametrize(("name", "what"), [("nowhere", "no manifest"), ("file", "no manifest"), ("s3://b/c", "local")])
def test_nothing_to_verify(name: str, what: str, tmp_path: Path) -> None:
    from lightnet_llm.cli import main

    (tmp_path / "file").mkdir()
    place = name if "://" in name else tmp_path / name
    result = CliRunner().invoke(main, ["data", "verify", str(place)])
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and what in result.stderr
    assert len(result.stderr.splitlines()) == 1
