"""Batches, losses and figures of the image heads against their definitions; data that do not fit the model."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightnet_data import image_operations
from lightnet_data.draws import Draws
from lightnet_data.errors import DataError
from lightnet_data.image_dataset import DRAWN, LatentSamples
from lightnet_data.rand_augment import Erase, RandAugment, arrays
from PIL import Image

from lightnet_llm.config import RunConfig, load_config, validate
from lightnet_llm.config.images import DiffusionConfig
from lightnet_llm.errors import UserError
from lightnet_llm.models import build_model, diffusion, initialize
from lightnet_llm.models.classifier import hits
from lightnet_llm.parallel.clock import Clock
from lightnet_llm.training import image_data
from lightnet_llm.training.image_tasks import PICTURES, ClassifierTask, DenoiserTask, mix
from lightnet_llm.training.schedule import Budget
from lightnet_llm.training.tasks import task_of
from tests.parallel.images import write_classifier, write_denoiser

MODEL: dict[str, Any] = {"causal": False, "axes": 2, "norm": "layer", "layers": 1, "width": 16, "heads": 2}
MODEL |= {"glu_width": 16, "gate_rank": 4, "tpe_rank": 4, "tpe_init_length": 4}
IMAGE = {"size": [8, 12], "patch": 4, "classes": 5}


def run(head: str, **changes: Any) -> RunConfig:
    return validate({"model": {**MODEL, "head": head, "image": IMAGE}, "train": {"steps": 1}, **changes}, "here")


def test_tokens_follow_from_the_image() -> None:
    assert run("classifier").data.sequence_length == 6 and run("denoiser").data.sequence_length == 8
    again = validate(run("denoiser").model_dump(), "there")
    assert again.data.sequence_length == 8
    for field, value, words in (
        ("data", {"sequence_length": 64}, "of these images is 8; leave it out"),
        ("data", {"mixture": {"a": {"path": "x", "weight": 1}}}, "mixture is of text"),
        ("parallel", {"pipeline_partition": "time"}, "measures language models"),
    ):
        with pytest.raises(UserError, match=words):
            run("denoiser", **{field: value})
    for field, value in (("randaugment", 7), ("erasing", 0.1), ("mixup", 0.8), ("cutmix", 1), ("label_smoothing", 0.1)):
        with pytest.raises(UserError, match=f"augmentation.{field} is of head: classifier, .*; leave it out"):
            run("denoiser", augmentation={field: value, "flip": 0.1})
    assert run("denoiser", augmentation={"flip": 0.1, "mixup": 0.0, "crop_scale": None}).augmentation.flip == 0.1
    with pytest.raises(UserError, match="mean has 2 values for 3 channels"):
        run("classifier", augmentation={"mean": [0.5, 0.5]})


def test_grey_images_are_one_channel(tmp_path: Path) -> None:
    """Pillow's luma of the crop, with and without drawing; a model of one channel trains on it."""
    folder = str(load_config(str(write_classifier(tmp_path))).data.path)
    image = {"size": [16, 12], "patch": 4, "classes": 3}
    for head, training in (("denoiser", False), ("denoiser", True), ("classifier", True)):
        given = {"mean": [0.5], "std": [0.2]} if head == "classifier" else {}
        grey, colour = (
            run(head, data={"path": folder}, augmentation=given, model={**MODEL, "head": head, "image": {**image, **c}})
            for c in ({"channels": 1}, {})
        )
        other = grey.model_copy(update={"diffusion": DiffusionConfig(prediction="velocity")})
        differ = image_data.check(grey) != image_data.check(other)  # so that neither is resumed as the other
        assert differ == (head == "denoiser")
        mine, its = (image_data.open_split(folder, "train", config, training) for config in (grey, colour))
        assert mine[5]["image"].shape == (1, 16, 12) and its[5]["image"].shape == (3, 16, 12)
        luma = Image.fromarray(its[5]["image"].transpose(1, 2, 0)).convert("L")
        assert (mine[5]["image"][0] == np.asarray(luma)).all()
        task, model = task_of(grey), build_model(grey.model)
        initialize(model, 0)
        samples = task.training_samples(Budget((), 4, 2, 12))
        loss = task.loss(model, task.collate([samples[i] for i in range(3)]), Clock(0), True)
        loss.backward()
        assert torch.isfinite(loss) and model.embedding.weight.grad.shape == (16, 1, 4, 4)  # type: ignore[union-attr]


