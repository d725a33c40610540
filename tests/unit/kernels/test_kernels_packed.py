"""`additive_scan` of what a joint projection gives; tests/gpu has the same on a card."""

import pytest
import torch
from lightnet_kernels import additive_scan

from . import packed_table as table
from .interpreter import inside, outside, run_inside


@outside
def test_table_under_the_interpreter():
    run_inside(__file__, "-x")


@inside
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal", torch.float16),  # its buffers are other ones
        *(
            (name, torch.bfloat16) for name in ("causal", "causal, segments", "causal, states")
        ),  # the rest on a GPU, for time
        *((name, torch.bfloat16) for name in ("causal, no token", "bidirectional", "bidirectional, segments")),
    ],
)
def test_triton(name, dtype):
    table.check(name, dtype, "cpu", "triton")


@outside
@pytest.mark.parametrize("name", table.CASES)
def test_torch(name):
    table.check(name, torch.float32, "cpu", "torch")


@inside
@pytest.mark.parametrize("causal", [True, False])
def test_compiled(causal):
    """The operator in torch.compile's graph returns no two tensors of one memory."""
    packed = torch.randn(1, 70, 2, 3, 32, dtype=torch.bfloat16)

    def run(x):
        return additive_scan(x, causal=causal, backend="triton")

    results = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        x = packed.clone().requires_grad_()
        function(x).float().square().sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "given",
    [(torch.zeros(1, 2, 2, 2, 8),), (torch.zeros(1, 2, 2, 8),), (torch.zeros(1, 2, 2, 3, 8), torch.zeros(1, 2, 2, 8))],
    ids=["two", "one", "key without value"],
)
def test_refusals(given):
    with pytest.raises(ValueError, match=r"give key and value, or all three as \[B, N, H, 3, D\]"):
        additive_scan(*given)
