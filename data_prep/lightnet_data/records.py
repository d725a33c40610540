"""Documents of Parquet files and of WebDataset tars."""

import itertools
import json
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from lightnet_data.options import Options
from lightnet_data.reading import CHUNK_BYTES, Document, Problem, record_documents
from lightnet_data.sources import Source

ROWS = 512


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
            of_subset = missing[0] not in {part for name in options.fields for part in (name, name.split(".")[0])}
            option = "--subset-field" if of_subset else "--field"
            yield Problem(
                "missing field", f"{source.name}: no column {missing[0]!r} (columns: {there}); choose with {option}"
            )
            return
        row = 0
        for batch in table.iter_batches(ROWS, columns=sorted(columns), use_threads=False):
            for record in _rows(batch):
                row += 1
                place = f"{source.name}, row {row}"
                if isinstance(record, UnicodeDecodeError):
                    where = f"byte {record.start} is 0x{record.object[record.start]:02x}"
                    yield Problem("invalid UTF-8", f"{place}: not UTF-8 ({where}); write it again")
                else:
                    yield from record_documents(place, record, options)
        if not row:
            yield Problem("empty", f"{source.name}: no row in it")
    except (pyarrow.ArrowException, OSError) as error:
        detail = " ".join(str(error).split())[:200]
        yield Problem("corrupt", f"{source.name}: not a whole Parquet file ({detail}); copy it again")


def _rows(batch: Any) -> Iterator[Any]:
    """The rows of a batch, or in the stead of one that cannot be decoded its error."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:  # of one of them: before the first was given
        pass
    for row in range(len(batch)):
        try:
            yield batch.slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield error


def tar(source: Source, chunks: Iterator[bytes], options: Options) -> Iterator[Document | Problem]:
    """The documents of a WebDataset tar.

    Members of one name up to the first dot of its last part are a sample. ``.json`` gives a record's fields, ``.txt`` its
    field "text"; other members are passed over. A sample with a member that cannot be read gives no document.
    """
    stream = _Stream(chunks)
    key, place = None, source.name
    record: dict[str, Any] | None = None
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                folder, slash, base = member.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                suffix = suffix.lower()
                if not member.isfile() or suffix not in ("txt", "json"):
                    continue
                if folder + slash + stem != key:
                    if record is not None:
                        yield from record_documents(place, record, options)
                    key, record = folder + slash + stem, {}
                place = f"{source.name}, member {member.name}"
                data = archive.extractfile(member).read()
                if record is not None and (problem := _add(data, suffix, record, place)):
                    yield problem
                    record = None
        if record is not None:
            yield from record_documents(place, record, options)
        elif key is None and stream.size:
            yield Problem("empty", f"{source.name}: no member in it that ends in .txt or .json")
        length, more = stream.behind(archive.offset)
        if not length:
            yield Problem("cut", f"{source.name}: the tar has no end, the file is cut; copy it again")
        elif more:
            where = f"at byte {archive.offset}"
            yield Problem(
                "corrupt",
                f"{source.name}: more follows the end of the tar {where}; make one tar of all, or several files",
            )
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
    """What tarfile reads from: the chunks as a file, whose last two reads are kept."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""
        self._last = b""
        self.size = 0

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
        self._last = self._last[-size:] + data
        return data

    def behind(self, position: int) -> tuple[int, bool]:
        """Bytes from a position that tarfile has just looked at to the end, and whether not all are zero.

        They are read so that whatever is wrong with them is met, too: a compressed stream that is cut, a checksum.
        """
        known = self._last[position - self.size :] if position < self.size else b""
        length, more = 0, False
        for piece in itertools.chain([known, self._rest], self._chunks):
            length, more = length + len(piece), more or bool(piece.strip(b"\0"))
        return length, more
