"""The work of ``lightnet prep``: raw text to token shards with a manifest."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightnet_data import manifest, scanning, sources
from lightnet_data.encoding import Encoded, Item, encode_all
from lightnet_data.errors import DataError
from lightnet_data.output import OutputFolder, ShardWriter, check_free
from lightnet_data.reading import Document
from lightnet_data.tokenizer import FILE_NAMES, Tokenizer
from lightnet_data.training import SAMPLE_BYTES, Sample, VocabularyTooLarge, fit

SPLITS = ("train", "validation")
DEFAULT_HOLDOUT = 0.05
# Without --vocab-size: a power of two between these, one id for so many bytes of text.
SMALLEST_VOCABULARY, LARGEST_VOCABULARY, BYTES_PER_ID = 512, 32768, 2048
# Round trips looked at: the first documents, and then one in so many, chosen by hash.
CHECKED_FIRST, CHECKED_ONE_IN = 64, 32


@dataclass(frozen=True)
class Options:
    """What a preparation depends on besides its sources and the tokenizer file.

    ``field``: JSON field of the text. ``vocab_size``: ids of a tokenizer to train, None for a size that suits the
    corpus. ``eod_token``: spelling of a given tokenizer's end-of-document token. ``holdout``: share of documents held
    out. ``seed``: seed of the held-out choice and of the tokenizer's training sample. ``skip_bad``: count what is bad
    instead of stopping at it.
    """

    field: str = "text"
    vocab_size: int | None = None
    eod_token: str | None = None
    holdout: float = DEFAULT_HOLDOUT
    seed: int = 0
    skip_bad: bool = False


class Reporter:
    """Where a preparation tells how it goes; this one is silent."""

    def note(self, line: str) -> None:
        """Something the user should know that is no error."""

    @contextlib.contextmanager
    def progress(self, stage: str, total: int) -> Iterator[Callable[[int], Any]]:
        """A stage over ``total`` bytes; yields a function to call with each number of bytes done."""
        yield lambda count: None


def prepare(
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer_path: str | Path | None = None,
    options: Options | None = None,
    workers: int = 1,
    overwrite: bool = False,
    reporter: Reporter | None = None,
) -> dict[str, Any]:
    """Prepare a corpus; the manifest of the finished folder.

    ``output`` gets ``train`` and ``validation`` as ``.bin``, ``.idx`` and ``.bytes.npy`` (UTF-8 bytes of each document,
    int64), the tokenizer file and ``manifest.json``. It appears when all of it is on disk, or not at all. Documents
    keep their order; each is its tokens and the end-of-document token. The result depends on the sources, the
    tokenizer and the options, not on ``workers``.

    Args:
        inputs: files, folders and patterns; see ``sources.find``.
        output: folder to make.
        tokenizer_path: a tokenizer to use instead of training one; see ``Tokenizer.load``.
        options: see ``Options``.
        workers: processes that encode.
        overwrite: replace a finished data set in ``output`` by this one.
        reporter: gets notes and progress.

    Raises:
        DataError: bad input, bad options, or ``output`` is taken. If it holds the result of the same work it is left
            as it is and its manifest returned, with ``"reused": true``.
    """
    options, reporter, output = options or Options(), reporter or Reporter(), Path(output)
    names = [str(name) for name in inputs]
    _check_options(names, tokenizer_path, options, workers)
    tokenizer = None if tokenizer_path is None else Tokenizer.load(tokenizer_path, options.eod_token)
    request = {**asdict(options), "tokenizer": tokenizer.fingerprint if tokenizer else None}
    free = check_free(output, overwrite)
    found = sources.find(names)
    total = sum(_size(source) for source in found.files)
    if not free:
        return _reuse(output, request, found, total, reporter)
    target = OutputFolder(output, reporter.note)
    with target as folder:
        problems = scanning.Problems(options.skip_bad)
        sample = Sample(options.seed, SAMPLE_BYTES) if tokenizer is None else None
        with reporter.progress("reading", total) as progress:
            scan = scanning.scan(found, names, options.field, options.seed, problems, sample, progress)
        threshold = scan.threshold(options.holdout)
        if sample is not None:
            # Held-out text stays out of the tokenizer's training as well.
            kept = sample.sentences(lambda key: key >= threshold)
            tokenizer = Tokenizer(_train(kept, options.vocab_size, scan.text_bytes, reporter))
        assert tokenizer is not None
        with reporter.progress("tokenizing", total) as progress:
            items = _items(scanning.reread(found, scan, options.field, progress), threshold)
            splits, round_trip = _write(folder, encode_all(items, tokenizer, workers), tokenizer)
        tokenizer.save(folder)
        result = {
            "format": manifest.FORMAT,
            "format_version": manifest.FORMAT_VERSION,
            "documents": scan.documents,
            "bytes": scan.text_bytes,
            "tokens": sum(split["tokens"] for split in splits.values()),
            "splits": splits,
            "tokenizer": _describe(tokenizer, trained=sample is not None),
            "round_trip": round_trip,
            "space_symbols": {"count": scan.space_symbols, "documents": scan.space_symbol_documents},
            "skipped": problems.kinds,
            "ignored_files": dict(sorted(found.ignored.items())),
            "request": request,
            "sources": scan.files,
        }
        manifest.save(folder, result)
        target.finish()
    return result


def _check_options(inputs: list[str], tokenizer_path: str | Path | None, options: Options, workers: int) -> None:
    if not inputs:
        raise DataError("no INPUT given; name files, folders or patterns to read")
    if workers < 1:
        raise DataError(f"--workers {workers}: must be at least 1")
    if not 0 <= options.holdout < 1:
        raise DataError(f"--holdout {options.holdout}: a share of the documents, at least 0 and below 1")
    if tokenizer_path is not None and options.vocab_size is not None:
        raise DataError("--tokenizer and --vocab-size: the first uses a tokenizer, the second trains one; give one")
    if tokenizer_path is None and options.eod_token is not None:
        raise DataError("--eod-token goes with --tokenizer; a trained tokenizer has its own end-of-document token")


def _size(source: sources.Source) -> int:
    try:
        return source.path.stat().st_size
    except OSError:  # met again, and reported, when it is read
        return 0


def _train(sample: list[str], vocab_size: int | None, text_bytes: int, reporter: Reporter) -> bytes:
    """Train the tokenizer; a size the user did not choose gives way to what the corpus supports."""
    if vocab_size is not None:
        return fit(sample, vocab_size)
    power = max(1, text_bytes // BYTES_PER_ID).bit_length() - 1
    vocab_size = min(max(2**power, SMALLEST_VOCABULARY), LARGEST_VOCABULARY)
    try:
        model = fit(sample, vocab_size)
    except VocabularyTooLarge as error:
        vocab_size = error.largest
        model = fit(sample, vocab_size)
    reporter.note(f"trained a vocabulary of {vocab_size} to suit {text_bytes} bytes of text; --vocab-size N sets it")
    return model


def _items(documents: Iterator[tuple[Document, bytes, int]], threshold: int) -> Iterator[Item]:
    for number, (document, data, key) in enumerate(documents):
        split = "validation" if key < threshold else "train"
        check = number < CHECKED_FIRST or key % CHECKED_ONE_IN == 0
        yield Item(document.text, document.place, split, len(data), check)


def _write(folder: Path, documents: Iterator[Encoded], tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Write the shards; the manifest's entries on the splits and on the round trips looked at."""
    writers = {name: ShardWriter(folder, name, tokenizer.vocab_size) for name in SPLITS}
    round_trip: dict[str, Any] = {"checked": 0, "differ": 0, "first": None}
    for encoded in documents:
        item = encoded.item
        writers[item.split].add(encoded.tokens, item.byte_length, item.place)
        if encoded.lossless is None:
            continue
        round_trip["checked"] += 1
        if not encoded.lossless:
            round_trip["differ"] += 1
            round_trip["first"] = round_trip["first"] or item.place
    return {name: writer.finish() for name, writer in writers.items()}, round_trip


