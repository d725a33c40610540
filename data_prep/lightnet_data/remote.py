"""Files by URL through fsspec: whole or in ranges, asked for again when a request fails."""

import errno
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lightnet_data.errors import DataError

PAUSES = [1.0, 4.0, 15.0]  # seconds before a request that failed is made again
# Errors that no second request mends; a package that is missing, a location that is none, no right to read.
_LASTING = (ImportError, ValueError, PermissionError, FileNotFoundError)
T = TypeVar("T")


def is_url(location: str | Path) -> bool:
    """Whether fsspec opens a location, rather than this machine's file system."""
    return "://" in str(location)


def read(url: str) -> bytes:
    """All of a file.

    Raises:
        FileNotFoundError: there is none.
        DataError: it cannot be read.
    """
    folder, _, name = url.rpartition("/")
    return Folder(folder).read([name])[0]


def patiently(request: Callable[[], T], what: str) -> T:
    """What a request for ``what`` gives, made again after each of ``PAUSES`` while it fails.

    Raises:
        OSError: it fails to the end. Each remote file system has errors of its own; this one is what files raise.
    """
    for pause in (*PAUSES, None):
        try:
            return request()
        except Exception as error:
            if isinstance(error, OSError) and isinstance(error, _LASTING):
                raise
            if pause is None or isinstance(error, _LASTING):
                raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from None
            _pause(pause, what, error)
    raise AssertionError


def _pause(seconds: float, what: str, error: BaseException) -> None:
    """Wait before a request is made again, and say so: it may be long."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
    print(f"note: {what}: {reason}; trying again in {seconds:g} s", file=sys.stderr, flush=True)
    time.sleep(seconds)


class File(io.RawIOBase):
    """A file of an fsspec file system, in order or with seeks; a read that fails is made again from where it stands.

    Raises:
        OSError: it cannot be opened or read.
    """

    def __init__(self, system: Any, path: str) -> None:
        super().__init__()
        self._system, self._path, self._place = system, path, 0
        self._file: Any = None
        patiently(self._opened, path)

    def _opened(self) -> Any:
        """The file, where the next byte is wanted; opened again after a request that failed."""
        if self._file is None:
            file = self._system.open(self._path, "rb")
            if self._place:
                file.seek(self._place)
            self._file = file
        return self._file

    def _ask(self, request: Callable[[Any], T]) -> T:
        def attempt() -> T:
            file = self._opened()
            try:
                return request(file)
            except Exception:
                self._file = None  # nobody knows where it stands now
                raise

        return patiently(attempt, self._path)

    def readinto(self, buffer: Any) -> int:
        """As of any file."""
        data: bytes = self._ask(lambda file: file.read(len(buffer)))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As of any file."""
        self._place = self._ask(lambda file: int(file.seek(offset, whence)))
        return self._place

    def close(self) -> None:
        """As of any file."""
        if self._file is not None and not self.closed:
            self._file.close()
        super().close()

    def tell(self) -> int:
        """As of any file."""
        return self._place

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Whether the file system can."""
        return self._ask(lambda file: bool(file.seekable()))


class Folder:
    """A folder of this machine or by URL, whose files are read in any process."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._opened: tuple[int, Any, str] | None = None

    def system(self) -> tuple[Any, str]:
        """The file system, with connections of this process, and the folder's path in it."""
        if self._opened is None or self._opened[0] != os.getpid():  # connections do not survive a fork
            import fsspec

            system, root = fsspec.core.url_to_fs(self.location)
            self._opened = os.getpid(), system, root.rstrip("/")
        return self._opened[1:]

    def read(self, files: Sequence[str], starts: Sequence[int] | None = None, length: int = 0) -> list[bytes]:
        """``length`` bytes of each file from each start, or the whole files; all at once where the file system can.

        Raises:
            FileNotFoundError: one is not there.
            DataError: one cannot be read.
        """
        return self._ask(files, lambda wanted: self._read(wanted, files, starts, length))

    def sizes(self, files: Sequence[str]) -> list[int]:
        """Bytes of each file.

        Raises:
            FileNotFoundError, DataError: as ``read``.
        """
        self.system()  # one for all threads
        with ThreadPoolExecutor(16) as pool:
            return self._ask(files, lambda wanted: list(pool.map(self._size, (files[place] for place in wanted))))

    def _read(self, wanted: list[int], files: Sequence[str], starts: Sequence[int] | None, length: int) -> list[Any]:
        system, root = self.system()
        paths = [f"{root}/{files[place]}" for place in wanted]
        if starts is None:
            return [system.cat_file(path) for path in paths]
        begins = [starts[place] for place in wanted]
        found: list[Any] = system.cat_ranges(paths, begins, [begin + length for begin in begins])
        return found

    def _size(self, file: str) -> Any:
        system, root = self.system()
        try:
            return int(system.info(f"{root}/{file}")["size"])
        except Exception as error:
            return error

    def _ask(self, files: Sequence[str], ask: Callable[[list[int]], list[Any]]) -> list[Any]:
        found: dict[int, Any] = {}
        for pause in (*PAUSES, None):
            wanted = [place for place in range(len(files)) if place not in found]
            try:
                given = ask(wanted)
            except Exception as error:  # each remote file system has its own
                given = [error] * len(wanted)
            failed: list[tuple[str, BaseException]] = []
            for place, item in zip(wanted, given, strict=True):
                if isinstance(item, FileNotFoundError):
                    raise FileNotFoundError(f"{self.location}/{files[place]}")
                if isinstance(item, BaseException):  # an error of one range is returned, not raised
                    failed.append((files[place], item))
                else:
                    found[place] = item
            if not failed:
                return [found[place] for place in range(len(files))]
            lasting = isinstance(failed[0][1], _LASTING)
            if pause is None or lasting or not is_url(self.location):
                break
            _pause(pause, f"{self.location}/{failed[0][0]}", failed[0][1])
        file, problem = failed[0]
        raise DataError(f"{self.location}/{file}: cannot read it ({type(problem).__name__}: {problem})")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}
