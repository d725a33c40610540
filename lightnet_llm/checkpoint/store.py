"""Checkpoints on disk: whole or not there (law 4 of a run).

A checkpoint is written to a folder whose name starts with a dot, listed with sizes and checksums in ``manifest.json``, and
only then renamed to ``step_00000100``; the file ``latest`` moves last. Reading trusts the manifest, never ``latest``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from ..errors import UserError

MANIFEST = "manifest.json"
LATEST = "latest"
DUE = "due"  # in the manifest: steps at which the checkpoint fell due, earlier ones where skipped steps put it off


def step_name(step: int) -> str:
    """Folder name of a checkpoint."""
    return f"step_{step:08d}"


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> list[Path]:
    """Wait until the content of all files below a folder is on the disk; returns them in order."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    return files


def sync_folders(folder: Path) -> None:
    """The same of the names in it and in all folders below."""
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)


def write_text(path: Path, text: str) -> None:
    """Replace a small file atomically.

    Raises:
        OSError: with the file's name; it is as it was.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    except OSError as error:  # a full disk's names no file
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def partial_folder(root: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return root / f".{step_name(step)}.partial"


def begin(root: Path, step: int) -> Path:
    """An empty folder to write into; what a killed save left there is removed. One process calls this."""
    for kind in ("partial", "removed"):  # what killed or failed saves left; it may be what fills the disk
        for left in root.glob(f".step_*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)
    folder = partial_folder(root, step)
    folder.mkdir(parents=True)
    return folder


def commit(root: Path, step: int, facts: dict[str, Any]) -> Path:
    """Turn the written folder into a checkpoint: manifest, rename, ``latest``. One process calls this.

    Args:
        root: the run's ``checkpoints`` folder.
        facts: what the manifest says beside the files (state, layout, ...), JSON-able.
    """
    final = root / step_name(step)
    seal(partial_folder(root, step), final, facts)
    write_text(root / LATEST, step_name(step) + "\n")
    return final


def seal(written: Path, final: Path, facts: dict[str, Any]) -> None:
    """List a written folder's files with sizes and checksums in its manifest, and rename it to ``final``.

    A ``final`` that exists (the same step saved again, after a resume) changes places with it at once.
    """
    files = sync_files(written)
    listing = {
        str(path.relative_to(written)): {"bytes": path.stat().st_size, "xxh3_128": _checksum(path)} for path in files
    }
    write_text(written / MANIFEST, json.dumps({**facts, "files": listing}, indent=1))
    sync_folders(written)
    if final.exists():
        before = final.with_name(f".{final.name}.removed")
        shutil.rmtree(before, ignore_errors=True)
        if _exchange(written, final):
            written.rename(before)
        else:
            final.rename(before)
            written.rename(final)
        shutil.rmtree(before, ignore_errors=True)
    else:
        written.rename(final)
    sync(final.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once; False where the system or the file system (NFS) cannot."""
    function = getattr(ctypes.CDLL(None), "renameat2", None)
    if function is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(function(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: there is none, or it is not readable; says which.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder}: no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / MANIFEST}: not readable ({error})") from None
    if not isinstance(manifest, dict) or "files" not in manifest:
        raise ValueError(f"{folder / MANIFEST}: lists no files")
    return manifest


def verify(folder: Path, checksums: bool = True) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest and return the manifest.

    Raises:
        ValueError: names the first file that is missing, of another size or of other content, or cannot be read.
    """
    manifest = read_manifest(folder)
    for name, facts in manifest["files"].items():
        path = folder / name
        try:
            if not path.is_file():
                raise ValueError(f"{path}: missing")
            size = path.stat().st_size
            if size != facts["bytes"]:
                raise ValueError(f"{path}: {size} bytes, should be {facts['bytes']}")
            if checksums and _checksum(path) != facts["xxh3_128"]:
                raise ValueError(f"{path}: content does not match its checksum")
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    return manifest


def listed(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first; not yet verified. Copies that somebody made under names of their own are none."""
    found = (path for path in root.glob("step_*") if path.name.removeprefix("step_").isdecimal() and path.is_dir())
    return sorted(found, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def newest_whole(root: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that verifies, with its manifest; damaged newer ones are passed over with a warning."""
    for folder in reversed(listed(root)):
        try:
            return folder, verify(folder)
        except ValueError as error:
            warn(f"passing over a damaged checkpoint: {error}")
    return None


def set_aside_newer(root: Path, whole: Path) -> list[Path]:
    """Rename damaged checkpoints newer than ``whole`` out of the way, so that they never count as kept ones."""
    aside = []
    for folder in listed(root):
        if folder.name > whole.name:
            gone = folder.with_name(f".{folder.name}.damaged")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            aside.append(gone)
    return aside


def _due(folder: Path) -> list[int]:
    try:
        return [int(step) for step in read_manifest(folder).get(DUE, [])]
    except (ValueError, TypeError):  # damaged
        return []


def prune(root: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Delete all but the newest ``keep_last`` checkpoints and those due at multiples of ``keep_every``; returns them.

    Damaged ones that were set aside go, too, once a whole one of their step or later is there.

    Raises:
        OSError: one cannot be renamed, by which it would go.
    """
    removed = []
    for damaged in root.glob(".step_*.damaged"):
        if any(damaged.name.removesuffix(".damaged")[1:] <= folder.name for folder in listed(root)[-1:]):
            shutil.rmtree(damaged, ignore_errors=True)
    for folder in listed(root)[:-keep_last]:
        if keep_every and any(step % keep_every == 0 for step in [_step_of(folder), *_due(folder)]):
            continue
        gone = folder.with_name(f".{folder.name}.removed")  # never half there under its own name
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        removed.append(folder)
    return removed


def resolve(path: Path, warn: Callable[[str], None]) -> Path:
    """A whole checkpoint folder from itself, from a run folder or from its ``checkpoints`` folder (the newest one).

    Raises:
        UserError: there is none.
    """
    inside = path / "checkpoints"  # a run folder: it has a manifest too, of its tokenizer
    if not inside.is_dir() and ((path / MANIFEST).is_file() or path.name.startswith("step_")):
        try:
            verify(path)
        except ValueError as error:
            raise UserError(f"damaged checkpoint: {error}") from None
        return path
    root = inside if inside.is_dir() else path
    found = newest_whole(root, warn)
    if found is None:
        if any(path.glob("model*.safetensors")) and any(
            (path / f"config.{kind}").is_file() for kind in ("json", "yaml")
        ):
            raise UserError(
                f"{path}: is no checkpoint, but can be made into one: lightnet convert {path} NEW --to training"
            )
        raise UserError(f"{path}: holds no whole checkpoint; name a run folder or a folder such as .../step_00000100")
    return found[0]
