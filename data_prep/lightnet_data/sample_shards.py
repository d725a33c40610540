"""WebDataset tar shards of images or latents, with an index for random access and a manifest.

A sample is a few members of one tar, ``KEY.EXT``: its data, ``KEY.cls`` (number of its class in ASCII) and ``KEY.json``. KEY is
the sample's number in its split. ``SPLIT.index.npy`` (int64 [samples, 4]: shard, offset and bytes of the data member, class)
makes any sample one read of one file.
"""

import hashlib
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import manifest
from lightnet_data.errors import DataError

FORMAT = "lightnet-samples"
FORMAT_VERSION = 1
CLASSES = "classes.json"
SHARD_BYTES = 1 << 30
_BLOCK = 512


def require_webdataset() -> Any:
    """The package, or a DataError that says how to have it."""
    try:
        import webdataset
    except ImportError:
        raise DataError("images need webdataset and pillow: pip install 'lightnet-llm[vision]'") from None
    return webdataset


class _Hashed:
    """A file that is hashed as it is written, until it is given up."""

    given_up = False

    def __init__(self, path: Path) -> None:
        self.file, self.digest, self.bytes = path.open("wb"), hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        if self.given_up:  # a tar's stream writes its end when it is collected
            return
        self.digest.update(data)
        self.bytes += len(data)
        self.file.write(data)

    def give_up(self) -> None:
        """Close it unfinished; what is still written goes nowhere."""
        self.given_up = True
        self.file.close()


class SampleWriter:
    """A context that writes the samples of a split to ``FOLDER/SPLIT-000000.tar`` and on, by webdataset's ShardWriter.

    Args:
        folder: existing folder.
        split: name of the split.
        shard_bytes: a shard is closed once it has so many bytes of members.
        first_shard: number of the first shard.
    """

    def __init__(self, folder: Path, split: str, shard_bytes: int = SHARD_BYTES, first_shard: int = 0) -> None:
        self.folder, self.split = folder, split
        self.shards: list[dict[str, Any]] = []
        self._rows: list[tuple[int, int, int, int]] = []
        self._open: _Hashed | None = None
        self._first = first_shard
        self._writer = require_webdataset().ShardWriter(
            f"{split}-%06d.tar",
            maxcount=10**9,
            maxsize=shard_bytes,
            start_shard=first_shard,
            verbose=0,
            opener=self._start,
            post=self._end,
            encoder=False,
            mtime=0,  # the same samples give the same bytes
        )

    def _start(self, name: str) -> _Hashed:
        self._open = _Hashed(self.folder / name)
        return self._open

    def _end(self, name: str) -> None:
        file = self._open
        assert file is not None
        file.file.close()
        samples = len(self._rows) - sum(shard["samples"] for shard in self.shards)
        self.shards.append({"file": name, "samples": samples, "bytes": file.bytes, "sha256": file.digest.hexdigest()})

    def __enter__(self) -> "SampleWriter":
        return self

    def add(self, extension: str, data: bytes, label: int, facts: dict[str, Any], number: int | None = None) -> None:
        """One sample; ``number`` of it where it is not that of samples so far."""
        number = len(self._rows) if number is None else number
        members = {
            extension: data,
            "cls": str(label).encode(),
            "json": json.dumps(facts, ensure_ascii=False, sort_keys=True).encode(),
        }
        self._writer.write({"__key__": f"{number:09d}", **members})
        end = self._writer.tarstream.tarstream.offset  # behind this sample: members go in order of their extension
        after = sum(_BLOCK + _padded(len(members[name])) for name in members if name > extension)
        shard = self._writer.shard - 1
        self._rows.append((shard, end - after - _padded(len(data)), len(data), label))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._writer.close()
        elif self._open is not None:
            self._open.give_up()

    def index(self) -> NDArray[np.int64]:
        """int64 [samples, 4]: shard, offset and bytes of the data, class."""
        return np.array(self._rows, dtype=np.int64).reshape(-1, 4)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def save_index(folder: Path, split: str, index: NDArray[np.int64]) -> str:
    """Write the index of a split; its file's name."""
    name = f"{split}.index.npy"
    np.save(folder / name, index)
    return name


