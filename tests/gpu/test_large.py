"""Tensors of more than 2^31 elements, where 32-bit offsets end: the last rows are those of a small call on them alone. (The
causal scan's stand in test_scan.py.)"""

import pytest
import torch
from lightnet_kernels import add_norm, additive_scan, gated_norm, norm, swiglu, toeplitz_scan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_card,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytest.importorskip("triton")

LAST = 2  # rows that are looked at
OPTIONS = {"kind": "rms", "eps": 1e-5, "backend": "triton"}


def weight(*shape):
    return torch.rand(shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def bidirectional(query, key, value):
    theta = weight(*query.shape[2:])
    return additive_scan(query, key, value, theta=theta, causal=False, backend="triton")


def toeplitz(x):
    return toeplitz_scan(x, weight(x.shape[2], 4), weight(x.shape[2], 4), backend="triton")


CASES = {  # how many inputs, the shape of a row, what is called
    "norm": (1, (1024,), lambda x: norm(x, weight(1024), **OPTIONS)),
    "norm of an odd width": (1, (1023,), lambda x: norm(x, weight(1023), **OPTIONS)),
    "norm by rows": (1, (1152,), lambda x: norm(x, weight(1152).bfloat16(), **OPTIONS)),
    "residual and norm": (2, (1024,), lambda x, y: sum(add_norm(x, y, weight(1024), **OPTIONS))),
    "gated norm": (2, (8, 128), lambda x, gate: gated_norm(x, gate, weight(8, 128), **OPTIONS)),
    "swiglu": (2, (1024,), lambda gate, up: swiglu(gate, up, backend="triton")),
    "swiglu of an odd width": (2, (1023,), lambda gate, up: swiglu(gate, up, backend="triton")),
    "bidirectional, 72": (3, (300, 16, 72), bidirectional),
    "bidirectional, 128": (3, (300, 16, 128), bidirectional),
    "toeplitz": (1, (300, 1024), toeplitz),
}


@pytest.fixture(autouse=True)
def empty_cache():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", CASES)
def test_last_rows(case):
    inputs, row, call = CASES[case]
    elements = torch.Size(row).numel()
    rows = 2**31 // elements + 5
    torch.cuda.empty_cache()
    needed = (4 * inputs + 4) * 2 * rows * elements  # inputs, gradients, what is in between
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free device memory")
    generator = torch.Generator("cuda").manual_seed(0)
    *leaves, grad = (
        torch.randn(rows, *row, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(inputs + 1)
    )
    assert grad.numel() > 2**31

    def run(given, upstream):
        given = [x.requires_grad_() for x in given]
        output = call(*given)
        return [output.detach(), *torch.autograd.grad(output, given, upstream)]

    wanted = run([x[-LAST:].clone() for x in leaves], grad[-LAST:].clone())
    found = run(leaves, grad)
    for one, other in zip(found, wanted, strict=True):
        assert torch.isfinite(one[::997].float().sum())
        # Bidirectional scans of few rows are cut otherwise: two bf16 results, each within 5e-3 of the exact one.
        bound = 1e-2 if call is bidirectional else 5e-3
        assert (one[-LAST:].float() - other.float()).norm() <= bound * other.float().norm()
