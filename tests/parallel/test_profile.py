"""A profiler's trace by one field: written once, of the steps that were asked for, and the run is the run without it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks, steps_of

FIELDS = ("loss", "grad_norm", "samples")


def steps_recorded(file: Path) -> set[str]:
    with gzip.open(file, "rt") as opened:
        trace: dict[str, Any] = json.load(opened)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and "ts" in event for event in events)
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event["name"] for event in events}
    return {event["name"] for event in events if event["name"].startswith("ProfilerStep")}


def test_steps_are_recorded_on_a_rank_of_each_part(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    plain = ranks.train(2, tiny, ["train.steps=12"], tmp_path, "plain")
    found = ranks.train(2, tiny, ["train.steps=12", "logging.profile_steps=2"], tmp_path, "run")
    assert steps_of(found, *FIELDS) == steps_of(plain, *FIELDS)
    assert not (tmp_path / "plain" / "profile").exists()
    (file,) = (tmp_path / "run" / "profile").iterdir()  # two data-parallel ranks do the same
    assert file.name == "step_00000007_to_00000008.rank_00000.json.gz"
    assert len(steps_recorded(file)) == 2


@pytest.mark.slow
def test_a_run_that_ends_early_keeps_what_was_recorded(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.stop_at_step=8", "logging.profile_steps=50", "parallel.tensor=2"]
    ranks.train(2, tiny, overrides, tmp_path, "run")
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [file.name for file in files] == [f"step_00000007_to_00000008.rank_{r:05d}.json.gz" for r in (0, 1)]
    assert all(len(steps_recorded(file)) >= 2 for file in files)  # and what came after the last one
    ranks.train(1, tiny, ["train.stop_at_step=6", "logging.profile_steps=2"], tmp_path, "shorter")
    assert not (tmp_path / "shorter" / "profile").exists()