def is_samples(folder: str | Path) -> bool:
    """Whether a folder's manifest is of images or latents."""
    try:
        found = json.loads(Path(folder, manifest.FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def load(folder: str | Path, kind: str | None = None) -> dict[str, Any]:
    """The manifest of a folder of images or latents.

    Args:
        folder: written by ``lightnet data images`` or ``lightnet data latents``.
        kind: "images" or "latents"; another is refused.

    Raises:
        DataError: there is none, or it is of another kind or a newer version.
    """
    path = Path(folder, manifest.FILE_NAME)
    made = f"lightnet data {kind or 'images'}"
    if not is_samples(folder):
        raise DataError(f"{path}: no manifest of images or latents; make the folder with {made}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if int(found.get("format_version", 0)) > FORMAT_VERSION:
        raise DataError(f"{path}: format_version {found['format_version']}, this package reads up to {FORMAT_VERSION}")
    if kind not in (None, found.get("kind")):
        raise DataError(f"{path}: holds {found.get('kind')}, not {kind}; make them with {made}")
    return found


def class_names(folder: str | Path) -> list[str]:
    """Names of the classes, by number."""
    try:
        numbers: dict[str, int] = json.loads(Path(folder, CLASSES).read_text(encoding="utf-8"))
        return sorted(numbers, key=numbers.__getitem__)
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{Path(folder, CLASSES)}: cannot read it ({error}); copy it again") from None


class SampleStore:
    """Random access to the samples of one split, for any number of processes; few open files.

    Attributes:
        labels: int64 [samples], class of each.
        shards: the manifest's entries.

    Raises:
        DataError: the split is not there, or a shard is missing or cut.
    """

    def __init__(self, folder: str | Path, split: str, kind: str | None = None) -> None:
        self.folder, self.name = Path(folder), split
        self.manifest = load(folder, kind)
        splits = self.manifest["splits"]
        if split not in splits:
            raise DataError(f"{folder}: no split {split!r}; it holds {', '.join(splits)}")
        self.shards: list[dict[str, Any]] = splits[split]["shards"]
        self._load_index()
        for shard in self.shards:
            path = self.folder / shard["file"]
            size = path.stat().st_size if path.is_file() else -1
            if size != shard["bytes"]:
                found = "no such file" if size < 0 else f"{size} bytes, the manifest says {shard['bytes']}"
                raise DataError(f"{path}: {found}; copy it again")

    def _load_index(self) -> None:
        path = self.folder / self.manifest["splits"][self.name]["index"]
        try:
            self.index: NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: cannot read it ({error}); copy it again") from None
        expected = self.manifest["splits"][self.name]["samples"]
        if self.index.shape != (expected, 4):
            raise DataError(f"{path}: {self.index.shape[0]} samples, the manifest says {expected}; copy it again")

    @property
    def labels(self) -> NDArray[np.int64]:
        """Class of each sample, int64 [samples]."""
        return self.index[:, 3]

    def __len__(self) -> int:
        """Samples of the split."""
        return len(self.index)

    def read(self, number: int) -> tuple[bytes, int]:
        """Data and class of one sample.

        Raises:
            DataError: its shard has gone or was cut.
        """
        offset, size, label = (int(value) for value in self.index[number, 1:])
        path = self.where(number)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise DataError(f"{path}: cannot read it ({error.strerror}); restore it and resume") from None
        if len(data) != size:
            raise DataError(f"{path}: cut since it was opened; copy it again and resume")
        return data, label

    def where(self, number: int) -> Path:
        """The shard of a sample."""
        first = int(self.shards[0]["file"].rpartition("-")[2].removesuffix(".tar"))
        return self.folder / self.shards[int(self.index[number, 0]) - first]["file"]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "index"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._load_index()
