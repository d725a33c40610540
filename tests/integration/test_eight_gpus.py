"""The script for eight GPUs, as far as it goes without one."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "benchmarks/eight_gpus.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
@pytest.mark.parametrize("gpus", ["2", "4", "8"])
def test_what_would_run_is_legal(gpus: str) -> None:
    shown = run("show", "--gpus", gpus)
    assert shown.returncode == 0, shown.stderr[-2000:]
    lines = [line.split()[0] for line in shown.stdout.splitlines() if line.split()]
    assert lines.count("parity") >= 6 and lines.count("speed") == 6 and lines.count("scaling") >= 4
    assert lines.count("layouts") >= 8 and lines.count("buckets") == 24


@pytest.mark.slow
def test_parts_that_need_gpus_say_so() -> None:
    done = run("parity", "--gpus", "8")
    assert done.returncode == 2 and "needs 8 GPUs" in done.stderr
