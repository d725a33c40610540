"""The causal Triton scan on a GPU. Up to 257 tokens against the definition (kernel_oracle, on the CPU); beyond, against
explicit float64 sums, then against the chunked PyTorch scan in float64, which the ordinary tests hold to the definition.

Every pair of head widths, dtype and LRPE is a compilation: the table below is chosen so that the whole file compiles
few of them, and other tests use those.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from lightnet_kernels import ScanState, additive_scan, triton_tables
from lightnet_kernels.bench.truth import scan_truth

from tests.unit.kernels import packed_table
from tests.unit.kernels import triton_table as table
from tests.unit.kernels.kernel_oracle import expected, make, random_state, relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("triton")

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}  # for -k
DTYPES = [pytest.param(dtype, id=name) for dtype, name in NAMES.items()]
scan = functools.partial(additive_scan, backend="triton")  # refuses what it does not do: no test passes by falling back

WIDTHS = [72, 128]  # by Triton alone, with chains by CUDA
DTYPES_AND_WIDTHS = [
    *[pytest.param(dtype, 72, id=name) for dtype, name in NAMES.items()],
    pytest.param(BF16, 128, id="bf16-128"),
]

TABLE = [  # N, D, Dv, LRPE, dtype
    *[(n, 24, 24, True, BF16) for n in (1, 7, 64, 257)],
    *[(n, 24, 24, False, BF16) for n in (2, 65)],
    (3, 32, 32, True, BF16),
    (65, 48, 48, True, BF16),
    (64, 64, 40, False, BF16),
    (8, 100, 96, True, BF16),
    *[(n, 72, 72, True, dtype) for dtype in NAMES for n in (5, 63, 257)],
    *[(n, 72, 72, False, BF16) for n in (4, 257)],
    *[(n, 128, 128, True, BF16) for n in (1, 64, 257)],
    *[(n, 128, 128, False, dtype) for dtype in NAMES for n in (6, 65, 257)],
    *[(n, 64, 64, theta, BF16) for theta in (True, False) for n in (1, 130)],
    (70, 64, 128, True, BF16),
    (200, 128, 64, False, BF16),
]


def named(case):
    """The case with its values as its name, for -k: 257-72-72-lrpe-bf16."""
    words = [("lrpe" if x else "plain") if isinstance(x, bool) else NAMES.get(x, str(x)) for x in case]
    return pytest.param(*case, id="-".join(words))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What the allocator hands out holds NaN, in blocks freed before the test and in those torch.empty fills."""
    if DEVICE == "cuda":
        blocks = [torch.full((2**28,), torch.nan, device=DEVICE) for _ in range(4)]
        blocks += [torch.full((2**k,), torch.nan, device=DEVICE) for k in range(4, 24) for _ in range(16)]
        del blocks
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def large(batch, tokens, heads, width, *, theta=True, dtype=BF16, seed=0):
    """Leaves on the device, keys of standard deviation 2, and an upstream gradient."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (batch, tokens, heads, width)
    query, key, value, grad = (torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in range(4))
    leaves = {"query": query, "key": 2 * key, "value": value}
    if theta:
        steps = torch.arange(heads * width, device=DEVICE) / (heads * width)
        leaves["theta"] = (10000.0**-steps).reshape(heads, width)
    return {name: x.requires_grad_() for name, x in leaves.items()}, grad


def both(leaves, grad, **options):
    """[output, gradients in the leaves' order]."""
    output = scan(**leaves, **options)
    return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad)]


