"""benchmarks/vision*.py: the probe is a logistic regression; tables are written, at tiny sizes."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightnet_llm.config import load_config
from tests.parallel.images import write_classifier
from tests.unit.eval.test_features import runs  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[3]


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # a script finds those beside it
        patch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("decay", [1e-2, 1.0])
def test_the_probe_is_a_logistic_regression(decay: float) -> None:
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 200)
    pixels = random.normal(size=(200, 6)) + 0.7 * np.eye(4, 6)[labels]
    model = LogisticRegression(C=1 / (decay * 200), max_iter=2000, tol=1e-10).fit(pixels, labels)
    given = torch.from_numpy(pixels).float(), torch.from_numpy(labels)
    weights = script("vision_learning").fitted(*given, 4, decay, 200)
    centred = weights[:-1] - weights[:-1].mean(1, keepdim=True)  # what all classes share means nothing
    np.testing.assert_allclose(centred.numpy(), model.coef_.T, atol=2e-3)
    assert script("vision_learning").hits(*given, weights) == pytest.approx(model.score(pixels, labels), abs=0.011)


def test_distances_of_a_runs_checkpoints(runs: tuple[Path, Path, str], tmp_path: Path, monkeypatch: Any) -> None:  # noqa: F811
    classifier, denoiser, _ = runs
    command = ["x", str(denoiser), "--features", str(classifier), "--per-class", "4", "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "x.json")])
    script("vision_samples").main()
    facts = json.loads((tmp_path / "x.json").read_text())
    assert [(row["step"], row["guidance"], row["images"]) for row in facts["rows"]] == [(7, 1.0, 12), (7, 1.5, 12)]
    assert facts["rows"][0]["frechet_distance"] > facts["training_images"]["frechet_distance"] > 0
    assert (denoiser / "distances.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_three_beside_each_other(tmp_path: Path, monkeypatch: Any) -> None:
    config = write_classifier(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'data_prep'}:{ROOT / 'eval'}")
    overrides = ["train.steps=6", "train.ema=null", "train.name=x", "checkpoint.interval=3"]
    monkeypatch.setattr(sys, "argv", ["x", str(config), *overrides, "--rounds", "30", "--output", "x.json"])
    script("vision_learning").main()
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["lightnet", "softmax", "linear probe"]
    assert all(0 <= row["top1"] <= row["top5"] <= 1 and row["images"] == 12 for row in rows)
    off = abs(rows[1]["seconds"] - rows[0]["seconds"])  # whole steps, and seconds to one place
    assert rows[0]["steps"] == 6 and off <= 0.5 * rows[1]["seconds"] / rows[1]["steps"] + 0.11
    assert load_config(str(tmp_path / "runs" / "x_softmax" / "config.yaml")).model.mixer == "softmax"
    assert (tmp_path / "runs" / "x" / "peers.png").is_file()


@pytest.mark.slow
def test_speeds_beside_peers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--output", str(tmp_path / "x.json")])
    script("vision").main()
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    peers = {"classifier": "vit, sdpa", "denoiser": "dit, sdpa"}
    for case, peer in peers.items():
        mine = [row for row in rows if row["case"] == case]
        assert {row["model"] for row in mine} >= {"lightnet", "softmax in our block", peer}
        assert len({row["tokens"] for row in mine}) == 2 and all(row["images_per_second"] > 0 for row in mine)
        assert all(row["ours_over_it"] == 1 for row in mine if row["model"] == "lightnet")
