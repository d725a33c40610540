"""Packed windows as WebDataset tar shards: written once, read in any order, from a disk or by URL through fsspec.

A shard holds samples of two members each, ``KEY.tokens.npy`` ([N + 1], the stored type) and ``KEY.boundaries.npy`` (uint8,
``numpy.packbits`` of where a segment begins among the N inputs). KEY is the window's number and the CRC-32 of both arrays. Every
member of a kind has the same size, so the manifest's index of member offsets is a few numbers: the data of a member of
sample i of a shard begin at ``i * stride + offset``, and a sample is one range of one file.
"""

import hashlib
import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightnet_data import manifest, remote
from lightnet_data.errors import DataError
from lightnet_data.stream import StreamWindows, Window

SAMPLES_PER_SHARD = 50_000  # 250 MB at 2,048 tokens of 16 bits
TOKENS, BOUNDARIES = "tokens.npy", "boundaries.npy"
_BLOCK = tarfile.BLOCKSIZE


def write(
    prefix: str | Path,
    output: str | Path,
    sequence_length: int,
    samples_per_shard: int = SAMPLES_PER_SHARD,
    eod_id: int | None = None,
) -> dict[str, Any]:
    """Write the windows of one split as ``OUTPUT/NAME-000000.tar`` and on, NAME the last part of ``prefix``.

    They are those that training cuts from the .bin/.idx shards, in stored order: training reads the same samples at the
    same positions from either.

    Args:
        prefix: of the split's .bin/.idx, or of its shards; the manifest beside them, if there is one, names the shards and
            the end-of-document token.
        output: existing folder.
        sequence_length: inputs of a window, N.
        samples_per_shard: windows of a tar file.
        eod_id: end-of-document token, where there is no manifest yet.

    Returns:
        What the manifest must hold under ``splits.NAME.webdataset``.

    Raises:
        DataError: the split is damaged or shorter than a window.
    """
    if sequence_length < 1 or samples_per_shard < 1:
        raise DataError(f"{sequence_length} tokens, {samples_per_shard} samples a shard: both must be at least 1")
    windows = StreamWindows(prefix, sequence_length, eod_id)
    if windows.samples < 1:
        raise DataError(
            f"{prefix}: {windows.tokens} tokens are fewer than sequence length {sequence_length} + 1; the largest for it is "
            f"{windows.tokens - 1}"
        )
    shards = []
    for number, first in enumerate(range(0, windows.samples, samples_per_shard)):
        count = min(samples_per_shard, windows.samples - first)
        path = Path(output, f"{Path(prefix).name}-{number:06d}.tar")
        with path.open("wb") as file:
            target = _Hashed(file)
            with tarfile.open(fileobj=target, mode="w|", format=tarfile.USTAR_FORMAT) as archive:  # type: ignore[call-overload]
                for index in range(first, first + count):
                    for name, data in _members(windows, index).items():
                        header = tarfile.TarInfo(name)
                        header.size = len(data)
                        archive.addfile(header, io.BytesIO(data))
        shards.append({"file": path.name, "samples": count, "bytes": target.bytes, "sha256": target.digest.hexdigest()})
    return {
        "sequence_length": sequence_length,
        "samples": windows.samples,
        "tokens": windows.tokens,
        "eod_id": windows.eod_id,
        "dtype": windows.dtype.name,
        **_layout(windows),
        "shards": shards,
    }


