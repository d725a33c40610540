"""Tests of kernels under Triton's interpreter, on CPU tensors.

TRITON_INTERPRET must be set before triton is imported, which other tests of a process may have done: such a file runs
itself again in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INSIDE, reason="run by test_table_under_the_interpreter")
outside = pytest.mark.skipif(INSIDE, reason="this is the inner run")


def run_inside(file: str, *options: str) -> None:
    """Run a file's tests again, those marked `inside` too; they must pass.

    Args:
        options: of pytest.
    """
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file],
        cwd=Path(__file__).parents[3],
        # Another test of this process may have turned torch.compile off.
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
