"""Kernels that the interpreter runs are compiled for a card, too: their types, loops and shapes are checked by nothing else
where there is no GPU. See `compiled`.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.conftest import ROOT

SLOW = ("causal, float32", "causal, without LRPE", "spans, without LRPE")
ORDINARY = ("spans", "spans by CUDA", "ranks", "decoding", "bidirectional", "companions", "toeplitz")


def compiled(*arguments, **environment):
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.unit.kernels.compiled", *arguments]
    run = {"cwd": ROOT, "env": {**given, "OMP_NUM_THREADS": "1", **environment}, "capture_output": True, "text": True}
    return subprocess.run(command, **run, timeout=280)


@pytest.mark.parametrize(
    "cases", [ORDINARY, *(pytest.param((case,), marks=pytest.mark.slow) for case in SLOW)], ids=", ".join
)
def test_kernels_compile_for_a_card(cases, tmp_path):
    done = compiled(*cases, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(cases)


@pytest.mark.parametrize(
    ("case", "error"), [("changes type", "Loop-carried variable"), ("too large", "of shared memory, of 232448")]
)
def test_what_does_not_compile_is_seen(case, error, tmp_path):
    done = compiled(case, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode and error in done.stderr, done.stderr[-3000:]