def batch_of(rows: int, seed: int = 0, beside: int = 1) -> dict[str, torch.Tensor]:
    """Mixed samples, ``beside`` of whose partners are not among them."""
    random = np.random.default_rng(seed)
    boxes = [[0, 0, 0, 0], [1, 2, 5, 9], [0, 0, 8, 12], [3, 3, 3, 3]]
    images = rows + beside
    drawn = [
        arrays(RandAugment(chance=0.8).operations(Draws(seed, 0, i), 8, 12)) | Erase(0.5)(Draws(seed, 1, i), 8, 12)
        for i in range(images)
    ]
    return {
        "images": torch.from_numpy(random.integers(0, 256, (images, 3, 8, 12), dtype=np.uint8)),
        **{DRAWN[name]: torch.from_numpy(np.stack([one[name] for one in drawn])) for name in drawn[0]},
        "labels": torch.arange(rows) % 5,
        "other_rows": torch.arange(rows).flip(0) + beside,
        "other_labels": (torch.arange(rows) + 2) % 5,
        "kept": torch.from_numpy(random.random(rows, dtype=np.float32)),
        "boxes": torch.tensor([boxes[i % 4] for i in range(rows)]),
        "sample_ids": torch.arange(rows) + 3,
    }


def cut(batch: dict[str, torch.Tensor], first: int, last: int) -> dict[str, torch.Tensor]:
    """Samples of a mixed batch, with all images."""
    order = torch.tensor([*range(first, last), *range(first), *range(last, len(batch["images"]))])
    found = {name: x[order] if name in PICTURES else x[first:last] for name, x in batch.items()}
    return {**found, "other_rows": torch.argsort(order)[batch["other_rows"][first:last]]}


def test_images_and_labels_are_mixed_as_defined() -> None:
    config = run("classifier", augmentation={"label_smoothing": 0.1})
    batch = batch_of(7)
    images, shares = ClassifierTask(config).prepared(batch, True)
    pixels = image_operations.augment(batch["images"], batch["operations"], batch["tables"], batch["factors"])
    pixels = image_operations.erase(pixels, batch["erased"])
    assert (pixels != batch["images"]).flatten(1).any(1).sum() > 3
    mean, std = (np.array(x, np.float32)[:, None, None] for x in (config.augmentation.mean, config.augmentation.std))
    for i in range(7):
        rows = (i, int(batch["other_rows"][i]))
        own, other = ((pixels[row].numpy() / np.float32(255) - mean) / std for row in rows)
        kept, (top, left, bottom, right) = float(batch["kept"][i]), batch["boxes"][i].tolist()
        if i % 4 == 0:
            wanted = kept * own + (1 - kept) * other
        else:
            wanted = own.copy()
            wanted[:, top:bottom, left:right] = other[:, top:bottom, left:right]
        np.testing.assert_allclose(images[i].numpy(), wanted, atol=1e-5)
        label = np.full(5, 0.02)
        label[batch["labels"][i]] += 0.9 * kept
        label[batch["other_labels"][i]] += 0.9 * (1 - kept)
        np.testing.assert_allclose(shares[i].numpy(), label, atol=1e-6)
    assert torch.equal(mix(images, images + 1, torch.ones(7), torch.zeros(7, 4, dtype=torch.int64)), images)


def test_what_fills_up_a_batch_does_not_count() -> None:
    config = run("classifier")
    task, clock = ClassifierTask(config), Clock(0)
    model = build_model(config.model)
    initialize(model, 1)
    plain = {name: batch_of(4, beside=0)[name] for name in ("images", "labels", "sample_ids")}
    whole = task.figures(model, task.rows(plain, 3), clock)
    filled = task.figures(model, {**plain, "labels": torch.tensor([0, 1, 2, -1])}, clock)
    torch.testing.assert_close(filled * 4 / 3, whole)
    assert task.uncounted({"label": 3}) == {"label": -1}


