"""A bad step is skipped on all ranks alike, in every engine, and nothing of it stays (law 6; laws 2 and 3 go on)."""

from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.checkpoint import store
from tests.conftest import Ranks, read_metrics, steps_of

FIELDS = ("loss", "grad_norm", "learning_rate", "samples", "batch_checksum")
SLOW = pytest.mark.slow
BF16 = "train.precision=bf16"
ENGINES = {
    "zero0": ["parallel.zero_stage=0"],
    "zero1": [],
    "zero2": ["parallel.zero_stage=2"],
    "zero3": ["parallel.zero_stage=3"],
    "tp2": ["parallel.tensor=2"],
    "sp2": ["parallel.sequence=2"],
    "pp2": ["parallel.pipeline=2"],
    "bf16_zero1": [BF16],
    "bf16_zero2": [BF16, "parallel.zero_stage=2"],
    "bf16_zero3": [BF16, "parallel.zero_stage=3"],
    "bf16_pp2": [BF16, "parallel.pipeline=2"],
}
END = "train.stop_at_step=12"  # six steps after the bad one
ORDINARY = ("zero0", "zero2", "zero3", "tp2", "pp2", "bf16_zero1")


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run) if row.get("event") == name]


@pytest.fixture(scope="module")
def left_out(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process in which update 5 was left out by hand, in fp32 and bf16."""
    tmp = tmp_path_factory.mktemp("left_out")
    return {
        precision: steps_of(
            ranks.train(1, tiny, [f"train.precision={precision}", END], tmp, precision, plant="update_left_out"),
            *FIELDS,
        )
        for precision in ("fp32", "bf16")
    }


@pytest.mark.parametrize("name", [n if n in ORDINARY else pytest.param(n, marks=SLOW) for n in ENGINES])
def test_nan_on_one_rank_only(name: str, ranks: Ranks, tiny: Path, tmp_path: Path, left_out: dict[str, Any]) -> None:
    """The run goes on as one process in which that update was left out by hand."""
    overrides = ENGINES[name]
    rows = ranks.train(2, tiny, [*overrides, END], tmp_path, "run", plant="nan_on_rank_one")
    run, reference = steps_of(rows, *FIELDS), left_out["bf16" if BF16 in overrides else "fp32"]
    assert list(run) == list(range(1, 13)) and run[6][0] is None
    loss, norm = (2e-3, 2e-2) if BF16 in overrides else (1e-5, 1e-4)
    for step in [s for s in run if s != 6]:
        assert abs(run[step][0] - reference[step][0]) < loss, step
        assert abs(run[step][1] / reference[step][1] - 1) < norm, step
    assert [run[step][2:] for step in run] == [reference[step][2:] for step in run], "rates and data go on by rule"
    (event,) = events(tmp_path / "run", "skipped")
    assert event["step"] == 6 and event["reason"] == "not finite" and event["found"]["loss"] is None
    assert event["samples"] == [40, 48]
    # Only rank 1's micro-batches are suspect: two samples each, the odd ones of four, unless ranks share samples.
    shares = any(axis in part for part in overrides for axis in ("tensor", "sequence", "pipeline"))
    assert event["suspects"] == (list(range(40, 48)) if shares else [42, 43, 46, 47])
    assert "skipped step 6: not finite" in (tmp_path / "run.log.rank0").read_text()


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=SLOW), 3])
def test_infinite_gradient_of_a_finite_loss(stage: int, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = [f"parallel.zero_stage={stage}", "train.stop_at_step=9"]
    rows = ranks.train(2, tiny, overrides, tmp_path, "run", plant="infinite_gradient_on_rank_one")
    run = steps_of(rows, "loss", "grad_norm")
    assert run[6][0] is not None and run[6][1] is None
    assert [event["step"] for event in events(tmp_path / "run", "skipped")] == [6]
    assert all(norm is not None for step, (_, norm) in run.items() if step != 6)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="1"),
        pytest.param(["parallel.zero_stage=0"], id="0", marks=SLOW),
        pytest.param(["parallel.pipeline=2"], id="pp2", marks=SLOW),
        # Verdicts are heard a step late where nothing is reported.
        pytest.param([BF16, "logging.interval=7"], id="bf16"),
    ],
)
def test_skipped_steps_and_resume(overrides: list[str], ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Law 2: stopped before anything was updated, inside a streak, and before a spike that only the past can tell."""
    overrides = [*overrides, "train.resume=auto", "bad_steps={deviations: 6, window: 10, after: 8}"]
    for plant, stops, skipped in (("nan_at_first", (1, 2, 8), [1, 2]), ("spike", (9, 12, 13, 16), [13])):
        end = [*overrides, f"train.stop_at_step={stops[-1]}"]
        whole = steps_of(ranks.train(2, tiny, end, tmp_path, f"{plant}_whole", plant=plant), *FIELDS)
        for stop in stops:
            at = [*overrides, f"train.stop_at_step={stop}"]
            rows = ranks.train(2, tiny, at, tmp_path, plant, plant=plant)
        found = steps_of(rows, *FIELDS)  # and of the steps at which it was stopped
        assert {step: found[step] for step in whole} == whole
        for run in (plant, f"{plant}_whole"):
            assert [event["step"] for event in events(tmp_path / run, "skipped")] == skipped
    (event,) = events(tmp_path / "spike", "skipped")
    assert event["reason"].startswith("loss ") and "deviations above the last" in event["reason"]


def test_a_spike_is_taken_unless_asked_otherwise(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    ranks.train(1, tiny, ["train.stop_at_step=15"], tmp_path, "run", plant="spike")
    assert not events(tmp_path / "run", "skipped")


def test_too_many_in_a_row_stop_the_run(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """... and none of the doubtful states pushes an older checkpoint out."""
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "logging.interval=7"]
    arguments += ["checkpoint.interval=1", "checkpoint.keep_last=2", "bad_steps.in_a_row=3"]
    assert ranks.run(2, arguments, tmp_path / "log", plant="nan_for_ever") == [1, 1]
    text = (tmp_path / "log.rank0").read_text()
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert "at step 8 (samples 56 to 63): not finite, the 3th step in a row" in error and "since step 5" in error
    assert f"train.init_from={tmp_path}/run/checkpoints and a lower" in error
    assert "error: " not in (tmp_path / "log.rank1").read_text()
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert kept == ["step_00000004", "step_00000005"]


def test_a_run_that_ends_while_steps_are_skipped_pushes_nothing_out(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["checkpoint.interval=1", "checkpoint.keep_last=2", "train.stop_at_step=7"]
    ranks.train(2, tiny, overrides, tmp_path, "run", plant="nan_for_ever")
    kept = [folder.name for folder in store.listed(tmp_path / "run" / "checkpoints")]
    assert kept == [store.step_name(step) for step in (4, 5, 7)]
    assert "leaves all older checkpoints" in (tmp_path / "run.log.rank0").read_text()


@pytest.mark.parametrize(("most", "last"), [(1, 6), (2, 7)])
def test_few_in_a_row_stop_the_run_where_verdicts_come_late(
    most: int, last: int, ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "logging.interval=9", BF16]
    codes = ranks.run(2, [*arguments, f"bad_steps.in_a_row={most}"], tmp_path / "log", plant="nan_for_ever")
    assert codes == [1, 1]
    (error,) = [x for x in (tmp_path / "log.rank0").read_text().splitlines() if x.startswith("error: ")]
    assert f"at step {last} (" in error and f"the {most}th step in a row" in error and "init_from" not in error
    skipped = [event["step"] for event in events(tmp_path / "run", "skipped")]
    assert skipped in (list(range(6, last + 1)), list(range(6, last + 2))), "and one that was made meanwhile, perhaps"


def test_a_single_bad_step_stops_a_run_that_allows_none(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "logging.interval=9", BF16]
    codes = ranks.run(1, [*arguments, "bad_steps.in_a_row=1"], tmp_path / "log", plant="nan_everywhere")
    assert codes == [1] and "at step 6 (" in (tmp_path / "log.rank0").read_text()


def test_a_save_that_falls_on_a_skipped_step_is_made_after_it(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["checkpoint.interval=6", "checkpoint.keep_last=1", "checkpoint.keep_every=6"]
    ranks.train(2, tiny, overrides, tmp_path, "run", plant="nan_on_rank_one")
    assert [event["step"] for event in events(tmp_path / "run", "saved")] == [7, 12, 18, 20]
    kept = [folder.name for folder in store.listed(tmp_path / "run" / "checkpoints")]
    assert kept == [store.step_name(step) for step in (7, 12, 18, 20)]  # 7 is that of step 6
