"""Inputs by URL: read as the files that they are, through a server that refuses some requests, and told when it refuses all."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data import remote
from lightnet_data.tokenizer import Tokenizer

from tests.unit.data.serving import serve

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(remote, "PAUSES", [0.01] * 3)
    place = tmp_path / "in"
    place.mkdir()
    lines = b"".join(json.dumps({"text": f"document {number}"}).encode() + b"\n" for number in range(5))
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a row", "another"]}), table)
    for name, data in {
        "a.jsonl": lines,
        "b.jsonl.zst": zstandard.compress(lines),
        "c.jsonl.gz": gzip.compress(lines) * 2,
        "d.parquet": table.getvalue(),
        "e.txt": b"text",
    }.items():
        (place / name).write_bytes(data)
    return place


def tokens(output: Path) -> list[bytes]:
    return [(output / f"train.{suffix}").read_bytes() for suffix in ("bin", "idx", "bytes.npy")]


def errors(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if not line.startswith("note: ")]


def test_http_that_fails_now_and_then(folder: Path, tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    options = ["--tokenizer", tokenizer_file, "--holdout", 0]
    assert run_prep(folder, "--output", tmp_path / "local", *options).exit_code == 0
    with serve(folder, fails_every=3) as url:
        files = [f"{url}/{path.name}" for path in sorted(folder.iterdir())]
        result = run_prep(*files, "--output", tmp_path / "out", *options)
    assert result.exit_code == 0, result.stderr
    assert tokens(tmp_path / "out") == tokens(tmp_path / "local")


@pytest.mark.parametrize("name", ["a.jsonl", "d.parquet"])
def test_http_that_fails(name: str, folder: Path, tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    with serve(folder, fails_every=1) as url:
        given = [folder / "e.txt", f"{url}/{name}", "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
        result = run_prep(*given)
        assert result.exit_code == 1 and len(errors(result)) == 1 and not (tmp_path / "out").exists()
        assert f"{url}/{name}: cannot read it" in result.stderr and "503" in result.stderr
        kept = json.loads(run_prep(*given, "--skip-bad", "--json").stdout)
    assert kept["documents"] == 1 and kept["skipped"]["unreadable"]["count"] == 1
    gone = run_prep(*given)
    assert gone.exit_code == 1 and len(errors(gone)) == 1 and f"{url}/{name}: cannot be reached" in gone.stderr
    notes = [line for line in gone.stderr.splitlines() if "trying again in 0.01 s" in line]
    assert len(notes) == 3 and all(line.startswith(f"note: {url}/{name}: ") for line in notes)


def test_a_remote_input_that_changes(folder: Path, tmp_path: Path, run_prep: Run, tokenizer_file: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/changing/a.jsonl", (folder / "a.jsonl").read_bytes())
    given = ["memory://changing/*", "--output", tmp_path / "out", "--tokenizer", tokenizer_file]
    assert run_prep(*given).exit_code == 0
    store.pipe("/changing/a.jsonl", (folder / "a.jsonl").read_bytes().replace(b"document 3", b"document 7"))
    refused = run_prep(*given)
    assert refused.exit_code == 1 and "made from other files" in refused.stderr
    assert run_prep(*given, "--overwrite").exit_code == 0


def test_a_remote_input_that_grows_under_the_run(
    folder: Path, tmp_path: Path, run_prep: Run, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that tells nothing of a file but its size."""
    original = Tokenizer.encode_array

    def encode(self: Tokenizer, text: str) -> object:
        with (folder / "a.jsonl").open("ab") as file:
            file.write(b'{"text": "more"}\n')
        return original(self, text)

    monkeypatch.setattr(Tokenizer, "encode_array", encode)
    with serve(folder, fails_every=10**9) as url:
        refused = run_prep(f"{url}/a.jsonl", "--output", tmp_path / "out", "--tokenizer", tokenizer_file, "--skip-bad")
    assert refused.exit_code == 1 and f"{url}/a.jsonl: the file changed while it was being read" in refused.stderr


class Failing:
    """A file system of one file, whose every third call fails."""

    def __init__(self, data: bytes) -> None:
        self.data, self.calls = data, 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise RuntimeError("now and then")

    def open(self, path: str, mode: str) -> Any:
        self._count()
        outer, file = self, io.BytesIO(self.data)

        class Opened(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                piece = file.read(size)  # what was read before a failure is not given again
                outer._count()
                return piece

            def seek(self, offset: int, whence: int = 0) -> int:
                return file.seek(offset, whence)

        return Opened()


@settings(deadline=None)
@given(st.binary(max_size=300), st.lists(st.tuples(st.booleans(), st.integers(0, 320)), max_size=12))
def test_reads_and_seeks_are_those_of_the_file(data: bytes, steps: list[tuple[bool, int]]) -> None:
    before, remote.PAUSES[:] = list(remote.PAUSES), [0.0] * 3
    try:
        twin = io.BytesIO(data)
        with io.BufferedReader(remote.File(Failing(data), "x"), 16) as file:
            for seek, number in steps:
                if seek:
                    assert file.seek(number) == twin.seek(number)
                else:
                    assert file.read(number) == twin.read(number)
                assert file.tell() == twin.tell()
            assert file.read() == twin.read()
    finally:
        remote.PAUSES[:] = before


def test_it_is_opened_again_after_a_read_that_failed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked first; and what fails while it is opened again leaves no file that stands elsewhere."""
    monkeypatch.setattr(remote, "PAUSES", [0.0] * 3)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    data, failing = bytes(range(100)), set[str]()

    class Opened(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if "read" in failing:
                raise RuntimeError("read")
            return super().read(size)

        def seek(self, offset: int, whence: int = 0) -> int:
            if "seek" in failing:
                failing.remove("seek")
                raise RuntimeError("seek")
            return super().seek(offset, whence)

    class System:
        def open(self, path: str, mode: str) -> Any:
            return Opened(data)

    for ask in (
        lambda file: (file.seek(3), file.read(2)),
        lambda file: (file.seek(3, io.SEEK_CUR), file.read(2)),
        lambda file: (file.seekable(), file.read(2)),
        lambda file: (file.tell(), file.read(2)),
    ):
        for seek_fails in (False, True):
            file, twin = remote.File(System(), "x"), io.BytesIO(data)
            assert file.read(10) == twin.read(10)
            failing.add("read")
            with pytest.raises(OSError, match="RuntimeError: read"):
                file.read(10)
            failing.clear()
            if seek_fails:
                failing.add("seek")
            assert ask(file) == ask(twin)
            file.close()


def test_a_missing_package_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def request() -> None:
        raise ImportError("Install s3fs")

    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(OSError, match="Install s3fs"):
        remote.patiently(request, "s3://x")
