"""The output folder of a preparation: whole, or not there."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lightnet_data import manifest
from lightnet_data.errors import DataError
from lightnet_data.sources import shown

_LOCK = ".lightnet-prep.lock"  # marks a folder as an unfinished one of ours, and is held while one is written
_READY, _REPLACED = "out", "replaced"  # in the partial folder: what becomes the output, and an earlier output


def check_free(output: Path, overwrite: bool = False) -> bool:
    """Whether ``output`` can be written (True) or holds a finished data set that may not be replaced (False).

    Raises:
        DataError: it is a file, or a folder with something else in it, which is never replaced.
    """
    settle(output)
    if not os.path.lexists(output):
        return True
    if not output.is_dir():
        raise DataError(f"{shown(output)}: exists and is not a folder; choose another --output")
    if not any(output.iterdir()):
        return True
    if not (output / manifest.FILE_NAME).is_file():
        raise DataError(f"{shown(output)}: the folder holds files that lightnet prep did not write; choose another")
    manifest.load(output)  # ours, or an error
    return overwrite


def settle(output: Path) -> None:
    """Bring to its end what a run that was killed in its very last step had left to do; nothing if another is at work.

    Killed between moving an earlier data set away and moving the new one, which is whole, to its place, it has left neither
    there; killed later, only its partial folder.
    """
    output = Path(os.path.realpath(output))
    partial = _partial(output)
    if not (partial / _LOCK).is_file():
        return
    with (partial / _LOCK).open("r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if (partial / _REPLACED).is_dir() and not output.exists():
            (partial / _READY).rename(output)
            flush(output.parent)
        if output.exists() and not (partial / _READY).exists():
            _remove(partial)


def _partial(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _remove(partial: Path) -> None:
    """The lock last: without it the folder would be in the way of the next run."""
    for entry in partial.iterdir() if partial.is_dir() else ():
        if entry.name != _LOCK:
            shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
    shutil.rmtree(partial, ignore_errors=True)


_WORK = ("parts", "sample", "dedup", "logs", "tokenizer", "plan.pickle")  # what a further run can go on from
# Any of these is finished work, or in a queue. What de-duplication finds counts by the marks of completion.
_DONE = ("parts/*.json", "sample/*.sample", "sample/model-*", "logs/*/completions/*", "logs/*/job")


class OutputFolder:
    """A context that gives a folder in ``OUTPUT.partial`` to write in; ``finish`` moves it to ``OUTPUT`` in one step.

    Left without ``finish`` the partial folder is removed. One that a killed run left behind is replaced (``note`` is
    called with a line that says so). With ``resume`` the partial folder itself is given, for the work, and its ``out`` becomes
    ``OUTPUT``: finished work of any stage (``keep``), and what a cluster has of it, stay when it is left, and are gone on
    from.

    Raises:
        DataError: another process is writing the same output, or the partial folder's name is taken.
    """

    def __init__(self, output: Path, note: Callable[[str], None], resume: bool = False) -> None:
        self._resume = resume
        self.output = Path(os.path.realpath(output))  # a link stays a link, and what it points to is made beside itself
        self.partial = _partial(self.output)
        self._note = note
        self._lock: Any = None
        self._finished = False
        self.submitted = False
        self.worthless = False  # whatever is in it
        self.elsewhere = False  # tasks run on other machines, and errors name their logs

    def __enter__(self) -> Path:
        partial = self.partial
        partial.parent.mkdir(parents=True, exist_ok=True)
        stale = os.path.lexists(partial)
        if stale and not (partial / _LOCK).is_file() and not (partial.is_dir() and not any(partial.iterdir())):
            raise DataError(f"{shown(partial)}: in the way, and not an unfinished output of lightnet prep; move it")
        partial.mkdir(exist_ok=True)
        self._lock = (partial / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DataError(
                f"{shown(self.output)}: another lightnet prep is writing it; wait or choose another"
            ) from None
        if stale:
            use = "its finished parts are used" if self._resume else "replaced"
            self._note(f"{shown(partial)}: left behind by a run that was stopped; {use}")
            for entry in partial.iterdir():
                if entry.name != _LOCK and not (self._resume and entry.name in _WORK):
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        (partial / _READY).mkdir()
        return partial if self._resume else partial / _READY

    def keep(self) -> bool:
        """Whether there is work in it that a further run can go on from."""
        if not self._resume or self.worthless:
            return False
        if self.submitted or (self.elsewhere and any((self.partial / "logs").glob("*/*"))):
            return True
        return any(found for pattern in _DONE for found in self.partial.glob(pattern))

    def finish(self) -> None:
        """Flush everything to disk and rename, replacing an earlier data set only now."""
        ready = self.partial / _READY
        for entry in [*ready.rglob("*"), ready]:
            flush(entry)
        old = self.partial / _REPLACED
        try:
            if self.output.is_dir() and any(self.output.iterdir()):
                self.output.rename(old)
            ready.rename(self.output)
        except BaseException:
            if old.is_dir() and not self.output.exists():
                old.rename(self.output)
            raise
        flush(self.output.parent)
        self._finished = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._finished or not self.keep():
            _remove(self.partial)
        self._lock.close()


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """How tokens are stored: ids below 65,536 fit 16 bits."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def flush(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Write a file, on disk and whole or not at all."""
    temporary = path.with_name(path.name + ".writing")
    try:
        temporary.write_bytes(data)
        flush(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)
