"""``lightnet data verify``: everything in a prepared folder re-read against its manifest."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from lightnet_data import manifest, sample_shards
from lightnet_data.errors import DataError

CHUNK_BYTES = 1 << 24  # a multiple of every token size
COPY_AGAIN = "copy it again or make the folder again"
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
    return sum(path.stat().st_size for root in _folders(folder) for path in root.glob("*") if path.is_file())


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
    for place in _folders(folder):
        _verify_folder(place, findings, threads, progress)
    findings.problems.sort(key=lambda problem: problem.where)
    return findings


def _folders(location: str | Path) -> list[Path]:
    """The folder, and those of its outputs."""
    if manifest.is_url(location):
        raise DataError(f"{location}: verify reads local folders; copy it here")
    folder = Path(location)
    if sample_shards.is_samples(folder):
        return [folder]
    return [folder, *(folder / place for place in manifest.load(folder).get("outputs", {}))]


def _verify_folder(folder: Path, findings: Findings, threads: int, progress: Progress) -> None:
    # Both use what is defined here.
    from lightnet_data.verify_samples import verify_samples
    from lightnet_data.verify_tokens import Tokens

    try:
        if sample_shards.is_samples(folder):
            verify_samples(folder, findings, threads, progress)
        else:
            Tokens(folder, manifest.load(folder), findings, progress).run(threads)
    except DataError as error:  # of the manifest of one output among several
        findings.problem(folder, f"its manifest cannot be read ({error})")
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        findings.problem(folder / manifest.FILE_NAME, f"an entry is missing or of another kind ({error!r})")


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
