"""Pipeline stages: what they are made of, and that a run keeps those it began with."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lightnet_llm.config.model import ModelConfig
from lightnet_llm.parallel import stages
from tests.conftest import Ranks, steps_of

SHAPE = {"width": 32, "heads": 4, "glu_width": 64, "vocab_size": 300}
FIELDS = ("loss", "grad_norm", "samples", "batch_checksum")


@pytest.mark.parametrize("layers", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_are_whole_and_none_is_without_parameters(layers: int, tied: bool) -> None:
    """Also where units without parameters (no TPE, a norm without weights) could be a stage of their own."""
    config = ModelConfig(**SHAPE, layers=layers, tie_embeddings=tied, tpe=False)  # type: ignore[arg-type]
    weights = stages.counts(config, 2)
    for count in range(1, layers + 1):
        for bounds in (stages.uniform(config, count), stages.balanced(weights, count)):
            assert len(bounds) == count + 1 and bounds[0] == 0 and bounds[-1] == layers + 4
            assert min(sum(weights[a:b]) for a, b in pairwise(bounds)) > 0, (count, bounds)
        blocks = [b - a for a, b in pairwise(stages.uniform(config, count))]
        blocks[0] -= 2
        blocks[-1] -= 2
        assert max(blocks) - min(blocks) <= 1 and sum(blocks) == layers


def test_parts_of_ranks_are_counted_in_their_shapes() -> None:
    config = ModelConfig(**{**SHAPE, "glu_width": 66}, layers=2)  # type: ignore[arg-type]
    one, four = stages.counts(config, 1), stages.counts(config, 4)
    assert one[0] == 384 * 32 and four[0] == 128 * 32  # padded to 128 rows a rank
    assert one[-1] == one[0]  # tied
    glu = 3 * 32
    split = one[2] - glu * 66 - 32 * config.gate_rank  # qkv, gate_up, output, theta; gate_down is whole
    assert four[2] == split // 4 + glu * 17 + 32 * config.gate_rank


def test_a_stage_in_words() -> None:
    config = ModelConfig(**SHAPE, layers=4)  # type: ignore[arg-type]
    assert [stages.describe(config, [0, 3, 5, 8], stage) for stage in range(3)] == [
        "embedding, tpe, layer 0",
        "layers 1-2",
        "layer 3, norm, head",
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stages_may_hold_different_kinds_of_parameters(
    precision: str, ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    """An embedding alone, and a tied head alone, whose weight is a copy that does not count in the norm."""
    common = ["train.steps=6", "model.lrpe=false", f"train.precision={precision}"]
    whole = steps_of(ranks.train(1, tiny, common, tmp_path, "whole"), *FIELDS)
    overrides = [*common, "parallel.pipeline=3", "parallel.pipeline_partition=time"]
    rows = ranks.train(3, tiny, overrides, tmp_path, "run", plant="slow_ends")
    assert _stages(tmp_path / "run", 6) == [0, 1, 7, 8]
    loss, norm = (1e-5, 1e-4) if precision == "fp32" else (2e-3, 2e-2)
    for step, values in steps_of(rows, *FIELDS).items():
        assert abs(values[0] - whole[step][0]) < loss and abs(values[1] / whole[step][1] - 1) < norm


def test_stages_by_time_are_kept_and_chosen_anew_by_a_move(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = ["parallel.pipeline_partition=time", "train.steps=12", "train.resume=auto", "parallel.recompute_every=2"]
    whole = steps_of(ranks.train(1, tiny, ["train.steps=12"], tmp_path, "whole"), *FIELDS)
    first = [*common, "parallel.pipeline=2", "train.stop_at_step=4"]
    ranks.train(2, tiny, first, tmp_path, "run", plant="slow_embedding")
    made = _stages(tmp_path / "run", 4)
    assert made[1] <= 2, "the embedding takes most of the time, and should have a stage of its own"
    # On the same layout nothing is measured, although it would come out otherwise.
    ranks.train(2, tiny, [*common, "parallel.pipeline=2", "train.stop_at_step=8"], tmp_path, "run", plant="no_measure")
    assert _stages(tmp_path / "run", 8) == made
    rows = ranks.train(4, tiny, [*common, "parallel.pipeline=4"], tmp_path, "run")
    assert len(_stages(tmp_path / "run", 12)) == 5
    moved = steps_of(rows, *FIELDS)
    assert list(moved) == list(whole)
    for step, values in whole.items():
        assert abs(moved[step][0] - values[0]) < 1e-5 and moved[step][2:] == values[2:]
        assert abs(moved[step][1] / values[1] - 1) < 1e-4


def _stages(run: Path, step: int) -> list[int]:
    return json.loads((run / "checkpoints" / f"step_{step:08d}" / "manifest.json").read_text())["stages"]
