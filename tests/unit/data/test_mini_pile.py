"""The mini-pile: readers of what the packages hold, on hand-made files, and the files it writes."""

import gzip
import io
import json
import struct
import zlib
from pathlib import Path

import pytest
import zstandard
from lightnet_data import mini_pile


def lines(path: Path) -> list[dict]:
    text = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read().decode()
    return [json.loads(line) for line in text.splitlines()]


def test_every_document_once_in_the_piles_shape(tmp_path: Path) -> None:
    documents = [(f"D{i % 3}", f"text {i} ☃\n" * (i + 1)) for i in range(50)]
    written = mini_pile.assemble([*documents, documents[7]], tmp_path, parts=3, small=2000)
    rows = [row for part in range(3) for row in lines(tmp_path / f"{part:02d}.jsonl.zst")]
    assert sorted((row["meta"]["pile_set_name"], row["text"]) for row in rows) == sorted(documents)
    assert sum(entry["documents"] for entry in written["domains"].values()) == 50
    assert written["bytes"] == sum(len(text.encode()) for _, text in documents)
    small = lines(tmp_path / "small.jsonl.zst")
    assert {row["meta"]["pile_set_name"] for row in small} == {"D0", "D1", "D2"}
    assert sum(len(row["text"].encode()) for row in small) <= 2000 + 3 * 600
    again = tmp_path / "again"
    assert mini_pile.assemble(reversed(documents), again, parts=3, small=2000) == written


@pytest.mark.parametrize("damage", ["none", "flipped", "missing"])
def test_check(damage: str, tmp_path: Path) -> None:
    written = mini_pile.assemble([("A", "one"), ("B", "two")], tmp_path, parts=1)
    (tmp_path / mini_pile.CHECKSUMS).write_text(json.dumps(written))
    if damage == "flipped":
        (tmp_path / "00.jsonl.zst").write_bytes(b"x" + (tmp_path / "00.jsonl.zst").read_bytes()[1:])
    if damage == "missing":
        (tmp_path / "00.jsonl.zst").unlink()
    assert mini_pile.check(tmp_path) == (damage == "none")


def test_dictionary_entries(tmp_path: Path) -> None:
    entries = [b"cat\n  An animal.\n", b"dog\n  Another.\n"]
    (tmp_path / "d.dict.dz").write_bytes(gzip.compress(b"".join(entries)))
    # Offsets and lengths in base 64: 0 = A, 17 = R, 15 = P. Two words may share an entry.
    (tmp_path / "d.index").write_text("cat\tA\tR\ndog\tR\tP\nhound\tR\tP\n")
    assert list(mini_pile.dictionary(tmp_path)) == [entry.decode() for entry in entries]


def test_novels(tmp_path: Path) -> None:
    def block(strings: list[bytes]) -> bytes:
        body = b"X\n" + b"".join(b"\x00\x04\x00\x09" + struct.pack(">i", len(s)) + s for s in strings)
        return struct.pack(">i", len(body)) + zlib.compress(body)

    long = [b"It was a line of a novel, %d" % i for i in range(3000)]
    (tmp_path / "a.rdb").write_bytes(block([b"names", b""]) + block(long))
    assert list(mini_pile.novels(tmp_path)) == ["\n".join(line.decode() for line in long)]


def test_pages_modules_and_licences(tmp_path: Path) -> None:
    man = tmp_path / "usr" / "man1"
    man.mkdir(parents=True)
    (man / "a.1.gz").write_bytes(gzip.compress(b".TH A 1\ntext"))
    (man / "b.1.gz").write_bytes(gzip.compress(b".so man1/a.1"))
    (man / "latin.1.gz").write_bytes(gzip.compress(b".TH caf\xe9"))
    assert list(mini_pile.manual_pages(tmp_path)) == [".TH A 1\ntext"]
    for name in ("a.py", "test/b.py", "site-packages/c.py", "json/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert list(mini_pile.standard_library(tmp_path)) == ["a.py", "json/d.py"]
    (tmp_path / "licenses").mkdir()
    (tmp_path / "licenses" / "x.json").write_text(json.dumps({"licenseText": "may &amp; may not"}))
    assert list(mini_pile.licenses(tmp_path)) == ["may & may not"]


@pytest.mark.system
def test_fetched_and_assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the packages themselves; fails without apt-get and a network."""
    monkeypatch.setattr("sys.argv", ["mini_pile", "--output", str(tmp_path)])
    mini_pile.main()
    found = json.loads((tmp_path / mini_pile.CHECKSUMS).read_text())
    assert mini_pile.check(tmp_path) and 90e6 < found["bytes"] < 200e6
    assert len(found["domains"]) == 10 and len(found["packages"]) == len(mini_pile.DEBIAN) + 2
    assert all(entry["bytes"] > 2e6 for entry in found["domains"].values())
    assert {row["meta"]["pile_set_name"] for row in lines(tmp_path / "small.jsonl.zst")} == set(found["domains"])
