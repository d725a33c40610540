"""Packages of real images to shards, from small files in their form."""

import gzip
import io
import json
from pathlib import Path

import numpy as np
from lightnet_data.image_dataset import ImageSamples
from lightnet_data.images import ImageOptions
from lightnet_data.real_images import assemble, emoji, fashion
from PIL import Image


def test_idx_files(tmp_path: Path) -> None:
    pixels = {}
    for stem, count in (("train", 12), ("t10k", 4)):
        pixels[stem] = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for part, header, data in (("images-idx3", 16, pixels[stem]), ("labels-idx1", 8, labels)):
            path = tmp_path / "root" / f"{stem}-{part}-ubyte.gz"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(gzip.compress(bytes(header) + data.tobytes()))
    (tmp_path / "work").mkdir()
    assemble(fashion(tmp_path / "root"), tmp_path / "work", tmp_path / "out", ImageOptions())
    for split, stem in (("train", "train"), ("validation", "t10k")):
        data = ImageSamples(tmp_path / "out", split, shuffle=False)
        assert len(data) == len(pixels[stem]) and "ankle boot" in data.classes
        seen = {data[i]["image"].tobytes() for i in range(len(data))}
        assert seen == {np.broadcast_to(x, (3, 28, 28)).tobytes() for x in pixels[stem]}


def test_emoji_stand_on_white(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "img" / "google" / "64"
    folder.mkdir(parents=True)
    entries = []
    for i in range(6):
        Image.new("RGBA", (64, 64), (10 * i, 0, 0, 255 * (i % 2))).save(folder / f"{i}.png")
        entries.append({"image": f"{i}.png", "category": "ab"[i % 2]})
    entries += [{"image": "gone.png", "category": "a"}, {"image": "0.png", "category": "Component"}]
    (tmp_path / "package" / "emoji.json").write_text(json.dumps(entries))
    found = list(emoji(tmp_path))
    assert [(split, name) for split, name, _ in found] == [("train", f"{'ab'[i % 2]}/{i}") for i in range(6)]
    colors = [Image.open(io.BytesIO(data)).getpixel((5, 5)) for _, _, data in found]
    assert colors == [(255, 255, 255) if i % 2 == 0 else (10 * i, 0, 0) for i in range(6)]
