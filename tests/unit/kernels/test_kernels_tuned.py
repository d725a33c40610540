"""Candidates of other people's tuners are compiled before they are timed (see `tuned`)."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.conftest import ROOT


@pytest.mark.parametrize(("given", "ready"), [([], [[4] * 4, [7] * 4, [11] * 4]), (["plain"], [[0] * 4] * 3)])
def test_candidates_are_compiled_before_they_are_timed(given, ready, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.tuned", *given]
    run = {"cwd": ROOT, "env": {**environment, "TRITON_CACHE_DIR": str(tmp_path)}, "capture_output": True, "text": True}
    done = subprocess.run(command, **run, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one for one, _ in found] == ready
    assert [size for _, size in found] == [256] * 3
