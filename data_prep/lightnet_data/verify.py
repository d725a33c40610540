"""``lightnet data verify``: everything in a prepared folder re-read against its manifest."""

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from lightnet_data import manifest, sample_shards
from lightnet_data.errors import DataError
from lightnet_data.storage import TokenStore
from lightnet_data.stream import shards_of
from lightnet_data.tokenizer import Tokenizer
from lightnet_data.webdataset_tokens import ShardWindows

CHUNK_BYTES = 1 << 24  # a multiple of every token size
COPY_AGAIN = "copy it again or run lightnet prep"
Progress = Callable[[int], Any]


@dataclass
class Problem:
    """What is wrong, where, and a way out."""

    where: str
    what: str
    way_out: str = COPY_AGAIN

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.way_out}"


@dataclass
class Findings:
    """What was checked, and what was found. ``counts``: files, bytes, documents, tokens or samples that were read."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _lock: Any = field(default_factory=Lock)

    def problem(self, where: Any, what: str, way_out: str = COPY_AGAIN) -> None:
        """Enter a problem; from any thread."""
        with self._lock:
            self.problems.append(Problem(str(where), what, way_out))

    def count(self, name: str, number: int) -> None:
        """Add to what was checked; from any thread."""
        with self._lock:
            self.counts[name] = self.counts.get(name, 0) + number

    def differ(self, where: Any, name: str, found: Any, expected: Any) -> None:
        """Enter a problem where a number is not the manifest's."""
        if found != expected:
            self.problem(where, f"{found} {name}, the manifest says {expected}")


def total_bytes(folder: str | Path) -> int:
    """Bytes that ``verify`` reads, for its progress bar.

    Raises:
        DataError: the folder has no manifest of ours.
    """
    return sum(path.stat().st_size for root in _folders(Path(folder)) for path in root.glob("*") if path.is_file())


def verify(folder: str | Path, threads: int = 4, progress: Progress = lambda count: None) -> Findings:
    """Re-read a folder that ``lightnet prep`` or ``lightnet data`` made.

    Sizes and checksums of all files; for tokens also: each ``.idx`` against its ``.bin``, ids below the vocabulary, an
    end-of-document token at the end of each document and nowhere else, and counts of documents, bytes, tokens and subsets;
    for packed tar shards every window; for images and latents every member against the index.

    Args:
        folder: a local folder.
        threads: files read at a time. Each takes a few times ``CHUNK_BYTES`` of memory.
        progress: called with numbers of bytes as they are read.

    Raises:
        DataError: the folder has no manifest of ours, so there is nothing to verify it against.
    """
    findings = Findings()
    for place in _folders(Path(folder)):
        _verify_folder(place, findings, threads, progress)
    findings.problems.sort(key=lambda problem: problem.where)
    return findings


def _folders(folder: Path) -> list[Path]:
    """The folder, and those of its outputs."""
    if manifest.is_url(folder):
        raise DataError(f"{folder}: verify reads local folders; copy it here")
    if sample_shards.is_samples(folder):
        return [folder]
    return [folder, *(folder / place for place in manifest.load(folder).get("outputs", {}))]


def _verify_folder(folder: Path, findings: Findings, threads: int, progress: Progress) -> None:
    if sample_shards.is_samples(folder):
        from lightnet_data.verify_samples import verify_samples

        return verify_samples(folder, findings, threads, progress)
    try:
        written = manifest.load(folder)
    except DataError as error:  # of one output among several
        return findings.problem(folder, f"its manifest cannot be read ({error})")
    try:
        _Tokens(folder, written, findings, progress).run(threads)
    except (KeyError, TypeError, AttributeError) as error:
        findings.problem(folder / manifest.FILE_NAME, f"an entry is missing or of another kind ({error!r})")


