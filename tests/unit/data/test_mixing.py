"""What is drawn for images beside their crops: functions of (seed, epoch, sample), by the rules they are named after."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightnet_data.draws import Draws
from lightnet_data.image_dataset import collate
from lightnet_data.mixing import MixedImages, Mixing, partner
from lightnet_data.noising import NoisedSamples


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
def test_partners_are_whole_samples_of_the_batch(mixing: Mixing) -> None:
    data = MixedImages(Samples(), mixing, batches)  # type: ignore[arg-type]
    kinds = set()
    for i in reversed(range(200)):
        sample, again = data[i], data[i]
        other = sample.pop("other")
        assert again.pop("other")["sample_id"] == other["sample_id"]
        assert all(np.array_equal(again[key], value) for key, value in sample.items())
        mixed, cut = sample["kept"] < 1.0, bool(sample["box"].any())
        expected = Samples()[i ^ 1]
        assert not mixed or all(np.array_equal(other[key], value) for key, value in expected.items())
        if cut:
            top, left, bottom, right = sample["box"].tolist()
            assert 0 <= top <= bottom <= 4 and 0 <= left <= right <= 6
            assert sample["kept"] == np.float32(1 - (bottom - top) * (right - left) / 24)
        kinds.add("cut" if cut else "mixed" if mixed else "alone")
    assert kinds >= ({"mixed"} if mixing.mixup else set()) | ({"cut"} if mixing.cutmix else set())
    assert ("mixed" in kinds) == bool(mixing.mixup) and ("cut" in kinds) == bool(mixing.cutmix)


@pytest.mark.parametrize("size", range(1, 8))
def test_everyone_but_the_last_of_an_odd_batch_is_its_partners_partner(size: int) -> None:
    partners = [partner(place, size) for place in range(size)]
    assert all(0 <= other < size and (other != place or size == 1) for place, other in enumerate(partners))
    assert all(partners[partners[place]] == place for place in range(size - size % 2))
    data = MixedImages(Samples(), Mixing(), lambda position: (position // size * size, size))  # type: ignore[arg-type]
    sample = data[size * 5]
    assert sample["other"]["sample_id"] == size * 5 + partners[0] and (size > 1 or sample["kept"] == 1.0)


@settings(max_examples=30, deadline=None)
@given(first=st.integers(0, 40), micro=st.sampled_from([1, 2, 3, 4, 8]))
def test_a_micro_batch_is_read_once_and_collated_whole(first: int, micro: int) -> None:
    """Partners outside of the micro-batch follow its own images, where other_rows says."""
    read: list[int] = []

    class Counted(Samples):
        def __getitem__(self, position: int) -> dict[str, Any]:
            read.append(position)
            return super().__getitem__(position)

    data = MixedImages(Counted(), Mixing(), batches)  # type: ignore[arg-type]
    positions = list(range(first, first + micro))
    samples = data.__getitems__(positions)
    assert len(read) == len(set(read)) and set(read) == {*positions, *(position ^ 1 for position in positions)}
    batch = collate(samples)
    assert len(batch["images"]) == len(read) and len(batch["labels"]) == micro == len(batch["other_rows"])
    if micro % 2 == first % 2 == 0:
        assert len(read) == micro
    for row, position in enumerate(positions):
        own, other = Samples()[position], Samples()[position ^ 1]
        assert np.array_equal(batch["images"][row], own["image"]) and batch["labels"][row] == own["label"]
        assert np.array_equal(batch["images"][batch["other_rows"][row]], other["image"])
        assert batch["other_labels"][row] == other["label"]


def test_draws_stay_what_they_are() -> None:
    """A run that goes on under another version of this package or of numpy sees the same samples."""
    assert Draws(1, 2, 3, 4).uniforms(3).tolist() == [0.645565208202291, 0.13903867821082294, 0.45422755340185506]
    assert Draws(-5, 2**64 - 1, 10**12, 2).integer(10**9) == 518652768
    normals = np.array([1.6230039596557617, -0.9336227178573608, 0.9694457650184631], np.float32)
    assert np.allclose(Draws(7, 0, 1).normals((3,)), normals, rtol=1e-6, atol=0)
    assert len({Draws(*place).uniform() for place in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0, 1)]}) == 5


def test_off_is_off() -> None:
    assert not Mixing(0.0, 0.0) and not Mixing(chance=0.0) and Mixing(cutmix=0.0)


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_shares_have_the_moments_of_a_beta_distribution(alpha: float) -> None:
    draws = [Mixing(alpha, 0.0).draw(Draws(3, 1, i), 8, 8) for i in range(4000)]
    kept = np.array([mix.kept for mix in draws if mix])
    assert len(kept) == 4000 and abs(kept.mean() - 0.5) < 0.03
    assert abs(kept.var() - 1 / (4 * (2 * alpha + 1))) < 0.01


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
