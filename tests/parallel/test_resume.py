"""A resumed run equals the run that was not stopped, exactly (law 2); checkpoints are whole or absent (law 4)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks, read_metrics, steps_of

FIELDS = ("loss", "grad_norm", "learning_rate", "samples", "batch_checksum", "tokens")
LARGE = "train.micro_batch=4"  # two of them a step, where one replica would make four
CASES = {
    "plain": (1, ["parallel.zero_stage=0", LARGE]),
    "zero1_dp2": (2, []),
    "zero2_dp2": (2, ["parallel.zero_stage=2"]),
    "zero3_dp2": (2, ["parallel.zero_stage=3"]),
    "tp2": (2, ["parallel.tensor=2", LARGE]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "bf16": (1, ["train.precision=bf16", LARGE]),
    "bf16_zero3": (2, ["train.precision=bf16", "parallel.zero_stage=3"]),
    "bf16_pp2": (2, ["train.precision=bf16", "parallel.pipeline=2"]),
    "sp2": (2, ["parallel.sequence=2", LARGE]),
    "tp2_token_shards": (2, ["parallel.tensor=2", "parallel.tensor_sequence_parallel=true"]),
    "ramp": (1, ["train.batch_ramp=[{until_step: 3, batch: 2},{until_step: 9, batch: 4}]"]),
}
DROPOUT = ["model.dropout=0.2"]


SLOW = ("zero1_dp2", "zero2_dp2", "tp2_token_shards", "bf16_zero3", "bf16_pp2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_resumed_equals_unstopped(name: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Stopped inside warm-up (step 2) and again at step 9, in fresh processes."""
    world, overrides = CASES[name]
    overrides = [*overrides, *DROPOUT, "train.resume=auto"]
    end = 12
    whole = steps_of(ranks.train(world, tiny, [*overrides, f"train.stop_at_step={end}"], tmp_path, "whole"), *FIELDS)
    for stop in (2, 9, end):
        rows = ranks.train(world, tiny, [*overrides, f"train.stop_at_step={stop}"], tmp_path, "pieces")
    pieces = steps_of(rows, *FIELDS)
    assert list(pieces) == list(range(1, end + 1))
    assert pieces == whole


def test_resume_across_the_end_of_an_epoch(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """The tiny set has some 180 windows; batches of 64 pass the end of an epoch at step 3."""
    overrides = ["train.global_batch=64", "train.micro_batch=16", "train.steps=6", "train.resume=auto"]
    whole = steps_of(ranks.train(1, tiny, overrides, tmp_path, "whole"), *FIELDS)
    from lightnet_data.dataset import PackedTokens

    epoch = PackedTokens(tiny.parent / "data" / "train", 64, 7).samples_per_epoch
    assert 64 < epoch < 6 * 64
    edge = epoch // 64  # the step within which the epoch ends
    for stop in (edge, edge + 1, 6):
        rows = ranks.train(1, tiny, [*overrides, f"train.stop_at_step={stop}"], tmp_path, "pieces")
    assert steps_of(rows, *FIELDS) == whole


def _damage_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


SIX = ["train.steps=6", "train.resume=auto", "checkpoint.interval=2"]


@pytest.fixture(scope="module")
def six_steps(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Any, ...]]:
    return steps_of(ranks.train(1, tiny, SIX, tmp_path_factory.mktemp("six"), "whole"), *FIELDS)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "no_manifest", "half_written"])
def test_damaged_checkpoint_is_passed_over(
    damage: str, ranks: Ranks, tiny: Path, tmp_path: Path, six_steps: dict[int, tuple[Any, ...]]
) -> None:
    ranks.train(1, tiny, [*SIX, "train.stop_at_step=4"], tmp_path, "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000004"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-100])
    elif damage == "flipped":
        _damage_last_byte(victim)
    elif damage == "missing":
        victim.unlink()
    elif damage == "no_manifest":
        (newest / "manifest.json").unlink()
    else:
        newest.rename(newest.with_name(".step_00000004.partial"))
    rows = ranks.train(1, tiny, SIX, tmp_path, "run")
    log = (tmp_path / "run.log.rank0").read_text()
    if damage != "half_written":  # what was never renamed is not a checkpoint; nobody need be told
        assert "warning: passing over a damaged checkpoint" in log and newest.name in log
    assert "step_00000002 at step 2" in log
    assert steps_of(rows, *FIELDS) == six_steps
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == "step_00000006"
    assert not list((tmp_path / "run" / "checkpoints").glob(".step*.partial"))