class _Tokens:
    """One folder of tokens."""

    def __init__(self, folder: Path, written: dict[str, Any], findings: Findings, progress: Progress) -> None:
        self.folder, self.written, self.findings, self.progress = folder, written, findings, progress
        self.files: dict[str, dict[str, Any]] = written.get("files", {})
        self.vocab_size = int(written["tokenizer"]["vocab_size"])
        self.eod_id = int(written["tokenizer"]["eod_id"])

    def run(self, threads: int) -> None:
        if not self.files:
            self.findings.notes.append(
                f"{self.folder}: its manifest has no checksums (an older lightnet prep wrote it); contents are checked only"
            )
        self.tokenizer()
        self.sums()
        splits: dict[str, dict[str, Any]] = self.written["splits"]
        stems = {
            name: [] if "webdataset" in split and not split.get("shards") else self.stems(name, split)
            for name, split in splits.items()
        }
        bins = {f"{stem}.bin" for names in stems.values() for stem in names}
        packed = {
            shard["file"]: shard for split in splits.values() for shard in split.get("webdataset", {}).get("shards", [])
        }
        with ThreadPoolExecutor(max(1, threads)) as pool:
            others = {name: entry for name, entry in {**self.files, **packed}.items() if name not in bins}
            list(pool.map(lambda item: check_file(self.folder / item[0], item[1], self.findings, self.progress),
                          others.items()))  # fmt: skip
            for name, split in splits.items():
                if stems[name]:
                    counted = list(pool.map(self.shard, stems[name]))
                    self.split(name, split, counted)
                if "webdataset" in split:
                    list(pool.map(self.packed(name), range(len(split["webdataset"]["shards"]))))

    def stems(self, name: str, split: dict[str, Any]) -> list[str]:
        if split.get("documents") == 0 and not (self.folder / f"{name}.bin").exists():
            return []
        return [Path(prefix).name for prefix in shards_of(self.folder / name)]

    def tokenizer(self) -> None:
        entry = self.written["tokenizer"]
        path = self.folder / entry["file"]
        try:
            made = Tokenizer.load(path)
        except DataError as error:
            return self.findings.problem(path, f"not the tokenizer ({error})")
        for name in ("vocab_size", "eod_id", "fingerprint"):
            self.findings.differ(path, name.replace("_", " "), getattr(made, name), entry[name])

    def sums(self) -> None:
        """Splits, subsets and outputs add up to the whole."""
        written, where = self.written, self.folder / manifest.FILE_NAME
        for group in ("splits", "subsets", "outputs"):
            entries = written.get(group)
            if not entries or (group == "splits" and written.get("outputs")):
                continue
            for name in ("documents", "bytes", "tokens"):
                if any(name not in entry for entry in entries.values()):
                    continue
                found = sum(entry[name] for entry in entries.values())
                if found != written[name]:
                    self.findings.problem(where, f"{group} hold {found} {name}, the whole {written[name]}")
        for place, entry in (written.get("outputs") or {}).items():
            own = manifest.load(self.folder / place) if (self.folder / place / manifest.FILE_NAME).is_file() else {}
            for name in ("documents", "bytes", "tokens"):
                self.findings.differ(self.folder / place / manifest.FILE_NAME, name, own.get(name), entry[name])

    def split(self, name: str, split: dict[str, Any], counted: list[dict[str, int] | None]) -> None:
        """Sums over the shards of a split, where all could be read."""
        if any(counts is None for counts in counted):
            return
        for kind in ("documents", "tokens", "bytes"):
            found = sum(counts[kind] for counts in counted if counts)
            self.findings.differ(self.folder / name, kind, found, split[kind])

    def shard(self, stem: str) -> dict[str, int] | None:
        """Check a .bin against its .idx and .bytes.npy; documents, tokens and bytes of text, None if it cannot be read."""
        prefix, findings, entry = self.folder / stem, self.findings, self.files.get(f"{stem}.bin")
        path = Path(f"{prefix}.bin")
        empty = entry is not None and entry["bytes"] == 0 and path.is_file() and path.stat().st_size == 0
        try:
            ends = np.zeros(0, dtype=np.int64) if empty else self.ends(prefix)
        except DataError as error:
            what, _, way_out = str(error).removeprefix(f"{path}: ").removeprefix(f"{prefix}.idx: ").partition("; ")
            findings.problem(f"{prefix}.idx" if f"{prefix}.idx" in str(error) else path, what, way_out or COPY_AGAIN)
            check_file(path, entry, findings, self.progress)
            return None
        self.tokens(path, entry, ends)
        sizes = Path(f"{prefix}.bytes.npy")
        text_bytes = 0
        try:
            per_document = np.load(sizes, mmap_mode="r", allow_pickle=False)
            text_bytes = int(per_document.sum(dtype=np.int64))
            if len(per_document) != len(ends):
                findings.problem(sizes, f"{len(per_document)} documents, the index {len(ends)}")
        except (OSError, ValueError) as error:
            findings.problem(sizes, f"cannot read it ({error})")
            return None
        findings.count("documents", len(ends))
        findings.count("tokens", int(ends[-1]) if len(ends) else 0)
        return {"documents": len(ends), "tokens": int(ends[-1]) if len(ends) else 0, "bytes": text_bytes}

    def ends(self, prefix: Path) -> Any:
        """Position behind each document, int64 [documents]; checks that the index is one of whole documents."""
        store = TokenStore(prefix, self.eod_id, checked=0)
        index = store._data.index
        pointers, lengths = index.sequence_pointers, index.sequence_lengths
        ends = np.cumsum(lengths, dtype=np.int64)
        where = f"{prefix}.idx"
        if len(lengths) and (lengths.min() < 1 or pointers[0] != 0):
            raise DataError(f"{where}: an empty document, or one that does not begin at the start")
        wrong = np.flatnonzero(pointers[1:] != ends[:-1] * store.dtype.itemsize)
        if len(wrong):
            raise DataError(f"{where}: document {int(wrong[0]) + 1} does not begin where the one before it ends")
        if not np.array_equal(index.document_indices, np.arange(len(lengths) + 1)):
            raise DataError(f"{where}: its documents are not one sequence each")
        split: dict[str, Any] = next((s for s in self.written["splits"].values() if "dtype" in s), {})
        if split and split["dtype"] != store.dtype.name:
            raise DataError(f"{where}: tokens of type {store.dtype.name}, the manifest says {split['dtype']}")
        self.dtype = store.dtype
        return ends

    def tokens(self, path: Path, entry: dict[str, Any] | None, ends: Any) -> None:
        """Read a .bin once: its checksum, ids below the vocabulary, end-of-document tokens where documents end."""
        done = next_document = 0
        told: set[str] = set()

        def tell(kind: str, what: str) -> None:
            if kind not in told:  # the first of each kind
                told.add(kind)
                self.findings.problem(path, what)

        def visit(data: bytes) -> None:
            nonlocal done, next_document
            tokens = np.frombuffer(data, dtype=self.dtype)
            if int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0:
                place = int(np.flatnonzero((tokens >= self.vocab_size) | (tokens < 0))[0])
                tell("id", f"token {done + place} is {int(tokens[place])}, the vocabulary has {self.vocab_size} ids")
            found = np.flatnonzero(tokens == self.eod_id) + done
            last = int(np.searchsorted(ends, done + len(tokens), side="right"))
            expected = ends[next_document:last] - 1
            if not np.array_equal(found, expected):
                inside, missing = np.setdiff1d(found, expected), np.setdiff1d(expected, found)
                if len(missing):
                    document = int(np.searchsorted(ends, missing[0], side="right"))
                    tell("end", f"document {document} does not end with the end-of-document token {self.eod_id}")
                if len(inside):
                    document = int(np.searchsorted(ends, inside[0], side="right"))
                    tell("inside", f"document {document} holds an end-of-document token inside, at {int(inside[0])}")
            done, next_document = done + len(tokens), last

        check_file(path, entry, self.findings, self.progress, visit if len(ends) else None)

    def packed(self, name: str) -> Callable[[int], None]:
        """A function that checks every window of one tar shard of a split, by number."""
        windows = ShardWindows(self.folder / name)
        firsts = np.cumsum([0, *(samples for _, samples, _, _ in windows.shards)])

        def check(number: int) -> None:
            path = self.folder / windows.shards[number][0]
            if not path.is_file():
                return  # told already
            previous = None
            for first in range(int(firsts[number]), int(firsts[number + 1]), 64):
                indices = range(first, min(first + 64, int(firsts[number + 1])))
                try:
                    read = windows.read(indices)
                except DataError as error:
                    return self.findings.problem(path, str(error).removeprefix(f"{path}: "))
                for index, (tokens, starts) in zip(indices, read, strict=True):
                    expected = tokens[:-1] == self.eod_id
                    expected[0] = True
                    if int(tokens.max()) >= self.vocab_size or int(tokens.min()) < 0:
                        return self.findings.problem(
                            path, f"sample {index} holds ids beyond the {self.vocab_size} known"
                        )
                    if not np.array_equal(starts, expected):
                        return self.findings.problem(
                            path, f"sample {index}: boundaries are not behind its documents' ends"
                        )
                    if previous is not None and previous != int(tokens[0]):
                        return self.findings.problem(
                            path, f"sample {index} does not go on where the one before it ends"
                        )
                    previous = int(tokens[-1])
                self.findings.count("samples", len(indices))

        return check


def check_file(
    path: Path,
    entry: dict[str, Any] | None,
    findings: Findings,
    progress: Progress,
    visit: Callable[[bytes], None] | None = None,
) -> bool:
    """Size and SHA-256 of one file against its entry (None: it has none), its chunks shown to ``visit``.

    Returns:
        Whether it is what the manifest says.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
                size += len(data)
                if visit is not None:
                    visit(data)
                progress(len(data))
    except FileNotFoundError:
        findings.problem(path, "no such file, the manifest lists it")
        return False
    except OSError as error:
        findings.problem(path, f"cannot read it ({error.strerror or error})")
        return False
    findings.count("files", 1)
    findings.count("bytes", size)
    if entry is None:
        return True
    if size != entry["bytes"]:
        findings.problem(path, f"{size} bytes, the manifest says {entry['bytes']}")
        return False
    if digest.hexdigest() != entry["sha256"]:
        findings.problem(path, f"sha256 {digest.hexdigest()[:16]}..., the manifest says {entry['sha256'][:16]}...")
        return False
    return True


def unlisted(folder: Path, listed: Iterable[str]) -> list[str]:
    """Names of files that a manifest does not list."""
    known = {*listed, manifest.FILE_NAME}
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in known)
