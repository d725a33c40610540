"""Images and latents for training: samples are functions of (seed, position), whoever asks for them and how often."""

import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data.draws import Draws
from lightnet_data.errors import DataError
from lightnet_data.image_dataset import ImageSamples, LatentSamples, collate
from lightnet_data.image_transforms import CenterCrop, Chain, HorizontalFlip, RandomResizedCrop
from lightnet_data.images import prepare_images
from lightnet_data.manifest import save
from lightnet_data.sample_shards import FORMAT, SampleWriter, save_index
from lightnet_data.sampler import GlobalBatchSampler
from PIL import Image
from torch.utils.data import DataLoader

IMAGES = 11
FIXED = [0.06344102965932141, 0.707504754819708, 0.27756060377104574]
TRAINING = Chain([RandomResizedCrop(24), HorizontalFlip()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("images")
    for i in range(IMAGES):
        values = np.random.default_rng(i).integers(0, 256, (30 + i, 40, 3), dtype=np.uint8)
        place = where / "tree" / "abc"[i % 3] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(place)
    prepare_images([str(where / "tree")], where / "out")
    return where / "out"


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents whose mean is the sample's number, and number + 100 mirrored, of little variance."""
    folder = tmp_path_factory.mktemp("latents")
    with SampleWriter(folder, "train") as writer:
        for i in range(6):
            values = np.zeros((2, 2, 4, 2, 3), np.float16)
            values[0, 0], values[1, 0] = i, i + 100
            values[:, 1] = math.log(0.25)
            buffer = io.BytesIO()
            np.save(buffer, values)
            writer.add("npy", buffer.getvalue(), i % 2, {})
    index = save_index(folder, "train", writer.index())
    (folder / "classes.json").write_text('{"a": 0, "b": 1}')
    facts = {"shape": [2, 2, 4, 2, 3], "scaling_factor": 0.5, "shift_factor": 1.0}
    split = {"samples": 6, "index": index, "shards": writer.shards}
    head = {"format": FORMAT, "format_version": 1, "kind": "latents"}
    save(folder, {**head, "splits": {"train": split}, "latents": facts})
    return folder


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)


def test_a_sample_is_a_function_of_seed_and_position(folder: Path) -> None:
    data = ImageSamples(folder, "train", TRAINING, seed=3)
    first = [data[i] for i in range(3 * IMAGES)]
    again = ImageSamples(folder, "train", TRAINING, seed=3)
    assert all(equal(again[i], first[i]) for i in reversed(range(3 * IMAGES)))
    copied = pickle.loads(pickle.dumps(data))
    assert all(equal(copied[i], first[i]) for i in range(IMAGES))
    for epoch in range(3):
        numbers = [sample["number"] for sample in first[epoch * IMAGES : (epoch + 1) * IMAGES]]
        assert sorted(numbers) == list(range(IMAGES))
    by_number = [{s["number"]: s["image"] for s in first[e * IMAGES : (e + 1) * IMAGES]} for e in range(3)]
    same = [n for n in range(IMAGES) if np.array_equal(by_number[0][n], by_number[1][n])]
    assert not same  # another epoch augments anew
    other = ImageSamples(folder, "train", TRAINING, seed=4)
    assert [other[i]["number"] for i in range(IMAGES)] != [s["number"] for s in first[:IMAGES]]


def test_stored_order_and_labels(folder: Path) -> None:
    data = ImageSamples(folder, "train", shuffle=False)
    assert data.classes == ["a", "b", "c"] and len(data) == data.samples_per_epoch == IMAGES
    expected = {(30 + i, "abc"[i % 3]) for i in range(IMAGES)}
    assert {(data[i]["image"].shape[1], data.classes[data[i]["label"]]) for i in range(IMAGES)} == expected
    assert [data[i]["number"] for i in range(2 * IMAGES)] == 2 * list(range(IMAGES))
    for i in range(IMAGES):
        height = data[i]["image"].shape[1]
        values = np.random.default_rng(height - 30).integers(0, 256, (height, 40, 3), dtype=np.uint8)
        assert np.array_equal(data[i]["image"], values.transpose(2, 0, 1))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_and_workers_see_the_same_samples(workers: int, ranks: int, folder: Path) -> None:
    data = ImageSamples(folder, "train", TRAINING, seed=1)
    seen = {}
    for rank in range(ranks):
        sampler = GlobalBatchSampler(4, 2, rank, ranks, end_step=4)
        for batch in DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=workers):
            assert batch["images"].shape == (2, 3, 24, 24) and batch["images"].dtype == torch.uint8
            for i, position in enumerate(batch["sample_ids"].tolist()):
                seen[position] = (batch["images"][i].numpy(), int(batch["labels"][i]), int(batch["numbers"][i]))
    assert sorted(seen) == list(range(16))
    for position, (image, label, number) in seen.items():
        own = data[position]
        assert np.array_equal(image, own["image"]) and (label, number) == (own["label"], own["number"])


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    data = ImageSamples(folder, "train")
    with pytest.raises(DataError, match=r"a batch of images of .*crop them to one size"):
        collate([data[0], data[1]])
    with pytest.raises(DataError, match=r"no split 'test'; it holds train"):
        ImageSamples(folder, "test")
    with pytest.raises(DataError, match=r"holds images, not latents"):
        LatentSamples(folder, "train")
    with pytest.raises(IndexError, match="negative"):
        data[-1]


