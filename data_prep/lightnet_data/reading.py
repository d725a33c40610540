"""Documents of one source file, and everything that can be wrong with it."""

import hashlib
import json
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from lightnet_data.sources import Source

CHUNK_BYTES = 1 << 20
_SKIPPABLE_FRAMES = tuple(bytes([n, 0x2A, 0x4D, 0x18]) for n in range(0x50, 0x60))
MAGIC = {"gzip": (b"\x1f\x8b",), "zstd": (b"\x28\xb5\x2f\xfd", *_SKIPPABLE_FRAMES)}
SUFFIX = {"gzip": ".gz", "zstd": ".zst"}
EMPTY = "empty"


@dataclass(frozen=True)
class Document:
    """A text that encodes to UTF-8, with at least one character that is not white space, and where it came from."""

    text: str
    place: str


@dataclass(frozen=True)
class Problem:
    """Something that gave no document.

    ``kind`` groups it in reports; ``message`` is one line with place, reason and a way out. Kind ``EMPTY`` is no error:
    blank lines and texts without a visible character are left out, and counted.
    """

    kind: str
    message: str


class _Broken(Exception):
    """The rest of the file cannot be read."""

    def __init__(self, kind: str, reason: str) -> None:
        self.problem = kind, reason


def read(source: Source, field: str = "text", digest: Any = None) -> Iterator[Document | Problem]:
    """The documents and problems of a file, in order.

    After a problem with the file as a whole (unreadable, cut or mislabelled) nothing follows; after one with a line
    the next line does.

    Args:
        source: the file.
        field: the field of a JSON line that holds the text.
        digest: a hashlib object that is fed the bytes of the file as they are on disk.
    """
    try:
        mode = source.path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise _Broken("not a file", "not a regular file; give a file on disk")
        with source.path.open("rb") as file:
            chunks = _contents(source, _raw(file, digest))
            if source.format == "jsonl":
                for number, (line, last) in enumerate(_lines(chunks), start=1):
                    yield _json_document(f"{source.name}, line {number}", line, last, number == 1, field)
            else:
                yield _text_document(source.name, b"".join(chunks))
    except _Broken as broken:
        kind, reason = broken.problem
        yield Problem(kind, f"{source.name}: {reason}")
    except OSError as error:
        yield Problem("unreadable", f"{source.name}: cannot read it ({error.strerror or error})")


def file_hash() -> Any:
    """A fresh digest for ``read``."""
    return hashlib.sha256()


def _raw(file: BinaryIO, digest: Any) -> Iterator[bytes]:
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
    stream = None
    while chunk:
        while chunk:
            if stream is None:
                if compression == "gzip" and not chunk.strip(b"\0"):
                    break  # gzip allows zeros behind the last stream
                stream = new()
            try:
                yield stream.decompress(chunk)
            except (zlib.error, zstandard.ZstdError) as error:
                raise _Broken("corrupt", f"damaged {compression} data ({error}); copy the file again") from None
            chunk, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
        chunk = next(chunks, b"")
    if stream is not None:
        raise _Broken("cut", f"the {compression} data ends in the middle, the file is cut; copy it again")


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


def _text_document(place: str, data: bytes) -> Document | Problem:
    nul = data.find(b"\0")
    if nul >= 0:
        return Problem("binary", f"{place}: binary data (a zero byte at byte {nul}); give UTF-8 text")
    text = _decoded(place, data)
    if isinstance(text, str) and (not text or text.isspace()):
        return Problem(EMPTY, f"{place}: no text in it")
    return Document(text, place) if isinstance(text, str) else text


def _decoded(place: str, data: bytes) -> str | Problem:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem(
            "invalid UTF-8",
            f"{place}: not UTF-8 (byte {error.start} is 0x{data[error.start]:02x}); convert it, for example with iconv",
        )


def _json_document(place: str, line: bytes, last: bool, first: bool, field: str) -> Document | Problem:
    decoded = _decoded(place, line)
    if isinstance(decoded, Problem):
        return decoded
    if first:
        decoded = decoded.removeprefix("\ufeff")
    if not decoded or decoded.isspace():
        return Problem(EMPTY, f"{place}: blank line")
    try:
        record = json.loads(decoded)
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
    if not isinstance(record, dict):
        return Problem("not an object", f"{place}: {_kind(record)}, not an object with a field {field!r}")
    if field not in record:
        names = ", ".join(map(repr, list(record)[:8])) or "none"
        return Problem("missing field", f"{place}: no field {field!r} (fields: {names}); choose one with --field")
    text = record[field]
    if not isinstance(text, str):
        return Problem("not a string", f"{place}: field {field!r} is {_kind(text)}, not a string")
    if not text or text.isspace():
        return Problem(EMPTY, f"{place}: no text in field {field!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return Problem("invalid text", f"{place}: field {field!r} holds half a surrogate pair (\\u{code:04x})")
    return Document(text, place)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
