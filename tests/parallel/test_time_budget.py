"""A budget in hours: turned into steps once, and from then on a run like any other (laws 1 and 2)."""

import json
from pathlib import Path

import pytest

from lightnet_llm.config import load_config
from lightnet_llm.config.load import validate
from lightnet_llm.training.run_folder import METRICS, RunFolder
from lightnet_llm.training.schedule import budget_of, steps_for
from lightnet_llm.training.time_budget import FILE, known
from tests.conftest import Ranks, read_metrics, steps_of

FIELDS = ("loss", "grad_norm", "learning_rate", "samples", "batch_checksum")
RAMP = "train.batch_ramp=[{until_step: 3, batch: 4}]"
GIVEN = ["train.steps=null", "train.hours=0.0002", "schedule.kind=triangle", "schedule.final_ratio=0", RAMP]


def test_hours_become_steps_once(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "timed").mkdir()  # what a start found that failed before its first step, with other hours
    (tmp_path / "timed" / FILE).write_text(json.dumps({"hours": 9, "seconds_per_step": 9e9, "steps": 1}))
    ranks.train(1, tiny, [*GIVEN, "train.stop_at_step=2"], tmp_path, "timed")
    facts = json.loads((tmp_path / "timed" / FILE).read_text())
    steps = facts["steps"]
    assert facts["hours"] == 0.0002 and facts["seconds_per_step"] < 9e9
    # Behind the ramp a step takes what the trial measured; on the ramp half of it.
    assert abs((steps - 3 + 3 / 2) * facts["seconds_per_step"] - 0.72) <= facts["seconds_per_step"] or steps <= 3
    # From there on it is a run of so many steps, whatever this machine would take now, and through a resume.
    ranks.train(1, tiny, ["train.steps=6", *GIVEN[1:], "train.stop_at_step=2"], tmp_path, "kept")
    (tmp_path / "kept" / FILE).write_text(json.dumps({**facts, "steps": 6}))
    ranks.train(1, tiny, [*GIVEN, "train.stop_at_step=4", "train.resume=must"], tmp_path, "kept")
    rows = ranks.train(1, tiny, [*GIVEN, "train.resume=must"], tmp_path, "kept")
    named = steps_of(ranks.train(1, tiny, ["train.steps=6", *GIVEN[2:]], tmp_path, "counted"), *FIELDS)
    assert set(named) == set(range(1, 7)) and steps_of(rows, *FIELDS) == named
    assert read_metrics(tmp_path / "kept")[-1]["event"] == "finished"
    for other, field in (
        ("train.hours=0.001", "train.hours was 0.0002"),
        ("train.global_batch=16", "train.global_batch was 8"),
    ):
        arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=kept", *GIVEN, "train.resume=must"]
        assert ranks.run(1, [*arguments, other], tmp_path / "log") == [1]
        assert f"error: {field} in" in (tmp_path / "log.rank0").read_text()


def test_a_start_that_trained_nothing_binds_nobody(tiny: Path, tmp_path: Path) -> None:
    config = load_config(str(tiny), [*GIVEN, f"train.output={tmp_path}", "train.name=run"])
    folder = RunFolder(config)
    folder.path.mkdir()
    (folder.path / FILE).write_text('{"hours": 0.0002, "seconds_per_step": 1, "steps": 6}')
    assert known(config, folder).train.steps is None
    (folder.path / METRICS).write_text('{"step": 0, "event": "failed"}\n')  # `lightnet train`
    assert known(config, folder).train.steps is None
    (folder.path / METRICS).write_text('{"step": 1, "loss": 5.5}\n')
    assert known(config, folder).train.steps == 6


@pytest.mark.slow
def test_all_ranks_agree_on_the_steps(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "train.stop_at_step=1"]
    ranks.train(4, tiny, [*GIVEN, *layout], tmp_path, "timed")
    assert json.loads((tmp_path / "timed" / FILE).read_text())["steps"] >= 1


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 23, 24, 25, 64, 1000])
def test_steps_for_samples_are_as_of_tokens(samples: int) -> None:
    model = {"layers": 1, "width": 16, "heads": 1, "glu_width": 8, "vocab_size": 9}
    train = {"tokens": samples * 16, "global_batch": 8, "micro_batch": 2, "batch_ramp": [{"until_step": 3, "batch": 4}]}
    config = validate({"model": model, "train": train, "data": {"sequence_length": 16}}, "here")
    steps = steps_for(config.train, samples)
    budget = budget_of(config, 1)
    assert budget.steps == steps
    assert budget.samples_before(steps) >= samples > budget.samples_before(steps - 1)
