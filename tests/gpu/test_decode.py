"""Decoding on a GPU: the kernels, CUDA graphs, and how far from the memory's speed a step is (printed with -s)."""

import pytest
import torch
from lightnet_kernels import ScanState, ToeplitzState, identity_state
from lightnet_kernels.decode import BLOCK, decode_state, decode_step, scan_state, toeplitz_step

from tests.unit.kernels import test_kernels_decode as table
from tests.unit.kernels.kernel_oracle import relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

BACKENDS = ["triton", "torch"]


def random_state(batch, heads, width, dtype=torch.bfloat16, *, lrpe=True):
    """A state of as many tokens as a block holds, at unlike places in the next one."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    theta = 10000.0 ** (-torch.arange(heads * width, device="cuda") / (heads * width)).reshape(heads, width)
    rows = 2 * width if lrpe else width
    length = torch.full((batch,), 64, device="cuda")
    first = ScanState(
        draw(batch, heads, width), draw(batch, heads, width).exp(), draw(batch, heads, rows, width), length
    )
    return decode_state(first, theta if lrpe else None, dtype)


def captured(step):
    """The step as a CUDA graph; it has run three times when this returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def milliseconds(run, times):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "value_width"), [(24, 40), (64, 64), (72, 72), (128, 128), (100, 33)])
def test_step_is_the_scan(width, value_width, dtype, theta, backend):
    tolerance = table.TOLERANCE
    tolerance.setdefault(torch.float16, 5e-3)
    table.check_step([63, 64, 130, 0], 4, 2, width, value_width, dtype, "cuda", backend, theta=theta, start=66)


@pytest.mark.parametrize("scale", [60.0, 1e4])
def test_keys_of_any_size(scale):
    table.check_step([66, 10], 70, 1, 24, 20, torch.float32, "cuda", "triton", scale=scale, start=64)


def test_many_heads():
    table.check_step([70] * 40, 3, 16, 64, 64, torch.bfloat16, "cuda", "triton", start=65)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "channels", "rank"), [(1, 7, 5), (5, 192, 64), (64, 2048, 64)])
def test_toeplitz_step(batch, channels, rank, dtype):
    table.check_toeplitz_step(batch, 4, channels, rank, dtype, "cuda", "triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_across_blocks(backend):
    """Replays of one captured step are the steps, with rows that enter their blocks at different replays."""
    state = random_state(6, 2, 32)
    state.count.copy_(torch.tensor([0, 10, 30, 60, 61, 64]))
    state.keys.normal_()
    state.values.normal_()
    other = state.clone()
    token = [torch.randn(6, 2, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    kept = []

    def step():
        kept[:] = [decode_step(state, *token, backend=backend)]

    graph = captured(step)
    for _ in range(3):
        decode_step(other, *token, backend=backend)
    for _ in range(140):
        graph.replay()
        wanted = decode_step(other, *token, backend=backend)
        assert torch.equal(kept[0], wanted)
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps_across_blocks(backend):
    state = random_state(3, 2, 32)
    state.count.copy_(torch.tensor([0, 62, 64]))
    state.keys.normal_()
    state.values.normal_()
    other = state.clone()
    token = [torch.randn(3, 2, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    positions = ToeplitzState(torch.randn(3, 24, 16, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda"))
    others = ToeplitzState(*(x.clone() for x in positions))
    x, rates = torch.randn(3, 24, device="cuda"), torch.rand(2, 24, 16, device="cuda")

    def step(state, positions, x, *token):
        y = toeplitz_step(positions, x, *rates, backend="triton")
        return decode_step(state, *token, backend=backend) * 2, y

    compiled = torch.compile(step, fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            found, wanted = compiled(state, positions, x, *token), step(other, others, x, *token)
            assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*state, *positions), (*other, *others), strict=True))


def test_small_masses_add_up_and_angles_do_not_drift():
    """One key far above 2^18 others, token by token, against the closed form."""
    gaps, theta = torch.tensor([14.0, 17.0, 18.0, 19.0]), torch.tensor([[1.0, 0.01, 0.3, 1e-4]])
    state = decode_state(identity_state(1, 1, 4, 1, lrpe=True, device="cuda"), theta.cuda())
    one = torch.ones(1, 1, 1, device="cuda")
    key = torch.zeros(1, 1, 4, device="cuda")
    decode_step(state, key, key, one)
    key -= gaps.cuda()
    graph, tokens = captured(lambda: decode_step(state, key, key, one)), 2**18
    for _ in range(tokens - 3):
        graph.replay()
    small = (-gaps.double()).exp()
    last = scan_state(state)
    assert int(last.length) == tokens + 1
    assert relative(last.sum[0, 0].cpu().double(), 1 + tokens * small) < 1e-5
    lags = torch.arange(1, tokens + 1).double()
    for j in range(4):
        step = float(theta[0, j])
        for part, wave in ((0, torch.cos), (4, torch.sin)):
            first = wave(torch.tensor(-(tokens + 1) * step, dtype=torch.float64))
            wanted = first + small[j] * wave(-lags * step).sum()
            assert abs(float(last.kv[0, 0, part + j, 0]) - float(wanted)) < 2e-5


def test_speed():
    """B64, a layer of d2048: the mean step of a block against a state read and written at the copy's rate."""
    print()
    batch, heads, width = 64, 16, 128
    for lrpe in (True, False):
        state = random_state(batch, heads, width, lrpe=lrpe)
        bound = milliseconds(lambda kv=state.kv: kv.clone(), 30)
        token = [torch.randn(batch, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for name, counts in (
            ("all rows at one place", torch.zeros(batch)),
            ("rows spread", torch.arange(batch) % BLOCK),
        ):
            state.count.copy_(counts)
            layers = [state.clone() for _ in range(4)]  # more than the cache holds

            def steps(layers=layers, token=token):
                for layer in layers:
                    decode_step(layer, *token)

            graph = captured(steps)
            each = milliseconds(graph.replay, BLOCK) / len(layers)
            ratio = each / bound
            print(f"decode_step lrpe={lrpe}, {name}: {each:.4f} ms; state copied {bound:.4f} ms; {ratio:.2f}x")
    hidden = torch.randn(batch, 2048, 64, device="cuda")
    states = [ToeplitzState(hidden.clone(), torch.zeros(batch, dtype=torch.int64, device="cuda")) for _ in range(8)]
    x, decay, gain = torch.randn(batch, 2048, device="cuda").bfloat16(), *torch.rand(2, 2048, 64, device="cuda")
    graph = captured(lambda: [toeplitz_step(state, x, decay, gain) for state in states])
    each, bound = milliseconds(graph.replay, 30) / len(states), milliseconds(lambda: hidden.clone(), 30)
    print(f"toeplitz_step: {each:.4f} ms; state copied {bound:.4f} ms; {each / bound:.2f}x")
