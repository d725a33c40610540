"""Documents of Parquet files and of WebDataset tars."""

import json
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from lightnet_data.options import Options
from lightnet_data.reading import CHUNK_BYTES, Document, Problem, record_documents
from lightnet_data.sources import Source

ROWS = 512
_BLOCK = 512  # of a tar, which ends in two blocks of zeros


def parquet(source: Source, file: BinaryIO, options: Options, digest: Any = None) -> Iterator[Document | Problem]:
    """The documents of a Parquet file, in order of rows; only the wanted columns are decoded."""
    import pyarrow
    import pyarrow.parquet

    while digest is not None and (chunk := file.read(CHUNK_BYTES)):
        digest.update(chunk)
    file.seek(0)
    try:
        table = pyarrow.parquet.ParquetFile(file)
        wanted = [name for name in (*options.fields, options.subset_field) if name]
        columns = {name if name in table.schema_arrow.names else name.split(".")[0] for name in wanted}
        missing = sorted(columns - set(table.schema_arrow.names))
        if missing:
            there = ", ".join(map(repr, table.schema_arrow.names[:8]))
            yield Problem(
                "missing field", f"{source.name}: no column {missing[0]!r} (columns: {there}); choose with --field"
            )
            return
        row = 0
        for batch in table.iter_batches(ROWS, columns=sorted(columns), use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield from record_documents(f"{source.name}, row {row}", record, options)
        if not row:
            yield Problem("empty", f"{source.name}: no row in it")
    except UnicodeDecodeError as error:
        yield Problem("invalid UTF-8", f"{source.name}: behind row {row}: not UTF-8 ({error.reason}); write it again")
    except (pyarrow.ArrowException, OSError) as error:
        detail = " ".join(str(error).split())[:200]
        yield Problem("corrupt", f"{source.name}: not a whole Parquet file ({detail}); copy it again")


def tar(source: Source, chunks: Iterator[bytes], options: Options) -> Iterator[Document | Problem]:
    """The documents of a WebDataset tar.

    Members of one name up to the first dot of its last part are a sample. ``.json`` gives a record's fields, ``.txt`` its
    field "text"; other members are passed over.
    """
    stream = _Stream(chunks)
    key = ""
    record: dict[str, Any] = {}
    place = source.name
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                folder, slash, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                suffix = suffix.lower()
                if not member.isfile() or suffix not in ("txt", "json"):
                    continue
                if record and folder + slash + stem != key:
                    yield from record_documents(place, record, options)
                    record = {}
                key, place = folder + slash + stem, f"{source.name}, member {member.name}"
                problem = _add(archive.extractfile(member).read(), suffix, record, place)
                if problem:
                    yield problem
        if record:
            yield from record_documents(place, record, options)
        if stream.size == 0 or stream.last.strip(b"\0"):
            yield Problem("cut", f"{source.name}: the tar has no end, the file is cut; copy it again")
    except tarfile.TarError as error:
        kind = "cut" if "end of" in str(error) or stream.size == 0 else "corrupt"
        yield Problem(kind, f"{source.name}: not a whole tar ({error}); copy it again")


def _add(data: bytes, suffix: str, record: dict[str, Any], place: str) -> Problem | None:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem("invalid UTF-8", f"{place}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})")
    if suffix == "txt":
        record["text"] = text
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Problem("broken JSON", f"{place}: broken JSON ({error})")
    if not isinstance(value, dict):
        return Problem("not an object", f"{place}: not an object")
    record.update({name: item for name, item in value.items() if name != "text" or "text" not in record})
    return None


class _Stream:
    """What tarfile reads from: the chunks as a file, whose last block is kept."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""
        self.size, self.last = 0, b""

    def read(self, size: int) -> bytes:
        parts, have = [self._rest], len(self._rest)
        while have < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            parts.append(chunk)
            have += len(chunk)
        data = b"".join(parts)
        data, self._rest = data[:size], data[size:]
        self.size += len(data)
        self.last = (self.last + data)[-_BLOCK:]
        return data
