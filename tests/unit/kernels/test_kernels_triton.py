"""The Triton scan under Triton's interpreter: small shapes, on a CPU. tests/gpu/test_scan.py has the whole table.

TRITON_INTERPRET must be set before triton is imported, which other tests of this process may have done: the table runs
in a process of its own.
"""

import math
from itertools import pairwise

import pytest
import torch
from lightnet_kernels import ScanState, additive_scan, backends

pytest.importorskip("triton")
from lightnet_kernels import triton_shape, triton_tables

from tests.gpu import test_scan as on_card

from . import kernel_oracle as oracle
from . import triton_table as table
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import make, relative


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


@outside
@pytest.mark.slow
def test_the_rest_of_it():
    run_inside(__file__, "-m", "slow")


@pytest.mark.skipif(INSIDE, reason="the interpreter takes CPU tensors")
def test_refusals_name_a_way_out():
    inputs = {name: x.float() for name, x in make(1, 3, 1, 8, 8).items()}
    with pytest.raises(ValueError, match=r"tensors on a CPU .*; use backend='auto'"):
        additive_scan(**inputs, backend="triton")
    assert additive_scan(**inputs).shape == (1, 3, 1, 8)
    assert backends() == ["reference", "torch", "triton"]


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(("tokens", "width", "value_width"), [(1, 24, 16), (8, 72, 5), (65, 32, 24), (130, 100, 72)])
def test_shapes(tokens, width, value_width, theta):
    table.check(make(2, tokens, 1, width, value_width, theta=theta), torch.float32, "cpu")


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_two_chunks(dtype):
    table.check(make(1, 300, 2, 24, 20), dtype, "cpu")


@inside
@pytest.mark.parametrize("height", [60, 400])
def test_spikes(height):
    table.check(table.spiked(make(1, 290, 1, 24, 20), height), torch.float32, "cpu")


@inside
def test_keys_of_any_size():
    table.check(make(1, 150, 1, 24, 20, scale=1e4), torch.float32, "cpu")


@inside
def test_segments():
    table.check_segments([3, 0, 64, 1, 260, 70], torch.float32, "cpu", heads=1)


@inside
@pytest.mark.parametrize("theta", [True, False])
def test_states(theta):
    table.check_states([5, 64, 200, 1], torch.float32, "cpu", theta=theta)