def test_damaged_checkpoints_never_push_out_whole_ones(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.resume=auto", "checkpoint.interval=1", "checkpoint.keep_last=2"]
    ranks.train(1, tiny, [*overrides, "train.stop_at_step=3", "checkpoint.keep_last=4"], tmp_path, "run")
    root = tmp_path / "run" / "checkpoints"
    for name in ("step_00000002", "step_00000003"):
        (root / name / "manifest.json").unlink()
    ranks.train(1, tiny, [*overrides, "train.stop_at_step=2"], tmp_path, "run")
    from lightnet_llm.checkpoint.store import listed, verify

    assert [folder.name for folder in listed(root)] == ["step_00000001", "step_00000002"]
    for folder in listed(root):
        verify(folder)


def test_no_whole_checkpoint_is_an_error_not_a_fresh_start(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=2", "train.resume=auto"]
    ranks.train(1, tiny, [*overrides, "train.stop_at_step=1"], tmp_path, "run")
    (tmp_path / "run" / "checkpoints" / "step_00000001" / "manifest.json").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "is whole" in refusal(ranks, tiny, tmp_path, overrides)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_step_that_is_not_finite_is_never_saved(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["optimizer.learning_rate=1e30", "optimizer.clip=0", "schedule.warmup_steps=0"]
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *overrides]
    codes = ranks.run(2, [*arguments, "checkpoint.interval=1", "logging.interval=7"], tmp_path / "nan.log")
    assert codes == [1, 1]
    log = (tmp_path / "nan.log.rank0").read_text()
    assert "error: loss is" in log and "train.init_from=" in log
    from lightnet_llm.checkpoint.store import listed
    from lightnet_llm.checkpoint.weights import load_weights

    for folder in listed(tmp_path / "run" / "checkpoints"):
        assert all(tensor.isfinite().all() for tensor in load_weights(folder).values())
    json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])


