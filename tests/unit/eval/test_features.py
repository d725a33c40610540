"""Figures of drawn images in features: of a classifier's run, of scripted nets, and by the command."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from lightnet_data.image_dataset import ImageSamples
from lightnet_eval.features import Reference, batches, compare, look, open_net
from lightnet_eval.images import load_classifier
from torch import Tensor, nn

from lightnet_llm.cli import main
from lightnet_llm.config import load_config
from lightnet_llm.errors import UserError
from lightnet_llm.models import Denoiser, ForwardContext, ImageClassifier, initialize
from lightnet_llm.training.image_tasks import ClassifierTask
from tests.parallel.images import MODEL, write_classifier
from tests.unit.inference.toy import save


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A classifier, a denoiser of the same pixels, and the folder of these."""
    folder = tmp_path_factory.mktemp("runs")
    config = load_config(str(write_classifier(folder)), ["train.ema=null"])
    classes = {"kind": "images", "classes": ["a", "b", "c"]}
    for name in ("classifier", "denoiser"):
        (folder / name).mkdir()
    (folder / "classifier" / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    classifier = ImageClassifier(config.model)
    initialize(classifier, 5)
    save(classifier, folder / "classifier", 3, data=classes)  # type: ignore[arg-type]
    given = yaml.safe_load(f"{{head: denoiser, {MODEL}, image: {{size: [16, 12], patch: 4, classes: 4}}}}")
    pixels = {"model": given, "data": {"path": config.data.path}, "augmentation": {"center_share": 1.0}}
    pixels |= {"train": config.model_dump(mode="json")["train"]}
    (folder / "denoiser" / "config.yaml").write_text(yaml.safe_dump(pixels))
    denoiser = Denoiser(load_config(str(folder / "denoiser" / "config.yaml")).model)
    initialize(denoiser, 5)
    save(denoiser, folder / "denoiser", 7, data=classes)  # type: ignore[arg-type]
    return folder / "classifier", folder / "denoiser", str(config.data.path)


class Published(nn.Module):
    """The calls of the file published with StyleGAN2-ADA."""

    def forward(self, img: Tensor, return_features: bool = False, no_output_bias: bool = False) -> Tensor:
        values = img.float().mean((2, 3))
        if return_features:
            return values
        return values.softmax(1) if no_output_bias else values * 0.0


class Three(nn.Module):
    def forward(self, img: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = img.float()
        return values.mean((2, 3)), values.amax((2, 3)), values[:, :, :2, :2]


class Wrong(nn.Module):
    def forward(self, img: Tensor) -> Tensor:
        return img.float().mean()


def pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 12, 3), dtype=np.uint8)


def test_a_classifier_sees_what_its_validation_shows_it(runs: tuple[Path, Path, str]) -> None:
    """Images as they are stored, larger than it takes: cropped and normed as in the run that trained it."""
    stored = ImageSamples(runs[2], "validation", shuffle=False)
    net = open_net(runs[0], "cpu")
    seen = net.see(np.stack([stored[i]["image"].transpose(1, 2, 0) for i in range(5)]))
    assert not net.inception and net.name.endswith("classifier (classifier, step 3)")
    model, config, _, _ = load_classifier(runs[0], "cpu")
    task = ClassifierTask(config)
    held = task.held_out(f"{runs[2]}/validation")
    images, _ = task.prepared(task.collate([held[i] for i in range(5)]), False)
    torch.testing.assert_close(seen.probabilities, model(images).logits.softmax(1))
    torch.testing.assert_close(model.head(seen.features).softmax(1), seen.probabilities)
    hidden = model.image_tokens(model.embedding(images), model.embedding.grid(images), ForwardContext())
    torch.testing.assert_close(hidden.mean(1), seen.features)
    assert seen.spatial is not None and seen.spatial.shape == (5, 12 * 7)  # 4 x 3 tokens, seven channels


