"""The bf16 update that asks the host nothing, beside DeepSpeed's own."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.training.bf16_steps"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("clip", ["0.0", "0.5", "10000.0"])  # none, at every step but the last, never
def test_it_is_deepspeeds(clip: str, found: dict[str, dict[str, float]]) -> None:
    """Two micro-batches, a parameter without gradient in one step, and an infinite gradient in another."""
    row = found[clip]
    assert row["gradients"] == 0.0, "also those of parameters that had none in this step"
    assert row["norm"] < 1e-6
    # DeepSpeed multiplies gradients by a coefficient that is rounded once more.
    assert row["masters"] < 1e-6 and row["moments"] < 1e-6 and row["weights"] < 1e-2
    assert row["still"], "the step of an infinite gradient changed masters"
    assert row["steps"] == 5, "it counts as a step of Adam's"
