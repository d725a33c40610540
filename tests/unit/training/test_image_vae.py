"""A denoiser whose images a VAE encodes while it trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightnet_data.autoencoders import encoded, load
from lightnet_data.images import prepare_images
from lightnet_data.latents import LatentOptions, prepare_latents
from PIL import Image

from lightnet_llm.config import RunConfig
from lightnet_llm.config.load import validate
from lightnet_llm.errors import UserError
from lightnet_llm.training import image_data
from lightnet_llm.training.image_tasks import DenoiserTask
from tests.small_vae import small_vae

pytest.importorskip("diffusers")
SIZE, FACTOR, CHANNELS = 8, 2, 4


def save_vae(path: Path, **changes: Any) -> Path:
    small_vae(**{"scaling_factor": 1.5, "shift_factor": 0.1, **changes}).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of random colours, a VAE, and the images' latents."""
    path = tmp_path_factory.mktemp("vae")
    for i in range(7):
        place = path / "tree" / "train" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (21, 17, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place)
    prepare_images([str(path / "tree")], path / "images")
    save_vae(path / "coder")
    options = LatentOptions(size=SIZE * FACTOR, flip=False, device="cpu")
    prepare_latents(path / "images", path / "latents", path / "coder", options)
    return path


def config_of(folder: Path, data: str, **diffusion: Any) -> RunConfig:
    model = {
        "head": "denoiser", "causal": False, "axes": 2, "layers": 1, "width": 16, "heads": 2, "glu_width": 16, "gate_rank": 4,
        "tpe_rank": 2, "image": {"size": [SIZE, SIZE], "patch": 2, "channels": CHANNELS, "classes": 2},
    }  # fmt: skip
    tree = {
        "model": model,
        "data": {"path": str(folder / data)},
        "augmentation": {"crop_scale": None, "center_share": 1.0, "flip": 0.0},
        "diffusion": diffusion,
        "train": {"steps": 3, "name": "x", "precision": "fp32", "seed": 5},
    }
    return validate(tree, "here")


def test_they_are_the_stored_latents(folder):
    """Drawn from the same distribution by the same numbers; what is stored is fp16."""
    here = image_data.open_split(
        str(folder / "images"), "train", config_of(folder, "images", vae=str(folder / "coder")), True
    )
    there = image_data.open_split(str(folder / "latents"), "train", config_of(folder, "latents"), True)
    coder = load(folder / "coder")
    for position in (0, 6, 9):
        one, other = here[position], there[position]
        assert one["number"] == other["number"] and one["label"] == other["label"]
        pixels, posterior = (torch.from_numpy(one[name])[None] for name in ("image", "posterior"))
        latent = encoded(coder, pixels, posterior)[0]
        torch.testing.assert_close(latent, torch.from_numpy(other["latent"]), rtol=2e-3, atol=2e-3)


def test_the_loss_is_that_of_stored_latents(folder):
    """Of one batch, through the task: the same noise, time steps and dropped classes."""
    losses = []
    for config in (config_of(folder, "images", vae=str(folder / "coder")), config_of(folder, "latents")):
        task = DenoiserTask(config)
        samples = task._noised(task.opened(), 0.5)
        batch = task.collate([samples[position] for position in range(4)])
        clock = type("Clock", (), {"weight": 1.0, "image_context": lambda self, *_: None})()
        seen: list[torch.Tensor] = []

        def model(noisy, timesteps, labels, context, seen=seen):
            seen.append(labels)
            return torch.cat([noisy.sin(), noisy.cos()], 1)

        losses.append((task.loss(model, batch, clock, True), seen[0]))
        assert task.checksum(batch) == task.checksum(batch)
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=2e-3, atol=0)
    assert torch.equal(losses[0][1], losses[1][1])


def test_what_a_run_must_find_again(folder, tmp_path):
    config = config_of(folder, "images", vae=str(folder / "coder"))
    found = image_data.check(config)
    assert found["kind"] == "images"
    assert found["latents"] == {"scaling_factor": 1.5, "shift_factor": 0.1, "shape": [1, 2, CHANNELS, SIZE, SIZE]}
    image_data.open_vae.cache_clear()
    other = image_data.check(config_of(folder, "images", vae=str(save_vae(tmp_path / "other", scaling_factor=2.0))))
    assert other["vae"] != found["vae"] and other["latents"] != found["latents"]


def refusal(folder: Path, tmp_path: Path, case: str) -> RunConfig:
    if case == "missing":
        return config_of(folder, "images", vae=str(tmp_path / "none"))
    if case == "channels":
        return config_of(folder, "images", vae=str(save_vae(tmp_path / "three", latent_channels=3)))
    if case == "latents":
        return config_of(folder, "latents", vae=str(folder / "coder"))
    return config_of(folder, "images")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("missing", r"diffusion.vae: .*none: no config.json; name the folder of a diffusers AutoencoderKL"),
        ("channels", r"three: its latents have 3 channels, the model takes 4; set model.image.channels=3"),
        ("latents", r"latents: holds latents, which no VAE encodes; leave out diffusion.vae"),
        ("no vae", r"holds images; set model.image.channels=3, or 1 to take them as grey, or give diffusion.vae"),
    ],
)
def test_refusals_are_one_line(folder, tmp_path, case, told):
    with pytest.raises(UserError, match=told) as caught:
        image_data.check(refusal(folder, tmp_path, case))
    assert "\n" not in str(caught.value)


def test_latents_of_another_scale(folder, tmp_path):
    task = DenoiserTask(config_of(folder, "images", vae=str(save_vae(tmp_path / "far", scaling_factor=500.0))))
    batch = task.collate([task._noised(task.opened(), 0.0)[position] for position in range(4)])
    for _ in range(2):  # kernels are compiled in a pass of their own, whose errors come again
        with pytest.raises(UserError, match=r"far: scaled latents have a standard deviation of \d+.*correct the VAE's"):
            task._clean(batch)
