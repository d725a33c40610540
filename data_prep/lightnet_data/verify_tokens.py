"""Token shards re-read against their manifest; part of ``lightnet data verify``."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.storage import TokenStore
from lightnet_data.stream import shards_of
from lightnet_data.tokenizer import Tokenizer
from lightnet_data.verify import COPY_AGAIN, Findings, Progress, check_file, unlisted
from lightnet_data.webdataset_tokens import ShardWindows

_DOCUMENTS = 1 << 20  # of an index, at a time


class _Ends:
    """Where the documents of a shard end, in tokens, looked up in its mapped index."""

    def __init__(self, pointers: Any, tokens: int, itemsize: int, store: TokenStore | None = None) -> None:
        self._pointers, self.tokens, self._itemsize = pointers, tokens, itemsize
        self._store = store  # megatron-core unmaps an index with its reader, whoever still looks at it

    def __len__(self) -> int:
        return len(self._pointers)

    def until(self, token: int) -> int:
        """Documents that end at or before a position."""
        if token >= self.tokens:
            return len(self)
        return int(np.searchsorted(self._pointers[1:], np.int64(token * self._itemsize), side="right"))

    def of(self, first: int, last: int) -> Any:
        """Ends of documents [first, last), int64."""
        ends = self._pointers[first + 1 : last + 1] // self._itemsize
        return np.append(ends, self.tokens) if last == len(self) and last > first else ends


class Tokens:
    """One folder of tokens."""

    def __init__(self, folder: Path, written: dict[str, Any], findings: Findings, progress: Progress) -> None:
        self.folder, self.written, self.findings, self.progress = folder, written, findings, progress
        self.files: dict[str, dict[str, Any]] = written.get("files", {})
        self.vocab_size = int(written["tokenizer"]["vocab_size"])
        self.eod_id = int(written["tokenizer"]["eod_id"])

    def run(self, threads: int) -> None:
        """Check everything in it."""
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
        strangers = unlisted(self.folder, {**self.files, **packed})
        if self.files and strangers:
            self.findings.notes.append(
                f"{self.folder}: not in the manifest, so not checked: {', '.join(strangers[:5])}"
            )
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
        if (split.get("documents") == 0 or "left_out" in split) and not (self.folder / f"{name}.bin").exists():
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
            ends = _Ends(np.zeros(0, dtype=np.int64), 0, 1) if empty else self.ends(prefix)
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
        findings.count("tokens", ends.tokens)
        return {"documents": len(ends), "tokens": ends.tokens, "bytes": text_bytes}

    def ends(self, prefix: Path) -> "_Ends":
        """Where documents end; checks that the index is one of whole documents, block by block."""
        store = TokenStore(prefix, self.eod_id, checked=0)
        index, size, where = store._data.index, store.dtype.itemsize, f"{prefix}.idx"
        split: dict[str, Any] = next((s for s in self.written["splits"].values() if "dtype" in s), {})
        if split and split["dtype"] != store.dtype.name:
            raise DataError(f"{where}: tokens of type {store.dtype.name}, the manifest says {split['dtype']}")
        documents = len(index.sequence_lengths)
        if len(index.document_indices) != documents + 1:
            raise DataError(f"{where}: its documents are not one sequence each")
        position = 0
        for first in range(0, documents, _DOCUMENTS):
            lengths = index.sequence_lengths[first : first + _DOCUMENTS].astype(np.int64) * size
            expected = position + np.cumsum(lengths) - lengths
            wrong = np.flatnonzero(index.sequence_pointers[first : first + _DOCUMENTS] != expected)
            if len(wrong):
                raise DataError(
                    f"{where}: document {first + int(wrong[0])} does not begin where the one before it ends"
                )
            if int(lengths.min()) < 1:
                raise DataError(f"{where}: document {first + int(lengths.argmin())} holds no token")
            numbers = index.document_indices[first : first + len(lengths)]
            if not np.array_equal(numbers, np.arange(first, first + len(lengths))):
                raise DataError(f"{where}: its documents are not one sequence each")
            position += int(lengths.sum())
        self.dtype = store.dtype
        return _Ends(index.sequence_pointers, store.tokens, size, store)

    def tokens(self, path: Path, entry: dict[str, Any] | None, ends: "_Ends") -> None:
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
            last = ends.until(done + len(tokens))
            expected = ends.of(next_document, last) - 1
            if not np.array_equal(found, expected):
                inside, missing = np.setdiff1d(found, expected), np.setdiff1d(expected, found)
                if len(missing):
                    document = ends.until(int(missing[0]))
                    tell("end", f"document {document} does not end with the end-of-document token {self.eod_id}")
                if len(inside):
                    document = ends.until(int(inside[0]))
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