def same_bits(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def double(leaves):
    return {name: x.detach().double().requires_grad_() for name, x in leaves.items()}


def close(actual, wanted, names, dtype, sizes):
    """`sizes`: for the names in it, what the error is measured against."""
    for name, one, two in zip(names, actual, wanted, strict=True):
        limit = table.TOLERANCE[dtype][0 if name == "output" or name.startswith("state") else 1]
        assert relative(one, two, sizes.get(name)) < limit, name


# --- the table


@pytest.mark.parametrize(("tokens", "width", "value_width", "theta", "dtype"), [named(case) for case in TABLE])
def test_output_and_gradients(tokens, width, value_width, theta, dtype):
    table.check(make(2, tokens, 2, width, value_width, theta=theta), dtype, DEVICE)


@pytest.mark.parametrize(
    ("width", "theta", "dtype"),
    [
        named(case)
        for case in [(128, True, BF16), (128, False, BF16), (72, True, FP16), (72, True, FP32), (128, False, FP32)]
    ],
)
@pytest.mark.parametrize("tokens", [600, 1100])
def test_several_chunks(tokens, width, theta, dtype):
    leaves, grad = large(2, tokens, 2, width, theta=theta, dtype=dtype)
    wanted = scan_truth(leaves, grad, causal=True)
    close(both(leaves, grad), [wanted.output, *wanted.grads.values()], ["output", *leaves], dtype, wanted.sizes)


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("tokens", [43884, 65537])
def test_long(tokens, theta):
    """All gradients; the key's error against the size of its two terms (model-spec 1), the rest against their own."""
    leaves, grad = large(1, tokens, 2, 128, theta=theta)
    exact = double(leaves)
    phi = F.silu(exact["query"]).detach().requires_grad_()
    wanted = additive_scan(**exact, backend="torch")
    expected = torch.autograd.grad(wanted, list(exact.values()), grad.double())
    again = additive_scan(**{**exact, "query": phi}, activation=None, backend="torch")
    (grad_phi,) = torch.autograd.grad(again, phi, grad.double())
    mass = exact["key"].detach().logcumsumexp(1)
    pressure = (phi.detach() * grad_phi * torch.exp(-mass)).flip(1).cumsum(1).flip(1) * exact["key"].detach().exp()
    names = ["output", *leaves]
    size = expected[1].norm() + pressure.norm() + (expected[1] + pressure).norm()
    close(both(leaves, grad), [wanted.detach(), *expected], names, BF16, {"key": size})


def test_a_million_tokens_keep_their_angles():
    """The rotation between chunks, applied thousands of times, against one token long ago (model-spec 2: 1e-3)."""
    tokens, width, heads = 2**20 - 7, 72, 2
    shape = (1, tokens, heads, width)
    key = torch.full(shape, -30.0, device=DEVICE)
    key[:, 0] = 0.0
    value = torch.zeros(shape, device=DEVICE)
    value[:, 0] = 1.0
    theta = (10000.0 ** (-torch.arange(heads * width, device=DEVICE) / (heads * width))).reshape(heads, width)
    query = torch.ones(shape, device=DEVICE)
    with torch.no_grad():
        output = scan(query, key, value, theta=theta)
    lag = torch.arange(tokens, device=DEVICE, dtype=torch.float64)
    mass = 1 + lag * float(torch.tensor(-30.0).double().exp())
    for t in (tokens - 1, tokens // 2, 1000):
        wanted = F.silu(query[0, t].double()) * (lag[t] * theta.double()).cos() / mass[t]
        for head in range(heads):
            assert abs(float(output[0, t, head, 0]) - float(wanted[head].sum())) < 1e-3 * width


# --- size and layout in memory


def copies_agree(copies, tokens, heads, width, packed, theta=True):
    """Copies of one sequence, as rows or as segments: every copy has the same bits, and what one sequence alone gives.
    Returns the elements of one tensor."""
    one, grad_one = large(1, tokens, heads, width, theta=theta)
    with pytest.MonkeyPatch.context() as patch:  # one row would be cut for parallelism, and so rounded otherwise
        patch.setattr(triton_tables, "PROGRAMS", 1)
        triton_tables.tables.cache_clear()
        alone = both(one, grad_one)
    triton_tables.tables.cache_clear()

    def many(x):
        x = x.detach().repeat(copies, 1, 1, 1)
        return x.view(1, copies * tokens, heads, width) if packed else x

    leaves = {name: (x.detach() if name == "theta" else many(x)).requires_grad_() for name, x in one.items()}
    options = {"cu_seqlens": torch.arange(copies + 1, device=DEVICE) * tokens} if packed else {}
    results = both(leaves, many(grad_one), **options)
    for name, x, wanted in zip(["output", *leaves], results, alone, strict=True):
        if name == "theta":
            assert relative(x, copies * wanted) < 1e-3
            continue
        rows = x.view(copies, 1, tokens, heads, width)
        assert all(torch.equal(rows[0], rows[i]) for i in range(1, copies)), name
        assert relative(rows[0], wanted) < 5e-3, name
    return leaves["query"].numel()


def needs_75_gb():
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if free < 75e9:
        pytest.skip(f"needs 75 GB of free device memory, there are {free / 1e9:.0f}")


@pytest.mark.whole_card
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_2_31_elements(packed):
    """4.3 GB a tensor. Rows with LRPE, segments without."""
    needs_75_gb()
    assert copies_agree(9, 456 * 256, 16, 128, packed, theta=not packed) > 2**31


@pytest.mark.whole_card
def test_one_sequence_of_more_than_2_31_elements():
    """Tokens whose rows lie beyond 2^31 elements from their sequence's first. Its last tokens hold almost all of the
    mass, so that they alone, without the first million, give the last outputs and the query's gradients."""
    needs_75_gb()
    tokens, tail = 2**20 + 4096 + 17, 2048
    leaves, grad = large(1, tokens, 16, 128)
    with torch.no_grad():
        leaves["key"][:, -tail:] += 40
    assert leaves["query"].numel() > 2**31
    results = both(leaves, grad)
    part = {n: x.detach() if n == "theta" else x.detach()[:, -tail:] for n, x in leaves.items()}
    wanted = both({n: x.clone().requires_grad_() for n, x in part.items()}, grad[:, -tail:])
    for name, x, one in zip(["output", *leaves], results, wanted, strict=True):
        if name == "theta":
            assert torch.isfinite(x).all()
            continue
        assert relative(x[:, -tail:], one) < 1e-2, name
        assert torch.isfinite(x[0, ::4099].sum())


LAYOUTS = {
    "projection": lambda x: torch.stack([x, x.flip(1), -x], 3)[..., 0, :],  # q, k, v beside each other in one tensor
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second feature": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "tokens backwards in memory": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "odd start": lambda x: torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape),
}
GRADS = {
    "expanded over tokens": lambda x: x[:, :1].expand_as(x),
    "expanded over all but features": lambda x: x[:1, :1, :1].expand_as(x),
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "heads first": LAYOUTS["heads first"],
}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs(layout, width):
    inputs = make(2, 200, 2, width, width)
    table.check(inputs, BF16, DEVICE, layout=lambda name, x: x if name == "theta" else LAYOUTS[layout](x).detach())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("upstream", GRADS)
def test_upstream_gradients_of_any_stride(upstream, width):
    table.check(make(2, 200, 2, width, width), BF16, DEVICE, grad_layout=GRADS[upstream])


@pytest.mark.parametrize("width", WIDTHS)
def test_expanded_inputs(width):
    """One query row and one value row for all sequences."""
    leaves, grad = large(3, 300, 2, width)
    one = {n: x.detach() if n in ("key", "theta") else x.detach()[:1].expand_as(x) for n, x in leaves.items()}
    plain = {n: x.contiguous().requires_grad_() for n, x in one.items()}
    assert same_bits(both({n: x.requires_grad_() for n, x in one.items()}, grad), both(plain, grad))


@pytest.mark.parametrize("width", WIDTHS)
def test_interleaved_heads_do_not_touch_their_neighbours(width):
    """Gradients of slices of one tensor reach that tensor, and only the slices."""
    joined = torch.randn(2, 130, 2, 4, width, device=DEVICE, dtype=BF16, requires_grad=True)
    output = scan(joined[..., 0, :], joined[..., 1, :], joined[..., 2, :])
    (grad,) = torch.autograd.grad(output.float().square().sum(), joined)
    assert torch.isfinite(grad).all() and not grad[..., 3, :].any()
    assert all(grad[..., i, :].any() for i in range(3))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("batch", "tokens"), [(0, 5), (2, 0)])
def test_nothing_in_nothing_out(batch, tokens, width):
    leaves, grad = large(batch, tokens, 2, width)
    results = both(leaves, grad)
    assert results[0].shape == grad.shape and not results[-1].any()


# --- the same bits


@pytest.mark.parametrize(("dtype", "width"), DTYPES_AND_WIDTHS)
def test_two_runs_give_the_same_bits(dtype, width):
    leaves, grad = large(3, 1000, 4, width, dtype=dtype)
    first = both(leaves, grad)
    for _ in range(3):
        assert same_bits(first, both(leaves, grad))


def test_two_runs_over_segments_and_a_long_sequence():
    for options in ({"cu_seqlens": torch.tensor([0, 1, 700, 701, 20000], device=DEVICE)}, {}):
        leaves, grad = large(1, 20000, 2, 128)
        assert same_bits(both(leaves, grad, **options), both(leaves, grad, **options))


@pytest.mark.parametrize("width", WIDTHS)
def test_activation_checkpointing_gives_the_same_bits(width):
    leaves, grad = large(2, 300, 2, width)
    output = torch.utils.checkpoint.checkpoint(lambda **x: scan(**x), **leaves, use_reentrant=False)
    again = [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad)]
    assert same_bits(both(leaves, grad), again)


