"""The bidirectional Triton scan under Triton's interpreter: small shapes, on a CPU. tests/gpu has the large ones.

TRITON_INTERPRET must be set before triton is imported: the table runs in a process of its own.
"""

import pytest
import torch
from lightnet_kernels import ScanState, additive_scan, recorded

pytest.importorskip("triton")
from . import bidirectional_table as table
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import make, relative

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@outside
def test_table_under_the_interpreter():
    run_inside(__file__, "-x")


@outside
@pytest.mark.parametrize(
    ("shape", "order", "as_it_is"),
    [
        ((1, 64, 16, 128), (0, 1, 2, 3), True),
        ((1, 2**19, 16, 128), (0, 2, 1, 3), True),  # heads first
        ((1, 2**20, 16, 128), (0, 2, 1, 3), False),  # a head's offset no longer goes into 32 bits
        ((1, 64, 16, 128), (0, 1, 3, 2), False),  # features apart
    ],
)
def test_what_a_kernel_can_address(shape: tuple[int, ...], order: tuple[int, ...], as_it_is: bool) -> None:
    from lightnet_kernels.triton_bidirectional_plan import addressable

    laid = torch.empty([shape[axis] for axis in order], dtype=BF16, device="meta")
    x = laid.permute([order.index(axis) for axis in range(4)])
    assert tuple(x.shape) == shape and (addressable(x) is x) == as_it_is
    assert addressable(x).stride(3) == 1


@pytest.mark.skipif(INSIDE, reason="the interpreter takes CPU tensors")
def test_refusals_name_a_way_out():
    inputs = {name: x.float() for name, x in make(1, 3, 1, 8, 8).items()}
    with pytest.raises(ValueError, match=r"tensors on a CPU .*; use backend='auto'"):
        additive_scan(**inputs, causal=False, backend="triton")
    with pytest.raises(ValueError, match="does not take decay"):
        additive_scan(**inputs, decay=inputs["key"], causal=False, backend="triton")


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "value_width", "dtype"),
    [
        (1, 24, 32, BF16),
        (2, 72, 20, FP16),
        (63, 32, 72, BF16),
        (64, 48, 48, FP32),
        (65, 72, 72, BF16),
        (130, 72, 66, BF16),
        (130, 100, 128, FP32),
        (66, 128, 24, BF16),
    ],
)
def test_shapes(tokens, width, value_width, dtype, theta):
    """Up to 128 tokens in one pass where the state fits, beyond by pieces of 64."""
    table.check(make(2 if tokens < 66 else 1, tokens, 1, width, value_width, theta=theta), dtype, "cpu")


@inside
@pytest.mark.parametrize(("dtype", "scale"), [(FP32, 1e4), (BF16, 1e4), (FP32, 40.0)])
def test_keys_of_any_size(dtype, scale):
    inputs = make(1, 130, 1, 24, 20, scale=scale)
    inputs["key"][:, 0] = scale
    table.check(inputs, dtype, "cpu")


@inside
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_mask(dtype):
    for tokens in (20, 130):
        table.check(make(2, tokens, 2, 24, 20), dtype, "cpu", key_mask=table.masked(2, tokens))


@inside
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_segments(dtype):
    for lengths in ([3, 0, 40, 1], [0, 150, 2, 0]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        table.check(make(1, sum(lengths), 2, 24, 20), dtype, "cpu", cu_seqlens=bounds)


@inside
def test_segments_with_a_mask():
    bounds = torch.tensor([0, 30, 30, 150])
    mask = table.masked(2, 150)[1:]
    mask[:, :30] = False
    table.check(make(1, 150, 1, 24, 20), FP32, "cpu", cu_seqlens=bounds, key_mask=mask)


@inside
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_coordinates(axes):
    table.check(make(2, 50, 2, 24, 20), BF16, "cpu", coordinates=table.grid(50, axes))
    table.check(make(1, 130, 1, 24, 20), FP32, "cpu", coordinates=table.grid(130, axes) - 3)


@inside
@pytest.mark.parametrize("far", [10**5, 2**24 - 3])
def test_far_coordinates_keep_their_angles(far):
    """Theta is met in integers: also millions of tokens from the origin only lags matter."""
    inputs = {name: x.float() for name, x in make(1, 40, 1, 24, 20).items()}
    near, away = (
        additive_scan(**inputs, coordinates=torch.arange(40) + offset, causal=False, backend="triton")
        for offset in (0, far)
    )
    assert relative(away, near) < 1e-5


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"cu_seqlens": torch.tensor([0, 5, 5, 75])}, {"coordinates": torch.arange(75) + 7}]
)
def test_states(theta, options):
    """The state that came before and the state afterwards, with gradients through both."""
    sequences = 3 if "cu_seqlens" in options else 1
    state = table.started(sequences, 1, 24, 20, theta)
    table.check(make(1, 75, 1, 24, 20, theta=theta), FP32, "cpu", state=state, **options)


