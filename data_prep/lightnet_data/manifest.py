"""The manifest beside a prepared data set: what went in, what came out, and which tokenizer it was cut with."""

import json
from pathlib import Path
from typing import Any

from lightnet_data.errors import DataError
from lightnet_data.remote import is_url, read

FILE_NAME = "manifest.json"
FORMAT = "lightnet-data"
FORMAT_VERSION = 1


def load(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder written by ``lightnet prep``.

    Args:
        folder: the folder, its URL, or the manifest file itself.

    Raises:
        DataError: there is none, it is not JSON, or a newer version of this package wrote it.
    """
    path: str | Path = f"{folder}/{FILE_NAME}" if is_url(folder) else Path(folder)
    if isinstance(path, Path) and path.is_dir():
        path = path / FILE_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8") if isinstance(path, Path) else read(path))
    except FileNotFoundError:
        raise DataError(f"{path}: no manifest; is this a finished output folder of lightnet prep?") from None
    except DataError:  # of a URL that cannot be read
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a readable manifest ({error}); run lightnet prep again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f'{path}: not a manifest of lightnet prep (no "format": "{FORMAT}")')
    version = manifest.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise DataError(f"{path}: format_version {version}, this package reads up to {FORMAT_VERSION}; upgrade it")
    return manifest


def find(prefix: str | Path) -> dict[str, Any] | None:
    """The manifest in the folder of a data set prefix (``DIR/train``), or None for shards of another stack.

    Raises:
        DataError: there is a manifest of ours that cannot be read.
    """
    if is_url(prefix):
        return load(str(prefix).rpartition("/")[0])
    path = Path(prefix).parent / FILE_NAME
    if not path.exists():
        return None
    try:
        other = json.loads(path.read_text(encoding="utf-8")).get("format") != FORMAT
    except (OSError, ValueError, AttributeError):
        other = False
    return None if other else load(path)


def save(folder: str | Path, manifest: dict[str, Any]) -> None:
    """Write ``manifest.json`` into ``folder`` with sorted, stable formatting."""
    text = json.dumps(manifest, indent=2, ensure_ascii=False)
    (Path(folder) / FILE_NAME).write_text(text + "\n", encoding="utf-8")
