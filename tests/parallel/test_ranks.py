"""The tests' own launcher: several runs at once, an end that leaves nothing behind, the page of a stopped matrix."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from lightnet_llm.training import failures
from tests.conftest import ROOT, Ranks


def wait_for(log: Path, text: str) -> None:
    deadline = time.monotonic() + 120
    while not (log.exists() and text in log.read_text()):
        assert time.monotonic() < deadline, f"no '{text}' in {log}"
        time.sleep(0.1)


def test_runs_are_answered_apart_and_end_with_the_server(tiny: Path, tmp_path: Path) -> None:
    ranks = Ranks()
    found: list[object] = []

    def train() -> None:
        arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=long", "train.steps=1000000"]
        try:
            found.append(ranks.run(1, arguments, tmp_path / "long", "check_shards"))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    wait_for(tmp_path / "long.rank0", "shards asserted")
    assert ranks.run(1, ["--config", "nowhere.yaml"], tmp_path / "short") == [failures.REFUSED]
    assert not found
    children = psutil.Process(ranks.process.pid).children(recursive=True)
    assert children
    ranks.close()
    thread.join(timeout=30)
    assert isinstance(found[0], RuntimeError)
    assert not psutil.wait_procs(children, timeout=30)[1], "ranks were left behind"


@pytest.mark.slow
def test_a_stopped_matrix_writes_what_has_run(tmp_path: Path) -> None:
    page, log = tmp_path / "page.md", tmp_path / "log"
    only = ["tp2-independent", "pp2-uniform", "one-4", "one-recompute2"]
    command = [sys.executable, "-m", "tests.parallel.matrix", "--only", *only, "--ranks", "2"]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--output", str(page)], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    wait_for(log, "| ok |")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) == 1
    text = page.read_text()
    left = re.search(r"Incomplete\*\*: stopped before (\d+) of", text)
    assert left and int(left[1]) + text.count("| ok |\n") == len(only), text