def test_scripted_nets(tmp_path: Path) -> None:
    for name, net in (("published", Published()), ("three", Three()), ("wrong", Wrong())):
        torch.jit.script(net).save(tmp_path / f"{name}.pt")
    images = pixels(40)
    seen = open_net(tmp_path / "published.pt", "cpu").see(images)
    means = torch.from_numpy(images).float().mean((1, 2))
    torch.testing.assert_close(seen.features, means)
    torch.testing.assert_close(seen.probabilities, means.softmax(1))
    assert seen.spatial is None
    seen = open_net(tmp_path / "three.pt", "cpu").see(images)
    torch.testing.assert_close(seen.probabilities, torch.from_numpy(images).float().amax((1, 2)).softmax(1))
    assert seen.spatial is not None and seen.spatial.shape == (40, 12)
    with pytest.raises(UserError, match=r"wrong.pt: must give features \[B, F\]"):
        open_net(tmp_path / "wrong.pt", "cpu").see(images)
    net = open_net(tmp_path / "published.pt", "cpu")
    found = compare(net, look(net, batches(images)), look(net, batches(images)))
    assert found["fid"] < 1e-6 and found["sfid"] is None and found["precision"] == found["recall"] == 1.0
    assert found["inception_score"] > 0 and found["images"] == found["reference_images"] == 40
    shares = torch.eye(4).repeat_interleave(25, 0)  # class by class, and all sure: nearly as many classes as there are
    sorted_look = look(net, batches(pixels(100)))
    sorted_look.probabilities = [shares]
    assert compare(net, sorted_look, look(net, batches(images)))["inception_score"] > 3
    with pytest.raises(UserError, match="3 images are too few to compare"):
        compare(net, look(net, batches(images[:3])), look(net, batches(images)))


def test_references(runs: tuple[Path, Path, str], tmp_path: Path) -> None:
    whole = np.concatenate(list(Reference(runs[2], (16, 12), 1.0)))
    again = np.concatenate(list(Reference(f"{runs[2]}/validation", (16, 12), 1.0)))
    assert whole.shape == (12, 16, 12, 3) and whole.dtype == np.uint8 and (whole == again).all()
    assert Reference(f"{runs[2]}/train", (16, 12)).count == 36
    for name in ("images", "arr_0"):
        np.savez(tmp_path / f"{name}.npz", **{name: pixels(70)})
        assert (np.concatenate(list(Reference(str(tmp_path / f"{name}.npz"), (9, 9)))) == pixels(70)).all()
    np.savez(tmp_path / "wrong.npz", images=pixels(3)[..., :1])
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "other.npz", labels=np.zeros(3))
    for name, words in (
        ("wrong.npz", "wanted is uint8"),
        ("text.npz", "holds no arrays"),
        ("other.npz", "holds no arrays"),
        ("nowhere", "name a folder of lightnet data images"),
    ):
        with pytest.raises(UserError, match=words):
            Reference(str(tmp_path / name), (9, 9))


def test_the_command(runs: tuple[Path, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier, denoiser, data = runs
    command = ["sample", str(denoiser), "--sampler", "ddim", "--steps", "2", "--per-class", "9", "--device", "cpu"]
    command += ["--output", str(tmp_path / "x.png"), "--reference", data, "--features", str(classifier)]
    result = CliRunner().invoke(
        main, [*command, "--figures", str(tmp_path / "x.json"), "--npz", str(tmp_path / "x.npz")]
    )
    assert result.exit_code == 0, result.output
    assert "27 images against 12: frechet distance " in result.stdout
    facts = json.loads((tmp_path / "x.json").read_text())
    net, drawn = open_net(classifier, "cpu"), np.load(tmp_path / "x.npz")["images"]
    expected = compare(net, look(net, batches(drawn)), look(net, Reference(data, (16, 12), 1.0)))
    assert facts["figures"] == expected and facts["step"] == 7 and expected["frechet_distance"] > 0
    from PIL import Image

    assert Image.open(tmp_path / "x.png").size == (8 * 14 - 2, 3 * 18 - 2)
    np.savez(tmp_path / "three.npz", images=drawn[:3])
    monkeypatch.setattr("lightnet_llm.inference.images.draw", None)  # all of this is said before
    for more, words in (
        (["--features", str(tmp_path / "none")], "no such file or folder"),
        (["--features", str(tmp_path / "x.json")], "neither TorchScript nor tensors"),
        (["--features", str(denoiser)], "holds a denoiser"),
        (["--reference", str(tmp_path)], "name a folder of lightnet data images"),
        (["--per-class", "1", "--reference", data], "3 drawn images are too few to compare; draw 4 or more"),
        (["--reference", str(tmp_path / "three.npz")], "three.npz: 3 images are too few; give 4 or more"),
        (["--npz", str(tmp_path / "x.png")], "name one file twice"),
    ):
        result = CliRunner().invoke(main, [*command, *more])
        assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1, result.output
    result = CliRunner().invoke(main, ["sample", str(denoiser), "--reference", data])
    assert result.exit_code == 1 and "go together" in result.stderr
    result = CliRunner().invoke(main, ["eval", str(denoiser)])
    assert result.exit_code == 1 and "lightnet sample --reference DIR --features RUN" in result.stderr