@pytest.mark.parametrize("head", ["classifier", "denoiser"])
def test_micro_batches_of_one_and_nine_give_the_gradient_of_ten(head: str) -> None:
    """The engine's weight of a micro-batch is its places times micro-batches over the labels of the step."""
    config = run(head)
    task, clock = task_of(config), Clock(0)
    model = build_model(config.model).double()
    initialize(model, 1)
    if head == "denoiser":
        torch.nn.init.normal_(model.head.weight, std=0.3)  # type: ignore[union-attr, arg-type]
    batch = batch_of(10, beside=3 if head == "classifier" else 0)
    if head == "denoiser":
        batch = {name: batch[name] for name in ("images", "labels", "sample_ids")}
    noise = torch.randn(10, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    batch |= {"noise": noise, "timesteps": torch.arange(10) * 100} if head == "denoiser" else {}
    rest = cut(batch, 1, 10) if head == "classifier" else {name: x[1:] for name, x in batch.items()}
    parts = [task.rows(batch, 1), rest]

    def gradient(pieces: list[dict[str, torch.Tensor]], weigh: bool = True) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            clock.step_weight = task.labels(piece).numel() * len(pieces) / 10 if weigh else 1.0
            total = total + task.loss(model, piece, clock, True) / len(pieces)
        return torch.cat([x.flatten() for x in torch.autograd.grad(total, list(model.parameters()))])

    whole = gradient([batch])
    torch.testing.assert_close(gradient(parts), whole, rtol=1e-5, atol=1e-7)
    assert (gradient(parts, weigh=False) - whole).abs().max() > 1e-3 * whole.abs().max()


def test_hits() -> None:
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4], [9, 8, 7, 6, 5, 4], [9, 8, 7, 6, 5, 4], [1, 2, 3, 4, 5, 6]])
    labels = torch.eye(6)[[0, 4, 5, 5]]
    assert hits(logits, labels).tolist() == [0.5, 0.75]
    assert hits(logits, labels * 0).tolist() == [0.0, 0.0]
    assert hits(logits[:, :3], torch.eye(3)[[0, 1, 2, 0]]).tolist() == [0.25, 1.0]


def test_the_denoiser_is_asked_for_the_noise() -> None:
    config, batch = run("denoiser"), {"images": batch_of(3, beside=0)["images"], "labels": torch.tensor([0, 5, -1])}
    noise, process = torch.randn(3, 3, 8, 12), diffusion.linear()
    batch |= {"noise": noise, "timesteps": torch.tensor([0, 500, 999]), "sample_ids": torch.arange(3)}
    given: list[torch.Tensor] = []

    def model(noisy: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor, context: Any) -> torch.Tensor:
        given.extend((noisy, timesteps, labels))
        return torch.cat([noise * 0.5, noise * 0], 1)

    loss = DenoiserTask(config).loss(model, batch, Clock(0, step_weight=2.0), True)
    pixels = batch["images"].float() / 127.5 - 1
    torch.testing.assert_close(given[0], process.add_noise(pixels, noise, batch["timesteps"]))
    assert given[2].tolist() == [0, 5, 0]  # the last does not count
    predicted = torch.cat([noise * 0.5, noise * 0], 1)
    torch.testing.assert_close(
        loss, 2.0 * process.loss(predicted, pixels, noise, batch["timesteps"])[:2].sum().float() / 3
    )


def test_a_checksum_sees_every_part_and_no_order() -> None:
    task, batch = ClassifierTask(run("classifier")), batch_of(6)
    whole = task.checksum(batch)
    assert whole == sum(task.checksum(cut(batch, i, i + 1)) for i in (4, 2, 5, 0, 1, 3))
    for name, x in batch.items():
        other = x.clone()
        other[3] = 1 - other[3] if x.is_floating_point() else (5 if name == "other_rows" else 250) - other[3]
        assert task.checksum({**batch, name: other}) != whole, name
    beside = {**batch, "images": batch["images"].clone()}
    beside["images"][6] += 1
    assert task.checksum(beside) != whole, "a partner outside of the batch"