@inside
def test_strides():
    def layout(name, x):
        return x if name == "theta" else x.transpose(1, 2).contiguous().transpose(1, 2)

    table.check(
        make(2, 70, 2, 24, 20), torch.float32, "cpu", layout=layout, grad_layout=lambda x: x[:, :1].expand_as(x)
    )


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        {"cuts": [5, 64, 60]},
        {"cuts": [70, 3], "begun": False},
        {"cuts": [70], "top": 1e4},
        {"cuts": [140], "cu_seqlens": [0, 0, 5, 69, 70, 140, 140]},
    ],
)
def test_gradients_of_states(case, theta, monkeypatch):
    monkeypatch.setattr(on_card, "DEVICE", "cpu")
    on_card.state_case(torch.float32, theta, width=24, **case)


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("cu_seqlens", [[0, 0, 70], [0, 0, 0]])
def test_a_sequence_without_tokens_and_a_state(theta, cu_seqlens):
    """What stands beside a maximum of -inf counts for nothing, and has no gradient; a state's is handed on."""
    tokens, found = cu_seqlens[-1], {}
    inputs = make(1, tokens, 1, 8, 6, theta=theta)
    top = torch.tensor([[[float("-inf")] * 4 + [1.0] * 4], [[2.0] * 8]])
    rows = (2 if theta else 1) * 8
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        parts = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        there = (top > float("-inf")).to(dtype)
        total = (torch.rand(2, 1, 8, generator=torch.Generator().manual_seed(1)).to(dtype) * there).requires_grad_()
        kv = torch.randn(2, 1, rows, 6, generator=torch.Generator().manual_seed(2)).to(dtype)
        kv = (kv * there.repeat(1, 1, rows // 8)[..., None]).requires_grad_()
        start = ScanState(top.to(dtype), total, kv, torch.tensor([0, 9]))
        options = {"cu_seqlens": torch.tensor(cu_seqlens), "initial_state": start, "return_state": True}
        _, end = additive_scan(**parts, **options, backend=backend)
        weights = [torch.arange(1.0, x.numel() + 1, dtype=dtype).view(x.shape) for x in (end.sum, end.kv)]
        found[backend] = torch.autograd.grad([end.sum, end.kv], [total, kv], weights)
    for one, other in zip(found["triton"], found["torch"], strict=True):
        assert torch.isfinite(one).all() and relative(one, other) < 1e-5
        assert (one[0, :, :4] == 0).all() and (one[0, :, 4:8] != 0).all()


@pytest.fixture(params=[1, 2])
def short_spans(request, monkeypatch):
    """Spans of two blocks, summed whole or block by block, and stretches of four; how many spans there are, given tokens."""
    monkeypatch.setattr(triton_shape, "WHOLE", 1)
    monkeypatch.setattr(triton_shape, "ROWS", {math.inf: (4, 32, 1)})
    monkeypatch.setattr(triton_tables, "PROGRAMS", 10**6)
    monkeypatch.setattr(triton_tables, "WINDOW", 1)
    monkeypatch.setattr(triton_tables, "pieces_of", lambda *_: request.param)
    table.forget()

    def spans(tokens):
        found = triton_tables.tables(1, tokens, None, 64, 1, 1, torch.device("cpu"))
        assert found.piece == 2 // request.param
        return len(found.spans)

    yield spans
    table.forget()


@inside
def test_gradients_of_states_over_spans(monkeypatch, short_spans):
    monkeypatch.setattr(on_card, "DEVICE", "cpu")
    assert short_spans(700) > 4
    on_card.state_case(torch.float32, True, width=24, cuts=[700])


@inside
@pytest.mark.parametrize("scale", [1, 100])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 0, 70, 71, 700, 900]])
def test_units_by_stretches(scale, cu_seqlens, monkeypatch):
    """Greatest keys and masses of stretches, put together: bits of one whole, but for the order of the mass's terms."""
    inputs = {name: x.float() for name, x in make(1, 900, 1, 24, 16).items()}
    inputs["key"] = scale * inputs["key"]
    options = {"cu_seqlens": None if cu_seqlens is None else torch.tensor(cu_seqlens), "return_state": True}
    exact, end = additive_scan(**{name: x.double() for name, x in inputs.items()}, **options, backend="torch")
    monkeypatch.setattr(triton_shape, "ROWS", {math.inf: (2, 32, 1)})
    found = []
    for whole in (10**6, 1):
        monkeypatch.setattr(triton_shape, "WHOLE", whole)
        table.forget()
        output, state = additive_scan(**inputs, **options, backend="triton")
        assert torch.equal(state.max.double(), end.max)
        assert relative(output, exact) < 1e-5 and relative(state.sum, end.sum) < 1e-5
        found.append(output)
    assert relative(*found) < 1e-6


@inside
@pytest.mark.parametrize("theta", [True, False])
def test_spans(theta, short_spans):
    """Chains begin with what their spans find; the first one, too, where the sequence goes on from a state."""
    assert short_spans(600) == 5
    inputs = make(1, 600, 1, 24, 20, theta=theta)
    table.check(inputs, torch.float32, "cpu")
    angles = inputs.pop("theta").float() if theta else None
    one, two = ({name: x[:, part].float() for name, x in inputs.items()} for part in (slice(70), slice(70, None)))
    _, state = additive_scan(**one, theta=angles, return_state=True, backend="triton")
    later = additive_scan(**two, theta=angles, initial_state=state, backend="triton")
    exact = {name: x.double() for name, x in inputs.items()}
    wanted = additive_scan(**exact, theta=angles if angles is None else angles.double(), backend="torch")
    assert relative(later, wanted[:, 70:]) < 1e-5


