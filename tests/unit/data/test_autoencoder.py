"""``lightnet data vae``: a small VAE that learns, whose latents have the scale it says, and the whole latent path with it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from lightnet_data import image_dataset
from lightnet_data.autoencoder import VaeOptions, build
from lightnet_data.image_dataset import LatentSamples
from lightnet_data.sample_shards import SampleStore
from PIL import Image

from lightnet_llm.cli import main
from lightnet_llm.config import load_config
from tests.conftest import Ranks
from tests.parallel.images import write_classifier
from tests.unit.eval.test_features import runs  # noqa: F401 - a fixture
from tests.unit.eval.test_vision_benchmarks import script


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(load_config(str(write_classifier(tmp_path_factory.mktemp("images")))).data.path)


def made(images: str, output: Path, *more: object) -> dict:
    small = ("--size", 16, "--width", 8, "--factor", 4, "--batch", 6, "--device", "cpu")
    result = run("data", "vae", images, "--output", output, *small, "--json", *more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def vae(images: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    output = tmp_path_factory.mktemp("vae") / "out"
    return output, made(images, output, "--steps", 30, "--learning-rate", "5e-3")


def test_it_learns_and_says_what_it_reached(images: str, vae: tuple[Path, dict], tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    output, facts = vae
    assert facts == {"output": str(output), **json.loads((output / "training.json").read_text())}
    barely = made(images, tmp_path / "barely", "--steps", 1)
    assert facts["loss"] < 0.9 * barely["loss"] and facts["psnr"] > barely["psnr"] + 1
    model = AutoencoderKL.from_pretrained(output)
    store, errors = SampleStore(images, "validation"), []
    assert facts["measured_on"] == "validation" and facts["parameters"] == sum(p.numel() for p in model.parameters())
    from lightnet_data import pictures

    for row in range(12):
        pixels = np.asarray(pictures.center_crop(pictures.decode(store.read(row)[0]), 16)).transpose(2, 0, 1)
        values = torch.from_numpy(pixels.copy())[None].float() / 127.5 - 1
        with torch.no_grad():
            decoded = model.decode(model.encode(values).latent_dist.mean).sample.clamp(-1, 1)
        errors.append(float((decoded - values).square().mean()))
    assert facts["psnr"] == pytest.approx(10 * np.log10(4 / np.mean(errors)), abs=1e-3)


def test_the_same_seed_gives_the_same_weights(images: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made(images, tmp_path / name, "--steps", 2, "--seed", seed)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = ((tmp_path / name / "diffusion_pytorch_model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(("factor", "width"), [(1, 8), (2, 16), (8, 12)])
def test_its_latents_have_the_shape_that_is_asked_for(factor: int, width: int) -> None:
    model = build(VaeOptions(16, factor=factor, channels=3, width=width))
    latent = model.encode(torch.zeros(2, 3, 16, 16)).latent_dist.mean
    assert latent.shape == (2, 3, 16 // factor, 16 // factor) and model.decode(latent).sample.shape == (2, 3, 16, 16)


def test_the_whole_latent_path(
    images: str,
    vae: tuple[Path, dict],
    runs: tuple[Path, Path, str],  # noqa: F811
    tmp_path: Path,
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its latents are of mean 0 and deviation 1, a denoiser trains on them, samples are decoded by it to pixels and compared."""
    result = run(
        "data", "latents", images, "--vae", vae[0], "--size", 16, "--device", "cpu", "--output", tmp_path / "latents"
    )
    assert result.exit_code == 0, result.output
    found = LatentSamples(tmp_path / "latents", "train")
    drawn = image_dataset.collate([found[i] for i in range(36)])["latents"]
    assert drawn.shape == (36, 4, 4, 4) and abs(float(drawn.mean())) < 0.15 and abs(float(drawn.std()) - 1) < 0.15
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
model: {{head: denoiser, causal: false, axes: 2, norm: layer, layers: 2, width: 32, heads: 2, glu_width: 48, gate_rank: 4,
  tpe_rank: 4, tpe_init_length: 4, image: {{size: [4, 4], patch: 1, channels: 4, classes: 3}}}}
data: {{path: {tmp_path / "latents"}}}
train: {{steps: 4, global_batch: 4, micro_batch: 4, precision: fp32}}
optimizer: {{learning_rate: 1.0e-3}}
validation: {{interval: 4, samples: 4}}
checkpoint: {{interval: 4}}
"""
    )
    ranks.train(1, config, [], tmp_path, "run")
    where, sheet, out = tmp_path / "run", tmp_path / "sheet.png", tmp_path / "x.npz"
    command = ("sample", where, "--sampler", "ddim", "--steps", 4, "--per-class", 2, "--output", sheet, "--npz", out)
    result = run(*command, "--vae", vae[0], "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert np.load(out)["images"].shape == (6, 16, 16, 3) and Image.open(sheet).size == (2 * 18 - 2, 3 * 18 - 2)
    common = ["x", str(where), "--features", str(runs[0]), "--per-class", "4", "--steps", "4", "--images", images]
    monkeypatch.setattr(sys, "argv", [*common, "--output", str(tmp_path / "x.json"), "--vae", str(vae[0])])
    script("vision_samples").main()
    facts = json.loads((tmp_path / "x.json").read_text())
    coded, floor = facts["training_images_through_the_vae"], facts["training_images"]
    assert coded["images"] == 12 and coded["frechet_distance"] > floor["frechet_distance"]
    assert [(row["step"], row["guidance"]) for row in facts["rows"]] == [(4, 1.0), (4, 1.5)]
    monkeypatch.setattr(sys, "argv", common)
    with pytest.raises(SystemExit):
        script("vision_samples").main()


def test_what_is_refused(images: str, vae: tuple[Path, dict], tmp_path: Path) -> None:
    for more, words in (
        (("--size", 18, "--factor", 4), "--size 18: must be a multiple of --factor 4; nearest 16"),
        (("--size", 16, "--factor", 3), "--factor 3: must be a power of two"),
        (("--size", 16, "--steps", 0), "--steps 0: must be at least 1"),
        (("--size", 16, "--width", 0), "--width 0: must be at least 1"),
        (("--size", 16, "--steps", 3, "--learning-rate", "1e30"), "the loss is not finite"),
        (("--size", 16, "--learning-rate", "nan"), "--learning-rate nan: must be a number above 0"),
        (("--size", 16, "--learning-rate", "-1"), "--learning-rate -1.0: must be a number above 0"),
        (("--size", 16, "--device", "cuda:99"), "--device cuda:99: not here"),
        (("--size", 16, "--output", vae[0]), "exists; choose another --output"),
    ):
        result = run("data", "vae", images, "--output", tmp_path / "x", "--device", "cpu", *more)
        assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1, result.output
        assert not list(tmp_path.iterdir())
    result = run("data", "vae", tmp_path, "--output", tmp_path / "x", "--size", 16)
    assert result.exit_code == 1 and str(tmp_path) in result.stderr
