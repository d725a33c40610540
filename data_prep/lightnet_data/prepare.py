"""The work of ``lightnet prep``: raw text to token shards with a manifest."""

import contextlib
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from lightnet_data import (
    executors,
    manifest,
    merging,
    parts,
    pipeline,
    reading,
    selection,
    sources,
    webdataset_tokens,
)
from lightnet_data.errors import DataError, NoDocument
from lightnet_data.executors import Execution
from lightnet_data.options import Options
from lightnet_data.output import OutputFolder, check_free, replace, token_dtype
from lightnet_data.tokenizer import FILE_NAMES, Tokenizer
from lightnet_data.training import SAMPLE_BYTES, Sample, VocabularyTooLarge, fit

# Without --vocab-size: a power of two between these, one id for so many bytes of text.
SMALLEST_VOCABULARY, LARGEST_VOCABULARY, BYTES_PER_ID = 512, 32768, 2048


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
    execution: Execution | None = None,
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
        execution: where the parts are worked on; left out, ``workers`` processes here.

    Raises:
        DataError: bad input, bad options, or ``output`` is taken. If it holds the result of the same work it is left
            as it is and its manifest returned, with ``"reused": true``.
    """
    options, reporter, output = options or Options(), reporter or Reporter(), Path(output)
    execution = execution or Execution(workers=workers)
    names = [str(name) for name in inputs]
    _check_options(names, tokenizer_path, options, execution)
    tokenizer = None if tokenizer_path is None else Tokenizer.load(tokenizer_path, options.eod_token)
    request = {
        **asdict(options),
        "fields": list(options.fields),
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
    }
    free = check_free(output, overwrite)
    found = sources.find(names, options.read_as)
    plan = parts.cut(found, names, request)
    total = sum(size for size, _ in plan.stamps.values())
    if not free:
        return _reuse(output, request, plan, total, reporter)
    target = OutputFolder(output, reporter.note, resume=True)
    target.elsewhere = execution.kind != "local"
    with target as folder:
        for name in ("parts", "sample", "tokenizer"):
            (folder / name).mkdir(exist_ok=True)
        plan.save(folder)
        parts.load.cache_clear()
        for message in found.unreadable:
            if not options.skip_bad:
                raise DataError(message)
        work = _Work(folder, plan, options, execution, total, reporter)
        trained = tokenizer is None
        try:
            work.find_duplicates()
            if tokenizer is None:
                tokenizer = work.train()
            work.encode(tokenizer)
            result = _merge(folder, plan, options, tokenizer, request, trained)
        except executors.Submitted as queued:
            target.submitted = True
            return {"submitted": True, "stage": queued.stage, "tasks": queued.tasks, "job": queued.job}
        except NoDocument:  # nothing to go on from
            target.worthless = True
            raise
        for place, split in [(place, split) for place, found in _splits(folder / "out", result) for split in found]:
            if "left_out" in split:
                reporter.note(f"{place}{split['left_out']}")
        target.finish()
    return result


class _Work:
    """The stages of a preparation up to its finished parts."""

    def __init__(
        self, folder: Path, plan: parts.Plan, options: Options, execution: Execution, total: int, reporter: Reporter
    ) -> None:
        self.folder, self.plan, self.options = folder, plan, options
        self.execution, self.total, self.reporter = execution, total, reporter

    def _run(self, name: str, steps: list[Any], tasks: int | None = None) -> None:
        """Run one pipeline over all parts, or over so many tasks."""
        with self.reporter.progress(name, self.total if tasks is None else 0) as progress:
            executors.run(
                steps,
                len(self.plan.spans) if tasks is None else tasks,
                name,
                self.folder / "logs",
                self.execution,
                done=lambda rank: progress(0 if tasks else self.plan.part_bytes(rank)),
            )

    def _documents(self, report: pipeline.Report) -> list[Any]:
        """The steps that give the documents to keep."""
        options = self.options
        return [
            pipeline.Reader(self.folder, options, report),
            *selection.filters(options, report),
            *selection.duplicates(self.folder, options, report),
        ]

    def find_duplicates(self) -> None:
        """What must be known of all documents before one can be kept."""
        if self.options.dedup is None:
            return
        selection.renew(self.folder, self.plan)
        for stage in selection.stages(self.folder, self.options):
            self._run(stage.name, stage.steps, stage.tasks)

    def train(self) -> Tokenizer:
        """Sample the corpus and train; held-out text stays out of it."""
        folder, plan, options = self.folder, self.plan, self.options
        mark, model = folder / "sample" / "plan", folder / "sample" / f"model-{options.holdout}-{options.test}"
        if not mark.is_file() or mark.read_text() != plan.fingerprint():
            shutil.rmtree(folder / "logs" / "reading", ignore_errors=True)
            for old in folder.glob("sample/model-*"):
                old.unlink()
            mark.write_text(plan.fingerprint())
        if model.is_file():
            return Tokenizer(model.read_bytes())
        self._run("reading", [*self._documents(pipeline.Report()), pipeline.SampleWriter(folder / "sample", options)])
        sample, low, high, size = Sample(options.seed, SAMPLE_BYTES), 2**64, -1, 0
        for rank in range(len(plan.spans)):
            found = pickle.loads((folder / "sample" / f"{rank:05d}.sample").read_bytes())
            low, high, size = min(low, found[0]), max(high, found[1]), size + found[2]
            sample.merge(found[3])
        if high < 0:
            _no_document(plan)
        _, limit = merging.bounded_limits(options.holdout, options.test, low, high)
        trained = _fit(sample.sentences(lambda key: key >= limit), options, size, self.reporter)
        replace(model, trained)
        return Tokenizer(trained)

    def encode(self, tokenizer: Tokenizer) -> None:
        """Tokens of every part that is not there yet, from this plan and this tokenizer."""
        plan, work = self.plan, self.folder / "parts"
        path = self.folder / "tokenizer" / FILE_NAMES[tokenizer.kind]
        if not path.is_file() or path.read_bytes() != tokenizer.model:  # a queued task may be reading it
            for old in path.parent.iterdir():
                old.unlink()
            tokenizer.save(path.parent)
        stamp, marks = (
            f"{tokenizer.fingerprint}-{tokenizer.eod_id}",
            self.folder / "logs" / "tokenizing" / "completions",
        )
        if self.options.dedup is not None:  # a duplicate may stand in any other part
            stamp += f"-{plan.fingerprint()}"
        redone = 0
        for rank in range(len(plan.spans)):
            file, mark = work / f"{rank:05d}.json", marks / f"{rank:05d}"
            if file.is_file() and json.loads(file.read_text())["fingerprint"] == pipeline.fingerprint(
                plan, rank, stamp
            ):
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
                continue
            redone += file.is_file()
            file.unlink(missing_ok=True)
            mark.unlink(missing_ok=True)
        for file in work.iterdir():
            if not file.name[:5].isdigit() or int(file.name[:5]) >= len(plan.spans):
                file.unlink()
        if redone:
            self.reporter.note(
                f"{redone} finished parts are of other inputs, options or tokenizer; they are done again"
            )
        report = pipeline.Report()
        writer = pipeline.TokenWriter(work, path, tokenizer.eod_token, self.options.seed, stamp, report)
        self._run("tokenizing", [*self._documents(report), writer])


def _no_document(plan: parts.Plan) -> NoReturn:
    shown = ", ".join(map(sources.shown, plan.inputs))
    raise NoDocument(f"{shown}: no document to read, no document in it; every file is empty or was skipped")


def _merge(
    folder: Path, plan: parts.Plan, options: Options, tokenizer: Tokenizer, request: dict[str, Any], trained: bool
) -> dict[str, Any]:
    """The finished parts as the data sets of ``out``, with its manifest."""
    work, out = folder / "parts", folder / "out"
    absent = [rank for rank in range(len(plan.spans)) if not (work / f"{rank:05d}.json").is_file()]
    if absent:
        raise DataError(
            f"{folder}: {len(absent)} parts are not done, the first {absent[0]}; see its log in {folder}/logs"
        )
    skipped: dict[str, dict[str, Any]] = {}
    dropped: dict[str, dict[str, Any]] = {}
    given: set[int] = set()
    trip: dict[str, Any] = {"checked": 0, "differ": 0, "first": None}
    marks = {"count": 0, "documents": 0}
    subsets: dict[str, dict[str, int]] = {}
    files: dict[str, list[dict[str, Any]]] = {source.name: [] for source in plan.sources.files}

    def meet(kind: str, count: int, first: str, found: dict[str, dict[str, Any]] = skipped) -> None:
        found.setdefault(kind, {"count": 0, "first": first})["count"] += count

    for message in plan.sources.unreadable:
        meet("unreadable", 1, message)
    for facts, columns in zip(merging.facts(work, plan), merging.columns(work, plan), strict=True):
        for kind, entry in facts["skipped"].items():
            meet(kind, entry["count"], entry["first"])
        for kind, entry in facts["dropped"].items():
            meet(kind, entry["count"], entry["first"], dropped)
        given.update(facts["given"])
        trip["checked"] += facts["round_trip"]["checked"]
        trip["differ"] += facts["round_trip"]["differ"]
        trip["first"] = trip["first"] or facts["round_trip"]["first"]
        for name in marks:
            marks[name] += facts["space_symbols"][name]
        for span in facts["spans"]:
            files[span["path"]].append(span)
        for index, name in enumerate(facts["subsets"]):
            mask = columns["subset"] == index
            entry = subsets.setdefault(name, {"documents": 0, "bytes": 0, "tokens": 0})
            entry["documents"] += int(mask.sum())
            entry["bytes"] += int(columns["bytes"][mask].sum())
            entry["tokens"] += int(columns["tokens"][mask].sum(dtype=np.int64))
    for argument, name in enumerate(plan.inputs):
        if argument not in given and any(source.argument == argument for source in plan.sources.files):
            message = f"{sources.shown(name)}: no document in it, there is no text"
            if not options.skip_bad:
                raise DataError(message) if subsets else NoDocument(message)
            meet("no document", 1, message)
    if not subsets:
        _no_document(plan)
    limits = merging.limits(work, plan, options.holdout, options.test)
    total = {name: sum(entry[name] for entry in subsets.values()) for name in ("documents", "bytes", "tokens")}
    result: dict[str, Any] = {
        "format": manifest.FORMAT,
        "format_version": manifest.FORMAT_VERSION,
        **total,
        "splits": {},
        "files": {},
        "tokenizer": _describe(tokenizer, trained),
        "round_trip": trip,
        "space_symbols": marks,
        "skipped": skipped,
        "dropped": dropped,
        "ignored_files": dict(sorted(plan.sources.ignored.items())),
        "request": request,
        "sources": [_source(source, plan, files[source.name]) for source in plan.sources.files],
    }
    if options.subset_field is not None:
        result["subsets"] = dict(sorted(subsets.items()))
    fields: list[int | None] = [None] if len(options.fields) == 1 else list(range(len(options.fields)))
    groups: list[str | None] = [*sorted(subsets)] if options.by_subset else [None]
    dtype, taken, eod_id = token_dtype(tokenizer.vocab_size), set[str](), tokenizer.eod_id
    size = options.shard_tokens if options.format == "megatron" else None
    for field in fields:
        for group in groups:
            if field is None and group is None:
                result["splits"], result["files"] = merging.write(work, plan, out, limits, dtype, (None, None), size)
                _pack(out, result["splits"], result["files"], options, eod_id)
                continue
            name = " ".join(([] if field is None else [options.fields[field]]) + ([] if group is None else [group]))
            place = merging.slug(name, taken)
            taken.add(place)
            (out / place).mkdir()
            splits, written = merging.write(work, plan, out / place, limits, dtype, (field, group), size)
            _pack(out / place, splits, written, options, eod_id)
            _add_tokenizer(out / place, tokenizer, written)
            own = {key: sum(split[key] for split in splits.values()) for key in total}
            own |= {"splits": splits, "output": name, "subsets": {}, "outputs": {}, "files": written}
            manifest.save(out / place, {**result, **own})
            own = {key: own[key] for key in total}
            result.setdefault("outputs", {})[place] = {"name": name, **own}
    _add_tokenizer(out, tokenizer, result["files"])
    manifest.save(out, result)
    return result


def _splits(out: Path, result: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What names an output in a note, and its splits: of the whole, or of each output."""
    yield "", list(result["splits"].values())
    for place in result.get("outputs", {}):
        yield f"{place}: ", list(manifest.load(out / place)["splits"].values())


