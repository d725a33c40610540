"""A profiler's trace by one field: written once, of the steps that were asked for, and the run is the run without it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightnet_llm.training.profiling import Trace
from tests.conftest import Ranks, steps_of

FIELDS = ("loss", "grad_norm", "samples")


def steps_recorded(file: Path, *others: str) -> set[str]:
    with gzip.open(file, "rt") as opened:
        trace: dict[str, Any] = json.load(opened)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and "ts" in event for event in events)
    assert {"aten::mm", *others} <= {event["name"] for event in events}
    return {event["name"] for event in events if event["name"].startswith("ProfilerStep")}


def test_steps_are_recorded_on_a_rank_of_each_part(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    plain = ranks.train(2, tiny, ["train.steps=12"], tmp_path, "plain")
    found = ranks.train(2, tiny, ["train.steps=12", "logging.profile_steps=2"], tmp_path, "run")
    assert steps_of(found, *FIELDS) == steps_of(plain, *FIELDS)
    assert not (tmp_path / "plain" / "profile").exists()
    (file,) = (tmp_path / "run" / "profile").iterdir()  # two data-parallel ranks do the same
    assert file.name == "step_00000007_to_00000008.rank_00000.json.gz"
    # Numbered as in the file's name and in metrics.jsonl.
    assert steps_recorded(file, "Optimizer.step#AdamW.step") == {"ProfilerStep#7", "ProfilerStep#8"}


def test_steps_of_a_resumed_run_have_its_numbers(tmp_path: Path) -> None:
    trace = Trace(tmp_path, 0, 2, start=4, end=20)
    for _ in range(16):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        trace.step()
    (file,) = tmp_path.iterdir()
    assert file.name == "step_00000011_to_00000012.rank_00000.json.gz"
    assert steps_recorded(file) == {"ProfilerStep#11", "ProfilerStep#12"}


@pytest.mark.parametrize(
    ("rank", "steps", "start", "end", "warned"),
    [
        (
            0,
            3,
            0,
            5,
            "logging.profile_steps=3: no step is recorded, as the run ends after step 5 and the first to record is 7",
        ),
        (0, 3, 4, 10, "the run ends after step 10 and the first to record is 11; let it run to step 13, or set"),
        (0, 3, 0, 7, None),
        (1, 3, 0, 5, None),
        (0, 0, 0, 5, None),
    ],
)
def test_a_run_that_ends_before_the_first_step_to_record_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    steps: int,
    start: int,
    end: int,
    warned: str | None,
) -> None:
    Trace(tmp_path, rank, steps, start, end).close()
    err = capsys.readouterr().err
    assert (err == "") if warned is None else (warned in err and err.startswith("warning: ") and err.count("\n") == 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_that_ends_early_keeps_what_was_recorded(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.stop_at_step=8", "logging.profile_steps=50", "parallel.tensor=2"]
    ranks.train(2, tiny, overrides, tmp_path, "run")
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [file.name for file in files] == [f"step_00000007_to_00000008.rank_{r:05d}.json.gz" for r in (0, 1)]
    # And what came after the last one.
    assert all({"ProfilerStep#7", "ProfilerStep#8"} <= steps_recorded(file) for file in files)
    ranks.train(2, tiny, ["train.stop_at_step=6", "logging.profile_steps=2", "parallel.tensor=2"], tmp_path, "shorter")
    assert not (tmp_path / "shorter" / "profile").exists()
    logs = [(tmp_path / f"shorter.log.rank{rank}").read_text() for rank in (0, 1)]
    assert [log.count("warning: logging.profile_steps=2: no step is recorded") for log in logs] == [1, 0]
