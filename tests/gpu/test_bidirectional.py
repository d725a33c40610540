"""The bidirectional Triton scan on a GPU, with memory that holds NaN before every call."""

import pytest
import torch
from lightnet_kernels import additive_scan

from tests.unit.kernels import bidirectional_table as table
from tests.unit.kernels.kernel_oracle import make

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [  # B, N, H, D, Dv: each pair of widths is compiled once a dtype
    *[(2, n, 2, 72, 72) for n in (1, 2, 63, 64, 65, 130, 257)],
    (64, 256, 16, 72, 72),
    *[(3, n, 2, 128, 128) for n in (1, 64, 200)],
    (2, 70, 3, 24, 24),
    (20, 300, 16, 32, 32),
    (2, 300, 2, 48, 64),
    (2, 300, 2, 96, 100),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Blocks that the allocator hands out again hold NaN."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (2**8, 2**12, 2**16, 2**20, 2**24)]
    del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("batch", "tokens", "heads", "width", "value_width"), SHAPES)
def test_shapes(batch, tokens, heads, width, value_width, theta):
    inputs = make(batch, tokens, heads, width, value_width, theta=theta)
    table.check(inputs, BF16, "cuda", wanted_by="torch")


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(("tokens", "width"), [(65, 72), (200, 72), (200, 128)])
def test_other_dtypes(tokens, width, dtype):
    table.check(make(2, tokens, 2, width, width), dtype, "cuda", wanted_by="torch")


@pytest.mark.parametrize("width", [72, 128])
def test_long(width):
    table.check(make(1, 65536, 2, width, width, scale=1.0), BF16, "cuda", wanted_by="torch")


@pytest.mark.parametrize("tokens", [100, 4096])
def test_keys_of_any_size(tokens):
    inputs = make(1, tokens, 2, 72, 72, scale=1e4)
    inputs["key"][:, 0] = 1e4
    table.check(inputs, BF16, "cuda", wanted_by="torch")


@pytest.mark.parametrize("tokens", [100, 300])
def test_mask(tokens):
    table.check(make(3, tokens, 2, 72, 72), BF16, "cuda", key_mask=table.masked(3, tokens), wanted_by="torch")


@pytest.mark.parametrize("lengths", [[3, 0, 64, 1], [1000, 0, 37, 260, 0], [128] * 20])
def test_segments(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    table.check(make(1, sum(lengths), 16, 72, 72), BF16, "cuda", cu_seqlens=bounds, wanted_by="torch")


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("tokens", [100, 257])
def test_coordinates(tokens, axes):
    places = table.grid(tokens, axes)
    table.check(make(2, tokens, 2, 72, 72), BF16, "cuda", coordinates=places, wanted_by="torch")


@pytest.mark.parametrize("options", [{}, {"coordinates": torch.arange(300) + 7}])
def test_states(options):
    state = table.started(2, 2, 72, 72)
    table.check(make(2, 300, 2, 72, 72), BF16, "cuda", state=state, wanted_by="torch", **options)


def test_strides():
    table.check_slices(make(2, 200, 2, 72, 72), BF16, "cuda", wanted_by="torch")


@pytest.mark.parametrize("shape", [(32, 256, 16, 72), (2, 4096, 16, 72), (2, 1024, 4, 128)])
def test_two_runs_give_the_same_bits(shape):
    table.check_bits(shape, BF16, "cuda", 3)


@pytest.mark.parametrize("cuts", [None, torch.tensor([0, 30, 30, 100])], ids=["rows", "segments"])
def test_compiled_code_gives_the_same_bits(cuts):
    inputs = {name: x.to(BF16).cuda() for name, x in make(2 if cuts is None else 1, 100, 2, 72, 72).items()}
    inputs["theta"] = inputs["theta"].float()
    leaves = [x.requires_grad_() for x in inputs.values()]

    def scan(**x):
        return additive_scan(**x, cu_seqlens=cuts, causal=False, backend="triton")

    results = []
    for call in (scan, torch.compile(scan, fullgraph=True)):
        output = call(**inputs)
        results.append([output, *torch.autograd.grad(output, leaves, torch.ones_like(output))])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_memory():
    """Inputs, output, gradients and states, and a tenth."""
    shape = (8, 4096, 16, 72)
    leaves = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
    theta = torch.rand(16, 72, device="cuda")
    grad = torch.randn(shape, device="cuda", dtype=BF16)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = additive_scan(*leaves, theta=theta, causal=False, backend="triton")
    grads = torch.autograd.grad(output, leaves, grad)
    extra = torch.cuda.max_memory_allocated() - before
    states = 5 * 8 * 16 * 144 * 72 * 4  # four pieces of a sequence, and their sum
    assert extra < 1.1 * (sum(x.nbytes for x in (output, *grads)) + states)