@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_code_gives_the_same_bits(width):
    leaves, grad = large(2, 300, 2, width)
    output = torch.compile(lambda **x: scan(**x) * 2, fullgraph=True)(**leaves)
    again = [output.detach() / 2, *torch.autograd.grad(output, list(leaves.values()), grad / 2)]
    assert same_bits(both(leaves, grad), again)


# --- keys of every size


@pytest.mark.parametrize(("dtype", "width"), [*DTYPES_AND_WIDTHS[::2], DTYPES_AND_WIDTHS[-1]])
@pytest.mark.parametrize("kind", ["signs", "signs and noise", "rising", "falling", "first token", "first token low"])
def test_keys_of_ten_thousand(kind, dtype, width):
    inputs = make(2, 200, 2, width, width)
    key = inputs["key"]
    sign = torch.randn(key.shape, generator=torch.Generator().manual_seed(1)).sign().double()
    ramp = torch.linspace(-1e4, 1e4, 200).double()[None, :, None, None].expand_as(key)
    changed = {"signs": 1e4 * sign, "signs and noise": key + 1e4 * sign, "rising": ramp, "falling": -ramp}
    if kind in changed:
        inputs["key"] = changed[kind]
    else:
        inputs["key"][:, 0] = 1e4 if kind == "first token" else -1e4
    table.check(inputs, dtype, DEVICE)


