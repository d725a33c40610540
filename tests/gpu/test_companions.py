"""The scan's companions on a GPU: against float64, the same bits twice, memory, and times beside the byte floor.

Times are printed (pytest -s), not asserted: ms, GB/s over tensors read once and written once.
"""

import functools
import statistics

import pytest
import torch
from lightnet_kernels import add_norm, gated_norm, linear_cross_entropy, norm, swiglu

from tests.unit.kernels import companion_table as table
from tests.unit.kernels.kernel_oracle import relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty holds NaN: a buffer read before it is written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", table.KINDS)
@pytest.mark.parametrize(
    "shape", [(0, 24), (1, 5), (2, 67, 72), (33, 100), (700, 1024), (3000, 768), (600, 2560), (9, 6784)], ids=str
)
def test_norms(shape, kind, dtype):
    table.check_norm(kind, shape, dtype, "cuda")
    table.check_add_norm(kind, shape, dtype, "cuda")
    if shape[0]:
        table.check_norm_beside(kind, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", table.KINDS)
@pytest.mark.parametrize(
    "shape",
    [(3, 5, 3, 24), (2, 300, 6, 32), (2, 300, 16, 48), (2, 200, 16, 72), (3000, 12, 64), (700, 8, 128)],
    ids=str,
)
def test_gated_norm(shape, kind, dtype):
    table.check_gated_norm(kind, shape, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 5, 90), (300, 1365), (200, 2688), (50, 6784)], ids=str)
def test_swiglu(shape, dtype):
    table.check_swiglu(shape, dtype, "cuda")
    table.check_swiglu(shape, dtype, "cuda", joined=True)


def test_strides_and_expanded_gradients():
    def transposed(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    places = {"layout": transposed, "grad_layout": lambda x: x[:1].expand_as(x), "device": "cuda"}
    table.check_add_norm("layer", (40, 60, 72), torch.bfloat16, **places)
    table.check_gated_norm("layer", (4, 60, 3, 72), torch.bfloat16, **places)
    table.check_swiglu((40, 60, 72), torch.bfloat16, **places)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20, 24, 128, 50), (700, 64, 1024, 1000), (300, 128, 50304, 50277)], ids=str)
def test_linear_cross_entropy(shape, dtype, reduction):
    torch.backends.cuda.matmul.allow_tf32 = False
    table.check_linear_cross_entropy(*shape, dtype, reduction, "cuda", chunk=256)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_weight_gradients_are_summed_in_fp32(reduction):
    hidden = torch.ones(600, 64, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    labels = torch.zeros(600, dtype=torch.int64, device="cuda")
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=1, backend="triton")
    (grad,) = torch.autograd.grad(loss.sum(), weight)
    assert relative(grad[1:], torch.full((63, 64), 600 / 64, device="cuda")) < 4e-3


TOKENS = 16384


