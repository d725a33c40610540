"""Whatever is cut off a file of any format: what is read is a beginning of it, and what is missing is told."""

import gzip
import hashlib
import io
import json
import tarfile
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import reading, sources
from lightnet_data.options import Options


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def tar(texts: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number, text in enumerate(texts):
            member = tarfile.TarInfo(f"{number:04d}.txt")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


def parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), out)
    return out.getvalue()


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


FORMATS: dict[str, Callable[[list[str]], bytes]] = {
    "a.jsonl": lines,
    "a.jsonl.gz": lambda texts: gzip.compress(lines(texts)),
    "a.jsonl.zst": lambda texts: zst(lines(texts)),
    "a.tar": tar,
    "a.tar.gz": lambda texts: gzip.compress(tar(texts)),
    "a.tar.zst": lambda texts: zst(tar(texts)),
    "a.parquet": parquet,
}
TEXTS = st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N"]), min_size=1, max_size=300), min_size=1)


def read(path: Path) -> tuple[list[str], list[str], str]:
    """Texts, kinds of problems, and the digest of what was read."""
    digest, texts, kinds = hashlib.sha256(), [], []
    for item in reading.read(reading.Span(sources.classify(path)), Options(), digest):
        if isinstance(item, reading.Problem):
            kinds.append(item.kind)
        else:
            texts.append(item.text)
    return texts, kinds, digest.hexdigest()


@pytest.mark.parametrize("chunk", [97, 1 << 20])
@pytest.mark.parametrize("name", FORMATS)
def test_cut_anywhere(name: str, chunk: int, tmp_path: Path) -> None:
    path = tmp_path / name

    @settings(max_examples=40, deadline=None)
    @given(TEXTS, st.floats(0, 1), st.booleans())
    def check(texts: list[str], where: float, near_the_end: bool) -> None:
        whole = FORMATS[name](texts)
        path.write_bytes(whole)
        assert read(path) == (texts, [], hashlib.sha256(whole).hexdigest())
        left = len(whole) - 1 - int(where * 20) if near_the_end else int(where * (len(whole) - 1))
        data = whole[: max(0, left)]
        path.write_bytes(data)
        found, kinds, digest = read(path)
        assert found == texts[: len(found)]
        between_lines = name == "a.jsonl" and b"\n" in (data[-1:], whole[len(data) : len(data) + 1])
        padding = name == "a.tar" and found == texts  # zeros behind the end
        assert kinds or between_lines or padding  # or else the cut is told
        assert kinds or digest == hashlib.sha256(data).hexdigest()

    before = reading.CHUNK_BYTES
    reading.CHUNK_BYTES = chunk
    try:
        check()
    finally:
        reading.CHUNK_BYTES = before


HOLLOW = " \t\n\x00\x85\xa0\xad\u034f\u200b\u200e\u2060\u3000\u3164\ufe0f\ufeff"


@given(
    st.text(st.sampled_from(HOLLOW)), st.text(st.sampled_from(HOLLOW)), st.characters(categories=["L", "N", "P", "S"])
)
def test_what_shows_nothing(before: str, behind: str, character: str) -> None:
    """A text is empty without one visible character, wherever it stands; the fillers among the letters show nothing."""
    assert reading.is_blank(before + behind)
    hollow = unicodedata.name(character, "").endswith("FILLER")
    assert reading.is_blank(before + character + behind) == hollow
