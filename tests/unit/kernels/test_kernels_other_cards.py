"""Cards other than those the kernels were measured on: no kernel of the scans asks for more shared memory than sm_80, sm_89 and
sm_100 have (see `compiled`), and with less the bidirectional scan's results are the same.
"""

import pytest
import torch

pytest.importorskip("triton")

from lightnet_kernels import triton_bidirectional_plan as plan

from . import bidirectional_table as table
from .compiled import HOPPER, SHARED
from .interpreter import inside, outside, run_inside
from .kernel_oracle import make
from .test_kernels_compile import compiled

# What comes nearest to what a card has. Shared memory is laid out for sm_80 as for sm_89, which has less.
NEAREST = {
    80: ("bidirectional", "bidirectional, coordinates"),
    89: ("bidirectional", "bidirectional, coordinates", "causal, 96"),
    100: ("bidirectional", "ranks"),  # another compiler's passes, which not every loop gets through
}
OTHERS = (
    ("causal", "causal, without LRPE", "causal, float32", "causal, float32, 128"),
    ("causal, 96", "spans", "spans, without LRPE", "ranks"),
    ("bidirectional, 128", "bidirectional, 64", "bidirectional, 64 by 128", "bidirectional, 128 by 64"),
    ("bidirectional, mask", "bidirectional, segments", "bidirectional, states", "bidirectional, float32"),
    ("bidirectional, without LRPE",),
)


@outside
@pytest.mark.parametrize(
    ("card", "cases"),
    [*NEAREST.items(), *(pytest.param(card, cases, marks=pytest.mark.slow) for card in NEAREST for cases in OTHERS)],
)
def test_kernels_compile_and_fit(card, cases, tmp_path):
    done = compiled("--card", str(card), *cases, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(cases)


@outside
def test_large_cards_run_what_was_measured():
    for width in (8, 64, 72, 128):
        for value_width in (8, 64, 72, 128):
            for lrpe in (True, False):
                shape = plan.Shape(1, 200, 2, width, value_width, lrpe, wide=False)
                given = sum(plan._narrow(width)), sum(plan._tiles(value_width)), SHARED[HOPPER]
                assert plan._at_once(shape, *given) == (plan.BLOCK, False)


@outside
def test_table_under_the_interpreter():
    run_inside(__file__, "-x")


@inside
@pytest.mark.parametrize("card", [80, 89])
@pytest.mark.parametrize(("width", "value_width", "theta"), [(72, 66, True), (66, 72, False)])
def test_results_with_less_shared_memory(card, width, value_width, theta, monkeypatch):
    monkeypatch.setattr(plan, "shared_memory", lambda _device: SHARED[card])
    inputs = make(1, 100 + card, 1, width, value_width, theta=theta)  # no recording is of so many tokens
    table.check(inputs, torch.bfloat16, "cpu")
