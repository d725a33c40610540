"""Image and latent shards re-read against their manifest and index; part of ``lightnet data verify``."""

import io
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lightnet_data import sample_shards
from lightnet_data.errors import DataError
from lightnet_data.verify import Findings, Progress, check_file, unlisted

WAY_OUT = "copy it again or make it again"


def verify_samples(folder: Path, findings: Findings, threads: int, progress: Progress) -> None:
    """Sizes and checksums of all files, then every member of every shard: name, class, place; latents also by value."""
    written = sample_shards.load(folder)
    splits: dict[str, dict[str, Any]] = written["splits"]
    shards = [(split, shard) for split in splits for shard in splits[split]["shards"]]
    listed = {**written["files"], **{shard["file"]: shard for _, shard in shards}}
    names = unlisted(folder, listed)
    if names:
        findings.notes.append(f"{folder}: not in the manifest, so not checked: {', '.join(names[:5])}")
    with ThreadPoolExecutor(max(1, threads)) as pool:
        whole = dict(
            zip(listed, pool.map(lambda n: check_file(folder / n, listed[n], findings, progress), listed), strict=True)
        )
        try:
            classes = len(sample_shards.class_names(folder))
            findings.differ(folder / sample_shards.CLASSES, "classes", classes, written["classes"])
        except DataError as error:
            findings.problem(folder / sample_shards.CLASSES, str(error).partition(": ")[2])
            return
        shape = written.get("latents", {}).get("shape")
        for entry in splits.values():
            index_path = folder / entry["index"]
            if not whole[entry["index"]]:
                continue
            index = np.load(index_path, allow_pickle=False)
            counts = np.bincount(index[:, 3], minlength=classes).tolist()
            findings.differ(index_path, "samples", len(index), entry["samples"])
            findings.differ(index_path, "samples in shards", sum(s["samples"] for s in entry["shards"]), len(index))
            if counts != entry["class_counts"]:
                findings.problem(index_path, "its classes are not counted as the manifest does", WAY_OUT)
            firsts = np.cumsum([0, *(shard["samples"] for shard in entry["shards"])])
            tasks = [
                (folder / shard["file"], int(first), index[first:last], classes, shape, findings)
                for shard, first, last in zip(entry["shards"], firsts, firsts[1:], strict=False)
                if (folder / shard["file"]).is_file()
            ]
            list(pool.map(lambda task: _shard(*task), tasks))


def _shard(path: Path, first: int, index: Any, classes: int, shape: list[int] | None, findings: Findings) -> None:
    """Members of one shard against its rows of the index."""
    row = -1
    try:
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # tarfile keeps all it has met
                key, _, extension = member.name.partition(".")
                if extension == "cls":  # sorted before the data of every extension used here
                    row += 1
                    if row >= len(index) or key != f"{first + row:09d}":
                        return findings.problem(path, f"member {member.name} is not sample {first + row}", WAY_OUT)
                    label = int(_read(archive, member))
                    if label != int(index[row, 3]) or not 0 <= label < classes:
                        found = f"class {label}, the index says {int(index[row, 3])} of {classes}"
                        return findings.problem(path, f"{member.name}: {found}", WAY_OUT)
                elif extension != "json":
                    if (member.offset_data, member.size) != (int(index[row, 1]), int(index[row, 2])):
                        return findings.problem(path, f"{member.name} is not where the index says", WAY_OUT)
                    if shape is not None:
                        wrong = latent_problem(_read(archive, member), shape)
                        if wrong:
                            return findings.problem(path, f"{member.name}: {wrong}", WAY_OUT)
    except (tarfile.TarError, ValueError, OSError) as error:
        return findings.problem(path, f"not a readable tar ({error})", WAY_OUT)
    if row + 1 != len(index):
        findings.problem(path, f"{row + 1} samples, the index says {len(index)}", WAY_OUT)
    findings.count("samples", row + 1)


def latent_problem(data: bytes, shape: list[int]) -> str | None:
    """What is wrong with the bytes of a stored latent, if anything."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        return f"not an array ({error})"
    if list(array.shape) != list(shape) or array.dtype != np.float16:
        return f"{array.dtype} {list(array.shape)}, not float16 {list(shape)}"
    return None if np.isfinite(array).all() else "values that are not finite"


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None
    return file.read()
