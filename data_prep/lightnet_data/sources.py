"""From the INPUT arguments of ``lightnet prep`` to the list of files it reads."""

import glob
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lightnet_data.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
JSON_LINES = ".jsonl"
PROSE = ".txt .text .md .markdown .rst .adoc .org .tex"
CODE = (
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .rs .go .java .kt .scala .js .mjs .ts .jsx .tsx .sh .bash .rb "
    ".pl .pm .php .lua .r .R .jl .hs .ml .swift .cs .sql .el .lisp .clj .ex .erl .vim .cmake .proto"
)
# What a folder is searched for, plain or compressed. Other suffixes are read when the file itself is named.
FOLDER_SUFFIXES = frozenset([JSON_LINES, *PROSE.split(), *CODE.split()])
SKIPPED_FOLDERS = ("__pycache__", "site-packages", "dist-packages")  # what Python keeps beside its own library


@dataclass(frozen=True)
class Source:
    """One file to read.

    ``format`` is "text" (the file is one document) or "jsonl" (each line is one); ``compression`` "gzip", "zstd" or
    None; ``argument`` the index of the INPUT that named it.
    """

    path: Path
    format: str
    compression: str | None
    argument: int

    @property
    def name(self) -> str:
        """The path for messages and the manifest, with undecodable bytes shown as escapes."""
        return shown(self.path)


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


def find(inputs: Iterable[str | Path]) -> Sources:
    """The files behind INPUT arguments.

    A file is read whatever its suffix: ``.jsonl`` holds JSON lines, anything else is one text, and ``.gz`` or ``.zst``
    behind either is undone. A folder is searched at any depth, in sorted order, for ``FOLDER_SUFFIXES``; hidden
    entries, ``SKIPPED_FOLDERS`` and linked folders are passed over and counted. A pattern (``*``, ``?``, ``[``) stands
    for its sorted matches as if each had been named, ``**`` for any depth. A file reached twice is read once, and
    counted.

    Raises:
        DataError: an INPUT does not exist or matches nothing, or a folder has nothing to read in it.
    """
    found = Sources()
    seen: set[str] = set()
    for argument, given in enumerate(inputs):
        for path in _matches(str(given)):
            paths = _walk(path, found) if path.is_dir() else [path]
            for file in paths:
                identity = os.path.realpath(file)
                if identity in seen:
                    found.ignored["named twice"] += 1
                    continue
                seen.add(identity)
                found.files.append(classify(file, argument))
    return found


def classify(path: Path, argument: int = 0) -> Source:
    """How a file is read, by its name."""
    stem, compression = path.name, COMPRESSIONS.get(path.suffix.lower())
    if compression is not None:
        stem = path.stem
    return Source(path, "jsonl" if stem.lower().endswith(JSON_LINES) else "text", compression, argument)


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
