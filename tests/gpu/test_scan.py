"""The Triton scan on a GPU, against the definition in float64."""

import pytest
import torch
from lightnet_kernels import additive_scan

from tests.unit.kernels import triton_table as table
from tests.unit.kernels.kernel_oracle import make, relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [  # N, D, Dv
    *[(1, 24, 24), (2, 32, 16), (3, 48, 48), (4, 64, 64), (5, 72, 72), (6, 96, 64), (7, 128, 128), (8, 100, 128)],
    *[(63, 128, 100), (64, 24, 128), (64, 100, 96), (65, 32, 32), (65, 64, 72), (257, 24, 40), (257, 72, 72)],
    *[(257, 128, 128), (1100, 32, 24)],
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty holds NaN: a buffer read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# Every shape in bfloat16, the dtype of training; each further dtype is a compilation of all kernels.
TABLE = [(*shape, torch.bfloat16) for shape in SHAPES]
TABLE += [(*shape, dtype) for shape in SHAPES[::4] for dtype in (torch.float16, torch.float32)]


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("tokens", "width", "value_width", "dtype"), TABLE)
def test_output_and_gradients(tokens, width, value_width, theta, dtype):
    batch, heads = (2, 2) if tokens < 100 else (1, 1)
    table.check(make(batch, tokens, heads, width, value_width, theta=theta), dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [60, 80, 120, 400])
def test_spikes(height, dtype):
    table.check(table.spiked(make(1, 300, 2, 72, 64), height), dtype, "cuda")


@pytest.mark.parametrize("theta", [True, False])
def test_keys_of_any_size(theta):
    inputs = make(1, 300, 2, 72, 64, scale=1e4, theta=theta)
    inputs["key"][:, 0] = 1e4
    table.check(inputs, torch.float32, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[5], [3, 0, 64, 1, 260, 70, 0], [256, 256, 1, 511], [1] * 40, [2048, 37, 900]])
def test_segments(lengths, dtype):
    table.check_segments(lengths, dtype, "cuda")
    table.check_segments(lengths, dtype, "cuda", width=128, value_width=128, theta=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("cuts", [[5, 64, 200, 1], [256, 256], [1, 700]])
def test_states(cuts, theta, dtype):
    table.check_states(cuts, dtype, "cuda", theta=theta)


def test_strides():
    """Query, key and value as slices of one projection; one upstream gradient for all tokens."""
    inputs = make(2, 200, 2, 64, 64)
    joined = torch.stack([inputs[name] for name in ("query", "key", "value")], 3).bfloat16().cuda()

    def layout(name, x):
        return x if name == "theta" else joined[..., ("query", "key", "value").index(name), :].detach()

    table.check(inputs, torch.bfloat16, "cuda", layout=layout, grad_layout=lambda x: x[:, :1].expand_as(x))


def large(batch, tokens, heads, width, *, theta=True, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, tokens, heads, width)
    query, key, value, grad = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(4))
    leaves = {"query": query, "key": 2 * key, "value": value}
    if theta:
        steps = torch.arange(heads * width, device="cuda") / (heads * width)
        leaves["theta"] = (10000.0**-steps).reshape(heads, width)
    return {name: x.requires_grad_() for name, x in leaves.items()}, grad


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("tokens", "width", "dtype"), [(2048, 128, torch.bfloat16), (2048, 96, torch.float32)])
def test_long(tokens, width, dtype, theta):
    """Against the chunked PyTorch scan in float64, which the ordinary tests hold against the definition."""
    leaves, grad = large(2, tokens, 4, width, theta=theta, dtype=dtype)
    output = additive_scan(**leaves)
    actual = torch.autograd.grad(output, list(leaves.values()), grad)
    double = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    wanted = additive_scan(**double, backend="torch")
    expected = torch.autograd.grad(wanted, list(double.values()), grad.double())
    tolerance = table.TOLERANCE[dtype]
    assert relative(output, wanted) < tolerance[0]
    for name, one, two in zip(leaves, actual, expected, strict=True):
        assert relative(one, two) < tolerance[1], name


def test_two_runs_give_the_same_bits():
    leaves, grad = large(2, 1000, 4, 128)

    def run():
        output = additive_scan(**leaves)
        return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(one, two) for one, two in zip(first, run(), strict=True))


def test_a_million_tokens_keep_their_angles():
    """The rotation between chunks, applied thousands of times, against one token long ago."""
    tokens, width = 2**20 - 7, 32
    key = torch.full((1, tokens, 1, width), -30.0, device="cuda")
    key[:, 0] = 0.0
    value = torch.zeros(1, tokens, 1, 16, device="cuda")
    value[:, 0] = 1.0
    theta = (10000.0 ** (-torch.arange(width, device="cuda") / width)).reshape(1, width)
    query = torch.ones(1, tokens, 1, width, device="cuda")
    with torch.no_grad():
        output = additive_scan(query, key, value, theta=theta, activation=None, backend="triton")
    lag = torch.arange(tokens, device="cuda", dtype=torch.float64)
    mass = 1 + lag * float(torch.tensor(-30.0).double().exp())
    for t in (tokens - 1, tokens // 2, 1000):
        wanted = (lag[t] * theta.double()).cos().sum() / mass[t]
        assert abs(float(output[0, t, 0, 0]) - float(wanted)) < 1e-3 * width
