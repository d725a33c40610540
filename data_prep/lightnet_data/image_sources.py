"""Where images come from: a folder tree, a tar of images, a tar of per-class tars such as ImageNet's, or WebDataset's shards."""

import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from lightnet_data.errors import DataError
from lightnet_data.manifest import FILE_NAME
from lightnet_data.pictures import SUFFIXES

SPLITS = ("train", "val", "validation", "test")


@dataclass(frozen=True, slots=True)
class Item:
    """An image: name for people, class, and the bytes [offset, offset + size) of a file; size -1: all of it."""

    name: str
    label: str
    path: str
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        """Its bytes.

        Raises:
            OSError: as reading files does; a cut tar is one.
        """
        with Path(self.path).open("rb", buffering=0) as file:
            file.seek(self.offset)
            data = file.read(self.size)
        if self.size >= 0 and len(data) != self.size:
            raise OSError(5, "the tar is cut", self.path)
        return data


@dataclass
class Listing:
    """Images of one split, in order of name, and how many files of which suffix are none."""

    items: list[Item] = field(default_factory=list)
    ignored: dict[str, int] = field(default_factory=dict)

    def meet(self, name: str) -> bool:
        """Whether a file is an image by its suffix; counted where it is not."""
        suffix = PurePosixPath(name).suffix.lower()
        if suffix in SUFFIXES:
            return True
        kind = suffix or "no suffix"
        self.ignored[kind] = self.ignored.get(kind, 0) + 1
        return False


def splits_of(sources: Sequence[str]) -> dict[str, Path]:
    """Name and place of each split: ``NAME=PATH``, or a folder of folders train and val, validation or test, or "train".

    Raises:
        DataError: one is not there, or a name comes twice.
    """
    found: dict[str, Path] = {}
    for source in sources:
        name, equals, rest = source.partition("=")
        path = Path(rest) if equals and not Path(source).exists() else Path(source)
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; name a folder of class folders, or a tar")
        inside = (
            sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")) if path.is_dir() else []
        )
        known = set(inside) & set(SPLITS)
        if "train" in known and len(known) > 1 and known != set(inside):
            others = ", ".join(sorted(set(inside) - known)[:3])
            named = " ".join(f"{entry}={path / entry}" for entry in sorted(known))
            raise DataError(f"{path}: holds splits and others ({others}); name the splits: {named}")
        if path == Path(source) and "train" in inside and known == set(inside):
            new = {("validation" if entry == "val" else entry): path / entry for entry in inside}
        else:
            new = {name if path != Path(source) else "train": path}
        for split, place in new.items():
            if split in found:
                raise DataError(f"{place}: a second split {split}; name splits as NAME=PATH")
            if not split.replace("-", "").replace("_", "").isalnum():
                raise DataError(f"{source}: split {split!r} must be of letters, digits, - and _")
            found[split] = place
    return found


def read_labels(path: str | Path) -> dict[str, str]:
    """Class by file name, from lines ``FILE CLASS`` (or with a comma).

    Raises:
        DataError: a line is another, or names a file twice.
    """
    labels: dict[str, str] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the labels ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = re.split(r"[,\s]+(?=\S+$)", line.strip())
        if len(parts) != 2 or parts[0] in labels:
            why = "is named twice" if parts[0] in labels else "a line is FILE CLASS"
            raise DataError(f"{path}: line {number}: {line[:60]!r} ({why})")
        labels[parts[0]] = parts[1]
    return labels


def listing(place: Path, labels: dict[str, str] | None = None) -> Listing:
    """Images below a folder or in a tar, with the class of each.

    A folder: the class is the folder under ``place``; a folder of tars and of no folders: as each of them says. A tar: what
    KEY.cls beside KEY.jpg holds (WebDataset), else the folder an image is in, or the name of the inner tar. With ``labels`` it is
    the file's.

    Raises:
        DataError: not a tar, no image, or an image without a class.
    """
    found = Listing()
    if place.is_dir() and (shards := _shards(place)):
        for shard in shards:
            _tar(shard, labels, found)
    elif place.is_dir():
        _folder(place, labels, found)
    else:
        _tar(place, labels, found)
    if not found.items:
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.ignored.items()) or "nothing"
        raise DataError(f"{place}: no image in it (found: {kinds}); images are {' '.join(SUFFIXES)}")
    found.items.sort(key=lambda item: item.name)
    return found


