"""Norms with residual or gate, and SwiGLU: PyTorch here, Triton under its interpreter; tests/gpu has the rest.

As in test_kernels_triton.py, the interpreter needs a process of its own.
"""

import pytest
import torch
from lightnet_kernels import add_norm, gated_norm, norm, norm_beside, swiglu

from . import companion_table as table
from .interpreter import inside, outside, run_inside

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


@outside
@pytest.mark.parametrize("kind", table.KINDS)
def test_pytorch_forms(kind):
    table.check_norm(kind, (2, 5, 24), torch.float64, backend="torch")
    table.check_add_norm(kind, (2, 5, 24), torch.float64, backend="torch")
    table.check_gated_norm(kind, (2, 5, 3, 8), torch.float64, backend="auto")
    table.check_norm_beside(kind, (2, 5, 24), torch.float64, backend="torch")
    table.check_swiglu((4, 10), torch.float64, joined=kind == "rms", backend="auto")


@outside
def test_bad_input_says_a_way_out():
    x = torch.randn(3, 8)
    cases = [
        (lambda: norm(x, kind="rmsnorm", eps=1e-5), "choose one of srms, rms, layer"),
        (lambda: norm(x, kind="rms", eps=1e-5), "takes a weight; pass weight=a tensor of 8"),
        (lambda: norm(x, x[0], kind="srms", eps=1e-5), "takes no weight"),
        (lambda: norm(x, x[0, :7], kind="rms", eps=1e-5), r"weight has shape \(7,\); expected \[8\]"),
        (lambda: add_norm(x, x[:2], kind="srms", eps=1e-5), "residual has shape"),
        (lambda: gated_norm(x, x[:, :4], kind="srms", eps=1e-5), "gate has shape"),
        (lambda: gated_norm(x[0], x[0], kind="srms", eps=1e-5), "expected .*head width"),
        (lambda: norm(x.long(), kind="srms", eps=1e-5), "pass a floating-point tensor"),
        (lambda: norm(x[0, 0], kind="srms", eps=1e-5), r"norm: x has shape \(\); expected \[.., W\]"),
        (lambda: norm(None, kind="srms", eps=1e-5), "x is of type NoneType; pass a tensor"),
        (lambda: norm(x.numpy(), kind="srms", eps=1e-5), "x is of type ndarray"),
        (lambda: norm(x, x[0].numpy(), kind="rms", eps=1e-5), "weight is of type ndarray"),
        (lambda: norm_beside(x[0, 0], kind="srms", eps=1e-5), r"norm_beside: x has shape \(\)"),
        (lambda: add_norm(x[0, 0], x[0, 0], kind="srms", eps=1e-5), r"add_norm: x has shape \(\)"),
        (lambda: add_norm(x, None, kind="srms", eps=1e-5), "residual is of type NoneType"),
        (lambda: add_norm(x, x.numpy(), kind="srms", eps=1e-5), "residual is of type ndarray"),
        (lambda: gated_norm(x, None, kind="srms", eps=1e-5), "gate is of type NoneType"),
        (lambda: gated_norm(x.numpy(), x, kind="srms", eps=1e-5), "x is of type ndarray"),
        (lambda: swiglu(1, 2), "gate is of type int; pass a tensor"),
        (lambda: swiglu(x.numpy()), "gate is of type ndarray"),
        (lambda: swiglu(x, x.numpy()), "up is of type ndarray"),
        (lambda: swiglu(x[0, 0]), r"gate is torch.float32 \(\); expected a floating-point \[.., W\]"),
        (lambda: swiglu(x.long()), "gate is torch.int64"),
        (lambda: swiglu(x, x[:, :4]), "up has shape"),
        (lambda: swiglu(x[:, :7]), "pass an even number, or up"),
        (lambda: swiglu(x, x, backend="cuda"), "choose one of auto, torch, triton"),
        (lambda: norm(x, kind="srms", eps=1e-5, backend="triton"), "tensors on a CPU .*; use backend='auto'"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


# Shapes: no rows, one row, widths that are no power of two, several tiles, and a ragged last one.
ROWS = [(0, 24), (1, 5), (3, 24), (2, 67, 72), (5, 100), (9, 1365), (2, 3, 2560)]


@inside
@pytest.mark.parametrize("kind", table.KINDS)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_norms(shape, kind):
    table.check_norm(kind, shape, torch.float32)
    table.check_add_norm(kind, shape, torch.float32)
    if shape[0]:
        table.check_norm_beside(kind, shape, torch.float32)


@inside
@pytest.mark.parametrize("kind", table.KINDS)
@pytest.mark.parametrize("shape", [(0, 2, 24), (1, 1, 5), (3, 5, 3, 24), (2, 40, 6, 72), (33, 2, 128)], ids=str)
def test_gated_norm(shape, kind):
    table.check_gated_norm(kind, shape, torch.float32)


@inside
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("kind", table.KINDS)
def test_half_precision(kind, dtype):
    table.check_norm(kind, (40, 200), dtype)
    table.check_add_norm(kind, (40, 200), dtype)
    table.check_norm_beside(kind, (40, 200), dtype)
    table.check_gated_norm(kind, (2, 20, 3, 48), dtype)
    table.check_swiglu((7, 150), dtype, joined=kind == "rms")


@inside
def test_norm_beside_refuses_a_second_derivative():
    x = torch.randn(3, 24, requires_grad=True)
    stream, normed = norm_beside(x, kind="srms", eps=1e-5, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivative; use backend='torch'"):
        torch.autograd.grad((stream * normed).sum(), x, create_graph=True)


@inside
def test_mixed_dtypes_follow_promotion():
    table.check_add_norm("layer", (9, 24), torch.float32, residual_dtype=torch.bfloat16)
    table.check_add_norm("srms", (9, 24), torch.bfloat16, residual_dtype=torch.float32)
    table.check_swiglu((5, 33), torch.float32, up_dtype=torch.bfloat16)


@inside
@pytest.mark.parametrize("kind", ["srms", "layer"])
def test_programs_that_take_several_blocks(kind, monkeypatch):
    from lightnet_kernels import triton_norms

    monkeypatch.setattr(triton_norms, "PROGRAMS", 3)
    table.check_norm(kind, (29, 1365), torch.float32)
    table.check_gated_norm(kind, (300, 2, 72), torch.float32)


def expanded(x):
    """One value for every token, as from a mean: stride 0 everywhere or in front."""
    return x[(0,) * x.ndim].expand_as(x) if x.shape[-1] % 2 else x[:1].expand_as(x)


@inside
@pytest.mark.parametrize("width", [24, 25])
def test_strides_and_expanded_gradients(width):
    def transposed(x):
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    def padded(x):
        return F_pad(x)[..., 3 : 3 + x.shape[-1]]

    def F_pad(x):
        return torch.nn.functional.pad(x, (3, 5), value=float("nan"))

    for layout in (transposed, padded):
        places = {"layout": layout, "grad_layout": expanded}
        table.check_norm("layer", (4, 6, width), torch.float32, **places)
        table.check_add_norm("rms", (4, 6, width), torch.float32, **places)
        table.check_gated_norm("layer", (4, 6, 3, width), torch.float32, **places)
        table.check_swiglu((4, 6, width), torch.float32, **places)
        table.check_swiglu((4, 6, width), torch.float32, joined=True, **places)


@inside
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5, 90), (9, 1365), (2, 2, 3000)], ids=str)
def test_swiglu(shape, joined):
    table.check_swiglu(shape, torch.float32, joined=joined)


