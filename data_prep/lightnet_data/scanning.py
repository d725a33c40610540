"""The first pass over a corpus: what is in it, what is wrong with it, and which documents are held out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from lightnet_data import reading
from lightnet_data.errors import DataError
from lightnet_data.sources import Sources, shown
from lightnet_data.tokenizer import SPACE_SYMBOL
from lightnet_data.training import Sample

Progress = Callable[[int], Any]
"""Called with the number of bytes just read."""


@dataclass
class Problems:
    """Problems met: raised at once, or counted by kind with the first of each."""

    skip: bool
    kinds: dict[str, dict[str, Any]] = field(default_factory=dict)

    def meet(self, problem: reading.Problem) -> None:
        """Count a problem.

        Raises:
            DataError: it is an error and errors are not skipped.
        """
        if not self.skip and problem.kind != reading.EMPTY:
            raise DataError(problem.message)
        entry = self.kinds.setdefault(problem.kind, {"count": 0, "first": problem.message})
        entry["count"] += 1


@dataclass
class Scan:
    """What the first pass found. Hashes are xxh3 of (seed, text), uniform over 64 bits."""

    seed: int
    documents: int = 0
    text_bytes: int = 0
    lowest: int = 2**64
    highest: int = -1
    space_symbols: int = 0
    space_symbol_documents: int = 0
    files: list[dict[str, Any]] = field(default_factory=list)

    def threshold(self, holdout: float) -> int:
        """Documents with a hash below this are held out.

        A share ``holdout`` of all possible texts is, whatever else the corpus holds. Only where that leaves one side
        without any document, the one of lowest hash is held out or the one of highest hash is not; copies of one
        text are never divided.
        """
        threshold = int(holdout * 2**64)
        if holdout > 0 and self.lowest < self.highest:
            threshold = min(max(threshold, self.lowest + 1), self.highest)
        elif self.lowest == self.highest:
            threshold = 0
        return threshold


class _Meter:
    """Feeds both the digest of a file and the progress bar."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._digest = reading.file_hash()
        self.size = 0

    def update(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self._progress(len(chunk))
        self.size += len(chunk)

    def hexdigest(self) -> str:
        digest: str = self._digest.hexdigest()
        return digest


def text_hash(data: bytes, seed: int) -> int:
    """Hash of a text's UTF-8 bytes that decides its side of the split."""
    return xxhash.xxh3_64_intdigest(data, seed & (2**64 - 1))


def scan(
    sources: Sources,
    inputs: list[str],
    text_field: str,
    seed: int,
    problems: Problems,
    sample: Sample | None,
    progress: Progress,
) -> Scan:
    """Read everything once.

    Args:
        sources: the files.
        inputs: the INPUT arguments they came from, for messages.
        text_field: the field of a JSON line that holds the text.
        seed: seed of the held-out choice.
        problems: where problems go.
        sample: filled for tokenizer training, tagged with each document's hash, if given.
        progress: told of bytes read.

    Raises:
        DataError: something is wrong and not to be skipped, an INPUT gives no document, or nothing does.
    """
    result = Scan(seed)
    for message in sources.unreadable:
        problems.meet(reading.Problem("unreadable", message))
    given: set[int] = set()  # INPUTs that gave a document, or an error that was counted
    for source in sources.files:
        meter, documents = _Meter(progress), 0
        for item in reading.read(source, text_field, meter):
            if isinstance(item, reading.Problem):
                problems.meet(item)
                if item.kind != reading.EMPTY:
                    given.add(source.argument)
                continue
            data = item.text.encode()
            key = text_hash(data, seed)
            documents += 1
            result.text_bytes += len(data)
            result.lowest, result.highest = min(result.lowest, key), max(result.highest, key)
            marks = item.text.count(SPACE_SYMBOL)
            result.space_symbols += marks
            result.space_symbol_documents += marks > 0
            if sample is not None:
                sample.add(item.text, key)
        if documents:
            given.add(source.argument)
        result.documents += documents
        result.files.append(
            {
                "path": source.name,
                "format": source.format,
                "compression": source.compression,
                "bytes": meter.size,
                "sha256": meter.hexdigest(),
                "documents": documents,
            }
        )
    # An INPUT whose files were all reached by an earlier one has none of its own, and is no problem.
    for argument, name in enumerate(inputs):
        if argument not in given and any(source.argument == argument for source in sources.files):
            problems.meet(reading.Problem("no document", f"{shown(name)}: no document in it, there is no text"))
    if not result.documents:
        raise DataError(f"{', '.join(map(shown, inputs))}: no document to read; every file is empty or was skipped")
    return result


def reread(
    sources: Sources, scanned: Scan, text_field: str, progress: Progress
) -> Iterator[tuple[reading.Document, bytes, int]]:
    """The documents again, with their UTF-8 bytes and hash; problems were met by ``scan``.

    Raises:
        DataError: a file is not what it was in the first pass.
    """
    for source, before in zip(sources.files, scanned.files, strict=True):
        meter = _Meter(progress)
        for item in reading.read(source, text_field, meter):
            if isinstance(item, reading.Document):
                data = item.text.encode()
                yield item, data, text_hash(data, scanned.seed)
        if meter.hexdigest() != before["sha256"]:
            raise DataError(f"{source.name}: the file changed while it was being read; run lightnet prep again")


def file_hashes(sources: Sources, progress: Progress) -> list[tuple[str, str]]:
    """(path, sha256) of every file as it is now; an unreadable one has an empty hash."""
    hashes = []
    for source in sources.files:
        meter = _Meter(progress)
        try:
            with source.path.open("rb") as file:
                while chunk := file.read(reading.CHUNK_BYTES):
                    meter.update(chunk)
            hashes.append((source.name, meter.hexdigest()))
        except OSError:
            hashes.append((source.name, ""))
    return hashes