@inside
@pytest.mark.parametrize(
    ("theta", "sums"),
    [
        (True, {"tile": 32, "stacked": False}),
        pytest.param(True, {"tile": 64, "stacked": False}, marks=pytest.mark.slow),
        pytest.param(True, {"tile": 32, "stacked": True}, marks=pytest.mark.slow),
        pytest.param(True, {"tile": 16, "features": 128, "stacked": True}, marks=pytest.mark.slow),
        (False, {"tile": 32, "values": 64}),
    ],
    ids=str,
)
def test_other_ways_to_sum_spans(theta, sums, short_spans, monkeypatch):
    """Those that benchmarks/span_sums.py times; of bf16, as float32 is always summed in the same way."""
    assert short_spans(400) > 2
    rules = [*triton_shape.LAUNCH["span_sums"]]
    rules[theta] = rules[theta]._replace(**sums)
    monkeypatch.setitem(triton_shape.LAUNCH, "span_sums", tuple(rules))
    table.forget()
    table.check(make(1, 400, 1, 72, 20, theta=theta), torch.bfloat16, "cpu")


@inside
@pytest.mark.parametrize(
    "case",
    [
        {"parts": [70, 3, 65], "batch": 2},
        {"parts": [65, 30], "batch": 2, "theta": False},
        {"parts": [40, 330, 40], "ends": [30, 40, 390]},  # one ends on a rank's edge; a rank between, in spans
        {"parts": [30, 266, 20], "lift": [100.0, 0.0, 30.0]},
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_spans")
def test_ranks(case):
    table.check_ranks(**case, dtype=torch.float32, device="cpu", heads=1)


@inside
def test_gradients_of_some_ranks_and_inputs():
    """Passes that ask for less leave nothing behind: for the query alone, for one rank's output, with frozen keys."""
    inputs = make(1, 24, 1, 8, 6)
    leaves = {name: x.float().requires_grad_() for name, x in inputs.items()}
    wanted = {name: x.double().requires_grad_() for name, x in inputs.items()}
    exact = additive_scan(**wanted, backend="torch")

    def parts(given):
        line, outputs = table.Line(given["theta"], 1), []
        for rank in (0, 1):
            line.continues = rank > 0
            part = {name: x[:, 12 * rank :][:, :12] for name, x in given.items() if name != "theta"}
            outputs.append(additive_scan(**part, theta=given["theta"], exchange=line, backend="triton"))
        return outputs

    def compare(actual, expected, names):
        for name, one, two in zip(names, actual, expected, strict=True):
            assert relative(one, two) < 1e-5, name

    first, last = parts(leaves)
    names = list(leaves)
    found = torch.autograd.grad(first.sum(), [leaves["query"]], retain_graph=True)
    compare(found, torch.autograd.grad(exact[:, :12].sum(), [wanted["query"]], retain_graph=True), ["query"])
    for _ in range(2):  # the first rank's output takes no part
        found = torch.autograd.grad(last.sum(), list(leaves.values()), retain_graph=True)
        compare(found, torch.autograd.grad(exact[:, 12:].sum(), list(wanted.values()), retain_graph=True), names)
    frozen = {name: x.detach().requires_grad_(name == "query") for name, x in leaves.items()}
    found = torch.autograd.grad(torch.cat(parts(frozen), 1).sum(), [frozen["query"]])
    compare(found, torch.autograd.grad(exact.sum(), [wanted["query"]], retain_graph=True), ["query"])
    fixed = {name: x.detach().requires_grad_(name != "theta") for name, x in leaves.items()}
    found = torch.autograd.grad(torch.cat(parts(fixed), 1).sum(), [fixed[name] for name in names[:3]])
    compare(found, torch.autograd.grad(exact.sum(), [wanted[name] for name in names[:3]]), names[:3])


@inside
@pytest.mark.parametrize("theta", [True, False])
def test_ranks_begin_with_a_state_and_give_one(theta):
    """An initial state, which each of two ranks is given, and the state after the second; gradients of both."""
    inputs = make(1, 24, 1, 8, 6, theta=theta)
    start = oracle.random_state(1, 1, 8, 6, lrpe=theta)

    def run(given, state, ranks, backend):
        line, outputs, bounds = table.Line(given.get("theta"), 1), [], [0, 11, 24] if ranks else [0, 24]
        for begin, end in pairwise(bounds):
            line.continues = begin > 0
            part = {name: x if name == "theta" else x[:, begin:end] for name, x in given.items()}
            exchange = line if ranks else None
            output, after = additive_scan(
                **part, initial_state=state, exchange=exchange, return_state=True, backend=backend
            )
            outputs.append(output)
        return torch.cat(outputs, 1), after

    found = []
    for dtype, ranks, backend in ((torch.float64, False, "torch"), (torch.float32, True, "triton")):
        leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
        state = start._replace(
            max=start.max.to(dtype), sum=start.sum.to(dtype).requires_grad_(), kv=start.kv.to(dtype).requires_grad_()
        )
        output, after = run(leaves, state, ranks, backend)
        asked = [*leaves.values(), state.sum, state.kv]
        loss = (
            output.square().sum() + (after.kv / after.sum.repeat(1, 1, after.kv.shape[2] // 8)[..., None]).sin().sum()
        )
        found.append([output, *after, *torch.autograd.grad(loss, asked)])
    for place, (wanted, actual) in enumerate(zip(*found, strict=True)):
        assert relative(actual.double(), wanted.double()) < 1e-5, place


@inside
@pytest.mark.parametrize("causal", [True, False])
def test_the_quick_interpreter_gives_the_plain_ones_bits(causal):
    import triton
    from triton.runtime import interpreter

    from . import quick_interpreter

    leaves = {name: x.bfloat16().requires_grad_() for name, x in make(1, 70, 1, 24, 20).items() if name != "theta"}
    leaves["theta"] = make(1, 1, 1, 24, 20)["theta"].float().requires_grad_()

    def run():
        output = additive_scan(**leaves, cu_seqlens=torch.tensor([0, 5, 70]), causal=causal, backend="triton")
        return [output, *torch.autograd.grad(output.float().square().sum(), list(leaves.values()))]

    patch, quick = interpreter._patch_lang, run()
    quick_interpreter.remove()
    try:
        made_for_it = triton.__version__.startswith(quick_interpreter.RELEASE)
        assert (interpreter._patch_lang is not patch) == made_for_it, "another release runs as it is"
        plain = run()
    finally:
        quick_interpreter.install()
    assert all(torch.equal(one, two) for one, two in zip(quick, plain, strict=True))
    assert all(torch.equal(one, two) for one, two in zip(run(), plain, strict=True))


@inside
def test_operators():
    leaves = {name: x.float().requires_grad_() for name, x in make(1, 70, 1, 24, 20).items()}

    def loss(query, key, value, theta):
        return additive_scan(query, key, value, theta=theta, backend="triton").square().sum()

    wanted = torch.autograd.grad(loss(**leaves), list(leaves.values()))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for one, two in zip(torch.autograd.grad(compiled(**leaves), list(leaves.values())), wanted, strict=True):
        assert torch.equal(one, two)
    output = torch.utils.checkpoint.checkpoint(loss, *leaves.values(), use_reentrant=False)
    for one, two in zip(torch.autograd.grad(output, list(leaves.values())), wanted, strict=True):
        assert torch.equal(one, two)
    arguments = (*(x.detach() for x in leaves.values()), None, None, None, None, True, True)
    torch.library.opcheck(torch.ops.lightnet.causal_scan, arguments, test_utils=("test_schema", "test_faketensor"))
