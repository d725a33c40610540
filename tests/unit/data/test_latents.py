"""``lightnet data latents``: the VAE's own distribution of every image and its mirror, resumed by shard."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from lightnet_data import latents, pictures, sample_shards
from lightnet_data.errors import DataError
from lightnet_data.sample_shards import SampleStore
from PIL import Image

from lightnet_llm.cli import main
from tests.small_vae import small_vae


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vae")
    small_vae(block_out_channels=(8, 8), scaling_factor=0.5).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("images")
    for i in range(14):
        values = np.random.default_rng(i).integers(0, 256, (400, 300 + 20 * i, 3), dtype=np.uint8)
        place = where / "tree" / "ab"[i % 2] / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(place)
    made = run("images", where / "tree", "--output", where / "out", "--shard-size", 2, "--holdout", "0.4")
    assert made.exit_code == 0, made.output
    assert len(list((where / "out").glob("train*.tar"))) > 1
    return where / "out"


def stored(folder: Path, split: str, number: int) -> np.ndarray:
    return np.load(io.BytesIO(SampleStore(folder, split, "latents").read(number)[0]))


def test_equal_to_the_vae_itself(source: Path, vae: Path, tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    out = tmp_path / "out"
    result = run("latents", source, "--vae", vae, "--size", 32, "--batch", 3, "--device", "cpu", "--output", out)
    assert result.exit_code == 0, result.output
    assert run("verify", out).exit_code == 0
    model = AutoencoderKL.from_pretrained(vae)
    values = []
    for split in ("train", "validation"):
        images, own = SampleStore(source, split), SampleStore(out, split)
        assert len(images) == len(own) and (images.labels == own.labels).all()
        for number in range(len(images)):
            image = pictures.center_crop(pictures.decode(images.read(number)[0]), 32)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
            for mirrored in range(2):
                with torch.no_grad():
                    expected = model.encode(pixels.flip(3) if mirrored else pixels).latent_dist
                found = torch.from_numpy(stored(out, split, number))[mirrored].float()
                torch.testing.assert_close(found[0], expected.mean[0], atol=2e-3, rtol=2e-3)
                torch.testing.assert_close(found[1], expected.logvar[0], atol=2e-3, rtol=2e-3)
                values.append(expected.mean + torch.randn(1000, 1, 1, 1) * expected.std)
    facts = sample_shards.load(out)["latents"]
    assert facts["shape"] == [2, 2, 4, 16, 16] and facts["scaling_factor"] == 0.5 and facts["size"] == 32
    drawn = torch.cat(values) * 0.5
    assert facts["scaled_std"] == pytest.approx(float(drawn.std()), rel=0.02)
    assert facts["scaled_mean"] == pytest.approx(float(drawn.mean()), abs=0.02)
    assert (out / "classes.json").read_text() == (source / "classes.json").read_text()
    result = run("inspect", out, "--output", tmp_path / "sheet.png")
    assert result.exit_code == 0 and "float16 [2, 2, 4, 16, 16]" in result.stdout and (tmp_path / "sheet.png").is_file()


@pytest.mark.parametrize("split", ["train", "validation"])
def test_stopped_and_gone_on_with(
    split: str, source: Path, vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped behind the first shard, or behind a whole split."""
    options = latents.LatentOptions(size=32, flip=False, device="cpu", batch=2)
    expected = latents.prepare_latents(source, tmp_path / "whole", vae, options)
    calls = []
    original = latents.Encoder.__call__

    def stopping(self: latents.Encoder, images: list) -> np.ndarray:
        calls.append(len(images))
        if sum(calls) > first:
            raise KeyboardInterrupt
        return original(self, images)

    monkeypatch.setattr(latents.Encoder, "__call__", stopping)
    train = SampleStore(source, "train")
    first = int((train.index[:, 0] == 0).sum()) if split == "train" else len(train)
    with pytest.raises(KeyboardInterrupt):
        latents.prepare_latents(source, tmp_path / "out", vae, options)
    assert not (tmp_path / "out").exists()
    done, calls, first = first, [], 10**9
    found = latents.prepare_latents(source, tmp_path / "out", vae, options)
    assert found == expected and sum(calls) == expected["samples"] - done
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    assert not (tmp_path / "out.partial").exists()


def test_another_request_starts_anew(source: Path, vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = latents.Encoder.__call__, [0]

    def stopping(self: latents.Encoder, images: list) -> np.ndarray:
        seen[0] += len(images)
        if seen[0] > 12:
            raise KeyboardInterrupt
        return original(self, images)

    with monkeypatch.context() as patch:
        patch.setattr(latents.Encoder, "__call__", stopping)
        with pytest.raises(KeyboardInterrupt):
            latents.prepare_latents(
                source, tmp_path / "out", vae, latents.LatentOptions(size=32, device="cpu", batch=1)
            )
    latents.prepare_latents(source, tmp_path / "out", vae, latents.LatentOptions(size=16, device="cpu"))
    assert stored(tmp_path / "out", "train", 0).shape == (2, 2, 4, 8, 8)
    assert run("verify", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--size", "33"], "takes multiples of 2; nearest 32"),
        (["--batch", "0"], "--batch 0"),
        (["--device", "cuda:77"], "--device cuda:77"),
    ],
)
def test_what_is_refused(arguments: list[str], what: str, source: Path, vae: Path, tmp_path: Path) -> None:
    result = run("latents", source, "--vae", vae, "--output", tmp_path / "out", *arguments)
    assert result.exit_code == 1 and what in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_no_vae_and_no_images(source: Path, vae: Path, tmp_path: Path) -> None:
    for images, folder, what in ((source, source, "no config.json"), (vae, vae, "no manifest of images")):
        result = run("latents", images, "--vae", folder, "--output", tmp_path / "out")
        assert result.exit_code == 1 and what in result.stderr
    (tmp_path / "config.json").write_text("{}")
    result = run("latents", source, "--vae", tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 1 and "holds no AutoencoderKL" in result.stderr and len(result.stderr.splitlines()) == 1


def test_beyond_fp16_is_refused(source: Path, vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        latents.Encoder, "__call__", lambda self, images: np.full((len(images), *self.shape), np.inf, np.float16)
    )
    with pytest.raises(DataError, match=r"sample 0: its latent is beyond fp16"):
        latents.prepare_latents(source, tmp_path / "out", vae, latents.LatentOptions(size=32, device="cpu"))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_verify_finds_latents_of_another_shape(source: Path, vae: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    latents.prepare_latents(source, out, vae, latents.LatentOptions(size=16, device="cpu"))
    written = json.loads((out / "manifest.json").read_text())
    written["latents"]["shape"] = [2, 2, 4, 16, 16]
    (out / "manifest.json").write_text(json.dumps(written))
    result = run("verify", out)
    assert result.exit_code == 1 and "not float16 [2, 2, 4, 16, 16]" in result.stderr
