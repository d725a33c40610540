"""What is drawn for images beside their crops: functions of (seed, epoch, sample), by the rules they are named after."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data.draws import Draws
from lightnet_data.image_dataset import collate
from lightnet_data.mixing import MixedImages, Mixing
from lightnet_data.noising import NoisedSamples
from lightnet_data.rand_augment import OPERATIONS, Erase, RandAugment
from PIL import Image


class Samples:
    """A data set of 10 images that are their number, in another order each epoch."""

    seed, samples_per_epoch = 5, 10

    def place(self, position: int) -> tuple[int, int]:
        return position // 10, (position * 7 + position // 10) % 10

    def __getitem__(self, position: int) -> dict[str, Any]:
        number = self.place(position)[1]
        image = np.full((3, 4, 6), number, np.uint8)
        return {"image": image, "label": number % 4, "number": number, "sample_id": position}


def batches(position: int) -> tuple[int, int]:
    return position // 8 * 8, 8


@pytest.mark.parametrize("mixing", [Mixing(), Mixing(cutmix=0.0), Mixing(mixup=0.0), Mixing(chance=0.5)])
def test_partners_come_from_the_batch_and_are_whole_samples(mixing: Mixing) -> None:
    data = MixedImages(Samples(), mixing, batches)  # type: ignore[arg-type]
    again = [data[i] for i in reversed(range(200))][::-1]
    kinds = set()
    for i, sample in enumerate(again):
        assert all(np.array_equal(sample[key], value) for key, value in data[i].items())
        mixed, cut = sample["kept"] < 1.0, bool(sample["box"].any())
        partners = [Samples()[j] for j in range(i // 8 * 8, i // 8 * 8 + 8) if j != i]
        same = [p for p in partners if p["label"] == sample["other_label"]]
        assert not mixed or any(np.array_equal(p["image"], sample["other_image"]) for p in same)
        if cut:
            top, left, bottom, right = sample["box"].tolist()
            assert 0 <= top <= bottom <= 4 and 0 <= left <= right <= 6
            assert sample["kept"] == np.float32(1 - (bottom - top) * (right - left) / 24)
        kinds.add("cut" if cut else "mixed" if mixed else "alone")
    assert kinds >= ({"mixed"} if mixing.mixup else set()) | ({"cut"} if mixing.cutmix else set())
    assert ("mixed" in kinds) == bool(mixing.mixup) and ("cut" in kinds) == bool(mixing.cutmix)


def test_draws_stay_what_they_are() -> None:
    """A run that goes on under another version of this package or of numpy sees the same samples."""
    assert Draws(1, 2, 3, 4).uniforms(3).tolist() == [0.645565208202291, 0.13903867821082294, 0.45422755340185506]
    assert Draws(-5, 2**64 - 1, 10**12, 2).integer(10**9) == 518652768
    normals = np.array([1.6230039596557617, -0.9336227178573608, 0.9694457650184631], np.float32)
    assert np.allclose(Draws(7, 0, 1).normals((3,)), normals, rtol=1e-6, atol=0)
    assert len({Draws(*place).uniform() for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0, 1)]}) == 5


def test_one_image_is_mixed_with_none_and_off_is_off() -> None:
    assert Mixing().draw(Draws(1, 0, 0), 0, 8, 8) is None
    assert not Mixing(0.0, 0.0) and not Mixing(chance=0.0) and Mixing(cutmix=0.0)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_shares_have_the_moments_of_a_beta_distribution(alpha: float) -> None:
    draws = [Mixing(alpha, 0.0).draw(Draws(3, 1, i), 1, 8, 8) for i in range(4000)]
    kept = np.array([mix.kept for mix in draws if mix])
    assert len(kept) == 4000 and abs(kept.mean() - 0.5) < 0.03
    assert abs(kept.var() - 1 / (4 * (2 * alpha + 1))) < 0.01


def test_every_partner_is_as_likely() -> None:
    partners = [mix.partner for i in range(6000) if (mix := Mixing().draw(Draws(9, 0, i), 5, 8, 8))]
    counts = np.bincount(partners, minlength=6)
    assert counts[0] == 0 and (abs(counts[1:] - 1200) < 150).all()


def test_noise_and_steps_are_drawn_anew_each_epoch_and_classes_left_out() -> None:
    data = NoisedSamples(Samples(), 1000, 4, 0.25)
    drawn = [data[i] for i in range(2000)]
    assert all(np.array_equal(drawn[i]["noise"], data[i]["noise"]) for i in (0, 17, 1999))
    noise = np.stack([sample["noise"] for sample in drawn])
    assert noise.shape == (2000, 3, 4, 6) and noise.dtype == np.float32
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01 and len(np.unique(noise[:, 0, 0, 0])) == 2000
    steps = np.array([sample["timestep"] for sample in drawn])
    assert steps.min() < 10 and steps.max() > 989 and abs(steps.mean() - 499.5) < 30
    left = [sample["label"] == 4 for sample in drawn]
    assert abs(np.mean(left) - 0.25) < 0.03
    assert all(sample["label"] in (4, Samples()[i]["label"]) for i, sample in enumerate(drawn))
    batch = collate(drawn[:3])
    assert batch["noise"].shape == (3, 3, 4, 6) and batch["timesteps"].tolist() == steps[:3].tolist()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("share", [-1.0, -0.3, 0.0, 0.3, 1.0])
def test_operations_keep_size_and_mode(operation: Callable[[Any, float], Any], share: float) -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (9, 14, 3), dtype=np.uint8))
    found = operation(image, share)
    assert found.size == image.size and found.mode == "RGB"


@settings(max_examples=40, deadline=None)
@given(sample=st.integers(0, 2**40), width=st.integers(1, 40), height=st.integers(1, 40))
def test_augmentation_is_a_function_of_its_draws(sample: int, width: int, height: int) -> None:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    for transform in (RandAugment(), Erase(1.0)):
        found = [np.asarray(transform(Image.fromarray(values), Draws(1, 2, sample))) for _ in range(2)]
        assert found[0].shape == values.shape and np.array_equal(*found)


def test_a_box_is_erased_as_often_as_said() -> None:
    image = Image.fromarray(np.full((32, 32, 3), 7, np.uint8))
    shares = [(np.asarray(Erase(0.4)(image, Draws(1, 0, i))) != 7).any(-1).mean() for i in range(400)]
    hit = [share for share in shares if share]
    assert abs(len(hit) / 400 - 0.4) < 0.08 and min(hit) > 0.015 and max(hit) < 0.36
