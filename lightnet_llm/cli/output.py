"""Files that a verb is asked to write: refused before the work, whole or absent after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import UserError


def writable(option: str, given: str | None) -> Path | None:
    """The file that ``option`` names.

    Raises:
        UserError: it is a folder or a device, or in no folder that is there and can be written to.
    """
    if given is None:
        return None
    target = Path(given)
    folder = target.absolute().parent
    special = target.exists() and not target.is_file()  # a device would be replaced by the file
    if special or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{option} {given}: cannot be written; name a file in an existing folder that you may write to")
    return target


def writable_picture(option: str, given: str | None) -> Path | None:
    """The same of a picture.

    Raises:
        UserError: as ``writable``, or its name does not end in .png.
    """
    target = writable(option, given)
    if target is not None and target.suffix.lower() != ".png":
        raise UserError(f"{option} {given}: pictures are PNG; name it {target.with_suffix('.png')}")
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A file beside ``target`` to write to, which becomes it at the end; nothing stays of one that failed.

    Raises:
        UserError: the disk is full, say.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror or error}); make room, or name another"
        ) from None
    finally:
        partial.unlink(missing_ok=True)