def pack(
    folder: Path,
    splits: dict[str, dict[str, Any]],
    files: dict[str, dict[str, Any]],
    sequence_length: int,
    shard_tokens: int | None = None,
    eod_id: int | None = None,
) -> None:
    """Replace the .bin/.idx of a folder that is being written by packed tar shards, in its manifest's entries too.

    Args:
        folder: with one .bin/.idx pair for each split.
        splits: the manifest's entries of the splits; an empty one is left as it is, and a held-out one shorter than a window
            gets ``left_out``, a line that says so, instead of ``webdataset``.
        files: its entries of the files.
        sequence_length: inputs of a window.
        shard_tokens: of a tar file, about; None: ``SAMPLES_PER_SHARD`` windows.
        eod_id: end-of-document token.

    Raises:
        DataError: the train split is shorter than a window.
    """
    samples = SAMPLES_PER_SHARD if shard_tokens is None else max(1, shard_tokens // sequence_length)
    for name, split in splits.items():
        if not split["tokens"]:
            continue
        if split["tokens"] <= sequence_length:
            short = (
                f"--sequence-length {sequence_length}: the {name} split has {split['tokens']} tokens, and a sample needs one "
                "more than its length; "
            )
            if name == "train":
                raise DataError(short + "choose a smaller one, or another --holdout")
            split["left_out"] = short + "it is left out"
            continue
        split["webdataset"] = write(folder / name, folder, sequence_length, samples, eod_id)
        for shard in split["webdataset"]["shards"]:
            files[shard["file"]] = {"bytes": shard["bytes"], "sha256": shard["sha256"]}
    for file in [f"{name}.{suffix}" for name in splits for suffix in ("bin", "idx", "bytes.npy")]:
        files.pop(file, None)
        (folder / file).unlink(missing_ok=True)


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.bytes += len(data)
        self.file.write(data)


def _members(windows: StreamWindows, index: int) -> dict[str, bytes]:
    tokens, starts = windows.read([index])[0]
    stored, bits = tokens.astype(windows.dtype), np.packbits(starts)
    key = f"{index:012d}-{zlib.crc32(bits.tobytes(), zlib.crc32(stored.tobytes())):08x}"
    return {f"{key}.{TOKENS}": _npy(stored), f"{key}.{BOUNDARIES}": _npy(bits)}


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def _layout(windows: StreamWindows) -> dict[str, Any]:
    """The index of member offsets; the same for all samples, as all have the same length."""
    length = windows.sequence_length
    sizes = {TOKENS: (length + 1) * windows.dtype.itemsize, BOUNDARIES: -(-length // 8)}
    members, position = {}, 0
    for (name, data), size in zip(_members(windows, 0).items(), sizes.values(), strict=True):
        members[name.partition(".")[2]] = {"offset": position + _BLOCK + len(data) - size, "bytes": size}
        position += _BLOCK + -(-len(data) // _BLOCK) * _BLOCK
    return {"members": members, "stride": position}


class ShardWindows:
    """Packed windows of one split in tar shards; the same interface as :class:`lightnet_data.stream.StreamWindows`.

    Args:
        location: folder or URL and the split's name, ``DIR/train`` or ``s3://bucket/DIR/train``. fsspec opens it, so
            ``simplecache::s3://...`` keeps whole shards on this machine's disk.
        sequence_length: of the run; the shards' own when None.
        eod_id: the shards' own when None.

    Raises:
        DataError: no such split, a manifest that does not add up, or windows of another length.
    """

    def __init__(self, location: str | Path, sequence_length: int | None = None, eod_id: int | None = None) -> None:
        self.folder, self.name = split_location(location)
        packed = _packed(location)
        if packed is None:
            raise DataError(
                f"{location}: no packed samples in the manifest of {self.folder}; .bin/.idx are read from a local folder "
                "only, write others with lightnet prep --format webdataset"
            )
        try:
            self.sequence_length, self.eod_id = int(packed["sequence_length"]), int(packed["eod_id"])
            self.tokens, self.samples = int(packed["tokens"]), int(packed["samples"])
            self.dtype, self._stride, self._members = (
                np.dtype(packed["dtype"]),
                int(packed["stride"]),
                packed["members"],
            )
            self.shards = [
                (str(s["file"]), int(s["samples"]), int(s["bytes"]), str(s["sha256"])) for s in packed["shards"]
            ]
            self._spans = [
                (int(self._members[n]["offset"]), int(self._members[n]["bytes"])) for n in (TOKENS, BOUNDARIES)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{location}: its manifest is not whole ({error!r}); copy it again") from None
        if sequence_length not in (None, self.sequence_length):
            raise DataError(
                f"{location}: packed at {self.sequence_length} tokens, not {sequence_length}; set "
                f"data.sequence_length={self.sequence_length}, or pack it again at {sequence_length}"
            )
        if eod_id not in (None, self.eod_id):
            raise DataError(f"{location}: its end-of-document token is {self.eod_id}, not {eod_id}")
        self._firsts = np.cumsum([0, *(samples for _, samples, _, _ in self.shards)])
        if int(self._firsts[-1]) != self.samples:
            raise DataError(
                f"{location}: the manifest lists {self._firsts[-1]} samples of {self.samples}; copy it again"
            )
        self._files = remote.Folder(self.folder)

    def read(self, indices: Sequence[int]) -> list[Window]:
        """Tokens int64 [N + 1] of each window, and where a segment begins among its inputs, bool [N].

        Raises:
            DataError: a shard is missing, cut or changed.
        """
        shards = [int(np.searchsorted(self._firsts, index, side="right")) - 1 for index in indices]
        starts = [(i - int(self._firsts[shard])) * self._stride for i, shard in zip(indices, shards, strict=True)]
        try:
            ranges = self._files.read([self.shards[shard][0] for shard in shards], starts, self._stride)
        except FileNotFoundError as error:
            raise DataError(f"{error}: no such file; copy it again and resume") from None
        return [self._window(*item) for item in zip(indices, shards, ranges, strict=True)]

    def _window(self, index: int, shard: int, data: bytes) -> Window:
        file = f"{self.folder}/{self.shards[shard][0]}"
        if len(data) != self._stride:
            problem = "it is cut: copy it again" if len(data) < self._stride else "its server gives no ranges of bytes"
            raise DataError(f"{file}: {len(data)} bytes for the {self._stride} of sample {index}; {problem}")
        stored, bits = (data[offset : offset + size] for offset, size in self._spans)
        if not data.startswith(b"%012d-%08x." % (index, zlib.crc32(bits, zlib.crc32(stored)))):
            raise DataError(
                f"{file}: sample {index} is not what was written there, the file has changed; copy it again"
            )
        tokens = np.frombuffer(stored, self.dtype).astype(np.int64)
        return tokens, np.unpackbits(np.frombuffer(bits, np.uint8), count=self.sequence_length).astype(bool)

    def check(self, checksums: bool = False) -> None:
        """Look at the size of every shard, and with ``checksums`` read them all.

        Raises:
            DataError: one is missing, cut or changed.
        """
        try:
            sizes = self._files.sizes([file for file, _, _, _ in self.shards])
        except FileNotFoundError as error:
            raise DataError(f"{error}: no such file, the manifest lists it; copy it again") from None
        for (file, _, expected, _), size in zip(self.shards, sizes, strict=True):
            if size != expected:
                raise DataError(f"{self.folder}/{file}: {size} bytes, the manifest says {expected}; copy it again")
        for file, _, _, expected_digest in self.shards if checksums else []:
            system, root = self._files.system()
            with system.open(f"{root}/{file}", "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected_digest:
                    raise DataError(f"{self.folder}/{file}: not what the manifest describes (sha256); copy it again")


def split_location(location: str | Path) -> tuple[str, str]:
    """``DIR/train`` as ("DIR", "train")."""
    folder, _, name = str(location).rpartition("/")
    return folder or ".", name


def _packed(location: str | Path) -> dict[str, Any] | None:
    written = manifest.find(location) or {}
    found: dict[str, Any] | None = (written.get("splits") or {}).get(split_location(location)[1], {}).get("webdataset")
    return found


def is_packed(location: str | Path) -> bool:
    """Whether a location names packed tar shards rather than .bin/.idx."""
    return manifest.is_url(location) or _packed(location) is not None