@pytest.mark.parametrize(("dtype", "width"), DTYPES_AND_WIDTHS)
@pytest.mark.parametrize("growth", [40, 77, 79, 120, 139, 141, 400])
def test_growth_about_the_bounds_of_the_fast_path(growth, dtype, width):
    """The running maximum climbs evenly inside every block of 64 tokens, in half of the features."""
    inputs = make(1, 257, 2, width, width, scale=0.1)
    climb = torch.arange(257).remainder(64).double() * growth / 63
    inputs["key"][..., ::2] += climb[None, :, None, None]
    table.check(inputs, dtype, DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("height", [60, 80, 120, 400, -400])
def test_spikes(height, dtype):
    table.check(table.spiked(make(1, 257, 2, 72, 72), height), dtype, DEVICE)


def test_one_head_beyond_the_fast_path_leaves_the_others():
    """Exact and fast blocks side by side: heads that need nothing have the bits of a run without the spike."""
    leaves, grad = large(2, 700, 4, 72)
    plain = both(leaves, grad)
    spiked = {n: x.detach().clone() for n, x in leaves.items()}
    spiked["key"][0, 333, 2] += 300
    results = both({n: x.requires_grad_() for n, x in spiked.items()}, grad)
    for one, two in zip(plain[:4], results[:4], strict=True):
        for head in (0, 1, 3):
            assert torch.equal(one[:, :, head], two[:, :, head])
        assert torch.equal(one[1], two[1])


# --- free tests (model-spec 1)


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("dtype", "limit"), [named((FP32, 1e-4)), named((BF16, 1e-2))])
def test_key_gradients_sum_to_nothing_in_every_segment(dtype, limit, theta):
    width = 72 if theta else 128
    leaves, grad = large(1, 1500, 2, width, theta=theta, dtype=dtype)
    bounds = [0, 0, 5, 69, 581, 582, 1500]
    key = both(leaves, grad, cu_seqlens=torch.tensor(bounds, device=DEVICE, dtype=torch.int32))[2]
    for begin, end in itertools.pairwise(bounds):
        if begin == end:
            continue
        size = key[0, begin:end].double().norm()
        if end - begin < 100:  # where the terms that cancel are larger than what is left
            part = {n: x.detach().cpu().double() for n, x in leaves.items()}
            part = {n: x if n == "theta" else x[:, begin:end] for n, x in part.items()}
            size = expected(part, grad[:, begin:end].cpu().double())[2]["key"]
        assert float(key[0, begin:end].double().sum(0).norm()) <= limit * float(size), (begin, end)