def cases():
    """name: (leaves, call, bytes forward, bytes backward)."""
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    for width in (1024, 2048, 2560):
        size = 2 * TOKENS * width
        for kind in ("srms", "layer"):
            weights = table.norm_weights(kind, width, torch.bfloat16, "cuda")
            more = list(weights.values())
            options = {"kind": kind, "eps": 1e-5}
            x, r = draw(TOKENS, width), draw(TOKENS, width)
            yield f"norm {kind} {width}", [x, *more], functools.partial(norm, **options), 2 * size, 3 * size
            yield f"add_norm {kind} {width}", [x, r, *more], functools.partial(add_norm, **options), 4 * size, 4 * size
            heads = [draw(TOKENS, width // 128, 128) for _ in range(2)]
            yield (
                f"gated_norm {kind} {width}",
                [*heads, *more],
                functools.partial(gated_norm, **options),
                3 * size,
                5 * size,
            )
    for width in (1365, 2688, 5376):
        size = 2 * TOKENS * width
        yield f"swiglu {width}", [draw(TOKENS, width) for _ in range(2)], swiglu, 3 * size, 5 * size
    yield f"swiglu joined {width}", [draw(TOKENS, 2 * width)], swiglu, 3 * size, 5 * size


def median_ms(call, repeats=20):
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # the host runs ahead, so that launches are not timed
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def test_times_beside_the_byte_floor():
    torch.use_deterministic_algorithms(False)  # no time for poison
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.numel() * 4 / median_ms(lambda: target.copy_(source)) / 1e6
    print(f"\n{torch.cuda.get_device_name()}, copy {rate:.0f} GB/s; bf16, {TOKENS} rows; share: of that copy rate")
    source.resize_(0), target.resize_(0)
    for name, leaves, call, forward_bytes, backward_bytes in cases():
        leaves = [x.requires_grad_() for x in leaves]
        outputs = call(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.randn_like(y) for y in outputs]
        with torch.no_grad():
            forward = median_ms(functools.partial(call, *leaves))
        backward = median_ms(lambda o=outputs, x=leaves, g=upstream: torch.autograd.grad(o, x, g, retain_graph=True))
        shares = [b / t / 1e6 for b, t in ((forward_bytes, forward), (backward_bytes, backward))]
        print(
            f"{name:24} forward {forward:.4f} ms {shares[0]:5.0f} GB/s ({shares[0] / rate:.0%})   "
            f"backward {backward:.4f} ms {shares[1]:5.0f} GB/s ({shares[1] / rate:.0%})"
        )


@pytest.mark.parametrize(("width", "rows", "vocab_size"), [(1024, 50304, 50277), (2048, 50304, 50277)])
def test_head_times_and_memory(width, rows, vocab_size):
    torch.use_deterministic_algorithms(False)
    chunk = 4096
    hidden = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(rows, width, device="cuda")).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab_size, (TOKENS,), device="cuda")

    def run(reduction):
        loss = linear_cross_entropy(hidden, weight, labels, vocab_size=vocab_size, reduction=reduction, chunk=chunk)
        return torch.autograd.grad(loss.sum(), (hidden, weight))

    def eager():
        logits = torch.nn.functional.linear(hidden, weight)[:, :vocab_size].float()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return torch.autograd.grad(loss, (hidden, weight))

    floor = 3 * 2 * TOKENS * rows * width / 716e9
    print(f"\nhead {TOKENS} x {width} x {rows}: three products at 716 TFLOP/s {floor:.2f} ms")
    wanted = eager()
    allowed = chunk * rows * 2 + rows * width * 6 + TOKENS * width * 2
    for reduction in ("sum", "none"):
        grads = run(reduction)
        for one, two in zip(grads, wanted, strict=True):
            assert relative(one, two) < 1e-2
        assert all(torch.equal(one, two) for one, two in zip(grads, run(reduction), strict=True))
        del grads
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(reduction)
        used = torch.cuda.max_memory_allocated() - before
        print(f"  {reduction}: {median_ms(functools.partial(run, reduction), 8):.2f} ms, {used / 2**20:.0f} MiB")
        assert used < 1.1 * allowed + 2**26
    del wanted
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    eager()
    used = torch.cuda.max_memory_allocated() - before
    print(f"  eager: {median_ms(eager, 8):.2f} ms, {used / 2**20:.0f} MiB")


def test_two_runs_give_the_same_bits():
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    weights = table.norm_weights("layer", 1024, torch.bfloat16, "cuda")
    leaves = [draw(3000, 8, 128).requires_grad_() for _ in range(2)]
    more = {n: w.requires_grad_() for n, w in weights.items()}

    def run():
        y = gated_norm(*leaves, **more, kind="layer", eps=1e-5)
        h, n = add_norm(y.flatten(1), leaves[0].flatten(1), **more, kind="layer", eps=1e-5)
        return [h, n, *torch.autograd.grad(n.square().sum() + h.sum(), [*leaves, *more.values()])]

    first = run()
    assert all(torch.equal(one, two) for one, two in zip(first, run(), strict=True))