def test_other_data_under_the_same_path_are_refused(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    import shutil

    data = tmp_path / "data"
    shutil.copytree(tiny.parent / "data", data)
    overrides = [f"data.path={data}", "train.steps=2", "train.resume=auto"]
    ranks.train(1, tiny, [*overrides, "train.stop_at_step=1"], tmp_path, "run")
    for suffix in ("bin", "idx"):
        shutil.copyfile(data / f"validation.{suffix}", data / f"train.{suffix}")
    assert "holds other data" in refusal(ranks, tiny, tmp_path, overrides)


def test_two_runs_on_one_folder(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "in use by a run" in refusal(ranks, tiny, tmp_path, ["train.steps=2"])
    ranks.train(1, tiny, ["train.steps=2"], tmp_path, "run")


def test_what_one_rank_alone_cannot_do_is_said(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """A pipeline's later stage finds that the weights to start from have too few blocks."""
    ranks.train(1, tiny, ["model.layers=2", "train.steps=1"], tmp_path, "small")
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "parallel.pipeline=2"]
    codes = ranks.run(2, [*arguments, f"train.init_from={tmp_path / 'small'}"], tmp_path / "log")
    assert 1 in codes
    text = "".join((tmp_path / f"log.rank{rank}").read_text() for rank in range(2))
    assert "error: rank 1: " in text and "another model" in text


def test_a_save_that_fails_on_one_rank_ends_the_run_on_all(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "checkpoint.interval=3"]
    codes = ranks.run(2, arguments, tmp_path / "log", plant="fail_save_on_rank_one")
    assert codes == [1, 1]  # of themselves: nobody waits in a collective until killed
    texts = [(tmp_path / f"log.rank{rank}").read_text() for rank in range(2)]
    assert "error: checkpoint of step 3 could not be written (on another rank" in texts[0]
    assert "error: rank 1: " in texts[1] and "No space left on device" in texts[1]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_rotation(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    overrides = ["train.steps=10", "checkpoint.interval=1", "checkpoint.keep_last=2", "checkpoint.keep_every=4"]
    ranks.train(1, tiny, overrides, tmp_path, "run")
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert kept == ["step_00000004", "step_00000008", "step_00000009", "step_00000010"]


def refusal(ranks: Ranks, tiny: Path, tmp: Path, overrides: list[str], world: int = 1) -> str:
    """The error line of a start that must be refused on every rank with exit code 1."""
    arguments = ["--config", str(tiny), f"train.output={tmp}", "train.name=run", *overrides]
    codes = ranks.run(world, arguments, tmp / "refused.log")
    assert codes == [1] * world
    lines = [line for line in (tmp / "refused.log.rank0").read_text().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_what_a_resume_refuses_and_allows(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    short = ["train.steps=3"]
    ranks.train(1, tiny, short, tmp_path, "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    assert "never overwritten" in refusal(ranks, tiny, tmp_path, short)
    again = [*short, "train.resume=auto"]
    message = refusal(ranks, tiny, tmp_path, [*again, "optimizer.learning_rate=1"])
    assert "optimizer.learning_rate was 0.001" in message and "train.steps" in message
    message = refusal(ranks, tiny, tmp_path, [*again, "train.seed=8"])
    assert "train.seed was 7" in message
    assert before == sorted(p.name for p in (tmp_path / "run").rglob("*"))
    assert config == (tmp_path / "run" / "config.yaml").read_text()
    ranks.train(1, tiny, again, tmp_path, "run")  # finished: says so, exits 0
    assert "is finished at step 3" in (tmp_path / "run.log.rank0").read_text()
    longer = ranks.train(1, tiny, ["train.resume=auto", "train.steps=5"], tmp_path, "run")
    assert list(steps_of(longer, "loss")) == [1, 2, 3, 4, 5]


def test_resume_must(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    assert "holds no checkpoint" in refusal(ranks, tiny, tmp_path, ["train.resume=must"])
    assert not (tmp_path / "run").exists()


def test_init_from_takes_weights_only(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    first = steps_of(ranks.train(2, tiny, ["parallel.tensor=2", LARGE], tmp_path, "first"), "loss")
    rows = ranks.train(1, tiny, [f"train.init_from={tmp_path / 'first'}", "train.steps=2"], tmp_path, "second")
    second = steps_of(rows, "loss", "samples", "learning_rate")
    assert second[1][0] < first[20][0] + 0.3 < first[1][0] - 0.7  # starts trained ...
    assert second[1][1] == [0, 8]  # ... at the first sample, with a fresh schedule
    message = refusal(ranks, tiny, tmp_path, [f"train.init_from={tmp_path / 'first'}", "model.glu_width=64"])
    assert "glu" in message and "another model" in message


def test_a_checkpoint_is_found_from_every_folder(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """A run folder of real data holds the tokenizer's manifest too; it must not pass for a checkpoint's."""
    import shutil

    from lightnet_data import manifest

    from lightnet_llm.checkpoint.store import resolve

    data = tmp_path / "data"
    shutil.copytree(tiny.parent / "data", data)
    (data / "tokenizer.model").write_bytes(b"a tokenizer")
    ranks.train(1, tiny, [f"data.path={data}", "train.steps=1"], tmp_path, "run")
    run = tmp_path / "run"
    assert (run / "tokenizer.model").read_bytes() == b"a tokenizer" and manifest.load(run)["tokenizer"]["eod_id"] == 0
    newest = run / "checkpoints" / "step_00000001"
    for given in (run, run / "checkpoints", newest):
        assert resolve(given, print) == newest


def test_run_folder_records_itself(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    rows = ranks.train(1, tiny, ["train.steps=2", "logging.groups_interval=1"], tmp_path, "run")
    folder = tmp_path / "run"
    facts = json.loads((folder / "environment.jsonl").read_text().splitlines()[0])
    assert facts["versions"]["torch"] and facts["command"] and facts["layout"]["world"] == 1
    from lightnet_llm.config import load_config

    assert load_config(str(folder / "config.yaml")).train.steps == 2
    assert {"loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "memory_bytes", "mfu"} <= set(rows[0])
    assert "layers.attention.lrpe.theta" in rows[0]["norms"]["gradient"]
    assert list((folder / "tensorboard").glob("events*"))
    assert json.loads((folder / "finished.json").read_text())["step"] == 2
    assert read_metrics(folder)[-1]["event"] == "finished"