def _pack(
    folder: Path, splits: dict[str, dict[str, Any]], files: dict[str, dict[str, Any]], options: Options, eod_id: int
) -> None:
    """With --format webdataset: packed samples instead of .bin and .idx."""
    if options.format == "webdataset":
        assert options.sequence_length is not None
        webdataset_tokens.pack(folder, splits, files, options.sequence_length, options.shard_tokens, eod_id)


def _add_tokenizer(folder: Path, tokenizer: Tokenizer, files: dict[str, dict[str, Any]]) -> None:
    """Save the tokenizer file, and its entry among the manifest's files."""
    path = tokenizer.save(folder)
    files[path.name] = {"bytes": len(tokenizer.model), "sha256": tokenizer.fingerprint}


def _source(source: sources.Source, plan: parts.Plan, spans: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest's entry of a file. One read in ranges of bytes has the sha256 of their digests, joined."""
    digests = [span["sha256"] for span in spans]
    return {
        "path": source.name,
        "format": source.format,
        "compression": source.compression,
        "bytes": plan.stamps[source.name][0],
        "sha256": joined(digests),
        "documents": sum(span["documents"] for span in spans),
    }


def joined(digests: list[str]) -> str:
    """One digest for a file: its own, or the sha256 of its ranges' digests."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def _check_options(
    inputs: list[str], tokenizer_path: str | Path | None, options: Options, execution: Execution
) -> None:
    if not inputs:
        raise DataError("no INPUT given; name files, folders or patterns to read")
    if execution.workers < 1:
        raise DataError(f"--workers {execution.workers}: must be at least 1")
    if execution.kind not in executors.KINDS:
        raise DataError(f"--executor {execution.kind}: one of {', '.join(executors.KINDS)}")
    selection.check(options)
    if options.by_subset and options.subset_field is None:
        raise DataError("--by-subset goes with --subset-field, which names the field of the subset")
    if options.format not in ("megatron", "webdataset"):
        raise DataError(f"--format {options.format}: megatron or webdataset")
    if (options.format == "webdataset") != (options.sequence_length is not None):
        raise DataError("--format webdataset and --sequence-length go together: packed samples have the run's length")
    if options.sequence_length is not None and options.sequence_length < 1:
        raise DataError(f"--sequence-length {options.sequence_length}: must be at least 1")
    if not 0 <= options.holdout < 1:
        raise DataError(f"--holdout {options.holdout}: a share of the documents, at least 0 and below 1")
    if not 0 <= options.test < 1 - options.holdout:
        raise DataError(
            f"--test {options.test}: a share of the documents, at least 0 and with --holdout {options.holdout} below 1"
        )
    if tokenizer_path is not None and options.vocab_size is not None:
        raise DataError("--tokenizer and --vocab-size: the first uses a tokenizer, the second trains one; give one")
    if tokenizer_path is None and options.eod_token is not None:
        raise DataError("--eod-token goes with --tokenizer; a trained tokenizer has its own end-of-document token")


def _fit(sample: list[str], options: Options, text_bytes: int, reporter: Reporter) -> bytes:
    """Train the tokenizer; a size the user did not choose gives way to what the corpus supports."""
    if options.vocab_size is not None:
        return fit(sample, options.vocab_size, options.model_type)
    power = max(1, text_bytes // BYTES_PER_ID).bit_length() - 1
    vocab_size = min(max(2**power, SMALLEST_VOCABULARY), LARGEST_VOCABULARY)
    try:
        model = fit(sample, vocab_size, options.model_type)
    except VocabularyTooLarge as error:
        vocab_size = error.largest
        model = fit(sample, vocab_size, options.model_type)
    reporter.note(f"trained a vocabulary of {vocab_size} to suit {text_bytes} bytes of text; --vocab-size N sets it")
    return model


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


def _reuse(output: Path, request: dict[str, Any], plan: parts.Plan, total: int, reporter: Reporter) -> dict[str, Any]:
    """The manifest of a finished output, if it came from the same request and files and is still whole."""
    taken = f"{sources.shown(output)}: holds a finished data set"
    written = manifest.load(output)
    changed = [name for name, value in request.items() if written.get("request", {}).get(name, None) != value]
    if changed:
        raise DataError(f"{taken} made with another {', '.join(changed)}; choose another --output or add --overwrite")
    with reporter.progress("comparing", total) as progress:
        now = _hashes(plan, progress)
    if now != [(source["path"], source["sha256"]) for source in written["sources"]]:
        raise DataError(f"{taken} made from other files; choose another --output or add --overwrite")
    for folder in [output, *(output / place for place in written.get("outputs", {}))]:
        for name, entry in manifest.load(folder).get("files", {}).items():
            size = (folder / name).stat().st_size if (folder / name).exists() else 0
            if size != entry["bytes"]:
                raise DataError(f"{folder / name}: {size} bytes, the manifest says {entry['bytes']}; add --overwrite")
    reporter.note(f"{taken} of exactly this work; nothing to do")
    return {**written, "reused": True}


def _hashes(plan: parts.Plan, progress: Callable[[int], Any]) -> list[tuple[str, str]]:
    """(path, digest) of every file as it is now; an unreadable one has an empty digest."""
    hashes: dict[str, list[str]] = {source.name: [] for source in plan.sources.files}
    for span in (span for part in plan.spans for span in part):
        digest, left = (
            reading.file_hash(),
            plan.stamps[span.source.name][0] if span.end is None else span.end - span.start,
        )
        try:
            with span.source.open() as file:
                file.seek(span.start)
                while chunk := file.read(min(reading.CHUNK_BYTES, left)):
                    digest.update(chunk)
                    left -= len(chunk)
                    progress(len(chunk))
            hashes[span.source.name].append(digest.hexdigest())
        except OSError:
            hashes[span.source.name].append("")
    return [(name, joined(digests)) for name, digests in hashes.items()]
