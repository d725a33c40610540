"""Figures of an image classifier, by the command as well."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from lightnet_data.image_dataset import ImageSamples
from lightnet_data.image_transforms import CenterCrop
from lightnet_eval.images import load_classifier, measure

from lightnet_llm.cli import main
from lightnet_llm.config import load_config
from lightnet_llm.models import ImageClassifier, initialize
from lightnet_llm.report import write_report
from lightnet_llm.training.image_tasks import ClassifierTask
from tests.parallel.images import write_classifier
from tests.unit.inference.toy import copy, save


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = load_config(str(write_classifier(folder)))
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    model = ImageClassifier(config.model)
    initialize(model, 5)
    model.head.weight.data.mul_(50)
    save(model, folder, 3, data={"kind": "images", "classes": ["a", "b", "c"]})  # type: ignore[arg-type]
    return folder


def test_figures_are_those_of_the_definition(run: Path) -> None:
    loaded = load_classifier(run, "cpu")
    model, config, step, _ = loaded
    facts = measure(loaded)
    samples = ClassifierTask(config).held_out(f"{config.data.path}/validation")
    assert step == 3 and facts["images"] == samples.samples_per_epoch == 12 and facts["class_names"] == ["a", "b", "c"]
    confusion, losses = np.zeros((3, 3), int), []
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.augmentation.mean, config.augmentation.std))
    for i in range(12):
        pixels = (torch.from_numpy(samples[i]["image"]).float() / 255 - mean) / std
        logits = model(pixels[None]).logits[0].log_softmax(0)
        confusion[samples[i]["label"], int(logits.argmax())] += 1
        losses.append(-float(logits[samples[i]["label"]]))
    assert facts["confusion"] == confusion.tolist() and abs(facts["loss"] - np.mean(losses)) < 1e-5
    assert facts["top1"] == pytest.approx(confusion.trace() / 12) and facts["top5"] == pytest.approx(1.0)
    assert measure(loaded, limit=5)["images"] == 5
    assert isinstance(samples, ImageSamples)


@pytest.mark.parametrize("size", [(24, 20), (8, 16), (4, 4)])
def test_other_sizes_than_trained(size: tuple[int, int], run: Path) -> None:
    """Larger, of the other shape, a single patch: the model itself on the crop that validation would make of that size."""
    loaded = load_classifier(run, "cpu")
    config, crop = loaded.config, CenterCrop(size, loaded.config.augmentation.center_share)
    samples = ImageSamples(str(config.data.path), "validation", crop, shuffle=False)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (config.augmentation.mean, config.augmentation.std))
    pixels = torch.stack([torch.from_numpy(samples[i]["image"]) for i in range(12)]).float() / 255
    assert pixels.shape[2:] == size
    chances = loaded.model((pixels - mean) / std).logits.log_softmax(1)
    labels = torch.tensor([samples[i]["label"] for i in range(12)])
    result = CliRunner().invoke(main, ["eval", str(run), "--size", f"{size[0]}x{size[1]}", "--json"])
    facts = json.loads(result.stdout)
    assert facts["size"] == list(size) and facts["loss"] == pytest.approx(-float(chances[range(12), labels].mean()))
    assert np.diag(facts["confusion"]).sum() == int((chances.argmax(1) == labels).sum())
    assert measure(loaded, size=size)["loss"] == pytest.approx(facts["loss"])
    assert loaded.config.model.image is not None and loaded.config.model.image.size == (16, 12)
    assert abs(facts["loss"] - measure(loaded)["loss"]) > 1e-3


def test_the_command_and_the_report(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["eval", str(run), "--output", str(run / "confusion.png")])
    assert result.exit_code == 0 and "12 images of step 3: top-1 " in result.stdout
    assert (run / "confusion.png").read_bytes().startswith(b"\x89PNG")
    split = f"{load_config(str(run / 'config.yaml')).data.path}/train"
    result = CliRunner().invoke(
        main, ["eval", str(run), "--json", "--data", split, "--output", str(tmp_path / "x.json")]
    )
    assert json.loads(result.stdout)["images"] == 36 == json.loads((tmp_path / "x.json").read_text())["images"]
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0}\n{"step": 1, "validation": {"heldout": {"top1": 0.5}}}\n'
    )
    page = write_report([run]).read_text()
    assert "data:image/png;base64,iVBOR" in page and "Validation, top-1" in page


def test_a_damaged_checkpoint_is_passed_over_aloud(run: Path, tmp_path: Path) -> None:
    copied = copy(run, tmp_path / "run")
    shutil.copytree(copied / "checkpoints" / "step_00000003", copied / "checkpoints" / "step_00000004")
    (copied / "checkpoints" / "step_00000004" / "config.yaml").write_text("cut")
    result = CliRunner().invoke(main, ["eval", str(copied), "--limit", "1"])
    assert result.exit_code == 0 and "1 images of step 3" in result.stdout
    assert "warning: passing over a damaged checkpoint: " in result.stderr and "step_00000004" in result.stderr


def test_other_classes_are_refused(run: Path, tmp_path: Path) -> None:
    """As many, but other ones: in a folder given, and in the run's own since it was trained."""
    known = str(load_config(str(run / "config.yaml")).data.path)
    shutil.copytree(known, tmp_path / "images")
    (tmp_path / "images" / "classes.json").write_text('{"a": 0, "c": 1, "b": 2}')
    moved = copy(run, tmp_path / "run")
    for path in (moved, moved / "checkpoints" / "step_00000003"):
        text = (path / "config.yaml").read_text().replace(known, str(tmp_path / "images"))
        (path / "config.yaml").write_text(text)
    manifest = moved / "checkpoints" / "step_00000003" / "manifest.json"
    facts = json.loads(manifest.read_text())
    del facts["files"]["config.yaml"]
    manifest.write_text(json.dumps(facts))
    for arguments in ([str(run), "--data", str(tmp_path / "images")], [str(moved)]):
        result = CliRunner().invoke(main, ["eval", *arguments])
        assert result.exit_code == 1 and result.stderr.count("\n") == 1, result.output
        assert f"{tmp_path}/images: class 1 is c, in the training data b; make it again" in result.stderr