@pytest.mark.parametrize("label", [3, -1])
def test_a_label_outside_the_classes_names_its_sample(folder: Path, tmp_path: Path, label: int) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "copy")
    index = np.load(copy / "train.index.npy")
    index[4, 3] = label
    np.save(copy / "train.index.npy", index)
    with pytest.raises(DataError, match=rf"train: sample 4 is of class {label}, classes.json has 3, 0 to 2"):
        ImageSamples(copy, "train")


def test_a_changed_shard_is_named(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    data = ImageSamples(copy, "train", shuffle=False)
    offset, size = (int(value) for value in data.store.index[3, 1:3])
    path = copy / "train-000000.tar"
    content = bytearray(path.read_bytes())
    content[offset + 40 : offset + size] = bytes(size - 40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train-000000.tar: sample 3 cannot be decoded") as alone:
        data[3]
    loader = DataLoader(data, sampler=[3], num_workers=1)
    with pytest.raises(DataError) as worker:
        next(iter(loader))
    assert str(worker.value) == str(alone.value), "not within a traceback"
    path.write_bytes(content[:offset])
    with pytest.raises(DataError, match=r"train-000000.tar: cut since it was opened"):
        data[3]
    with pytest.raises(DataError, match=r"bytes, the manifest says"):
        ImageSamples(copy, "train")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (b"no array at all", "sample 2 is no stored latent"),
        (np.full((2, 2, 4, 2, 3), np.nan, np.float16), "sample 2 holds values that are not finite"),
        (np.zeros((2, 2, 4, 3, 2), np.float16), r"sample 2 is \[2, 2, 4, 3, 2\], the manifest says"),
        (np.full((2, 2, 4, 2, 3), 300, np.float16), "sample 2 reaches .* when scaled, where noise has deviation 1"),
    ],
)
def test_a_changed_latent_is_named(latents: Path, tmp_path: Path, what: Any, words: str) -> None:
    import shutil

    copy = shutil.copytree(latents, tmp_path / "copy")
    buffer = io.BytesIO()
    if isinstance(what, bytes):
        buffer.write(what)
    else:
        np.save(buffer, what)
    shard, offset, size, _ = np.load(copy / "train.index.npy")[2]
    path = copy / f"train-{shard:06d}.tar"
    content = bytearray(path.read_bytes())
    content[offset : offset + size] = buffer.getvalue().ljust(size, b"\0")[:size]
    path.write_bytes(content)
    data = LatentSamples(copy, "train", shuffle=False)
    assert np.isfinite(data[1]["latent"]).all()
    with pytest.raises(DataError, match=words):
        data[2]