def _describe(tokenizer: Tokenizer, trained: bool) -> dict[str, Any]:
    return {
        "file": FILE_NAMES[tokenizer.kind],
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "eod_token": tokenizer.eod_token,
        "fingerprint": tokenizer.fingerprint,
        "trained": trained,
    }


def _reuse(
    output: Path, request: dict[str, Any], found: sources.Sources, total: int, reporter: Reporter
) -> dict[str, Any]:
    """The manifest of a finished output, if it came from the same request and files and is still whole."""
    taken = f"{sources.shown(output)}: holds a finished data set"
    written = manifest.load(output)
    changed = [name for name, value in request.items() if written.get("request", {}).get(name, None) != value]
    if changed:
        raise DataError(f"{taken} made with another {', '.join(changed)}; choose another --output or add --overwrite")
    with reporter.progress("comparing", total) as progress:
        now = scanning.file_hashes(found, progress)
    if now != [(source["path"], source["sha256"]) for source in written["sources"]]:
        raise DataError(f"{taken} made from other files; choose another --output or add --overwrite")
    for name, split in written["splits"].items():
        path = output / f"{name}.bin"
        size = path.stat().st_size if path.exists() else 0
        if size != split["tokens"] * np.dtype(split["dtype"]).itemsize:
            raise DataError(f"{path}: {size} bytes, the manifest describes {split['tokens']} tokens; add --overwrite")
    reporter.note(f"{taken} of exactly this work; nothing to do")
    return {**written, "reused": True}