@pytest.mark.parametrize(("width", "theta"), [(72, True), (128, False)])
def test_key_gradients_with_states(width, theta):
    """sum_r dk_r + s_0 ds_0 + <KV_0, dKV_0> = s_N ds_N + <KV_N, dKV_N> per feature, in float32."""
    leaves, grad = large(2, 600, 2, width, theta=theta, dtype=FP32)
    start = start_state(2, 2, width, width, theta)
    output, end = scan(**leaves, initial_state=start, return_state=True)
    weights = [torch.randn_like(x) for x in (end.sum, end.kv)]
    loss = (output * grad).sum() + (end.sum * weights[0]).sum() + (end.kv * weights[1]).sum()
    grad_key, grad_sum, grad_kv = torch.autograd.grad(loss, [leaves["key"], start.sum, start.kv])

    def scaled(state_sum, state_kv, sum_gradient, kv_gradient):
        rows = (state_kv * kv_gradient).double().sum(-1)
        return (state_sum * sum_gradient).double() + rows.unflatten(2, (-1, width)).sum(2)

    before = grad_key.double().sum(1) + scaled(start.sum.detach(), start.kv.detach(), grad_sum, grad_kv)
    after = scaled(end.sum.detach(), end.kv.detach(), *weights)
    assert relative(before, after, after.norm() + grad_key.double().norm()) < 1e-5


# --- chains by CUDA (widths of 64 and 128 in bfloat16)


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    "case",
    [
        {"cuts": [5, 64, 2000, 1]},
        {"cuts": [9000], "begun": False},
        {"cuts": [300], "top": 400.0},
        {"cuts": [5000], "cu_seqlens": [0, 0, 5, 261, 262, 4900, 5000]},
    ],
    ids=str,
)
def test_states_by_cuda(case, width, theta):
    from lightnet_kernels import cuda_chains, cuda_launch

    if torch.cuda.get_device_capability()[0] in (9, 10) and cuda_launch.available():
        assert cuda_chains.runs(torch.device(DEVICE), BF16, width, width)
    state_case(BF16, theta, width=width, **case)


@pytest.mark.parametrize("theta", [True, False])
def test_more_chains_than_multiprocessors(theta):
    """As in training: each sequence one span, and more of them than run at once."""
    leaves, grad = large(160, 200, 2, 128, theta=theta)
    wanted = scan_truth(leaves, grad, causal=True)
    close(both(leaves, grad), [wanted.output, *wanted.grads.values()], ["output", *leaves], BF16, wanted.sizes)


@pytest.mark.parametrize("size", [1e5, 1e7])
def test_keys_that_are_large_and_equal(size):
    """They count alike, however large."""
    inputs = make(1, 200, 2, 128, 128)
    inputs["key"][:] = size
    table.check(inputs, BF16, DEVICE)


@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("lift", [0.0, 150.0])
def test_segments_by_cuda(lift, theta):
    table.check_segments([3, 0, 64, 1, 5000, 70], BF16, DEVICE, width=128, value_width=64, theta=theta, lift=lift)


# --- segments


@pytest.mark.parametrize("dtype", DTYPES[::2])
@pytest.mark.parametrize("lengths", [[5], [3, 0, 64, 1, 260, 70, 0], [256, 256, 1, 511], [1] * 40, [2048, 37, 900, 1]])
def test_segments(lengths, dtype):
    table.check_segments(lengths, dtype, DEVICE, width=72, value_width=72)


@pytest.mark.parametrize("lengths", [[63, 65, 64, 1, 255, 257], [1, 1000, 1, 1, 1000], [0, 0, 777]])
def test_segments_without_lrpe(lengths):
    table.check_segments(lengths, BF16, DEVICE, width=128, value_width=128, theta=False)


def test_one_token_segments():
    """o = sum_j phi_j v: nothing of the key and theta, whose gradients are 0."""
    leaves, grad = large(1, 300, 2, 72, dtype=FP32)
    bounds = torch.arange(301, device=DEVICE)
    output, _, grad_key, grad_value, grad_theta = both(leaves, grad, cu_seqlens=bounds)
    weight = F.silu(leaves["query"].detach().double()).sum(-1, keepdim=True)
    assert relative(output, weight * leaves["value"].detach().double()) < 1e-5
    assert relative(grad_value, weight * grad.double()) < 1e-5
    assert float(grad_key.norm()) < 1e-5 * float(grad_value.norm())
    assert float(grad_theta.norm()) < 1e-5 * float(grad_value.norm())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_may_repeat_at_the_end(dtype):
    leaves, grad = large(1, 500, 2, 72)
    plain = both(leaves, grad, cu_seqlens=torch.tensor([0, 129, 500], device=DEVICE))
    padded = torch.tensor([0, 129, *[500] * 6], device=DEVICE, dtype=dtype)
    assert same_bits(plain, both(leaves, grad, cu_seqlens=padded))


# --- states


def start_state(sequences, heads, width, value_width, theta, top=0.0):
    state = random_state(sequences, heads, width, value_width, lrpe=theta, dtype=FP32)
    maximum, total, kv, length = (x.to(DEVICE) for x in state)
    return ScanState(maximum + top, total.requires_grad_(), kv.requires_grad_(), length)


