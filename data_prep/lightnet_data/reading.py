"""Documents of one source file, or of a byte range of it, and everything that can be wrong with it."""

import hashlib
import itertools
import json
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from lightnet_data.options import Options
from lightnet_data.sources import UNKNOWN, Source

CHUNK_BYTES = 1 << 20
_SKIPPABLE_FRAMES = tuple(bytes([n, 0x2A, 0x4D, 0x18]) for n in range(0x50, 0x60))
MAGIC = {"gzip": (b"\x1f\x8b",), "zstd": (b"\x28\xb5\x2f\xfd", *_SKIPPABLE_FRAMES)}
SUFFIX = {"gzip": ".gz", "zstd": ".zst"}
BLANK = "blank"
# What shows nothing: white space, control characters, and what Unicode calls default ignorable (zero-width spaces and joiners,
# soft hyphen, marks of direction, fillers, variation selectors).
_HOLLOW = re.compile(
    r"[\s\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*"
)


@dataclass(frozen=True)
class Document:
    """A text that encodes to UTF-8, with at least one visible character, and where it came from.

    ``field`` is the index of the field it was in, ``subset`` the name of its record's subset.
    """

    text: str
    place: str
    field: int = 0
    subset: str = ""


@dataclass(frozen=True)
class Problem:
    """Something that gave no document.

    ``kind`` groups it in reports; ``message`` is one line with place, reason and a way out. Kind ``BLANK`` is no error:
    blank lines, and empty files of source code that a folder search found, are left out and counted.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of a source; ``end`` None: all of it. A line (document) belongs to the span that it begins in."""

    source: Source
    start: int = 0
    end: int | None = None


class _Broken(Exception):
    """The rest of the file cannot be read."""

    def __init__(self, kind: str, reason: str) -> None:
        self.problem = kind, reason


def read(span: Span, options: Options, digest: Any = None) -> Iterator[Document | Problem]:
    """The documents and problems of a span, in order.

    After a problem with the file as a whole (unreadable, cut or mislabelled) nothing follows; after one with a record
    the next record does.

    Args:
        span: the file, or a part of an uncompressed one of JSON lines or of documents behind a separator.
        options: names the fields and the separator.
        digest: a hashlib object that is fed the span's bytes as they are on disk.
    """
    source = span.source
    try:
        if source.url is None and not stat.S_ISREG(source.path.stat().st_mode):
            raise _Broken("not a file", "not a regular file; give a file on disk")
        if source.format == UNKNOWN:
            raise _Broken("unknown extension", "its extension says nothing; name its format with --read-as, as text")
        if source.format == "parquet" and source.compression is not None:
            raise _Broken(
                "unknown extension", "Parquet is compressed inside and not read behind .gz or .zst; undo that"
            )
        with source.open() as file:
            if source.format == "parquet":
                from lightnet_data.records import parquet

                yield from parquet(source, file, options, digest)
                return
            if span.end is not None and source.format == "text":
                assert options.separator is not None
                yield from _texts_of_range(source, file, span.start, span.end, options.separator.encode(), digest)
                return
            if span.end is not None:
                lines = _lines_of_range(source, file, span.start, span.end, digest)
                yield from _json_lines(source.name, lines, options, span.start)
                return
            chunks = _contents(source, _raw(file, digest))
            if source.format == "jsonl":
                yield from _json_lines(source.name, _lines(chunks), options)
            elif source.format == "tar":
                from lightnet_data.records import tar

                yield from tar(source, chunks, options)
            else:
                yield from _texts(source, chunks, options.separator)
    except _Broken as broken:
        kind, reason = broken.problem
        yield Problem(kind, f"{source.name}: {reason}")
    except OSError as error:
        yield Problem("unreadable", f"{source.name}: cannot read it ({error.strerror or error})")


def file_hash() -> Any:
    """A fresh digest for ``read``."""
    return hashlib.sha256()