@inside
def test_halves_of_one_projection_need_no_copies():
    joined = table.draw(6, 40).requires_grad_()
    gate, up = joined.chunk(2, -1)
    one, two = swiglu(gate, up, backend="triton"), swiglu(joined, backend="triton")
    assert torch.equal(one, two)
    grads = [torch.autograd.grad(y.sum(), joined)[0] for y in (one, two)]
    assert torch.equal(*grads)


@inside
def test_only_one_result_is_used():
    """A residual stream whose norm has no gradient, and the other way round."""
    x, r = table.draw(5, 24).requires_grad_(), table.draw(5, 24, seed=1).requires_grad_()
    for index in (0, 1):
        results = []
        for backend in ("torch", "triton"):
            y = add_norm(x, r, kind="srms", eps=1e-5, backend=backend)[index]
            results.append(torch.autograd.grad(y.square().sum(), (x, r)))
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


@inside
def test_zeros_and_large_values():
    x = torch.zeros(3, 24)
    x[1] = 1e18
    x[2] = 1e-18
    for kind in ("srms", "rms"):
        weights = table.norm_weights(kind, 24, torch.float32)
        one, two = (norm(x, **weights, kind=kind, eps=1e-5, backend=b) for b in ("torch", "triton"))
        torch.testing.assert_close(one, two, atol=0, rtol=1e-6)


def calls():
    """Every companion as a function of two tensors [6, 2, 24] and weights [48]."""
    weights = table.norm_weights("layer", 48, torch.float32)
    options = {"eps": 1e-5, "backend": "triton"}
    return {
        "norm": lambda x, y: norm(x.flatten(1), **weights, kind="layer", **options) + y.flatten(1),
        "add_norm": lambda x, y: sum(add_norm(x, y, kind="srms", **options)),
        "gated_norm": lambda x, y: gated_norm(x, y, **weights, kind="layer", **options),
        "swiglu": lambda x, y: swiglu(x, y, backend="triton"),
        "swiglu joined": lambda x, y: swiglu(torch.cat([x, y], -1), backend="triton"),
    }


@inside
@pytest.mark.parametrize("name", calls())
def test_compile_and_checkpoint(name):
    leaves = [table.draw(6, 2, 24, seed=i).requires_grad_() for i in range(2)]
    table.check_compiled_and_checkpointed(calls()[name], leaves)


@inside
def test_operators_are_sound():
    x, gate = (table.draw(5, 2, 24, seed=i).requires_grad_() for i in range(2))
    weight, bias = (table.draw(48, seed=i).requires_grad_() for i in range(2))
    ops = torch.ops.lightnet
    torch.library.opcheck(ops.norm.default, (x, None, gate, weight, bias, True, 1e-5))
    torch.library.opcheck(ops.norm.default, (x, gate, None, weight, None, False, 1e-5))
    torch.library.opcheck(ops.swiglu.default, (x[:, 0], gate[:, 0]))
    torch.library.opcheck(ops.swiglu.default, (x[:, 0], None))
    for call in (
        (ops.norm_backward.default, (x, gate, weight, bias, torch.ones(5, 2), x, None, True)),
        (ops.norm_backward.default, (x, None, None, None, torch.ones(5, 2), x, gate, False)),
        (ops.swiglu_backward.default, (x[:, 0], gate[:, 0], x[:, 1])),
        (ops.swiglu_backward.default, (x[:, 0], None, x[:, 0, :12])),
    ):
        torch.library.opcheck(*call, test_utils=("test_schema", "test_faketensor"))
