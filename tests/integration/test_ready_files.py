"""Ready files started for real on this machine: each trains like ranks started by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightnet_llm.cli.launch import KINDS
from lightnet_llm.launch.hosts import free_port
from lightnet_llm.launch.job import job_of
from tests.conftest import ROOT, Ranks, read_metrics, steps_of
from tests.integration.test_launcher import FIELDS

# Starts the command once for each node, all at the same time, as srun does; ends with the largest exit code.
SRUN = """#!/bin/bash
words=("$@")
while [[ ${words[0]} == --* ]]; do words=("${words[@]:1}"); done
for rank in 0 1; do SLURM_NODEID=$rank "${words[@]}" & jobs+=($!); done
worst=0
for job in "${jobs[@]}"; do wait "$job" || worst=$?; done
exit $worst
"""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\necho 127.0.0.1\n"


# Hosts and the arguments with which the script is started on each.
STARTS = {
    "torchrun": (2, [["0", "127.0.0.1"], ["1", "127.0.0.1"]]),
    "slurm": (2, [[]]),
    "deepspeed": (1, [[]]),
}


@pytest.mark.parametrize("kind", [k if k == "torchrun" else pytest.param(k, marks=pytest.mark.slow) for k in STARTS])
def test_ready_file_trains(kind: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = ["parallel.tensor=2", "train.steps=6", "validation.interval=0"]
    whole = steps_of(ranks.train(2, tiny, common, tmp_path, "whole"), *FIELDS)
    nodes, starts = STARTS[kind]
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    setup = f"launch.setup=['PATH={programs}:{Path(sys.executable).parent}:$PATH']"
    where = [f"train.output={tmp_path}/it's here", "train.name=run", f"launch.nodes={nodes}"]
    job = job_of(str(tiny), (*common, *where, f"launch.gpus_per_node={2 // nodes}", setup))
    script = tmp_path / "script"
    script.write_text(KINDS[kind][0](job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"SLURM_JOB_NODELIST": "all", "SLURM_JOB_ID": "1"}
    logs = [tmp_path / f"log{i}" for i in range(len(starts))]
    processes = []
    for arguments, log in zip(starts, logs, strict=True):
        with log.open("wb") as output:
            command = ["bash", str(script), *arguments]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
    codes = [process.wait(timeout=200) for process in processes]
    assert set(codes) == {0}, "".join(log.read_text()[-3000:] for log in logs)
    assert steps_of(read_metrics(tmp_path / "it's here" / "run"), *FIELDS) == whole