def pieces(run, leaves, start, cuts):
    """Output of a sequence in parts that hand their state on, and the last state."""
    outputs, state, begin = [], start, 0
    for size in cuts:
        part = {n: x if n == "theta" else x[:, begin : begin + size] for n, x in leaves.items()}
        output, state = run(**part, initial_state=state, return_state=True)
        outputs.append(output)
        begin += size
    return torch.cat(outputs, 1), state


def with_state_gradients(run, leaves, start, grad, cuts):
    """(last state, [output, its sum, its kv, gradients of leaves, of the start's sum and kv]); all three outputs have
    upstream gradients."""
    output, end = pieces(run, leaves, start, cuts)
    generator = torch.Generator(DEVICE).manual_seed(5)
    weights = [torch.randn(x.shape, generator=generator, device=DEVICE).to(x.dtype) for x in (end.sum, end.kv)]
    free = [*leaves.values(), *([] if start is None else [start.sum, start.kv])]
    grads = torch.autograd.grad([output, end.sum, end.kv], free, [grad.to(output.dtype), *weights])
    return end, [output.detach(), end.sum.detach(), end.kv.detach(), *grads]


def state_case(dtype, theta, cuts, *, top=0.0, width=72, cu_seqlens=None, begun=True):
    """Outputs, last state and gradients to everything, the initial state too, in parts, against one pass of the
    PyTorch scan in float64."""
    tokens = sum(cuts)
    sequences = 2 if cu_seqlens is None else len(cu_seqlens) - 1
    leaves, grad = large(2 if cu_seqlens is None else 1, tokens, 2, width, theta=theta, dtype=dtype)
    options = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens, device=DEVICE)}
    start = start_state(sequences, 2, width, width, theta, top) if begun else None
    actual = with_state_gradients(functools.partial(scan, **options), leaves, start, grad, cuts)
    exact_start = None
    if start is not None:
        tensors = [x.detach().double() for x in start[:3]]
        exact_start = ScanState(tensors[0], *(x.requires_grad_() for x in tensors[1:]), start.length)
    run = functools.partial(additive_scan, backend="torch", **options)
    wanted = with_state_gradients(run, double(leaves), exact_start, grad, [tokens])
    assert torch.equal(actual[0].length, wanted[0].length)
    assert relative(actual[0].max, wanted[0].max) < 1e-6 and not actual[0].max.requires_grad
    names = ["output", "state sum", "state kv", *leaves, *([] if start is None else ["start sum", "start kv"])]
    terms = wanted[1][3].norm()  # key and theta: as large as the terms that cancel
    sizes = {name: wanted[1][names.index(name)].norm() + terms for name in ("key", "theta") if name in names}
    close(actual[1], wanted[1], names, dtype, sizes)


@pytest.mark.parametrize(
    ("dtype", "theta"), [named(case) for case in [(BF16, True), (BF16, False), (FP16, True), (FP32, True)]]
)
@pytest.mark.parametrize("cuts", [[5, 64, 200, 1], [256, 256], [1, 700]])
def test_states_and_their_gradients(cuts, theta, dtype):
    state_case(dtype, theta, cuts)


@pytest.mark.parametrize("theta", [True, False])
def test_a_state_from_the_beginning(theta):
    state_case(BF16, theta, [300, 33], begun=False)


@pytest.mark.parametrize(
    "top", [-400.0, 75.0, 400.0, 1e4]
)  # exp(-90) is denormal in float32: the kernels take it for 0
def test_initial_states_of_any_size(top):
    state_case(FP32, True, [300], top=top)


@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_states_of_segments(dtype):
    state_case(dtype, True, [700], cu_seqlens=[0, 0, 5, 261, 262, 700, 700])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    "case",
    [
        {"parts": [3000, 1, 700], "batch": 2},
        {"parts": [2000, 640, 3000], "ends": [100, 2000, 2300, 5000]},
        {"parts": [70, 4000, 65], "theta": False},
        {"parts": [90, 3000, 80], "lift": [0.0, 90.0, -90.0]},
        {"parts": [3000, 90, 70], "lift": [100.0, 0.0, 30.0]},
    ],
    ids=str,
)
def test_ranks(case, dtype):
    table.check_ranks(**case, dtype=dtype, device=DEVICE, width=128, value_width=128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", packed_table.CASES)
def test_queries_keys_and_values_in_one(name, dtype):
    packed_table.check(name, dtype, "cuda", "triton")
