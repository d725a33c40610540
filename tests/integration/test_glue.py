"""`lightnet glue` as a user runs it: from a masked model to figures, and again without doing anything twice."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
GOOD, BAD = ["good", "great", "lovely", "fine"], ["bad", "awful", "sad", "poor"]
MODEL = ["model.layers=2", "model.width=32", "model.heads=2", "model.glu_width=40", "model.vocab_size=400"]
SMALL = [*MODEL, "model.initializer_std=0.2", "data.sequence_length=32", "train.global_batch=4", "train.micro_batch=4"]


def lightnet(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightnet_llm.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked model's run, and two tasks laid out as GLUE's archives lay them out."""
    folder = tmp_path_factory.mktemp("glue")
    words = [*GOOD, *BAD, "the", "film", "was", "a"]
    (folder / "text.txt").write_text("\n".join(" ".join(words[i % 12 :]) for i in range(400)))
    lightnet("prep", folder / "text.txt", "--output", folder / "data", "--vocab-size", 300, "--holdout", 0)
    train = ["train.steps=3", "train.hours=null", "train.batch_ramp=[]", "train.precision=fp32", "train.name=masked"]
    where = [f"data.path={folder / 'data'}", f"train.output={folder}", "validation.interval=0"]
    lightnet("train", "bidirectional/cramming", *SMALL, *train, *where)
    for split, count in (("train", 60), ("dev", 20)):
        rows = [(f"the film was a {(GOOD if i % 2 else BAD)[i % 4]} film", i % 2) for i in range(count)]
        (folder / "glue" / "SST-2").mkdir(parents=True, exist_ok=True)
        (folder / "glue" / "STS-B").mkdir(parents=True, exist_ok=True)
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
        (folder / "glue" / "SST-2" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
        lines = ["sentence1\tsentence2\tscore", *(f"{text}\tthe film\t{5 * label}.0" for text, label in rows)]
        (folder / "glue" / "STS-B" / f"{split}.tsv").write_text("\n".join(lines) + "\n")
    return folder


def measured(place: Path, *options: object) -> dict[str, Any]:
    source = ["glue", place / "masked", "--data", place / "glue", "--epochs", 10, "--json"]
    found: dict[str, Any] = json.loads(lightnet(*source, *options).stdout)
    return found


def test_figures_and_nothing_twice(place: Path) -> None:
    options = ["--rates", "3e-3,1e-9", "--output", place / "glue.json"]
    report = measured(place, *options)
    assert list(report["tasks"]) == ["sst2", "stsb"] and report["average"] is None
    for key, task in report["tasks"].items():
        assert task["rate"] == 3e-3 and task["score"] > 0.9, key
        kept = [path.parent.parent.name for path in (place / "masked" / "glue" / key).glob("*/checkpoints/latest")]
        assert kept == ["rate0.003_seed0"]  # a rate of nothing has learned nothing
    assert json.loads((place / "glue.json").read_text())["tasks"] == report["tasks"]
    confusion = report["tasks"]["sst2"]["runs"][0]["confusion"]["dev"]
    assert sum(map(sum, confusion)) == 20
    start = time.time()
    again = measured(place, *options)
    assert again["tasks"] == report["tasks"]
    newest = max(path.stat().st_mtime for path in (place / "masked" / "glue").rglob("metrics.jsonl"))
    assert newest < start
    picture = [sys.executable, "-m", "lightnet_eval.glue_picture", str(place / "x.png"), f"one={place / 'glue.json'}"]
    subprocess.run(picture, check=True)
    assert (place / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_other_options_are_another_folders(place: Path) -> None:
    measured(place, "--rates", "1e-3", "--tasks", "sst2", "--runs", place / "other")
    source = ["glue", place / "masked", "--data", place / "glue", "--rates", "1e-3", "--tasks", "sst2"]
    said = lightnet(*source, "--epochs", 1, "--runs", place / "other", code=1).stderr
    assert "is of other options or another checkpoint; choose another --runs" in said and "Traceback" not in said
    said = lightnet("glue", place / "other" / "none", "--data", place / "glue", code=1).stderr
    assert said.startswith("error: ") and "no such checkpoint" in said
    said = lightnet("glue", place / "masked", "--data", place / "glue", "--rates", "x", code=2).stderr
    assert "give different learning rates" in said


def test_a_stop_is_passed_on_and_the_same_command_goes_on(place: Path) -> None:
    options = ["--rates", "1e-3,1e-4", "--tasks", "sst2", "--epochs", "400", "--runs", place / "stopped"]
    source = ["glue", place / "masked", "--data", place / "glue", *options]
    command = [sys.executable, "-m", "lightnet_llm.cli", *map(str, source)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    run = place / "stopped" / "sst2" / "rate0.001_seed0"
    deadline = time.time() + 240
    while not (run / "metrics.jsonl").is_file() or "loss" not in (run / "metrics.jsonl").read_text():
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 1 and "the same command goes on" in said and "Traceback" not in said
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["event"] == "stopped" and rows[-1]["step"] < 1500  # of 60 samples, 16 a step
    assert not (place / "stopped" / "sst2" / "rate0.0001_seed0").exists()


def test_a_run_that_fails_says_why(place: Path) -> None:
    done = place / "broken"
    measured(place, "--rates", "1e-3", "--tasks", "sst2", "--runs", done, "--keep-all")
    (done / "sst2" / "rate0.001_seed0" / "result.json").unlink()
    (done / "sst2" / "rate0.001_seed0" / "finished.json").unlink()
    (done / "sst2" / "data" / "train.npz").write_bytes(b"x")
    source = ["glue", place / "masked", "--data", place / "glue", "--rates", "1e-3", "--tasks", "sst2", "--epochs", 10]
    said = lightnet(*source, "--runs", done, code=1).stderr
    assert "training ended with code" in said and "train.npz: not readable" in said and "Traceback" not in said
