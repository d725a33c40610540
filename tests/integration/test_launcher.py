"""The real launcher: start, SIGTERM, resume, once per engine; and the same run by hand."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, Ranks, read_metrics, steps_of

LIGHTNET = [sys.executable, "-c", "from lightnet_llm.cli import main; main()"]
FIELDS = ("loss", "grad_norm", "learning_rate", "samples")


def train(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [*LIGHTNET, "train", *arguments], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.time() + 120
    while time.time() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        path = run / "metrics.jsonl"
        if path.exists() and any(json.loads(line)["step"] >= step for line in path.read_text().splitlines()[:-1]):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached\n{log.read_text()[-3000:]}")


def ours(marker: str) -> list[psutil.Process]:
    """Processes whose command line names this test's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(marker in part for part in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.mark.parametrize(
    ("overrides", "launched"),
    [
        pytest.param(["parallel.tensor=2"], False, id="plain"),
        pytest.param(["parallel.pipeline=2"], True, id="pipeline", marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_and_resume_equals_no_stop(
    overrides: list[str], launched: bool, ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    """`launched`: it resumes by the launcher, too, as tests/parallel/test_faults.py does after a rank was killed."""
    common = [*overrides, "train.steps=30", "train.micro_batch=4", "model.dropout=0.1", "validation.interval=0"]
    whole = steps_of(ranks.train(2, tiny, common, tmp_path, "whole"), *FIELDS)
    arguments = [str(tiny), "--gpus", "2", f"train.output={tmp_path}", "train.name=run", *common]
    log = tmp_path / "first.log"
    process = train(arguments, log)
    wait_for_step(tmp_path / "run", 4, process, log)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, log.read_text()[-3000:]
    stopped = max(steps_of(read_metrics(tmp_path / "run"), "loss"))
    assert 4 <= stopped < 30, "the stop must come midway"
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().strip() == f"step_{stopped:08d}"
    if launched:
        process = train([*arguments, "train.resume=auto"], tmp_path / "second.log")
        assert process.wait(timeout=120) == 0, (tmp_path / "second.log").read_text()[-3000:]
    else:
        ranks.train(2, tiny, [*common, "train.resume=auto"], tmp_path, "run")
    assert steps_of(read_metrics(tmp_path / "run"), *FIELDS) == whole
    assert not ours(str(tmp_path)), "processes were left behind"


def test_by_hand_and_killed_rank(tiny: Path, tmp_path: Path) -> None:
    """``deepspeed launch/train.py --config CONFIG`` is the same run; a rank killed with -9 ends it with an error."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_gpus", "2"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command += ["--master_port", str(port), "launch/train.py", "--config", str(tiny), f"train.output={tmp_path}"]
    command += [
        "train.name=run",
        "parallel.tensor=2",
        "train.steps=2000",
        "checkpoint.interval=5",
        "train.micro_batch=4",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not Ranks.gpus():
        environment["DS_ACCELERATOR"] = "cpu"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for_step(tmp_path / "run", 6, process, log)
        rank = next(p for p in ours(str(tmp_path)) if "--local_rank=1" in p.cmdline())
        rank.kill()
        assert process.wait(timeout=60) != 0
        deadline = time.time() + 30
        while ours(str(tmp_path)) and time.time() < deadline:
            time.sleep(0.2)
        assert not ours(str(tmp_path)), "processes were left behind"
    finally:
        for left in ours(str(tmp_path)):
            left.kill()
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert "step_00000005" in saved


def test_failing_run_says_why(tiny: Path, tmp_path: Path) -> None:
    """An error that only a rank can find still comes out as one line and exit code 1."""
    arguments = [str(tiny), "--gpus", "1", f"train.output={tmp_path}", "train.name=run", "validation.interval=0"]
    arguments += ["data.sequence_length=100000"]
    process = train(arguments, tmp_path / "log")
    assert process.wait(timeout=90) == 1
    errors = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("error: ")]
    (error,) = errors  # the supervisor says it, its rank does not
    assert error.startswith("error: the run ended: ") and "sequence_length" in error and "said by" not in error
