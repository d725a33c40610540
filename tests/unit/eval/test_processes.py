"""``lightnet eval --processes``: what fails is one line, whichever process it is, without the launcher's report."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.cli.processes import in_processes

from . import rows


def test_bad_input_is_one_line(run: Path, tmp_path: Path) -> None:
    folder = rows.write(tmp_path / "data")
    (folder / "piqa.validation.jsonl").write_text('{"goal": 1\n')
    command = [sys.executable, "-m", "lightnet_llm.cli", "eval", str(run), "--tasks", "piqa", "--processes", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([*command, "--offline", str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: --offline ") and done.stderr.count("\n") == 1, done.stderr[-2000:]
    assert "Missing a comma" in done.stderr


def test_one_process_that_fails_alone_is_heard(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def run(arguments: Any) -> None:
        assert arguments.redirects == "1:2,2:2" and arguments.nproc_per_node == "3"
        log = Path(arguments.log_dir) / "run" / "attempt_0" / "1" / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text("error: device 'cuda:1' is not here\n")
        raise ChildFailedError("lightnet_llm.cli", {1: ProcessFailure(1, 5, 1, "/nowhere")})

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert in_processes(3) == 1
    assert capfd.readouterr().err == "error: device 'cuda:1' is not here\n"
