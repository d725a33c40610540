"""Whoever trains on rows of other lengths, or packs other documents, waits for a compiler once."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.conftest import ROOT


def counted(module, folder):
    given = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.unit.kernels.{module}"],
        cwd=ROOT, env={**given, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_step_compiles_nothing_after_the_pass_ahead_of_it(tmp_path):
    found = {(case, when): names for case, when, names in counted("ahead", tmp_path)}
    assert len(found) == 8 and len(found["rows", "ahead"]) >= 30
    assert "causal_chain" in found["rows", "ahead"] and "chain_grads" in found["by Triton", "ahead"]
    assert [names for (_, when), names in found.items() if when == "step"] == [[]] * 4


def test_other_numbers_of_tokens_compile_nothing(tmp_path):
    calls = counted("recompiled", tmp_path)
    first = {}
    for case, batch, tokens, names in calls:
        if case not in first:
            first[case] = names
        else:
            assert names == [], (case, batch, tokens)
    assert len(calls) == 6 * 8 and "join_spans" in first["causal, 16 heads, CUDA"]
    assert {"span_sums", "stretch_totals"} <= {*first["causal, 72"]} and {"norm_forward"} <= {*first["companions"]}
