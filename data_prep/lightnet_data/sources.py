"""From the INPUT arguments of ``lightnet prep`` to the list of files it reads."""

import glob
import io
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from lightnet_data import remote
from lightnet_data.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
JSON_LINES = ".jsonl"
FORMATS = {JSON_LINES: "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".tar": "tar"}
UNKNOWN = "unknown"
PROSE = ".txt .text .md .markdown .rst .adoc .org .tex"
CODE = (
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .rs .go .java .kt .scala .js .mjs .ts .jsx .tsx .sh .bash .rb "
    ".pl .pm .php .lua .r .R .jl .hs .ml .swift .cs .sql .el .lisp .clj .ex .erl .vim .cmake .proto"
)
# What a folder is searched for, plain or compressed. Other suffixes are read when the file itself is named.
FOLDER_SUFFIXES = frozenset([*FORMATS, *PROSE.split(), *CODE.split()])
_CODE_SUFFIXES = frozenset(map(str.lower, CODE.split()))
_TEXT_SUFFIXES = _CODE_SUFFIXES | frozenset(PROSE.split())
SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages")  # what Python keeps beside its own library


@dataclass(frozen=True)
class Source:
    """One file to read.

    ``format`` is "text" (one document, or several behind separators), "jsonl" (a document a line), "parquet" (a row),
    "tar" (a WebDataset sample), or "unknown" by its suffix; ``compression`` "gzip", "zstd" or None; ``argument`` the
    index of the INPUT that named it; ``searched`` whether a folder search found it; ``url`` where fsspec finds a
    remote file, whose ``path`` is then no more than a name.
    """

    path: Path
    format: str
    compression: str | None
    argument: int
    searched: bool = False
    url: str | None = None

    @property
    def name(self) -> str:
        """The path for messages and the manifest, with undecodable bytes shown as escapes."""
        return self.url or shown(self.path)

    @property
    def code(self) -> bool:
        """Whether its suffix is of source code."""
        return Path(self.path.stem if self.compression else self.path.name).suffix.lower() in _CODE_SUFFIXES

    def open(self) -> BinaryIO:
        """The file's bytes."""
        if self.url is None:
            return self.path.open("rb")
        return io.BufferedReader(remote.File(*_remote(self.url)), 1 << 20)

    def stamp(self) -> tuple[int, str]:
        """Size in bytes, and what changes with the contents (time of change, or a store's own tag).

        Raises:
            OSError: it is not there, or cannot be reached.
        """
        if self.url is None:
            status = self.path.stat()
            return status.st_size, f"{status.st_mtime_ns}"
        system, path = _remote(self.url)
        facts: dict[str, Any] = remote.patiently(lambda: system.info(path), self.url)
        tag = next(
            (facts[key] for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created") if key in facts), ""
        )
        return int(facts.get("size") or 0), str(tag)


def _remote(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a protocol whose package is not installed, or that nobody knows
        raise DataError(f"{url}: cannot be reached ({error})") from None
    return system, path


@dataclass
class Sources:
    """The files to read, in order, and what was passed over on the way."""

    files: list[Source] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    """Files and folders inside INPUT folders that are not read, by suffix or reason."""
    unreadable: list[str] = field(default_factory=list)
    """Messages on folders that could not be listed."""


def shown(path: Path | str) -> str:
    """A path as printable UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def find(inputs: Iterable[str | Path], read_as: str | None = None) -> Sources:
    """The files behind INPUT arguments, paths or URLs that fsspec knows.

    ``.jsonl`` holds JSON lines, ``.parquet`` rows, ``.tar`` WebDataset samples, the suffixes of ``PROSE`` and ``CODE``
    text; ``.gz`` or ``.zst`` behind any but parquet is undone. A file of another suffix is read as ``read_as``, and
    without it not at all. A folder is searched at any depth, in sorted order, for ``FOLDER_SUFFIXES``; hidden
    entries, ``SKIPPED_FOLDERS`` and linked folders are passed over and counted. A pattern (``*``, ``?``, ``[``) stands
    for its sorted matches as if each had been named, ``**`` for any depth. A file reached twice is read once, and
    counted.

    Raises:
        DataError: an INPUT does not exist or matches nothing, or a folder has nothing to read in it.
    """
    found = Sources()
    seen: set[str] = set()
    for argument, given in enumerate(inputs):
        if "://" in str(given):
            found.files += _find_remote(str(given), argument, read_as, seen, found)
            continue
        for path in _matches(str(given)):
            searched = path.is_dir()
            paths = _walk(path, found) if searched else [path]
            for file in paths:
                identity = os.path.realpath(file)
                if identity in seen:
                    found.ignored["named twice"] += 1
                    continue
                seen.add(identity)
                found.files.append(classify(file, argument, read_as, searched))
    return found


def classify(
    path: Path, argument: int = 0, read_as: str | None = None, searched: bool = False, url: str | None = None
) -> Source:
    """How a file is read, by its name."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    suffix = Path(path.stem if compression else path.name).suffix.lower()
    text = "text" if suffix in _TEXT_SUFFIXES else None
    return Source(path, FORMATS.get(suffix) or text or read_as or UNKNOWN, compression, argument, searched, url)


def _find_remote(url: str, argument: int, read_as: str | None, seen: set[str], found: Sources) -> list[Source]:
    system, path = _remote(url)
    pattern = glob.has_magic(path)
    try:
        searched = not pattern and bool(remote.patiently(lambda: system.isdir(path), url))
        paths = remote.patiently(lambda: _list_remote(system, path, pattern, searched), url)
    except OSError as error:
        raise DataError(f"{url}: cannot be reached ({error.strerror or error})") from None
    if not paths:
        raise DataError(f"{url}: no such file, or a pattern or folder without one")
    files = []
    for match in paths:
        name = str(system.unstrip_protocol(match))
        if name in seen:
            found.ignored["named twice"] += 1
            continue
        seen.add(name)
        files.append(classify(Path(match), argument, read_as, searched, name))
    return files


def _list_remote(system: Any, path: str, pattern: bool, searched: bool) -> list[str]:
    if pattern:
        return sorted(match for match in system.glob(path) if not system.isdir(match))
    if searched:
        return sorted(match for match in system.find(path) if _file_reason(Path(match).name) is None)
    return [path] if system.exists(path) else []


def _matches(given: str) -> list[Path]:
    path = Path(given)
    if not given:
        raise DataError("an INPUT is the empty string; name a file, a folder or a pattern")
    if os.path.lexists(path):
        return [path]
    if glob.has_magic(given):
        matches = [Path(match) for match in sorted(glob.glob(given, recursive=True))]  # noqa: PTH207
        if "**" in given:  # which matches the files inside its folders by itself
            matches = [match for match in matches if not match.is_dir()]
        if not matches:
            raise DataError(f"{shown(given)}: the pattern matches no file; check it, and quote it for ** to work")
        return matches
    raise DataError(f"{shown(given)}: no such file or folder")


def _walk(folder: Path, found: Sources) -> list[Path]:
    """Files to read below a folder, sorted by their relative path."""
    files: list[Path] = []
    before, blocked = found.ignored.copy(), len(found.unreadable)

    def unlisted(error: OSError) -> None:
        found.unreadable.append(f"{shown(error.filename)}: cannot list the folder ({error.strerror})")

    for top, folders, names in os.walk(folder, onerror=unlisted):
        for name in list(folders):
            reason = _folder_reason(Path(top, name))
            if reason:
                folders.remove(name)
                found.ignored[reason] += 1
        for name in names:
            reason = _file_reason(name)
            if reason:
                found.ignored[reason] += 1
            else:
                files.append(Path(top, name))
    if not files and len(found.unreadable) == blocked:
        passed = ", ".join(f"{count} {reason}" for reason, count in sorted((found.ignored - before).items()))
        raise DataError(
            f"{shown(folder)}: the folder has no text file"
            + (f" (it has: {passed})" if passed else "")
            + "; it is searched for .txt, .jsonl, .md, .py and the like: name other files themselves"
        )
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def _folder_reason(path: Path) -> str | None:
    if path.name in SKIPPED_FOLDERS:
        return path.name
    if path.name.startswith("."):
        return "hidden"
    return "linked folder" if path.is_symlink() else None


def _file_reason(name: str) -> str | None:
    if name.startswith("."):
        return "hidden"
    path = Path(name)
    suffix = Path(path.stem).suffix if path.suffix.lower() in COMPRESSIONS else path.suffix
    if suffix in FOLDER_SUFFIXES or suffix.lower() in FOLDER_SUFFIXES:
        return None
    return suffix + path.suffix if suffix != path.suffix else path.suffix or "no suffix"