@inside
@pytest.mark.parametrize("kind", ["alone", "mask", "state"])
def test_recorded_with_segments(kind):
    """Repeated, or simply run, for any number of segments."""
    theta = torch.rand(1, 8).requires_grad_()
    mask = torch.arange(70)[None] % 5 > 0 if kind == "mask" else None

    def call(x, bounds):
        found = additive_scan(
            x, x * 2, x + 1, theta=theta, cu_seqlens=bounds, key_mask=mask, causal=False, return_state=kind == "state",
            backend="triton",
        )  # fmt: skip
        return found[0] * found[1].sum.mean() if kind == "state" else found * 2

    for bounds in ([0, 30, 70], [0, 30, 70], [0, 1, 9, 9, 70], [0, 70]):
        x, cuts = torch.randn(1, 70, 1, 8, requires_grad=True), torch.tensor(bounds)
        results = []
        for y in (call(x, cuts), recorded(call, [x], [theta], [cuts], f"segments, {kind}")):
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, theta])])
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@inside
def test_state_of_a_masked_batch():
    table.check(make(2, 40, 1, 24, 20), BF16, "cpu", state=table.started(2, 1, 24, 20), key_mask=table.masked(2, 40))


@inside
def test_exchange():
    """Two ranks, each with the other's state: together the whole sequence."""
    inputs = {name: x.float() for name, x in make(1, 90, 1, 24, 20).items()}
    theta = inputs.pop("theta")
    places = torch.arange(90)

    def part(span, **options):
        own = {name: x[:, span] for name, x in inputs.items()}
        return additive_scan(**own, theta=theta, coordinates=places[span], causal=False, backend="triton", **options)

    spans = slice(0, 33), slice(33, 90)
    states = [part(span, return_state=True)[1] for span in spans]

    class Exchange:
        def total(self, state: ScanState) -> ScanState:
            from lightnet_kernels import merge_states

            assert any(torch.equal(state.sum, own.sum) for own in states)
            return merge_states(*states)

    outputs = torch.cat([part(span, exchange=Exchange()) for span in spans], 1)
    assert relative(outputs, part(slice(0, 90))) < 1e-5


@inside
def test_strides():
    def layout(name, x):
        return x if name == "theta" else x.transpose(1, 2).contiguous().transpose(1, 2)

    table.check(make(2, 40, 3, 24, 20), FP32, "cpu", layout=layout, upstream=lambda x: x[:, :1].expand_as(x))
    table.check(make(2, 40, 3, 24, 20), BF16, "cpu", upstream=lambda x: x[..., :1].expand_as(x))


@inside
def test_nothing_to_do():
    for shape in ((0, 5, 2, 24), (2, 0, 2, 24), (2, 5, 0, 24)):
        x = torch.zeros(shape, requires_grad=True)
        theta = torch.zeros(shape[2], 24, requires_grad=True)
        output = additive_scan(x, x, x, theta=theta, causal=False, backend="triton")
        assert output.shape == shape
        assert [g.shape for g in torch.autograd.grad(output.sum(), [x, theta])] == [x.shape, theta.shape]


@inside
def test_torch_library():
    from lightnet_kernels import triton_bidirectional_scan as scan

    inputs = {name: x.float() for name, x in make(1, 5, 1, 8, 6).items()}
    query, key, value, theta = (x.requires_grad_() for x in inputs.values())
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(scan.scan_op.node, (query, key, value, theta, None, None, None, True), test_utils=checks)
    torch.library.opcheck(scan.states_op.node, (key, value, theta, None, None, None), test_utils=checks)
    state = torch.randn(1, 1, 16, 6, requires_grad=True)
    torch.library.opcheck(scan.read_op.node, (query, state, theta, None, None, None, True), test_utils=checks)


@inside
def test_compile_and_checkpoint():
    from torch.utils.checkpoint import checkpoint

    leaves = [x.float().requires_grad_() for x in make(1, 6, 1, 24, 20).values()]

    def scan(query, key, value, theta):
        return additive_scan(query, key, value, theta=theta, causal=False, backend="triton")

    def grads(function):
        return torch.autograd.grad(function(*leaves).square().sum(), leaves)

    wanted = grads(scan)
    again = grads(lambda *x: checkpoint(scan, *x, use_reentrant=False))
    compiled = grads(torch.compile(scan, backend="aot_eager", fullgraph=True))
    for one, two, three in zip(wanted, again, compiled, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
