"""The emitted batch script under a real Slurm: submitted, told to stop, queued again, resumed, finished."""

import sys
from pathlib import Path

import pytest

from lightnet_llm.launch import slurm
from lightnet_llm.launch.job import job_of
from tests.conftest import Ranks, read_metrics, steps_of
from tests.integration.slurm import Slurm, until
from tests.integration.test_launcher import FIELDS

pytestmark = pytest.mark.system


def test_batch_script_in_a_real_queue(cluster: Slurm, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = ["parallel.tensor=2", "train.steps=150", "validation.interval=0"]
    whole = steps_of(ranks.train(2, tiny, common, tmp_path, "whole"), *FIELDS)
    programs = Path(sys.executable).parent
    launch = [
        "launch.nodes=2",
        "launch.gpus_per_node=1",
        "launch.partition=gpu",
        "launch.time=0:30:00",
        "launch.qos=normal",
    ]
    setup = f"launch.setup=['export PATH={programs}:{cluster.root}/usr/bin:$PATH']"
    where = [f"train.output={tmp_path}", "train.name=run"]
    text = slurm.emit(job_of(str(tiny), (*common, *where, *launch, setup)))
    script, log, run = tmp_path / "run.sbatch", tmp_path / "job.log", tmp_path / "run"
    script.write_text(text.replace("#SBATCH --gpus-per-node=1\n", ""))  # these nodes have none
    job = cluster.shell(f"sbatch --parsable --output={log} {script}").strip()
    assert job.isdigit(), job

    def told() -> str:
        return log.read_text()[-3000:] if log.exists() else "the job did not start"

    def step() -> int:
        steps = steps_of(read_metrics(run), "loss") if (run / "metrics.jsonl").exists() else {}
        return max(steps, default=0)

    until(lambda: step() >= 5, 120, told)
    cluster.shell(f"scancel --signal=TERM --batch {job}")  # what --signal=B:TERM@300 does before the limit
    until(lambda: "PENDING" in cluster.shell(f"squeue -h -o %T -j {job}"), 60, told)
    stopped = step()
    assert 5 <= stopped < 150 and "stop requested: saved step" in log.read_text()
    cluster.shell(f"scontrol update jobid={job} starttime=now")  # a requeued job waits two minutes otherwise
    until(lambda: (run / "finished.json").exists(), 150, told)
    until(lambda: not cluster.shell("squeue -h").strip(), 60, told)
    assert "JobState=COMPLETED" in cluster.shell(f"scontrol show job {job}")
    assert steps_of(read_metrics(run), *FIELDS) == whole