def _raw(file: Any, digest: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        if digest is not None:
            digest.update(chunk)
        yield chunk


def _contents(source: Source, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The bytes of a file with its compression undone."""
    first = next(chunks, b"")
    looks_like = next((name for name, magics in MAGIC.items() if first.startswith(magics)), None)
    if source.compression is None:
        if looks_like is not None:
            raise _Broken("mislabelled", f"is {looks_like} data; rename it to end in {SUFFIX[looks_like]}")
        yield first
        yield from chunks
        return
    suffix = SUFFIX[source.compression]
    if not first:
        raise _Broken("cut", f"the file is empty, not {source.compression} data; was it cut while copying?")
    if looks_like != source.compression:
        instead = f"{looks_like} data; rename it to end in {SUFFIX[looks_like]}" if looks_like else "something else"
        raise _Broken("mislabelled", f"ends in {suffix} but is not {source.compression} data, it is {instead}")
    yield from _decompressed(source.compression, first, chunks)


def _decompressed(compression: str, chunk: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Several compressed streams one after the other, as ``cat a.gz b.gz`` makes them, count as one."""
    import zstandard

    new: Callable[[], Any]
    if compression == "gzip":
        new = lambda: zlib.decompressobj(wbits=31)  # noqa: E731 - 31: with a gzip header and its checksum
    else:
        new = lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # noqa: E731
    stream, position = None, 0  # of what is read and not yet decompressed
    while chunk:
        while chunk:
            if stream is None:
                if compression == "gzip" and not chunk.strip(b"\0"):
                    break  # gzip allows zeros behind the last stream
                stream = new()
            try:
                yield stream.decompress(chunk)
            except (zlib.error, zstandard.ZstdError) as error:
                where = f"in the {len(chunk)} bytes from byte {position}"
                raise _Broken("corrupt", f"damaged {compression} data {where} ({error}); copy the file again") from None
            left, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
            chunk, position = left, position + len(chunk) - len(left)
        chunk = next(chunks, b"")
    if stream is not None:
        raise _Broken(
            "cut", f"the {compression} data ends in the middle, at byte {position}; the file is cut, copy it again"
        )


def _lines(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines without their newline, and whether it is a last one that has none."""
    rest: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest), False
            for line in others[:-1]:
                yield line, False
            rest = [others[-1]]
    if line := b"".join(rest):
        yield line, True


def _lines_of_range(source: Source, file: BinaryIO, start: int, end: int, digest: Any) -> Iterator[tuple[bytes, bool]]:
    """The lines that begin in bytes [start, end) of a file."""
    inside = True
    if start:
        file.seek(start - 1)
        inside = file.read(1) == b"\n"  # else a line of the span before reaches into this one
    chunks = _raw(_Range(file, end - start), digest)
    if not start:
        chunks = _contents(source, chunks)
    rest = b""
    for line, cut in _lines(chunks):
        if cut:
            rest = line
            break
        if inside:
            yield line, False
        inside = True
    if not rest:
        return
    # The last line goes on in the next span; if the whole span is inside one line, it is not this span's.
    if inside or not start:
        tail: list[bytes] = []
        while chunk := file.read(CHUNK_BYTES):
            head, newline, _ = chunk.partition(b"\n")
            tail.append(head)
            if newline:
                yield rest + b"".join(tail), False
                return
        yield rest + b"".join(tail), True


class _Range:
    """The next ``size`` bytes of a file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        chunk = self._file.read(min(size, self._left))
        self._left -= len(chunk)
        return chunk


def is_blank(text: str) -> bool:
    """Whether a text has no visible character."""
    return _HOLLOW.fullmatch(text) is not None


def _texts(source: Source, chunks: Iterator[bytes], separator: str | None) -> Iterator[Document | Problem]:
    if separator is None:
        data = b"".join(chunks)
        if source.searched and source.code and not data.strip():
            yield Problem(BLANK, f"{source.name}: no text in it")  # such as most __init__.py
        else:
            yield _text_document(source.name, data, 0)
        return
    number, offset, rest = 0, 0, b""
    for number, (offset, rest, ended) in enumerate(_pieces(chunks, separator.encode()), start=1):
        if ended:
            yield _text_document(f"{source.name}, document {number}", rest, offset)
    yield from _last_text(f"{source.name}, document {number}", rest, offset, number == 1)


def _last_text(place: str, rest: bytes, offset: int, alone: bool) -> Iterator[Document | Problem]:
    """What lies behind the last separator."""
    if rest.strip() or alone:
        yield _text_document(place, rest, offset)
    elif rest:
        yield Problem(BLANK, f"{place}: nothing but white space behind the last separator")


def _pieces(chunks: Iterator[bytes], mark: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, bytes, whether a mark follows) of what lies between marks; the last has none behind it."""
    offset = 0
    begun: list[bytes] = []  # of a piece whose end has not come: searched once, joined once
    tail = b""  # its last bytes, in which a mark may begin
    for chunk in chunks:
        *ends, rest = (tail + chunk).split(mark)
        for end in ends:
            piece = b"".join([*begun, end])
            begun.clear()
            yield offset, piece, True
            offset += len(piece) + len(mark)
        kept = max(0, len(rest) - len(mark) + 1)
        begun.append(rest[:kept])
        tail = rest[kept:]
    yield offset, b"".join([*begun, tail]), False


def is_unambiguous(separator: str) -> bool:
    """Whether its occurrences cannot overlap, so that they are the same wherever one begins to look."""
    mark = separator.encode()
    return not any(mark.startswith(mark[shift:]) for shift in range(1, len(mark)))


def _texts_of_range(
    source: Source, file: BinaryIO, start: int, end: int, mark: bytes, digest: Any
) -> Iterator[Document | Problem]:
    """The documents that begin in bytes [start, end) of a file: behind a mark, or at its first byte."""
    before = b""
    if start:
        file.seek(max(0, start - len(mark)))
        before = file.read(min(start, len(mark)))  # a document at `start` has its mark here
    chunks = _raw(_Range(file, end - start), digest)
    begin = start - len(before)
    if not start:
        chunks = _contents(source, chunks)
    else:
        found = _behind(itertools.chain([before], chunks), mark)
        if found is None:
            return
        skipped, rest = found
        begin += skipped
        if begin >= end:  # the next range's
            return
        chunks = itertools.chain([rest], chunks)
    further = iter(lambda: file.read(CHUNK_BYTES), b"")
    behind = f" behind byte {start}" if start else ""
    for number, (offset, piece, ended) in enumerate(_pieces(itertools.chain(chunks, further), mark), start=1):
        place = f"{source.name}, document {number}{behind}"
        if ended:
            yield _text_document(place, piece, begin + offset)
            if begin + offset + len(piece) + len(mark) >= end:
                return
        else:
            yield from _last_text(place, piece, begin + offset, number == 1 and not start)


def _behind(chunks: Iterator[bytes], mark: bytes) -> tuple[int, bytes] | None:
    """How many bytes lie up to the end of the first mark, and what follows it in its chunk; None without one."""
    passed, tail = 0, b""
    for chunk in chunks:
        text = tail + chunk
        at = text.find(mark)
        if at >= 0:
            return passed + at + len(mark), text[at + len(mark) :]
        kept = max(0, len(text) - len(mark) + 1)
        passed, tail = passed + kept, text[kept:]
    return None


def _text_document(place: str, data: bytes, offset: int) -> Document | Problem:
    nul = data.find(b"\0")
    if nul >= 0:
        return Problem("binary", f"{place}: binary data (a zero byte at byte {offset + nul}); give UTF-8 text")
    text = _decoded(place, data, offset)
    if isinstance(text, str) and is_blank(text):
        return Problem("empty", f"{place}: no text in it")
    return Document(text, place) if isinstance(text, str) else text


def _decoded(place: str, data: bytes, offset: int = 0) -> str | Problem:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"byte {offset + error.start} is 0x{data[error.start]:02x}"
        return Problem("invalid UTF-8", f"{place}: not UTF-8 ({where}); convert it, for example with iconv")


def _json_lines(
    name: str, lines: Iterator[tuple[bytes, bool]], options: Options, start: int = 0
) -> Iterator[Document | Problem]:
    """Lines of a file; counted from its begin, else named by the byte after which the span goes looking."""
    nested, number = "." in "".join(options.fields), 0
    only = options.fields[0] if len(options.fields) == 1 and not nested else None
    for number, (line, last) in enumerate(lines, start=1):
        place = f"{name}, line {number}" + (f" behind byte {start}" if start else "")
        if only is not None:  # the common case first; whatever is odd is looked at again below
            try:
                record = orjson.loads(line)
                text = record[only]
                if type(text) is str and not is_blank(text):
                    subset = subset_of(record, options.subset_field, place)
                    yield Document(text, place, 0, subset) if isinstance(subset, str) else subset
                    continue
            except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
                pass
        parsed = _parsed(place, line, last, number == 1 and not start)
        if isinstance(parsed, Problem):
            yield parsed
        else:
            yield from record_documents(place, parsed, options)
    if not number and not start:
        yield Problem("empty", f"{name}: no line in it; leave the file out or copy it again")


def _parsed(place: str, line: bytes, last: bool, first: bool) -> Any:
    """The value of a line, or what is wrong with it."""
    decoded = _decoded(place, line)
    if isinstance(decoded, Problem):
        return decoded
    if first:
        decoded = decoded.removeprefix("\ufeff")
    if not decoded or decoded.isspace():
        return Problem(BLANK, f"{place}: blank line")
    try:
        return json.loads(decoded)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            reason = f"a second value starts at column {error.colno}; put one object on a line"
        elif last:
            reason = f"broken JSON on the last line ({error.msg}, column {error.colno}); is the file cut?"
        else:
            reason = f"broken JSON ({error.msg}, column {error.colno})"
        return Problem("broken JSON", f"{place}: {reason}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of nested lists
        return Problem("broken JSON", f"{place}: JSON that cannot be read ({type(error).__name__}: {error})")


def record_documents(place: str, record: Any, options: Options) -> Iterator[Document | Problem]:
    """The documents of a record: one a field, or a problem in its stead."""
    if not isinstance(record, dict):
        wanted = " and ".join(map(repr, options.fields))
        yield Problem("not an object", f"{place}: {_kind(record)}, not an object with a field {wanted}")
        return
    subset = subset_of(record, options.subset_field, place)
    if isinstance(subset, Problem):
        yield subset
        return
    for index, field in enumerate(options.fields):
        text = _value(record, field, place)
        if not isinstance(text, Problem):
            text = _checked(place, field, text)
        yield text if isinstance(text, Problem) else Document(text, place, index, subset)


def subset_of(record: dict[str, Any], field: str | None, place: str) -> str | Problem:
    """The name of a record's subset, "" where none is asked for."""
    if field is None:
        return ""
    value = _value(record, field, place, "--subset-field")
    if isinstance(value, Problem):
        return value
    if not isinstance(value, str) or not value.strip():
        return Problem("no subset", f"{place}: field {field!r} is {_kind(value)}, not the name of a subset")
    return value


def _value(record: dict[str, Any], field: str, place: str, option: str = "--field") -> Any:
    """A field, or one inside others whose names dots divide; ``option`` chooses it."""
    value: Any = record
    for name in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or name not in value:
            names = ", ".join(map(repr, list(record)[:8])) or "none"
            return Problem("missing field", f"{place}: no field {field!r} (fields: {names}); choose one with {option}")
        value = value[name]
    return value


def _checked(place: str, field: str, text: Any) -> str | Problem:
    if not isinstance(text, str):
        return Problem("not a string", f"{place}: field {field!r} is {_kind(text)}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return Problem("invalid text", f"{place}: field {field!r} holds half a surrogate pair (\\u{code:04x})")
    return Problem("empty", f"{place}: no text in field {field!r}") if is_blank(text) else text


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
