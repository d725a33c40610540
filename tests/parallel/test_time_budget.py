"""A budget in hours: turned into steps once, and from then on a run like any other (laws 1 and 2)."""

import json
from pathlib import Path

import pytest

from lightnet_llm.config.load import validate
from lightnet_llm.training.schedule import budget_of, steps_for
from tests.conftest import Ranks, read_metrics, steps_of

FIELDS = ("loss", "grad_norm", "learning_rate", "samples", "batch_checksum")
RAMP = "train.batch_ramp=[{until_step: 3, batch: 4}]"
GIVEN = ["train.steps=null", "train.hours=0.0002", "schedule.kind=triangle", "schedule.final_ratio=0", RAMP]


def test_hours_become_steps_once(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    ranks.train(1, tiny, [*GIVEN, "train.stop_at_step=2"], tmp_path, "timed")
    facts = json.loads((tmp_path / "timed" / "time_budget.json").read_text())
    steps = facts["steps"]
    # Behind the ramp a step takes what the trial measured; on the ramp half of it.
    assert abs((steps - 3 + 3 / 2) * facts["seconds_per_step"] - 0.72) <= facts["seconds_per_step"] or steps <= 3
    # From there on it is a run of so many steps, whatever this machine would take now, and through a resume.
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "time_budget.json").write_text(json.dumps({**facts, "steps": 6}))
    ranks.train(1, tiny, [*GIVEN, "train.stop_at_step=4"], tmp_path, "kept")
    rows = ranks.train(1, tiny, [*GIVEN, "train.resume=must"], tmp_path, "kept")
    named = steps_of(ranks.train(1, tiny, ["train.steps=6", *GIVEN[2:]], tmp_path, "counted"), *FIELDS)
    assert set(named) == set(range(1, 7)) and steps_of(rows, *FIELDS) == named
    assert read_metrics(tmp_path / "kept")[-1]["event"] == "finished"


@pytest.mark.slow
def test_all_ranks_agree_on_the_steps(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    layout = ["parallel.tensor=2", "parallel.pipeline=2", "train.stop_at_step=1"]
    ranks.train(4, tiny, [*GIVEN, *layout], tmp_path, "timed")
    assert json.loads((tmp_path / "timed" / "time_budget.json").read_text())["steps"] >= 1


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 23, 24, 25, 64, 1000])
def test_steps_for_samples_are_as_of_tokens(samples: int) -> None:
    model = {"layers": 1, "width": 16, "heads": 1, "glu_width": 8, "vocab_size": 9}
    train = {"tokens": samples * 16, "global_batch": 8, "micro_batch": 2, "batch_ramp": [{"until_step": 3, "batch": 4}]}
    config = validate({"model": model, "train": train, "data": {"sequence_length": 16}}, "here")
    steps = steps_for(config.train, samples)
    budget = budget_of(config, 1)
    assert budget.steps == steps
    assert budget.samples_before(steps) >= samples > budget.samples_before(steps - 1)
