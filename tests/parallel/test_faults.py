"""Faults of one rank: the others end within a minute, by themselves, non-zero, and name the cause; what was saved stays."""

import json
import time
from pathlib import Path

import pytest

from lightnet_llm.checkpoint.store import newest_whole
from lightnet_llm.training import failures
from tests.conftest import Ranks, read_metrics, steps_of

SLOW = pytest.mark.slow
KILLED = -9
FIELDS = ("loss", "grad_norm", "samples")
# The first three steps of a start may take other_seconds; the faults come at step 8.
QUICK = ["watchdog={step_seconds: 4, other_seconds: 40, silent_seconds: 8}", "checkpoint.interval=2"]
QUICK += ["train.stop_at_step=12"]
LAYOUTS = {
    "dp2": (2, []),
    "zero3": (2, ["parallel.zero_stage=3"]),
    "tp2": (2, ["parallel.tensor=2"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "tp2_dp2": (4, ["parallel.tensor=2"]),
}
LOADERS = {layout: ["data.workers=2"] for layout in ("dp2", "tp2")}


class Fault:
    """A run with a fault in it, and what came of it."""

    def __init__(self, ranks: Ranks, tiny: Path, tmp: Path, world: int, plant: str, overrides: list[str]):
        self.ranks, self.tiny, self.tmp, self.world = ranks, tiny, tmp, world
        self.overrides = [*overrides, *QUICK]
        start = time.time()
        self.codes = self._run(plant, "run.log", LIGHTNET_FAILURES=str(tmp / "failures"))
        self.seconds = time.time() - start
        self.logs = [(tmp / f"run.log.rank{rank}").read_text() for rank in range(world)]
        self.errors = [[x for x in log.splitlines() if x.startswith("error: ")] for log in self.logs]
        self.words = failures.read(tmp / "failures")

    def _run(self, plant: str | None, log: str, **environment: str) -> list[int]:
        arguments = ["--config", str(self.tiny), f"train.output={self.tmp}", "train.name=run", *self.overrides]
        arguments += ["train.resume=auto"]
        return self.ranks.run(self.world, arguments, self.tmp / log, plant, grace=50, **environment)

    def nothing_is_lost(self) -> None:
        """The newest checkpoint is whole, and the run that continues from it is the run that never failed."""
        found = newest_whole(self.tmp / "run" / "checkpoints", pytest.fail)
        assert found is not None and found[0].name == "step_00000006"
        assert self._run(None, "again.log") == [0] * self.world
        run = steps_of(read_metrics(self.tmp / "run"), *FIELDS)
        whole = steps_of(self.ranks.train(self.world, self.tiny, self.overrides, self.tmp, "whole"), *FIELDS)
        assert run == whole


@pytest.mark.parametrize("layout", [n if n in ("dp2", "pp2") else pytest.param(n, marks=SLOW) for n in LAYOUTS])
def test_killed_rank(layout: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    world, overrides = LAYOUTS[layout]
    fault = Fault(ranks, tiny, tmp_path, world, "kill_rank_one", [*overrides, *LOADERS.get(layout, [])])
    assert fault.codes[1] == KILLED and fault.seconds < 60
    assert all(code in (failures.FAILED, failures.HUNG) for rank, code in enumerate(fault.codes) if rank != 1)
    assert any("lost rank 1 (host " in line and "killed or crashed" in line for line in fault.errors[0]), fault.logs[0]
    assert fault.words and fault.words[0].kind in ("hung", "lost") and "rank 1 " in fault.words[0].message
    assert all(word.step == 8 for word in fault.words)
    if layout == "dp2":
        fault.nothing_is_lost()


@pytest.mark.parametrize("layout", [n if n in ("tp2", "pp2") else pytest.param(n, marks=SLOW) for n in LAYOUTS])
def test_hung_rank(layout: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """It is named, with the place it is in and the collective the others wait in; all stacks are written. Data loaders' workers,
    which are ended with their rank, say nothing."""
    world, overrides = LAYOUTS[layout]
    fault = Fault(ranks, tiny, tmp_path, world, "hang_rank_one", [*overrides, *LOADERS.get(layout, [])])
    assert fault.codes == [failures.HUNG] * world and fault.seconds < 60
    (report,) = (tmp_path / "run" / "hangs").glob("*/report.txt")
    text = report.read_text()
    assert "step 8" in text.split(" has not ended after ")[0]
    assert "rank 1 (host " in text and "has not arrived: step 8 at tests/parallel/faults.py" in text
    collective = {"dp2": "all_reduce", "zero3": "reduce_scatter_tensor", "pp2": "recv"}.get(layout, "all_reduce")
    assert f" wait in {collective}" in text or f" waits in {collective}" in text
    assert " at lightnet_llm/" in text
    said = [line for lines in fault.errors for line in lines]
    assert len(said) == 1 and said[0] in text, "one rank speaks"
    for rank in range(world):
        stacks = (report.parent / f"rank_{rank:05d}.txt").read_text()
        assert f"rank {rank}, host " in stacks and "most recent call first" in stacks
    assert "faults.py" in (report.parent / "rank_00001.txt").read_text()
    assert fault.words[0].kind == "hung" and fault.words[0].step == 8 and len(fault.words) == world
    if layout == "tp2":
        fault.nothing_is_lost()


@pytest.mark.parametrize("plant", ["freeze_rank_one", "freeze_rank_zero"])
def test_frozen_rank(plant: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """SIGSTOP: no thread of it runs, so that it can say nothing; even when it holds the store."""
    frozen = 1 if plant.endswith("one") else 0
    fault = Fault(ranks, tiny, tmp_path, 2, plant, [])
    other = 1 - frozen
    assert fault.codes[other] == failures.HUNG and fault.codes[frozen] == KILLED and fault.seconds < 60
    (error,) = fault.errors[other]
    assert f"rank {frozen} (" in error and ("no sign of life" in error or "gone, frozen or cut off" in error)


def test_a_bug_on_one_rank(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    fault = Fault(ranks, tiny, tmp_path, 2, "crash_rank_one", [])
    assert fault.codes == [failures.FAILED] * 2 and fault.seconds < 60
    assert fault.errors == [
        ["error: rank 0: rank 1 ended: ValueError: a bug on one rank"],
        ["error: rank 1: ValueError: a bug on one rank"],
    ]
    assert "Traceback" in fault.logs[1]
    assert [(word.kind, word.rank, word.step) for word in fault.words] == [("failed", 1, 8), ("lost", 0, 8)]


def test_sigterm_to_one_rank_saves_on_all(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """As a scheduler does: the step is ended, saved, and every rank exits 0."""
    fault = Fault(ranks, tiny, tmp_path, 2, "terminate_rank_one", [])
    assert fault.codes == [0, 0] and not any(fault.errors)
    assert read_metrics(tmp_path / "run")[-1]["event"] == "stopped"
    found = newest_whole(tmp_path / "run" / "checkpoints", pytest.fail)
    assert found is not None and found[0].name == "step_00000008"
    assert [word.kind for word in fault.words] == ["ended", "ended"]


def test_full_disk_during_a_save(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """See tests/integration/test_system.py for a disk that is really full."""
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "train.resume=auto"]
    assert ranks.run(2, [*arguments, "train.stop_at_step=2"], tmp_path / "log") == [0, 0]
    codes = ranks.run(
        2,
        [*arguments, "train.stop_at_step=4"],
        tmp_path / "log",
        "fail_save_on_rank_one",
        LIGHTNET_FAILURES=str(tmp_path / "f"),
    )
    assert codes == [failures.REFUSED] * 2
    found = newest_whole(tmp_path / "run" / "checkpoints", pytest.fail)
    assert found is not None and found[0].name == "step_00000002"
    words = failures.read(tmp_path / "f")
    assert [word.kind for word in words] == ["refused"] * 2 and "No space left" in words[1].message


@pytest.mark.parametrize("part", ["train.bin", "train.idx", "validation.bin"])
def test_truncated_shard_of_data(part: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """Refused before any work, in one line that names it."""
    import shutil

    data = tmp_path / "data"
    shutil.copytree(tiny.parent / "data", data)
    content = (data / part).read_bytes()
    (data / part).write_bytes(content[: len(content) * 2 // 3])
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", f"data.path={data}"]
    assert ranks.run(2, arguments, tmp_path / "log") == [failures.REFUSED] * 2
    errors = [x for x in (tmp_path / "log.rank0").read_text().splitlines() if x.startswith("error: ")]
    assert len(errors) == 1 and str(data / part).removesuffix(".bin").removesuffix(".idx") in errors[0], errors
    assert "Error: " not in (tmp_path / "log.rank0").read_text().split("error: ", 1)[1]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_failures_are_read_causes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failures.VARIABLE, str(tmp_path))
    for rank, kind in enumerate(("lost", "ended", "failed", "refused")):
        monkeypatch.setenv("RANK", str(rank))
        failures.record(kind, f"{rank}", 3)
        failures.record("hung", "the first word stands", 4)
    (tmp_path / "rank_00009.json").write_text("{cut")
    assert [(one.kind, one.rank) for one in failures.read(tmp_path)] == [
        ("refused", 3),
        ("failed", 2),
        ("lost", 0),
        ("ended", 1),
    ]
    assert json.loads((tmp_path / "rank_00000.json").read_text())["message"] == "0"


def test_the_launcher_starts_a_killed_run_again(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """``lightnet train --restarts``: a rank is killed with -9; the run goes on and equals the one that never failed."""
    from tests.integration.test_launcher import ours, train, wait_for_step

    common = ["train.steps=30", "train.micro_batch=4", "checkpoint.interval=5", "validation.interval=0"]
    common += ["train.batch_ramp=[]"]
    whole = steps_of(ranks.train(2, tiny, common, tmp_path, "whole"), *FIELDS)
    log = tmp_path / "log"
    arguments = [str(tiny), "--gpus", "2", "--restarts", "2", "--back-off", "0.1", f"train.output={tmp_path}"]
    began = time.time()
    process = train([*arguments, "train.name=run", *common], log)
    wait_for_step(tmp_path / "run", 6, process, log)
    next(p for p in ours(str(tmp_path)) if "--local_rank=1" in p.cmdline()).kill()
    killed = time.time()
    assert process.wait(timeout=120) == 0, log.read_text()[-3000:]
    ended = time.time()
    assert not ours(str(tmp_path)), "processes were left behind"
    rows = read_metrics(tmp_path / "run")
    assert steps_of(rows, *FIELDS) == whole
    assert [row["event"] for row in rows if row.get("event") in ("failed", "restarted", "finished")] == [
        "failed",
        "restarted",
        "finished",
    ]
    launches = [row["launch_seconds"] for row in rows if "launch_seconds" in row]
    assert len(launches) == 2
    for one, most in zip(launches, (killed - began, ended - killed), strict=True):  # the restart's from the restart on
        parts = [one[name] for name in ("processes", "imports", "checks", "engine", "first_step")]
        assert len(one) == 6 and min(parts) >= 0 and one["processes"] > 0.1
        assert sum(parts) < most and one["total"] == pytest.approx(sum(parts))
    (failed,) = [row for row in rows if row.get("event") == "failed"]
    assert "lost rank 1 (host " in failed["cause"] and not (tmp_path / "run" / "failures").exists()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [["parallel.zero_stage=3"], []], ids=["zero3", "zero1"])
def test_the_supervisor_goes_on_with_fewer_ranks(
    overrides: list[str], ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    """Two ranks, of which one is lost for good: one goes on, with the same batches and the same losses."""
    import threading

    from lightnet_llm.config import load_config
    from lightnet_llm.launch.command import launcher_command
    from lightnet_llm.supervisor import Supervisor
    from tests.integration.test_launcher import ours

    common = [*overrides, "train.steps=60", "checkpoint.interval=5", "validation.interval=0"]
    whole = steps_of(ranks.train(2, tiny, common, tmp_path, "whole"), *FIELDS)
    given = (*common, f"train.output={tmp_path}", "train.name=run")
    run = tmp_path / "run"

    def kill() -> None:
        deadline = time.time() + 100
        while not (run / "checkpoints" / "step_00000005").exists() and time.time() < deadline:
            time.sleep(0.05)
        next(p for p in ours(str(tmp_path)) if "--local_rank=1" in p.cmdline()).kill()

    def command(world: int, hosts: object, further: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
        return launcher_command(str(tiny), (*given, *further), world, None, run)

    killer = threading.Thread(target=kill)
    killer.start()
    config = load_config(str(tiny), given)
    Supervisor(config, run, lambda: None, command, restarts=1, back_off=0.1, devices=lambda: 1).run(2)
    killer.join()
    rows = read_metrics(run)
    (event,) = [row for row in rows if row.get("event") == "restarted"]
    assert event["world"] == 1
    again = steps_of(rows, *FIELDS)
    assert list(again) == list(whole)
    for step, (loss, norm, samples) in whole.items():
        assert abs(again[step][0] - loss) < 1e-5 and abs(again[step][1] / norm - 1) < 1e-4 and again[step][2] == samples
