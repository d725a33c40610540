"""``lightnet data images``: folders or tars of images to WebDataset shards."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lightnet_data import image_sources, manifest, pictures, sample_shards
from lightnet_data import workers as processes
from lightnet_data.errors import DataError
from lightnet_data.image_sources import Item
from lightnet_data.output import OutputFolder, settle
from lightnet_data.shards import sha256

BATCH = 32  # images of a worker's task


@dataclass(frozen=True)
class ImageOptions:
    """Options of a preparation of images.

    ``convert``: take images that are not RGB. ``skip_bad``: count bad images instead of stopping at the first. ``min_size``:
    least pixels of the shorter side. ``resize``: shrink the shorter side to so many. ``holdout``: share of images, by the hash
    of their bytes, that becomes "validation" where there is one split. ``seed``: of that and of the order in the shards.
    ``shard_bytes``: of a shard, about.
    """

    convert: bool = False
    skip_bad: bool = False
    min_size: int = 16
    resize: int | None = None
    holdout: float = 0.0
    seed: int = 0
    shard_bytes: int = sample_shards.SHARD_BYTES


def check_output(output: Path) -> None:
    """Refuse an output that is there already.

    Raises:
        DataError: it is, and is no empty folder.
    """
    settle(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"{output}: exists; choose another --output, or remove it")


def prepare_images(
    sources: Sequence[str],
    output: str | Path,
    options: ImageOptions | None = None,
    labels: str | Path | None = None,
    classes: str | Path | None = None,
    workers: int = 1,
    note: Callable[[str], None] = lambda line: None,
    progress: Callable[[int], Any] = lambda count: None,
    counted: Callable[[int], Any] = lambda count: None,
) -> dict[str, Any]:
    """Write images as shards of a training and other splits; the manifest of the finished folder.

    ``output`` gets ``SPLIT-000000.tar`` and on (members KEY.jpg, .png ..., KEY.cls, KEY.json), ``SPLIT.index.npy``,
    ``classes.json`` (name to number) and ``manifest.json``; it appears when all of it is on disk, or not at all. Images are
    in an order drawn from (seed, name), so that a shard holds all classes. Bytes are the source's, unless ``resize``
    encodes them anew.

    Args:
        sources: see ``image_sources.splits_of``.
        output: folder to make.
        options: see ``ImageOptions``.
        labels: file of lines FILE CLASS for images that are in no class folder.
        classes: ``classes.json`` of another folder, or that folder, whose numbers are used; a class that it has not is refused.
        workers: processes that decode; the result does not depend on them.
        note: gets lines for the user.
        progress: called with numbers of images done; ``counted`` once before with their total.

    Raises:
        DataError: a bad image or option, an image without a class, or ``output`` is there.
    """
    options, output = options or ImageOptions(), Path(output)
    sample_shards.require_webdataset()
    pictures.pillow()
    _check(options, workers)
    check_output(output)
    places = image_sources.splits_of(sources)
    if not places:
        raise DataError("no SRC given; name a folder of class folders, or a tar")
    if options.holdout and len(places) > 1:
        raise DataError(f"--holdout goes with one split; there are {', '.join(places)}")
    by_name = None if labels is None else image_sources.read_labels(labels)
    listings = {split: image_sources.listing(place, by_name) for split, place in places.items()}
    numbers = _classes(classes, listings)
    counted(sum(len(listing.items) for listing in listings.values()))
    target = OutputFolder(output, note)
    with target as folder:
        work = _Work(folder, options, numbers, progress)
        for split, listing in listings.items():
            work.run(split, listing.items, workers)
        ignored: dict[str, int] = {}
        for listing in listings.values():
            for kind, count in listing.ignored.items():
                ignored[kind] = ignored.get(kind, 0) + count
        (folder / sample_shards.CLASSES).write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", "utf-8")
        result = work.manifest()
        result["ignored_files"] = dict(sorted(ignored.items()))
        result["request"] = {**asdict(options), "sources": {split: str(place) for split, place in places.items()}}
        manifest.save(folder, result)
        target.finish()
    return result


def _check(options: ImageOptions, workers: int) -> None:
    if workers < 1:
        raise DataError(f"--workers {workers}: must be at least 1")
    if not 0 <= options.holdout < 1:
        raise DataError(f"--holdout {options.holdout}: a share of the images, at least 0 and below 1")
    if options.min_size < 1 or (options.resize is not None and options.resize < options.min_size):
        raise DataError(f"--resize {options.resize}, --min-size {options.min_size}: need 1 <= min-size <= resize")


def _classes(given: str | Path | None, listings: dict[str, image_sources.Listing]) -> dict[str, int]:
    names = {split: {item.label for item in listing.items} for split, listing in listings.items()}
    if given is None:
        numbers = {name: number for number, name in enumerate(_ordered(set().union(*names.values())))}
        known = names.get("train", set(numbers))
        source = "train"
    else:
        path = Path(given)
        folder = path.parent if path.name == sample_shards.CLASSES and path.is_file() else path
        if not (folder / sample_shards.CLASSES).is_file():
            raise DataError(
                f"--classes {given}: no folder with a {sample_shards.CLASSES}; name one that lightnet data images made"
            )
        numbers = {name: number for number, name in enumerate(sample_shards.class_names(folder))}
        known, source = set(numbers), str(given)
    for split, own in names.items():
        if own - known:
            first = sorted(own - known)[0]
            raise DataError(
                f"class {first!r} of {split} is not in {source}; its classes are {len(known)}, add or remove it"
            )
    return numbers


def _ordered(names: set[str]) -> list[str]:
    """By the alphabet; classes that are numbers, as numbers."""
    if all(name.isascii() and name.isdigit() for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


class _Work:
    """Writers of the splits, and what they have met."""

    def __init__(
        self, folder: Path, options: ImageOptions, numbers: dict[str, int], progress: Callable[[int], Any]
    ) -> None:
        self.folder, self.options, self.numbers, self.progress = folder, options, numbers, progress
        self.skipped: dict[str, dict[str, Any]] = {}
        self.modes: dict[str, int] = {}
        self.splits: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, Any]] = {}

    def run(self, split: str, items: list[Item], workers: int) -> None:
        """Write one split, or with a hold-out two."""
        options = self.options
        items.sort(key=lambda item: xxhash.xxh3_64_intdigest(item.name.encode(), options.seed))
        names = [split, "validation"] if options.holdout else [split]
        limit = int(options.holdout * 2**64)
        writers = {name: sample_shards.SampleWriter(self.folder, name, options.shard_bytes) for name in names}
        sizes: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        try:
            for item, outcome in _looked_at(items, options, workers):
                self.progress(1)
                if isinstance(outcome, tuple):
                    self._skip(*outcome)
                    continue
                picture, key = outcome.picture, outcome.key
                name = "validation" if key < limit else split
                facts = {"name": item.name, "width": picture.width, "height": picture.height}
                writers[name].add(picture.extension, picture.data, self.numbers[item.label], facts)
                sizes[name].append((picture.width, picture.height))
                self.modes[picture.mode] = self.modes.get(picture.mode, 0) + 1
        except BaseException as error:
            for writer in writers.values():
                writer.__exit__(type(error), error, None)
            raise
        for name, writer in writers.items():
            writer.__exit__(None, None, None)
            self._finish(name, writer, sizes[name])

    def _finish(self, name: str, writer: sample_shards.SampleWriter, sizes: list[tuple[int, int]]) -> None:
        if not sizes:
            first = next((f" (first skipped: {entry['first']})" for entry in self.skipped.values()), "")
            raise DataError(f"split {name}: no image is left for it{first}; use another --holdout or more images")
        index = writer.index()
        file = sample_shards.save_index(self.folder, name, index)
        self.splits[name] = {
            "samples": len(index),
            "bytes": int(index[:, 2].sum()),
            "class_counts": np.bincount(index[:, 3], minlength=len(self.numbers)).tolist(),
            "sizes": size_statistics(np.array(sizes), index[:, 2]),
            "index": file,
            "shards": writer.shards,
        }
        path = self.folder / file
        self.files[file] = {"bytes": path.stat().st_size, "sha256": sha256(path)}

    def _skip(self, kind: str, message: str) -> None:
        if not self.options.skip_bad:
            hint = "--convert takes it and makes RGB of it, --skip-bad leaves it out" if kind == "channels" else None
            raise DataError(f"{message}; {hint or 'mend it, or leave such images out with --skip-bad'}")
        self.skipped.setdefault(kind, {"count": 0, "first": message})["count"] += 1

    def manifest(self) -> dict[str, Any]:
        """The manifest so far; classes.json must be there."""
        path = self.folder / sample_shards.CLASSES
        self.files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        return {
            "format": sample_shards.FORMAT,
            "format_version": sample_shards.FORMAT_VERSION,
            "kind": "images",
            "samples": sum(split["samples"] for split in self.splits.values()),
            "classes": len(self.numbers),
            "splits": self.splits,
            "modes": dict(sorted(self.modes.items())),
            "skipped": self.skipped,
            "files": self.files,
        }


def size_statistics(sizes: Any, stored: Any) -> dict[str, dict[str, float]]:
    """Least, median, mean and most of width, height (int [n, 2]), shorter side, aspect (width / height) and bytes [n]."""
    columns = {
        "width": sizes[:, 0],
        "height": sizes[:, 1],
        "shorter_side": sizes.min(axis=1),
        "aspect": sizes[:, 0] / sizes[:, 1],
        "bytes": stored,
    }
    return {
        name: {
            "min": round(float(column.min()), 3),
            "median": round(float(np.median(column)), 3),
            "mean": round(float(column.mean()), 3),
            "max": round(float(column.max()), 3),
        }
        for name, column in columns.items()
    }


@dataclass
class _Looked:
    """A good image, and the hash of its source's bytes."""

    picture: pictures.Picture
    key: int


