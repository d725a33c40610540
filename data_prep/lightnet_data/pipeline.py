"""The steps of a preparation as datatrove pipelines.

``Reader`` gives the documents of one part; ``SampleWriter`` keeps what a tokenizer is trained on, ``TokenWriter`` writes the
part's tokens. datatrove's own readers and tokenizer steps do not serve: its readers skip a bad line with a warning and
cannot start inside a file, its Megatron tokenizer neither resumes by content nor keeps an order over tasks, and takes
the spelling of a special token in a text for the token. Its blocks (filters, de-duplication) can stand between.
"""

import json
import os
import pickle
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from numpy.typing import NDArray

from lightnet_data import parts, reading
from lightnet_data.errors import DataError
from lightnet_data.options import Options
from lightnet_data.output import flush, replace, token_dtype
from lightnet_data.tokenizer import SENTENCEPIECE, SPACE_SYMBOL, Tokenizer
from lightnet_data.training import SAMPLE_BYTES, Sample

# Round trips looked at: the first documents of the corpus, and then one in so many, chosen by hash.
CHECKED_FIRST, CHECKED_ONE_IN, CHECKED_CHARACTERS = 64, 32, 1 << 18
# Type codes of array and numpy alike: a part may be 45 GB of text of 7 million documents.
COLUMNS = {"tokens": "i", "bytes": "q", "key": "Q", "field": "B", "subset": "H"}


def text_hash(data: bytes, seed: int) -> int:
    """Hash of a text's UTF-8 bytes that decides its side of the split."""
    return xxhash.xxh3_64_intdigest(data, seed & (2**64 - 1))


class Report:
    """What the steps of one task have to tell; they share one."""

    def __init__(self) -> None:
        self.problems: dict[str, dict[str, Any]] = {}
        self.dropped: dict[str, dict[str, Any]] = {}
        self.spans: list[dict[str, Any]] = []
        self.given: set[int] = set()

    def meet(self, problem: reading.Problem, skip: bool) -> None:
        """Count a problem, or raise it as a DataError if it is an error and errors are not skipped."""
        if not skip and problem.kind != reading.BLANK:
            raise DataError(problem.message)
        entry = self.problems.setdefault(problem.kind, {"count": 0, "first": problem.message})
        entry["count"] += 1

    def drop(self, kind: str, place: str) -> None:
        """Count a good document that a filter did not let through."""
        self.dropped.setdefault(kind, {"count": 0, "first": place})["count"] += 1


class Reader(PipelineStep):
    """The documents of part ``rank``, strictly read; ``id`` is the place, ``metadata`` field and subset."""

    name, type = "strict reader", "📖 - READER"

    def __init__(self, folder: Path, options: Options, report: Report) -> None:
        super().__init__()
        self.folder, self.options, self.report = folder, options, report

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """See the class."""
        self.report.__init__()  # type: ignore[misc]
        plan = parts.load(self.folder)
        for span in plan.spans[rank]:
            source, digest, documents = span.source, reading.file_hash(), 0
            stamped = plan.stamps[source.name] != parts.UNSTAMPED
            if stamped:
                plan.check(source)
            for item in reading.read(span, self.options, digest):
                if isinstance(item, reading.Problem):
                    self.report.meet(item, self.options.skip_bad)
                    if item.kind != reading.BLANK:
                        self.report.given.add(source.argument)
                    continue
                documents += 1
                facts = {"field": item.field, "subset": item.subset, "part": rank}
                yield Document(item.text, item.place, metadata=facts)
            if stamped:
                plan.check(source)
            if documents:
                self.report.given.add(source.argument)
            self.report.spans.append(
                {"path": source.name, "documents": documents, "sha256": digest.hexdigest(), "argument": source.argument}
            )


class SampleWriter(PipelineStep):
    """Keeps at most ``limit`` bytes of a part for the tokenizer's training, and its lowest and highest hash."""

    name, type = "tokenizer sample", "✍️ - WRITER"

    def __init__(self, folder: Path, options: Options, limit: int = SAMPLE_BYTES) -> None:
        super().__init__()
        self.folder, self.options, self.limit = folder, options, limit

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        """See the class."""
        sample, low, high, size = Sample(self.options.seed, self.limit), 2**64, -1, 0
        for document in data:
            encoded = document.text.encode()
            key = text_hash(encoded, self.options.seed)
            low, high, size = min(low, key), max(high, key), size + len(encoded)
            sample.add(document.text, key, f"{document.id}\0{document.metadata['field']}")
        replace(self.folder / f"{rank:05d}.sample", pickle.dumps((low, high, size, sample.kept(rank))))