@given(width=st.integers(1, 700), height=st.integers(1, 700), sample=st.integers(0, 2**40))
@settings(max_examples=300, deadline=None)
def test_crops_lie_inside(width: int, height: int, sample: int) -> None:
    left, top, right, bottom = RandomResizedCrop(8).box(width, height, Draws(0, 0, sample))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    if min(width, height) > 50 and 3 / 4 <= width / height <= 4 / 3:
        across, down = right - left, bottom - top
        assert 0.07 <= across * down / (width * height) <= 1.01
        assert 0.72 <= across / down <= 1.38


def test_crops_have_the_recipes_distribution() -> None:
    crop = RandomResizedCrop(8)
    boxes = np.array([crop.box(400, 400, Draws(0, 0, i)) for i in range(4000)])
    across, down = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    ratio = np.log(across / down)
    assert abs(ratio.mean()) < 0.02 and ratio.min() > math.log(0.74) and ratio.max() < math.log(1.36)
    centers = (boxes[:, 0] + boxes[:, 2]) / 2
    assert abs(centers.mean() - 200) < 5
    area = np.sort(across * down / 160000)
    assert area[0] < 0.09 and abs(np.median(area) - 0.5) < 0.06  # a little below 0.54: the largest may not fit


def test_flips_and_center_crops() -> None:
    image = Image.fromarray(np.arange(40 * 60 * 3, dtype=np.uint32).reshape(40, 60, 3).astype(np.uint8))
    flipped = [HorizontalFlip()(image, Draws(7, 0, i)) is not image for i in range(2000)]
    assert 0.46 < np.mean(flipped) < 0.54
    always = HorizontalFlip(1.0)(image, Draws(0, 0, 0))
    assert np.array_equal(np.asarray(always), np.asarray(image)[:, ::-1])
    middle = CenterCrop(20, share=0.5)(image, Draws(0, 0, 0))
    assert np.array_equal(np.asarray(middle), np.asarray(image)[10:30, 20:40])


def test_latents_are_drawn_from_their_distribution(latents: Path) -> None:
    data = LatentSamples(latents, "train", seed=2)
    samples = [data[i] for i in range(6 * 200)]
    assert all(equal(LatentSamples(latents, "train", seed=2)[i], samples[i]) for i in (0, 7, 600, 1199))
    mirrored, noise = [], []
    for sample in samples:
        values = sample["latent"] / 0.5 + 1.0
        assert (
            values.shape == (4, 2, 3)
            and sample["latent"].dtype == np.float32
            and sample["label"] == sample["number"] % 2
        )
        mirrored.append(values.mean() > 50)
        noise.append((values - sample["number"] - 100 * mirrored[-1]) / 0.5)
    noise = np.stack(noise)
    assert 0.45 < np.mean(mirrored) < 0.55
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02 and abs((noise**4).mean() - 3) < 0.15
    assert len(np.unique(noise[:, 0, 0, 0])) > 1190
    for chance, low, high in ((0.0, 0, 0), (0.1, 0.07, 0.13), (1.0, 1, 1)):
        data = LatentSamples(latents, "train", seed=2, flip=chance)
        assert low <= np.mean([data[i]["latent"].max() > 20 for i in range(1000)]) <= high, chance
    batch = collate([data[0], data[1]])
    assert batch["latents"].shape == (2, 4, 2, 3) and batch["latents"].dtype == torch.float32


def test_draws_are_fixed_for_ever() -> None:
    """Another version of numpy, or another machine, must not change a run that is resumed there."""
    found = Draws(1, 2, 3).uniforms(3)
    raw = np.random.Philox(counter=np.array([0, 0, 0, 3], np.uint64), key=np.array([1, 2], np.uint64)).random_raw(3)
    assert np.array_equal(found, [int(value >> np.uint64(11)) / 2**53 for value in raw])
    assert found.tolist() == FIXED
    parts = Draws(1, 2, 3)
    assert [parts.uniform(), *parts.uniforms(2).tolist()] == FIXED
    others = [Draws(*key).uniform() for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2, 3, 1), (-1, 2, 3))]
    assert len({FIXED[0], *others}) == 6
