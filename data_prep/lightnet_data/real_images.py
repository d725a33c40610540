"""Two small sets of real images out of packages, as shards: ``make fashion-mnist`` and ``make emoji``.

Fashion-MNIST (Xiao et al. 2017; 60,000 and 10,000 grey pictures of 28 x 28, ten classes) is a Debian package; emoji of
64 x 64 pixels by category are an npm package. Both are downloaded and unpacked, never installed.
"""

import argparse
import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from lightnet_data import pictures, sample_shards
from lightnet_data.errors import DataError
from lightnet_data.images import ImageOptions, prepare_images
from lightnet_data.mini_pile import fetch_debian, fetch_npm

FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
EMOJI = "emoji-datasource-google", "16.0.0"
EMOJI_HOLDOUT = 0.1
Picture = tuple[str, str, bytes]  # split, class/name, PNG


def fashion(folder: Path) -> Iterator[Picture]:
    """Every picture of the unpacked Debian package."""
    for split, stem in (("train", "train"), ("validation", "t10k")):
        found = {part: next(folder.rglob(f"{stem}-{part}-ubyte.gz")) for part in ("images-idx3", "labels-idx1")}
        pixels = np.frombuffer(gzip.decompress(found["images-idx3"].read_bytes()), np.uint8, offset=16)
        labels = np.frombuffer(gzip.decompress(found["labels-idx1"].read_bytes()), np.uint8, offset=8)
        for number, (image, label) in enumerate(zip(pixels.reshape(-1, 28, 28), labels, strict=True)):
            yield split, f"{FASHION[label]}/{number:05d}", _png(pictures.pillow().fromarray(image).convert("RGB"))


def emoji(folder: Path) -> Iterator[Picture]:
    """Every emoji of the unpacked npm package on white, without skin tones; classes are their categories."""
    for entry in json.loads(next(folder.rglob("emoji.json")).read_text(encoding="utf-8")):
        path = next(folder.rglob(f"img/google/64/{entry['image']}"), None)
        if path is not None and entry["category"] != "Component":
            image = pictures.pillow().open(path).convert("RGBA")
            ground = pictures.pillow().new("RGBA", image.size, "white")
            ground.alpha_composite(image)
            yield "train", f"{entry['category']}/{path.stem}", _png(ground.convert("RGB"))


def _png(image: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")  # type: ignore[attr-defined]
    return buffer.getvalue()


def assemble(found: Iterator[Picture], where: Path, output: Path, options: ImageOptions) -> None:
    """Pictures to shards, by way of a tar a split below ``where``."""
    tars: dict[str, tarfile.TarFile] = {}
    with ExitStack() as stack:
        for split, name, data in found:
            if split not in tars:
                tars[split] = stack.enter_context(tarfile.open(where / f"{split}.tar", "w"))
            entry = tarfile.TarInfo(f"{name}.png")
            entry.size = len(data)
            tars[split].addfile(entry, io.BytesIO(data))
    prepare_images([f"{split}={where / split}.tar" for split in tars], output, options)


def main() -> None:
    """Fetch and assemble, unless the folder is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("name", choices=["fashion-mnist", "emoji"])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    output = given.output or Path("data", given.name)
    if not sample_shards.is_samples(output):
        with tempfile.TemporaryDirectory() as temporary:
            where = Path(temporary)
            where.chmod(0o755)  # apt's own user writes nothing here, but may look
            if given.name == "fashion-mnist":
                found, options = fashion(fetch_debian("dataset-fashion-mnist", where)[0]), ImageOptions()
            else:
                found, options = emoji(fetch_npm(*EMOJI, where)), ImageOptions(holdout=EMOJI_HOLDOUT)
            assemble(found, where, output, options)
    facts = sample_shards.load(output)
    splits = ", ".join(f"{split['samples']:,} for {name}" for name, split in facts["splits"].items())
    print(f"{output}: {facts['classes']} classes, {splits}")


if __name__ == "__main__":
    try:
        main()
    except DataError as failure:
        sys.exit(f"error: {failure}")
