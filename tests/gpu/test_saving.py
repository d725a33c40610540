"""Saving on GPUs: moves between layouts, and what an asynchronous checkpoint costs a step (pytest -s prints it)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Ranks, steps_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGER = ["model.layers=12", "model.width=1024", "model.heads=8", "model.glu_width=2752", "train.precision=bf16"]


@pytest.mark.parametrize("later", ["false", "true"])
def test_step_time_while_saving(later: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """A model of 150M parameters, 2 GB a checkpoint: resumed from what was written beside training, it goes on alike."""
    overrides = [*LARGER, "train.steps=60", "checkpoint.interval=30", "validation.interval=0", "train.resume=auto"]
    overrides += [f"checkpoint.async={later}", "logging.interval=1"]
    rows = ranks.train(1, tiny, [*overrides, "train.stop_at_step=50"], tmp_path, "run")
    figures: list[dict[str, Any]] = [row["checkpoint"] for row in rows if "checkpoint" in row]
    print(f"\ncheckpoint.async={later}: {figures}")
    assert [found["step"] for found in figures] == [30, 50]
    if later == "true":
        assert figures[0]["steps_while_writing"] > 0
        assert figures[0]["pause_seconds"] < figures[0]["write_seconds"]
    resumed = steps_of(ranks.train(1, tiny, overrides, tmp_path, "run"), "loss", "samples")
    whole = steps_of(ranks.train(1, tiny, [*overrides, "checkpoint.interval=0"], tmp_path, "whole"), "loss", "samples")
    assert list(resumed) == list(whole)
    assert all(abs(resumed[step][0] - whole[step][0]) < 2e-3 and resumed[step][1] == whole[step][1] for step in whole)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, ["parallel.zero_stage=0"]), (1, ["parallel.zero_stage=3"])),
        ((2, ["parallel.zero_stage=3"]), (2, ["parallel.tensor=2"])),
        ((2, ["parallel.pipeline=2"]), (1, ["parallel.zero_stage=2"])),
    ],
    ids=["z0-z3", "z3dp2-tp2", "pp2-z2"],
)
def test_move(before: Any, after: Any, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = ["train.resume=auto", "validation.interval=0"]
    still = steps_of(ranks.train(1, tiny, common, tmp_path, "still"), "loss", "samples")
    ranks.train(before[0], tiny, [*common, *before[1], "train.stop_at_step=7"], tmp_path, "run")
    moved = steps_of(ranks.train(after[0], tiny, [*common, *after[1]], tmp_path, "run"), "loss", "samples")
    assert list(moved) == list(still)
    assert max(abs(moved[step][0] - still[step][0]) for step in still) < 1e-5
    assert all(moved[step][1] == still[step][1] for step in still)
