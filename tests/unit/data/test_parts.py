"""Parts of a corpus: byte ranges, formats and subsets give the documents of the whole, in one order."""

import io
import json
import tarfile
from itertools import pairwise
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightnet_data import parts, reading, sources
from lightnet_data.documents import DocumentReader
from lightnet_data.options import Options
from lightnet_data.prepare import prepare
from lightnet_data.tokenizer import Tokenizer

TEXTS = ["first", "second é", "third\nline", "x" * 300]


def documents(path: Path | str, options: Options | None = None) -> list[object]:
    plan = parts.cut(sources.find([path]), [str(path)], {})
    return [item for part in plan.spans for span in part for item in reading.read(span, options or Options())]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), size=st.integers(3, 90), newline=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_give_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int], size: int, newline: bool
) -> None:
    texts = [f"{number} " + "y" * length for number, length in enumerate(lengths)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n" * newline)
    monkeypatch.setattr(parts, "PART_BYTES", size)
    assert [getattr(item, "text", item) for item in documents(path)] == texts


@given(
    text=st.text("ab-é \n", max_size=80),
    mark=st.text("ab-é", min_size=1, max_size=4),
    size=st.integers(1, 40),
    chunk=st.integers(1, 9),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranges_give_every_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, mark: str, size: int, chunk: int
) -> None:
    """The documents, blanks and problems of the whole file, in its order, wherever ranges and chunks end."""
    path = tmp_path / "a.txt"
    path.write_text(text)
    options = Options(separator=mark)

    def read(size: int) -> list[tuple[object, ...]]:
        monkeypatch.setattr(parts, "PART_BYTES", size)
        plan = parts.cut(sources.find([path]), [str(path)], {"separator": mark})
        assert len(plan.spans) == 1 or reading.is_unambiguous(mark)
        found = [item for part in plan.spans for span in part for item in reading.read(span, options)]
        return [(getattr(item, "text", None), getattr(item, "kind", None)) for item in found]

    whole = read(1000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
    assert read(size) == whole


def test_separators_that_overlap_themselves_do_not_divide() -> None:
    assert all(map(reading.is_unambiguous, ["\n", "<end>", "ab", "<|endoftext|>"]))
    assert not any(map(reading.is_unambiguous, ["\n\n", "aba", "--"]))


def test_formats_give_the_same_texts(tmp_path: Path) -> None:
    table = pyarrow.table({"text": TEXTS, "meta": [{"pile_set_name": "a"}] * 4})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, text in enumerate(TEXTS):
            for suffix, data in (("txt", text), ("json", json.dumps({"meta": {"pile_set_name": "a"}}))):
                member = tarfile.TarInfo(f"d/{number:04d}.{suffix}")
                member.size = len(data.encode())
                archive.addfile(member, io.BytesIO(data.encode()))
    (tmp_path / "a.txt").write_text("<end>".join([*TEXTS, ""]))
    with fsspec.open("memory://corpus/a.jsonl", "wb") as file:
        file.write(b"".join(json.dumps({"text": t, "meta": {"pile_set_name": "a"}}).encode() + b"\n" for t in TEXTS))
    options = Options(subset_field="meta.pile_set_name")
    for path in (tmp_path / "a.parquet", tmp_path / "a.tar", "memory://corpus/*.jsonl"):
        assert [(item.text, item.subset) for item in documents(path, options)] == [(t, "a") for t in TEXTS]  # type: ignore[attr-defined]
    split = documents(tmp_path / "a.txt", Options(separator="<end>"))
    assert [item.text for item in split] == TEXTS  # type: ignore[attr-defined]
    cut = (tmp_path / "a.tar").read_bytes()[:1024]
    (tmp_path / "b.tar").write_bytes(cut)
    assert isinstance(documents(tmp_path / "b.tar")[-1], reading.Problem)


def test_subsets_and_fields_have_outputs_of_their_own(tmp_path: Path, tokenizer_file: Path) -> None:
    records = [{"text": f"t{i}", "title": f"name {i}", "set": "AB"[i % 2]} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = Options(fields=("text", "title"), subset_field="set", by_subset=True, holdout=0)
    written = prepare([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer_file, options)
    assert {name: entry["documents"] for name, entry in written["subsets"].items()} == {"A": 8, "B": 8}
    tokenizer = Tokenizer.load(tokenizer_file)
    for field in ("text", "title"):
        for index, subset in enumerate("ab"):
            reader = DocumentReader(tmp_path / "out" / f"{field}-{subset}" / "train")
            assert [tokenizer.decode(d.tokens) for d in reader] == [r[field] for r in records[index::2]]


@given(
    text=st.text("ab-", max_size=60),
    mark=st.text("a-", min_size=1, max_size=4),
    bounds=st.lists(st.integers(0, 60), max_size=8).map(sorted),
)
def test_a_separator_is_found_wherever_chunks_end(text: str, mark: str, bounds: list[int]) -> None:
    data = text.encode()
    chunks = [data[a:b] for a, b in pairwise([0, *bounds, len(data)])]
    source = sources.Source(Path("x.txt"), "text", None, 0)
    found = [(getattr(x, "text", None), x) for x in reading._texts(source, iter(chunks), mark)]
    pieces = text.split(mark)
    pieces = pieces[:-1] if len(pieces) > 1 and not pieces[-1] else pieces
    assert [piece if piece else None for piece in pieces] == [text for text, _ in found]