@given(
    stairs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=3), batch=st.integers(1, 6),
    position=st.integers(0, 80),
)  # fmt: skip
def test_the_batch_around_a_position(stairs: list[tuple[int, int]], batch: int, position: int) -> None:
    ends = np.cumsum([steps for steps, _ in stairs]).tolist()
    ramp = tuple((end, size) for end, (_, size) in zip(ends, stairs, strict=True))
    budget = Budget(ramp, batch, 100, 1)
    first, size = image_data.batch_around(ramp, batch, position)
    step = next(s for s in range(100) if budget.samples_before(s + 1) > position)
    assert (first, size) == (budget.samples_before(step), budget.batch_at(step))


def test_data_that_do_not_fit(tmp_path: Path) -> None:
    for name, write in (("a", write_classifier), ("b", write_denoiser)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    images, latents = str(tmp_path / "a" / "images"), str(tmp_path / "b" / "latents")
    latent = {**MODEL, "head": "denoiser", "image": {"size": [4, 6], "patch": 2, "channels": 4, "classes": 3}}
    identity = image_data.check(run("classifier", data={"path": images}))
    assert identity["samples"] == 36 and identity["kind"] == "images" and identity["classes"] == ["a", "b", "c"]
    identity = image_data.check(run("denoiser", model=latent, data={"path": latents}))
    factors = {"scaling_factor": 0.5, "shift_factor": 1.0, "shape": [2, 2, 4, 4, 6]}
    assert identity["samples"] == 30 and identity["latents"] == factors, "a run resumed on other factors is refused"
    for chance in (0.0, 0.1):
        config = run("denoiser", model=latent, data={"path": latents}, augmentation={"flip": chance})
        for split, training, flip in (("train", True, chance), ("validation", False, 0.0)):
            opened = image_data.open_split(latents, split, config, training)
            assert isinstance(opened, LatentSamples) and opened.flip == flip
    shutil.copytree(images, tmp_path / "other")
    (tmp_path / "other" / "classes.json").write_text('{"a": 0, "c": 1, "b": 2}')
    other = {"path": images, "validation": {"x": str(tmp_path / "other")}}
    few = {**MODEL, "head": "classifier", "image": {**IMAGE, "classes": 2}}
    for head, changes, words in (
        ("classifier", {}, "data.path is not set"),
        ("classifier", {"data": {"path": "nowhere"}}, "nowhere: no such folder; write it with `lightnet data images"),
        ("classifier", {"data": {"path": str(tmp_path)}}, "no manifest of images or latents"),
        ("classifier", {"data": {"path": latents}}, "holds latents, head: classifier takes images"),
        ("classifier", {"model": few, "data": {"path": images}}, "holds 3 classes; set model.image.classes=3 or more"),
        ("denoiser", {"model": latent, "data": {"path": images}}, "holds images; set model.image.channels=3, or 1"),
        ("denoiser", {"data": {"path": latents}}, r"are \[4, 4, 6\], .* set model.image.channels=4 model.image.size="),
        ("classifier", {"data": {"path": images, "validation": {"x": images + "/none"}}}, "none is no split"),
        ("classifier", {"data": {"path": images, "validation": {"heldout": images}}}, "choose another"),
        ("classifier", {"data": other, "validation": {"interval": 1}}, "other: class 1 is c, in the training data b"),
    ):
        with pytest.raises((UserError, DataError), match=words):
            image_data.check(run(head, **changes))
    manifest = Path(latents, "manifest.json")
    manifest.write_text(
        manifest.read_text().replace('"scaling_factor": 0.5', '"scaling_factor": 0.5, "scaled_std": 5.3')
    )
    with pytest.raises(
        UserError, match=r"standard deviation of 5\.3, and noise has 1; correct the VAE's scaling_factor"
    ):
        image_data.check(run("denoiser", model=latent, data={"path": latents}))