class TokenWriter(PipelineStep):
    """Writes a part: ``RANK.bin`` (its documents' tokens, in order), ``RANK.npz`` (columns of ``COLUMNS``) and ``RANK.json``."""

    name, type = "IndexedDataset part writer", "🔢 - TOKENIZER"

    def __init__(self, folder: Path, tokenizer: Path, eod: str | None, seed: int, stamp: str, report: Report) -> None:
        super().__init__()
        self.folder, self.tokenizer, self.eod, self.seed = folder, tokenizer, eod, seed
        self.stamp, self.report = stamp, report

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        """See the class."""
        tokenizer = load_tokenizer(self.tokenizer, self.eod, self.stamp)
        dtype = token_dtype(tokenizer.vocab_size)
        end = np.array([tokenizer.eod_id], dtype=dtype)
        columns = {name: array(code) for name, code in COLUMNS.items()}
        subsets: dict[str, int] = {}
        trip: dict[str, Any] = {"checked": 0, "differ": 0, "first": None}
        marks = {"count": 0, "documents": 0}
        temporary = self.folder / f"{rank:05d}.bin.writing"
        with temporary.open("wb", buffering=1 << 20) as file:
            for number, document in enumerate(data):
                encoded = document.text.encode()
                key = text_hash(encoded, self.seed)
                try:
                    ids = tokenizer.encode_array(document.text)
                except DataError as error:
                    raise DataError(f"{document.id}: {error}") from None
                if len(ids) >= 2**31 - 1:  # .idx counts a document's tokens in int32
                    raise DataError(f"{document.id}: {len(ids)} tokens, a document holds at most 2^31 - 2; split it")
                if (rank == 0 and number < CHECKED_FIRST) or key % CHECKED_ONE_IN == 0:
                    _check(tokenizer, document, ids, trip)
                count = document.text.count(SPACE_SYMBOL)
                marks["count"] += count
                marks["documents"] += count > 0
                file.write(ids.astype(dtype).tobytes())
                file.write(end.tobytes())
                subset = subsets.setdefault(document.metadata["subset"], len(subsets))
                if subset >= 2**16 - 1:
                    raise DataError(f"{document.id}: more than 65,535 subsets; is --subset-field the right field?")
                for column, value in zip(
                    columns.values(), (len(ids) + 1, len(encoded), key, document.metadata["field"], subset), strict=True
                ):
                    column.append(value)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / f"{rank:05d}.bin")
        arrays = {name: np.frombuffer(columns[name], dtype=code) for name, code in COLUMNS.items()}
        with (self.folder / f"{rank:05d}.npz.writing").open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        flush(self.folder / f"{rank:05d}.npz.writing")
        (self.folder / f"{rank:05d}.npz.writing").replace(self.folder / f"{rank:05d}.npz")
        facts = {
            "fingerprint": fingerprint(parts.load(self.folder.parent), rank, self.stamp),
            "subsets": list(subsets),
            "skipped": self.report.problems,
            "dropped": self.report.dropped,
            "spans": self.report.spans,
            "given": sorted(self.report.given),
            "round_trip": trip,
            "space_symbols": marks,
        }
        flush(self.folder)  # the mark of a finished part does not reach the disk before the part does
        replace(self.folder / f"{rank:05d}.json", json.dumps(facts).encode())


def fingerprint(plan: parts.Plan, rank: int, stamp: str) -> str:
    """Of a finished part: its plan's, and the tokenizer's (``stamp``)."""
    return f"{plan.fingerprint(rank)}-{stamp}"


@lru_cache(maxsize=2)
def load_tokenizer(path: Path, eod: str | None, stamp: str) -> Tokenizer:
    """A tokenizer, once a process; ``stamp`` changes with the file's contents."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is one thread
    return Tokenizer.load(path, eod)


def _check(tokenizer: Tokenizer, document: Document, ids: NDArray[np.int32], trip: dict[str, Any]) -> None:
    """Decode again, of a long text its beginning; U+2581, which SentencePiece cannot tell from a space, does not count."""
    text = document.text
    if len(text) > CHECKED_CHARACTERS:
        text = text[:CHECKED_CHARACTERS]
        ids = tokenizer.encode_array(text)
    if tokenizer.kind == SENTENCEPIECE:
        text = text.replace(SPACE_SYMBOL, " ")
    trip["checked"] += 1
    if tokenizer.decode(ids.tolist()) != text:
        trip["differ"] += 1
        trip["first"] = trip["first"] or document.id