Outcome = _Looked | tuple[str, str]  # or kind and message of a bad one


def _look(items: list[Item], options: ImageOptions) -> list[Outcome]:
    """A worker's task."""
    found: list[Outcome] = []
    for item in items:
        try:
            data = item.read()
            picture = pictures.check(data, options.convert, options.min_size, options.resize)
            found.append(_Looked(picture, xxhash.xxh3_64_intdigest(data, options.seed)))
        except pictures.BadImage as error:
            found.append((error.kind, f"{_where(item)}: {error}"))
        except OSError as error:
            found.append(("unreadable", f"{_where(item)}: cannot read it ({error.strerror or error})"))
    return found


def _where(item: Item) -> str:
    return item.path if item.size < 0 else f"{item.path}: {item.name}"


def _looked_at(items: list[Item], options: ImageOptions, workers: int) -> Iterator[tuple[Item, Outcome]]:
    """Each image with what was found, in order; a few tasks a worker ahead, so that memory is bounded."""
    look = partial(_look, options=options)
    batches = (items[start : start + BATCH] for start in range(0, len(items), BATCH))
    if workers == 1:
        for batch in batches:
            yield from zip(batch, look(batch), strict=True)
        return
    with processes.pool(workers) as pool:
        try:
            for batch, found in _ahead(pool, look, batches, 2 * workers):
                yield from zip(batch, found, strict=True)
        except BrokenProcessPool:
            raise processes.died(workers) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _ahead(
    pool: ProcessPoolExecutor, task: Callable[[list[Item]], list[Outcome]], batches: Iterable[list[Item]], depth: int
) -> Iterator[tuple[list[Item], list[Outcome]]]:
    iterator = iter(batches)
    queue: deque[tuple[list[Item], Future[list[Outcome]]]] = deque()
    queue.extend((batch, pool.submit(task, batch)) for batch in islice(iterator, depth))
    while queue:
        batch, future = queue.popleft()
        found = future.result()
        queue.extend((following, pool.submit(task, following)) for following in islice(iterator, 1))
        yield batch, found
