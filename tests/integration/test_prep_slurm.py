"""``lightnet prep --executor slurm``: its files checked everywhere, and run under a real Slurm where there is one to fetch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lightnet_data.tokenizer import Tokenizer

from lightnet_llm.cli.prep import prep
from tests.integration.slurm import Slurm, until

SETTINGS = [
    "partition=gpu",
    "time=0:10:00",
    "mem_per_cpu_gb=1",
    f"env_command=export PATH={Path(sys.executable).parent}:$PATH",
]
# A queue that takes every script, keeps it, and says as long as a file is there that the job is in it.
SBATCH = """#!/bin/sh
cp "$(eval echo \\${$#})" "$QUEUE/script.$$"; echo "$@" >> "$QUEUE/arguments"; touch "$QUEUE/running"
echo "Submitted batch job 4711"
"""
SQUEUE = """#!/bin/sh
test -e "$QUEUE/running" && echo RUNNING; exit 0
"""


def write_corpus(folder: Path) -> list[str]:
    """Six small files, a tokenizer, and the arguments that prepare them."""
    (folder / "in").mkdir()
    for number in range(6):
        lines = (json.dumps({"text": f"document {number} {line} of a corpus"}) + "\n" for line in range(20))
        (folder / "in" / f"{number}.jsonl").write_text("".join(lines))
    tokenizer = Tokenizer.train(["a document of a corpus, and another one " * 20], 300).save(folder)
    return [f"{folder}/in", "--tokenizer", str(tokenizer)]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(prep, [str(argument) for argument in arguments], catch_exceptions=False)


def slurm(*settings: str) -> list[str]:
    return ["--executor", "slurm", "--workers", "2", *(part for setting in settings for part in ("--set", setting))]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightnet_data.parts.PART_BYTES", 1000)


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "queue"
    folder.mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(folder))
    return folder


def test_files_for_slurm(tmp_path: Path, queue: Path, small_parts: None) -> None:
    """The script is bash that ShellCheck accepts, with the options asked for; a queued stage is not submitted twice."""
    given = [*write_corpus(tmp_path), "--output", tmp_path / "out", *slurm(*SETTINGS)]
    first = run(*given)
    assert first.exit_code == 0 and "tokenizing: 6 tasks are in the queue as job 4711" in first.stdout, first.output
    logs = tmp_path / "out.partial" / "logs" / "tokenizing"
    script = logs / "launch_script.slurm"
    lines = script.read_text().splitlines()
    for option in ("partition=gpu", "time=0:10:00", "array=0-5%2", "cpus-per-task=1", "mem-per-cpu=1G", "requeue"):
        assert f"#SBATCH --{option}" in lines
    assert f"launch_pickled_pipeline {logs}/executor.pik" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "-s", "bash", "-e", "SC1091", script],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
    assert json.loads((logs / "ranks_to_run.json").read_text()) == list(range(6))
    submitted = (queue / "arguments").read_text()
    again = run(*given)
    assert "6 tasks are in the queue as job 4711" in again.stdout and (queue / "arguments").read_text() == submitted

    (queue / "running").unlink()  # what the array does, task by task, on some node
    (queue / "scontrol").write_text("#!/bin/sh\necho node1\n")
    (queue / "scontrol").chmod(0o755)

    def task(number: int) -> None:
        launch = [Path(sys.executable).with_name("launch_pickled_pipeline"), logs / "executor.pik"]
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number), "SLURM_NODELIST": "n", "SLURM_JOB_ID": "1"}
        done = subprocess.run(launch, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]

    for number in range(5):
        task(number)
    left = run(*given)
    assert "tokenizing: 1 tasks are in the queue" in left.stdout
    assert json.loads((logs / "ranks_to_run.json").read_text()) == [5]
    (queue / "running").unlink()
    task(0)
    assert run(*given).exit_code == 0
    assert run(*given[:4], tmp_path / "local").exit_code == 0
    for path in (tmp_path / "local").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "--executor slurm needs time and partition; give --set time=VALUE"),
        (["partition=a", "time=1", "colour=red"], "unexpected keyword argument 'colour'"),
        (["partition=a", "time=1"], "sbatch failed"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], message: str) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    result = run(*write_corpus(tmp_path), "--output", tmp_path / "out", *slurm(*settings))
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and message in result.stderr
    assert not (tmp_path / "out").exists()
    partial = tmp_path / "out.partial"
    assert partial.exists() == (message == "sbatch failed")
    if partial.exists():
        script = partial / "logs" / "tokenizing" / "launch_script.slurm"
        assert f"the script is {script}" in result.stderr and script.is_file()


@pytest.mark.system
def test_a_real_queue(cluster: Slurm, tmp_path: Path, small_parts: None) -> None:
    """Array, error of a task, another array of what is left; the result is the local one."""
    given = [*write_corpus(tmp_path), "--output", f"{tmp_path}/out"]
    bad = tmp_path / "in" / "3.jsonl"
    good = bad.read_text()
    programs = f"export PATH={Path(sys.executable).parent}:{cluster.root}/usr/bin:$PATH"
    settings = {"partition": "gpu", "time": "0:10:00", "sbatch_args": {"mem-per-cpu": "1M"}, "env_command": programs}
    config = {
        "inputs": [f"{tmp_path}/in"],
        "output": f"{tmp_path}/out",
        "tokenizer": {"path": given[2]},
        "executor": {"kind": "slurm", "workers": 2, "settings": settings},
    }
    (tmp_path / "prep.yaml").write_text(json.dumps(config))
    code = "from lightnet_data import parts; parts.PART_BYTES = 1000; from lightnet_llm.cli import main; main()"
    quoted = " ".join(
        f"'{argument}'" for argument in (sys.executable, "-c", code, "prep", "--config", f"{tmp_path}/prep.yaml")
    )

    def command() -> str:
        return cluster.shell(f"{quoted} 2>&1")

    def finished() -> bool:
        return not cluster.shell("squeue -h").strip()

    bad.write_text(good + "broken\n")
    said = command()
    assert "tokenizing: 6 tasks are in the queue as job" in said, said
    until(finished, 180, lambda: "the array did not end")
    said = command()
    assert said.startswith("error: ") or "\nerror: " in said, said
    assert "3.jsonl, line 21" in said
    bad.write_text(good)
    assert "tokenizing: 1 tasks are in the queue" in command()
    until(finished, 180, lambda: "the second array did not end")
    said = command()
    assert "120 documents" in said, said
    assert run(*given[:3], "--output", tmp_path / "local").exit_code == 0
    for path in (tmp_path / "local").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
