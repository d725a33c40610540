"""The CUDA kernels in a process whose threads have no CUDA context yet: autograd's, which is the first to load one."""

import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

FIRST_IN_THE_BACKWARD_PASS = """
import threading, torch
from lightnet_kernels import additive_scan, cuda_bidirectional
x = [torch.randn(32, 50, 8, 72, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
grad = torch.randn(32, 50, 8, 72, device="cuda").bfloat16()
y = additive_scan(*x, causal=False)
grads = torch.autograd.grad(y, x, grad)
found = []
thread = threading.Thread(target=lambda: found.append(additive_scan(*(t.detach() for t in x), causal=False)))
thread.start(); thread.join()
torch.cuda.synchronize()
assert torch.equal(found[0], y.detach()) and all(bool(g.isfinite().all()) for g in grads)
print("same")
"""


def test_threads_without_a_context():
    done = subprocess.run(
        [sys.executable, "-c", FIRST_IN_THE_BACKWARD_PASS], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and done.stdout.endswith("same\n"), done.stderr[-2000:]
