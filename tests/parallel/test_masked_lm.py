"""The masked language model trains alike under every layout, however unevenly labels lie (law 3)."""

from pathlib import Path

import pytest

from lightnet_llm.checkpoint.store import resolve
from lightnet_llm.checkpoint.weights import AVERAGE, FOLDER, load_weights
from tests.conftest import Ranks, read_metrics, steps_of

FIELDS = ("loss", "grad_norm", "samples", "batch_checksum")
MASKED = ["model.head=masked_lm", "model.causal=false", "model.vocab_size=252"]
MASKED += ["optimizer.learning_rate=1.5e-3", "optimizer.clip=0.3"]
LAYOUTS = {
    "micro1": (1, ["train.micro_batch=1"]),
    "micro8": (1, ["train.micro_batch=8"]),
    "dp4": (4, ["train.micro_batch=1"]),
    "dp2_zero3": (2, ["parallel.zero_stage=3"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "sp2": (2, ["parallel.sequence=2"]),
    "tp2_sp2": (4, ["parallel.tensor=2", "parallel.sequence=2"]),
    "pp2": (2, ["parallel.pipeline=2", "train.micro_batch=1"]),
    "pp2_sp2_dp2": (8, ["parallel.pipeline=2", "parallel.sequence=2"]),
}


@pytest.fixture(scope="module")
def one(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, tuple[object, ...]]]:
    """Runs of one process: masks as they are, and uneven ones."""
    tmp = tmp_path_factory.mktemp("one")
    return {
        plant: steps_of(ranks.train(1, tiny, MASKED, tmp, f"one{plant}", plant or None), *FIELDS)
        for plant in ("", "hide_one_or_nine")
    }


def differences(found: dict[int, tuple[object, ...]], wanted: dict[int, tuple[object, ...]]) -> tuple[float, float]:
    assert [row[2:] for row in found.values()] == [row[2:] for row in wanted.values()]
    loss = max(abs(found[step][0] - wanted[step][0]) for step in wanted)  # type: ignore[operator]
    norm = max(abs(found[step][1] / wanted[step][1] - 1) for step in wanted)  # type: ignore[operator]
    return loss, norm


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("micro1", "hide_one_or_nine"),
        ("dp4", "hide_one_or_nine"),
        ("pp2", "hide_one_or_nine"),
        ("tp2_sp2", ""),
        *(
            pytest.param(name, plant, marks=pytest.mark.slow)
            for name, plant in (
                ("micro8", "hide_one_or_nine"),
                ("dp2_zero3", "hide_one_or_nine"),
                ("tp2", "hide_one_or_nine"),
                ("sp2", "hide_one_or_nine"),
                ("tp2_sp2", "hide_one_or_nine"),
                ("pp2_sp2_dp2", "hide_one_or_nine"),
                ("micro1", ""),
                ("dp4", ""),
                ("pp2_sp2_dp2", ""),
            )
        ),
    ],
)
def test_layout_equals_one_process(
    name: str, plant: str, ranks: Ranks, tiny: Path, tmp_path: Path, one: dict[str, dict[int, tuple[object, ...]]]
) -> None:
    world, overrides = LAYOUTS[name]
    rows = ranks.train(world, tiny, [*MASKED, *overrides], tmp_path, name, plant or None)
    loss, norm = differences(steps_of(rows, *FIELDS), one[plant])
    assert loss < 1e-5 and norm < 1e-4


def test_it_learns(one: dict[str, dict[int, tuple[object, ...]]]) -> None:
    rows = one[""]
    assert rows[20][0] < rows[1][0] - 1.0  # type: ignore[operator]


def test_a_mean_of_means_is_seen(
    ranks: Ranks, tiny: Path, tmp_path: Path, one: dict[str, dict[int, tuple[object, ...]]]
) -> None:
    rows = ranks.train(1, tiny, MASKED, tmp_path, "run", "hide_one_or_nine,take_means_of_means")
    assert differences(steps_of(rows, *FIELDS), one["hide_one_or_nine"])[0] > 1e-2


@pytest.mark.parametrize("overrides", [[], ["parallel.pipeline=2"]])
def test_steps_without_a_label_count_nothing(overrides: list[str], ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    rows = ranks.train(2, tiny, [*MASKED, *overrides, "train.steps=2"], tmp_path, "run", "hide_nothing")
    assert [row[:2] for row in steps_of(rows, *FIELDS).values()] == [(0.0, 0.0)] * 2


def test_resumed_is_the_same_to_the_bit(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Masks, moments and the average of weights."""
    overrides = [
        *MASKED,
        "train.resume=auto",
        "model.dropout=0.1",
        "train.ema=0.9",
        "train.steps=8",
        "checkpoint.interval=0",
    ]
    whole = ranks.train(2, tiny, overrides, tmp_path, "whole")
    ranks.train(2, tiny, [*overrides, "train.stop_at_step=3"], tmp_path, "pieces")
    ranks.train(2, tiny, overrides, tmp_path, "pieces")
    assert steps_of(read_metrics(tmp_path / "pieces"), *FIELDS) == steps_of(whole, *FIELDS)
    for kind in (FOLDER, AVERAGE):
        mine, theirs = (load_weights(resolve(tmp_path / run, print), kind) for run in ("pieces", "whole"))
        assert mine.keys() == theirs.keys() and all(mine[name].equal(x) for name, x in theirs.items()), kind


def test_resumed_and_moved_and_validated(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Masks go on, validation is the same for every layout, and says no bits per byte."""
    overrides = [*MASKED, "train.resume=auto", "model.dropout=0.1"]
    whole = ranks.train(1, tiny, overrides, tmp_path, "whole")
    ranks.train(2, tiny, [*overrides, "train.stop_at_step=7"], tmp_path, "pieces")
    ranks.train(2, tiny, [*overrides, "parallel.sequence=2"], tmp_path, "pieces")
    pieces = read_metrics(tmp_path / "pieces")
    loss, norm = differences(steps_of(pieces, *FIELDS), steps_of(whole, *FIELDS))
    assert loss < 1e-5 and norm < 1e-4
    first, second = (
        {row["step"]: row["validation"]["heldout"] for row in rows if "validation" in row} for rows in (whole, pieces)
    )
    assert set(first) == {10, 20} < set(second) and set(first[10]) == {"loss", "perplexity"}
    assert max(abs(first[step]["loss"] - second[step]["loss"]) for step in first) < 1e-5
    # Of few labels each, and on the same grammar: not far from the training loss of that step.
    assert all(abs(first[step]["loss"] - steps_of(whole, "loss")[step][0]) < 0.5 for step in (10, 20))
