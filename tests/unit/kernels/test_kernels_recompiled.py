"""Whoever trains on rows of other lengths, or packs other documents, waits for a compiler once."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.conftest import ROOT


def test_other_numbers_of_tokens_compile_nothing(tmp_path):
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.recompiled"],
        cwd=ROOT, env={**given, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    first = {}
    for case, batch, tokens, names in calls:
        if case not in first:
            first[case] = names
        else:
            assert names == [], (case, batch, tokens)
    assert len(calls) == 5 * 8 and "join_spans" in first["causal, 16 heads, CUDA"]
    assert {"span_sums", "stretch_totals"} <= {*first["causal, 72"]} and {"norm_forward"} <= {*first["companions"]}