def _label(name: str, folder: str, labels: dict[str, str] | None, place: Path) -> str:
    if labels is not None:
        label = labels.get(name) or labels.get(PurePosixPath(name).name)
        if label is None:
            raise DataError(f"{place}: {name} has no class in --labels; add it, or leave the file out")
        return label
    if not folder:
        raise DataError(
            f"{place}: {name} is in no class folder; move it into one, or give its class with --labels FILE or, in a tar, KEY.cls"
        )
    return folder


def _folder(place: Path, labels: dict[str, str] | None, found: Listing) -> None:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot read the folder ({error.strerror})")

    visited: set[tuple[int, int]] = set()
    for root, folders, files in os.walk(place, followlinks=True, onerror=refuse):
        status = Path(root).stat()
        if (status.st_dev, status.st_ino) in visited:
            raise DataError(f"{root}: a link to a folder that is read already; remove it")
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = PurePosixPath(Path(root).relative_to(place).as_posix())
        met = False
        for file in files:
            if not file.startswith(".") and found.meet(file):
                met = True
                name = (inside / file).as_posix()
                folder = inside.parts[0] if inside.parts else ""
                found.items.append(Item(name, _label(name, folder, labels, place), str(Path(root, file))))
        if not met and not folders and inside.parts and labels is None:
            raise DataError(f"{root}: a class folder without an image; remove it")


def _shards(place: Path) -> list[Path]:
    """Tars of a folder that holds no folder, and is none that ``lightnet data images`` made: its tars are of several splits."""
    if (place / FILE_NAME).is_file():
        return []
    inside = [entry for entry in place.iterdir() if not entry.name.startswith(".")]
    return [] if any(entry.is_dir() for entry in inside) else sorted(e for e in inside if e.suffix == ".tar")


def _key(name: str) -> str:
    """What WebDataset tells samples by: the name up to the first dot behind the last slash."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _class_of(place: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    try:
        label = "" if file is None else file.read().decode("utf-8").strip()
    except UnicodeDecodeError:
        label = ""
    if not label or "\n" in label:
        raise DataError(f"{place}: {member.name} holds no class; a .cls holds one name or number")
    return label


def _tar(place: Path, labels: dict[str, str] | None, found: Listing) -> None:
    images: list[tuple[str, int, int]] = []
    classes: dict[str, str] = {}
    try:
        # "r:" and not "r": members of a compressed tar cannot be read in any order.
        with tarfile.open(place, "r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # tarfile keeps all it has met
                if not member.isfile() or PurePosixPath(member.name).name.startswith("."):
                    continue
                if member.name.endswith(".tar"):
                    _inner(place, member, labels, found)
                elif member.name.endswith(".cls") and labels is None:
                    classes[_key(member.name)] = _class_of(place, archive, member)
                elif found.meet(member.name):
                    images.append((member.name, member.offset_data, member.size))
    except (tarfile.TarError, OSError, EOFError) as error:
        raise DataError(f"{place}: not a readable tar ({error}); an uncompressed tar, or a folder, is read") from None
    for name, offset, size in images:
        label = classes.get(_key(name)) or _label(name, PurePosixPath(name).parent.name, labels, place)
        found.items.append(Item(name, label, str(place), offset, size))


def _inner(place: Path, outer: tarfile.TarInfo, labels: dict[str, str] | None, found: Listing) -> None:
    """Images of a tar in a tar: its members are ranges of the outer file, too."""
    folder, before = PurePosixPath(outer.name).stem, len(found.items)
    with place.open("rb") as file:
        file.seek(outer.offset_data)
        with tarfile.open(fileobj=file, mode="r:") as archive:  # goes on from where the file stands
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]
                if member.offset_data + member.size > outer.offset_data + outer.size:
                    raise tarfile.ReadError(f"{outer.name} is cut")
                if not member.isfile() or PurePosixPath(member.name).name.startswith("."):
                    continue
                if not found.meet(member.name):
                    continue
                name = f"{folder}/{member.name.removeprefix('./')}"
                label = _label(name, folder, labels, place)
                found.items.append(Item(name, label, str(place), member.offset_data, member.size))
    if len(found.items) == before and labels is None:
        raise DataError(f"{place}: {outer.name} is a class without an image; remove it")
