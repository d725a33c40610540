"""Saving beside training and against faults: what was saved before is whole, and the run ends or goes on as said."""

from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.checkpoint import store
from tests.conftest import Ranks, steps_of

FIELDS = ("loss", "grad_norm", "learning_rate", "samples", "batch_checksum", "tokens")
ASYNC = "checkpoint.async=true"
COMMON = ["train.resume=auto", "checkpoint.interval=3", "train.steps=12", "validation.interval=0"]
LAYOUTS = {
    "zero1_dp2": (2, []),
    "zero0": (1, ["parallel.zero_stage=0"]),
    "zero3_dp2": (2, ["parallel.zero_stage=3"]),
    "tp2_pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "bf16_dp2": (2, ["train.precision=bf16"]),
}
QUICK = ("zero1_dp2",)


def checkpoints(run: Path) -> list[str]:
    """Names of the whole checkpoints of a run."""
    folders = store.listed(run / "checkpoints")
    for folder in folders:
        store.verify(folder)
    return [folder.name for folder in folders]


def resumed_from(step: int, ranks: Ranks, world: int, tiny: Path, overrides: list[str], tmp: Path, plant: str) -> dict:
    """The steps of a run whose checkpoints after ``step`` are taken away, and that then goes on to the end."""
    import shutil

    ranks.train(world, tiny, [*COMMON, ASYNC, *overrides], tmp, "run", plant=plant)
    (tmp / "run" / "finished.json").unlink()
    for folder in store.listed(tmp / "run" / "checkpoints"):
        if folder.name > store.step_name(step):
            shutil.rmtree(folder)
    return steps_of(ranks.train(world, tiny, [*COMMON, *overrides], tmp, "run"), *FIELDS)


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, ...]]:
    """The run of two ranks to which nothing happened."""
    return steps_of(ranks.train(2, tiny, COMMON, tmp_path_factory.mktemp("two"), "whole"), *FIELDS)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_an_asynchronous_checkpoint_holds_its_own_step(name: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Files are written slowly while training goes on, and yet hold the step at which they were taken."""
    world, overrides = LAYOUTS[name]
    whole = steps_of(ranks.train(world, tiny, [*COMMON, *overrides], tmp_path, "whole"), *FIELDS)
    assert resumed_from(6, ranks, world, tiny, overrides, tmp_path, "write_slowly") == whole
    assert checkpoints(tmp_path / "run") == [store.step_name(step) for step in (6, 9, 12)]


def test_without_a_copy_it_would_not(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    world, overrides = LAYOUTS["zero0"]
    whole = steps_of(ranks.train(world, tiny, [*COMMON, *overrides], tmp_path, "whole"), *FIELDS)
    assert resumed_from(6, ranks, world, tiny, overrides, tmp_path, "write_slowly_without_copy") != whole


def test_the_step_time_while_saving_is_reported(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    rows = ranks.train(2, tiny, [*COMMON, ASYNC], tmp_path, "run", plant="write_slowly")
    saved = {row["checkpoint"]["step"]: row["checkpoint"] for row in rows if "checkpoint" in row}
    assert list(saved) == [3, 6, 9, 12]
    for step in (3, 6, 9):
        figures = saved[step]
        assert figures["steps_while_writing"] >= 1 and figures["step_seconds_while_writing"] > 0
        assert figures["write_seconds"] > figures["pause_seconds"] > 0
    assert saved[12]["steps_while_writing"] == 0  # the end waits for it
    events = [row["step"] for row in rows if row.get("event") == "saved"]
    assert events == [3, 6, 9, 12]
    rows = ranks.train(1, tiny, [*COMMON], tmp_path, "at_once")
    assert all(row["checkpoint"]["pause_seconds"] > 0 for row in rows if "checkpoint" in row)


@pytest.mark.parametrize(
    ("plant", "later"),
    [("fail_second_save_on_rank_one", True), ("limit_files_on_rank_one", False),
     pytest.param("fail_second_save_on_rank_one", False, marks=pytest.mark.slow),
     pytest.param("limit_files_on_rank_one", True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_full_disk_leaves_the_one_before(
    plant: str, later: bool, ranks: Ranks, tiny: Path, tmp_path: Path, two_ranks: dict[int, tuple[Any, ...]]
) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *COMMON]
    arguments += [ASYNC] if later else []
    if plant.startswith("limit"):  # the first checkpoint is of a start without the limit
        ranks.train(2, tiny, [*COMMON, "train.stop_at_step=3"], tmp_path, "run")
    codes = ranks.run(2, arguments, tmp_path / "log", plant=plant)
    assert codes == [1, 1]  # of themselves: nobody waits in a collective until killed
    texts = [(tmp_path / f"log.rank{rank}").read_text() for rank in range(2)]
    assert "error: checkpoint of step 6 could not be written (on another rank" in texts[0]
    assert "error: rank 1: checkpoint of step 6 could not be written" in texts[1]
    assert checkpoints(tmp_path / "run") == ["step_00000003"]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_00000003"
    assert steps_of(ranks.train(2, tiny, COMMON, tmp_path, "run"), *FIELDS) == two_ranks


def test_metrics_that_cannot_be_written_end_the_run_with_a_checkpoint(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *COMMON, "logging.interval=1"]
    arguments += [ASYNC, "checkpoint.interval=100"]
    assert ranks.run(2, arguments, tmp_path / "log", plant="fill_disk_of_metrics") == [1, 1]
    texts = [(tmp_path / f"log.rank{rank}").read_text() for rank in range(2)]
    assert [line for text in texts for line in text.splitlines() if line.startswith(("error: ", "Traceback"))] == [
        line for line in texts[0].splitlines() if line.startswith(f"error: {tmp_path}/run/metrics.jsonl could not be ")
    ]
    assert "(No space left on device; " in texts[0]
    assert "the run ended at step 5, which is saved: make room and go on with train.resume=auto" in texts[0]
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert text.count("\n") == 3 and text.endswith("}\n")  # no half line
    assert checkpoints(tmp_path / "run") == ["step_00000005"] and not (tmp_path / "run" / "finished.json").exists()
    assert steps_of(ranks.train(2, tiny, COMMON, tmp_path, "run"), *FIELDS).keys() >= set(range(6, 13))


@pytest.mark.parametrize(
    ("plant", "says", "later"),
    [
        ("fail_oddly_in_second_save", "cannot pickle this", True),
        ("lose_files_of_rank_one", "files of ranks [1] cannot be seen", False),
        pytest.param("fail_oddly_in_second_save", "cannot pickle this", False, marks=pytest.mark.slow),
        pytest.param("lose_files_of_rank_one", "files of ranks [1] cannot be seen", True, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_that_lacks_a_file_is_none(
    plant: str, says: str, later: bool, ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *COMMON]
    codes = ranks.run(2, [*arguments, *([ASYNC] if later else [])], tmp_path / "log", plant=plant)
    assert codes == [1, 1]
    assert any(says in (tmp_path / f"log.rank{rank}").read_text() for rank in range(2))
    assert checkpoints(tmp_path / "run") == ["step_00000003"]


@pytest.mark.parametrize("later", [False, True])
def test_killed_while_saving_leaves_the_one_before(
    later: bool, ranks: Ranks, tiny: Path, tmp_path: Path, two_ranks: dict[int, tuple[Any, ...]]
) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *COMMON]
    codes = ranks.run(2, [*arguments, *([ASYNC] if later else [])], tmp_path / "log", plant="die_in_second_save")
    assert -9 in codes and 0 not in codes
    root = tmp_path / "run" / "checkpoints"
    assert checkpoints(tmp_path / "run") == ["step_00000003"] and (root / ".step_00000006.partial").is_dir()
    assert (root / "latest").read_text().strip() == "step_00000003"
    assert steps_of(ranks.train(2, tiny, COMMON, tmp_path, "run"), *FIELDS) == two_ranks
    assert not list(root.glob(".step*"))


def test_a_second_save_waits_for_the_first(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=4", "checkpoint.interval=1", "checkpoint.keep_last=9", "validation.interval=0", ASYNC]
    ranks.train(1, tiny, overrides, tmp_path, "run", plant="write_slowly")
    assert checkpoints(tmp_path / "run") == [store.step_name(step) for step in (1, 2, 3, 4)]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_00000004"