@pytest.mark.parametrize("name", ["x.png", "x.json"])
def test_an_output_is_whole_or_as_it_was(name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *rest: object, **more: object) -> None:
        path.write_bytes(b"cut")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightnet_eval.images.draw_confusion", lambda facts, path: full(path))
    monkeypatch.setattr(Path, "write_text", full)
    (tmp_path / name).write_bytes(b"before")
    result = CliRunner().invoke(main, ["eval", str(run), "--limit", "1", "--output", str(tmp_path / name)])
    assert result.exit_code == 1 and f"{name}: cannot be written (No space left on device)" in result.stderr
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ([str(run), "--data", str(tmp_path)], "name a folder of lightnet data images"),
        ([str(run), "--weights", "ema"], "holds no exponential average"),
        ([str(run), "--output", "nowhere/x.png"], "--output nowhere/x.png: cannot be written"),
        ([str(run), "--output", str(tmp_path)], "cannot be written"),
        ([str(run), "--size", "16x13"], "--size 16x13: not made of whole patches of 4"),
        ([str(run), "--size", "16"], "--size 16: must be HEIGHTxWIDTH"),
        (["elsewhere", "--size", "16x12"], "--size goes with image classifiers"),
        ([str(run), "--tasks", "paper"], "--tasks goes with language models"),
        ([str(run), "--text", "x.txt", "--tasks", "paper"], "--tasks goes with language models"),
        ([str(run), "--text", "x.txt"], "--text goes with language models"),
        ([str(run), "--processes", "2"], "--processes goes with language models"),
        ([str(run), "--baselines"], "--baselines goes with language models"),
        ([str(run), "--batch-tokens", "9"], "--batch-tokens goes with language models"),
    ):
        result = CliRunner().invoke(main, ["eval", *arguments])
        assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1
