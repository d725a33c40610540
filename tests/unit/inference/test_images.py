"""Images drawn from a denoiser: the samplers' process, seeds, batches, guidance, sizes, and the command."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from lightnet_llm.cli import main
from lightnet_llm.cli.sample import _Place
from lightnet_llm.config import ModelConfig, dump_config, validate
from lightnet_llm.errors import UserError
from lightnet_llm.inference import images
from lightnet_llm.inference.images import Sampler, as_pixels, decode, draw, grid, load_denoiser, open_vae
from lightnet_llm.launch.hosts import free_port
from lightnet_llm.models import Denoiser, diffusion, initialize
from tests.parallel.images import write_denoiser
from tests.unit.inference.toy import save

MODEL: dict[str, Any] = {"head": "denoiser", "causal": False, "axes": 2, "norm": "layer", "layers": 2, "width": 16}
MODEL |= {"heads": 2, "glu_width": 16, "gate_rank": 4, "tpe_rank": 4, "tpe_init_length": 4, "initializer_std": 0.2}
MODEL |= {"image": {"size": [8, 8], "patch": 4, "classes": 5}}


@pytest.fixture(scope="module")
def model() -> Denoiser:
    model = Denoiser(ModelConfig.model_validate(MODEL))
    initialize(model, 3)
    torch.nn.init.normal_(model.head.weight, std=0.2, generator=torch.Generator().manual_seed(4))
    return model.eval()


@pytest.mark.parametrize("name", ["ddpm", "ddim"])
def test_an_image_is_the_same_in_every_batch_and_order(name: str, model: Denoiser) -> None:
    sampler, wanted = Sampler(name, 5, guidance=3.0), [(0, 0), (0, 1), (4, 0), (5, 2), (1, 7)]
    whole = draw(model, wanted, sampler, batch_size=5)
    assert whole.shape == (5, 3, 8, 8) and torch.isfinite(whole).all()
    torch.testing.assert_close(draw(model, wanted[::-1], sampler, batch_size=2).flip(0), whole, atol=1e-4, rtol=1e-4)
    assert torch.equal(draw(model, wanted, sampler, batch_size=5), whole)
    others = (Sampler(name, 5, 3.0, seed=1), Sampler(name, 5, 1.0), Sampler(name, 8, 3.0))
    assert all((draw(model, wanted, other, 5) - whole).abs().max() > 1e-2 for other in others)
    assert (whole[0] - whole[1]).abs().max() > 1e-2


class Knows(Denoiser):
    """Sees what noise was added to an image that is the same for all."""

    answer = torch.linspace(-0.9, 0.9, 3 * 8 * 8).view(3, 8, 8)
    prediction = "noise"

    def forward(self, noisy, timesteps, labels, context=None):  # type: ignore[no-untyped-def]
        kept = diffusion.linear().kept[timesteps].float().view(-1, 1, 1, 1)
        noise = (noisy - kept.sqrt() * self.answer) / (1 - kept).sqrt()
        if self.prediction == "velocity":
            noise = kept.sqrt() * noise - (1 - kept).sqrt() * self.answer
        return torch.cat([noise, torch.zeros_like(noise)], 1)


@pytest.mark.parametrize(("name", "steps"), [("ddpm", 1000), ("ddpm", 250), ("ddpm", 3), ("ddim", 50), ("ddim", 8)])
@pytest.mark.parametrize(("clip", "prediction"), [(True, "noise"), (False, "noise"), (False, "velocity")])
def test_a_model_that_knows_the_noise_finds_the_image(name: str, steps: int, clip: bool, prediction: str) -> None:
    """So the samplers run the process that training adds noise by, from its first step to its last."""
    model = Knows(ModelConfig.model_validate(MODEL))
    model.prediction = prediction
    found = draw(model, [(0, 0), (1, 0)], Sampler(name, steps, clip=clip, prediction=prediction))
    assert (found - Knows.answer).abs().max() < 1e-3


def test_other_sizes_and_none(model: Denoiser) -> None:
    assert draw(model, [(0, 0)], Sampler("ddim", 2), size=(12, 4)).shape == (1, 3, 12, 4)
    assert draw(model, [], Sampler("ddim", 2)).shape == (0, 3, 8, 8)


def test_pixels_and_grid() -> None:
    images = torch.tensor([-1.0, 0.0, 1.0, 7.0]).view(4, 1, 1, 1).expand(4, 3, 2, 3)
    pixels = as_pixels(images)
    assert pixels[:, 0, 0, 0].tolist() == [0, 128, 255, 255] and pixels.shape == (4, 2, 3, 3)
    assert (as_pixels(images[:, :1]) == pixels).all()  # grey
    sheet = grid(pixels, 3, gap=1)
    assert sheet.shape == (5, 11, 3)
    assert sheet[0, :, 0].tolist() == [0, 0, 0, 255, 128, 128, 128, 255, 255, 255, 255] and (sheet[2] == 255).all()


@pytest.mark.parametrize(
    ("sampler", "words"),
    [(Sampler("dpm"), "use ddpm or ddim"), (Sampler(steps=1001), "1 to 1000"), (Sampler("ddim", 7), "nearest: 8")],
)
def test_samplers_that_are_none(sampler: Sampler, words: str) -> None:
    with pytest.raises(UserError, match=words):
        sampler.scheduler()


@pytest.fixture(scope="module")
def run(model: Denoiser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as far as sampling reads it."""
    path = tmp_path_factory.mktemp("run")
    config = validate({"model": MODEL, "train": {"steps": 7, "name": "x", "precision": "fp32"}}, "here")
    (path / "config.yaml").write_text(dump_config(config))
    save(model, path, 7, data={"kind": "images", "classes": list("abcde")})  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def latent_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on latents of three channels, whose data folder says something else today; and a VAE of other factors."""
    from diffusers import AutoencoderKL

    path = tmp_path_factory.mktemp("latent")
    data = write_denoiser(path).parent / "latents"
    config = validate(
        {"model": MODEL, "data": {"path": str(data)}, "train": {"steps": 7, "name": "x", "precision": "fp32"}}, "here"
    )
    (path / "config.yaml").write_text(dump_config(config))
    drawn = Denoiser(config.model)
    initialize(drawn, 3)
    factors = {"scaling_factor": 2.0, "shift_factor": -1.0, "shape": [2, 2, 3, 8, 8]}
    save(drawn, path, 7, data={"kind": "latents", "classes": list("vwxyz"), "latents": factors})  # type: ignore[arg-type]
    coder = AutoencoderKL(latent_channels=3, norm_num_groups=4, block_out_channels=(4,), scaling_factor=0.25)
    coder.save_pretrained(path / "vae")
    return path, path / "vae"


def test_the_command(run: Path, tmp_path: Path) -> None:
    common = [
        "sample",
        str(run),
        "--sampler",
        "ddim",
        "--steps",
        "4",
        "--classes",
        "4,none",
        "--per-class",
        "3",
        "--json",
    ]
    for name, size in (("a", "4"), ("b", "1")):
        files = ["--output", str(tmp_path / f"{name}.png"), "--npz", str(tmp_path / f"{name}.npz")]
        result = CliRunner().invoke(main, [*common, *files, "--batch-size", size])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["classes"] == [4, 5] and json.loads(result.stdout)["step"] == 7
    first, second = (np.load(tmp_path / f"{name}.npz") for name in "ab")
    assert first["images"].shape == (6, 8, 8, 3) and first["labels"].tolist() == [4, 4, 4, 5, 5, 5]
    assert np.abs(first["images"].astype(int) - second["images"]).max() <= 1
    sheet = np.asarray(Image.open(tmp_path / "a.png"))
    assert sheet.shape == (18, 28, 3) and (sheet[:8, :8] == first["images"][0]).all()
    assert (sheet[10:, 20:] == first["images"][5]).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--classes", "6"], "class '6' is none of 0 to 4, or none"),
        (["--classes", "shoe"], "class 'shoe' is none of 0 to 4"),
        (["--steps", "2000"], "2000 steps: must be from 1 to 1000"),
        (["--size", "9x8"], "--size 9x8: not made of whole patches of 4"),
        (["--size", "9"], "must be HEIGHTxWIDTH"),
        (["--size", "8x²"], "--size 8x²: must be HEIGHTxWIDTH"),
        (["--classes", "²"], "class '²' is none of 0 to 4"),
        (["--output", "nowhere/x.png"], "nowhere/x.png: cannot be written"),
        (["--output", "x.jpg"], "--output x.jpg: pictures are PNG; name it x.png"),
        (["--weights", "ema"], "holds no exponential average"),
        (["--vae", "."], "draws pixels, which no VAE decodes; leave out --vae"),
        (["--guidance", "nan"], "--guidance nan: must be a number"),
    ],
)
def test_what_is_refused_in_one_line(arguments: list[str], words: str, run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["sample", str(run), "--output", str(tmp_path / "x.png"), *arguments])
    assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_latents_are_scaled_as_the_checkpoint_says(latent_run: tuple[Path, Path]) -> None:
    """Neither as the VAE says, nor as the data folder does today."""
    from diffusers import AutoencoderKL

    path, vae = latent_run
    loaded = load_denoiser(path, "cpu")
    assert loaded.classes == list("vwxyz") and loaded.latents["scaling_factor"] == 2.0
    latents = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    found = decode(latents, open_vae(vae, 3, torch.device("cpu")), loaded.latents, batch_size=2)
    with torch.no_grad():
        wanted = AutoencoderKL.from_pretrained(vae).decode(latents / 2.0 - 1.0).sample
    torch.testing.assert_close(found, wanted)


def test_the_checkpoint_says_that_it_draws_latents(latent_run: tuple[Path, Path], tmp_path: Path) -> None:
    path, vae = latent_run
    common = ["sample", str(path), "--sampler", "ddim", "--steps", "2", "--per-class", "1"]
    common += ["--classes", "z", "--output", str(tmp_path / "x.png")]
    result = CliRunner().invoke(main, common)
    assert result.exit_code == 1 and "draws latents; name the folder" in result.stderr
    result = CliRunner().invoke(main, [*common, "--vae", str(vae)])
    assert result.exit_code == 0 and Image.open(tmp_path / "x.png").size == (8, 8)


def test_a_run_that_encoded_its_images_names_the_vae(latent_run: tuple[Path, Path], tmp_path: Path) -> None:
    vae, run = latent_run[1], tmp_path / "run"
    run.mkdir()
    tree = {"model": MODEL, "diffusion": {"vae": str(vae)}, "train": {"steps": 7, "name": "x", "precision": "fp32"}}
    (run / "config.yaml").write_text(dump_config(validate(tree, "here")))
    drawn = Denoiser(validate(tree, "here").model)
    initialize(drawn, 3)
    factors = {"scaling_factor": 2.0, "shift_factor": -1.0, "shape": [1, 2, 3, 8, 8]}
    save(drawn, run, 7, data={"kind": "images", "classes": list("vwxyz"), "latents": factors})  # type: ignore[arg-type]
    common = ["sample", str(run), "--sampler", "ddim", "--steps", "2", "--per-class", "1", "--classes", "z"]
    result = CliRunner().invoke(main, [*common, "--output", str(tmp_path / "x.png")])
    assert result.exit_code == 0, result.output
    assert Image.open(tmp_path / "x.png").size == (8, 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no config.json; name the folder of a diffusers AutoencoderKL"),
        ("no JSON", "holds no AutoencoderKL"),
        ("{}", "holds no AutoencoderKL"),
        ({"latent_channels": 4}, "has 4 latent channels, the model 3"),
    ],
)
def test_a_vae_is_looked_at_before_anything_is_drawn(
    config: Any, words: str, latent_run: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import AutoencoderKL

    (tmp_path / "vae").mkdir()
    if isinstance(config, dict):
        AutoencoderKL(norm_num_groups=4, block_out_channels=(4,), **config).save_pretrained(tmp_path / "vae")
    elif config is not None:
        (tmp_path / "vae" / "config.json").write_text(config)
    monkeypatch.setattr(images, "draw", None)
    command = ["sample", str(latent_run[0]), "--output", str(tmp_path / "x.png"), "--vae", str(tmp_path / "vae")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1, result.output


def test_files_are_written_whole_or_not_at_all(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["sample", str(run), "--sampler", "ddim", "--steps", "2", "--classes", "0", "--per-class", "1"]
    common += ["--output", str(tmp_path / "x.png"), "--npz", str(tmp_path / "y.dat")]
    assert CliRunner().invoke(main, common).exit_code == 0
    assert np.load(tmp_path / "y.dat")["images"].shape == (1, 8, 8, 3)
    assert Image.open(tmp_path / "x.png").format == "PNG"
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"x.png", "y.dat"}

    def full(image: Image.Image, file: Any, kind: str) -> None:
        Path(file).write_bytes(b"cut")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    result = CliRunner().invoke(main, common)
    assert result.exit_code == 1 and "x.png: cannot be written (No space left" in result.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_not_finite_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightnet_llm.inference.images.draw", lambda *rest: torch.full((1, 3, 8, 8), torch.nan))
    output = ["--output", str(tmp_path / "x.png"), "--classes", "0", "--per-class", "1"]
    result = CliRunner().invoke(main, ["sample", str(run), *output])
    assert result.exit_code == 1 and "step 7 draws what is not finite; try" in result.stderr
    assert result.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_no_steps_are_no_default(run: Path) -> None:
    result = CliRunner().invoke(main, ["sample", str(run), "--steps", "0"])
    assert result.exit_code == 2 and "0 is not in the range x>=1" in result.stderr


@pytest.mark.slow
def test_ranks_draw_what_one_process_does(run: Path, tmp_path: Path) -> None:
    common = ["sample", str(run), "--sampler", "ddim", "--steps", "2", "--classes", "4,none", "--per-class", "3"]
    alone = [*common, "--output", str(tmp_path / "one.png"), "--npz", str(tmp_path / "one.npz")]
    assert CliRunner().invoke(main, alone).exit_code == 0
    command = [sys.executable, "-m", "lightnet_llm.cli", *common, "--device", "cpu"]
    command += ["--output", str(tmp_path / "two.png"), "--npz", str(tmp_path / "two.npz")]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(2)]
    try:
        assert [process.wait(timeout=200) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
    one, two = (np.load(tmp_path / f"{name}.npz") for name in ("one", "two"))
    assert one["images"].shape == (6, 8, 8, 3) and one["labels"].tolist() == two["labels"].tolist()
    assert np.abs(one["images"].astype(int) - two["images"]).max() <= 1
    assert len({image.tobytes() for image in two["images"]}) == 6


def test_ranks_without_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks and two images: what the third sends has a latent's shape."""
    images = np.arange(2 * 6 * 6 * 3, dtype=np.uint8).reshape(2, 6, 6, 3)
    sent = [images[:1], images[1:], np.zeros((0, 2, 2, 4), np.uint8)]
    place = _Place()
    place.size = 3
    monkeypatch.setattr("torch.distributed.gather_object", lambda own, parts: parts.__setitem__(slice(None), sent))
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    assert np.array_equal(place.together(images[:1], 2), images)


def test_a_checkpoint_that_does_not_say_how_latents_are_scaled(model: Denoiser, run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    save(model, tmp_path, 7, data={"kind": "latents", "classes": list("abcde")})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"its manifest does not say how the latents .* are scaled"):
        load_denoiser(tmp_path, "cpu")


def test_other_models_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["sample", str(tmp_path / "nothing")])
    assert result.exit_code == 1 and "no such checkpoint" in result.stderr
