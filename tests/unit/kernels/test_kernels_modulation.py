"""Modulated norms and gated sums: PyTorch here, Triton under its interpreter; tests/gpu has the rest."""

import pytest
import torch
from lightnet_kernels import gated_add, gated_add_norm, modulate, modulated_norm

from . import companion_table
from . import modulation_table as table
from .interpreter import inside, outside, run_inside

KINDS = companion_table.KINDS


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


@outside
@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_forms(kind):
    table.check_modulation(kind, (3, 5, 24), torch.float64, backend="torch", flat=kind == "rms")


@outside
def test_bad_input_says_a_way_out():
    x, row = torch.randn(2, 3, 8), torch.randn(2, 8)
    options = {"kind": "srms", "eps": 1e-5}
    cases = [
        (
            lambda: modulated_norm(x, row, row[:1], **options),
            r"scale has shape \(1, 8\); expected samples, width \(2, 8\)",
        ),
        (
            lambda: modulated_norm(x, row[:, :5], row, **options),
            r"shift has shape \(2, 5\); expected samples, width \(2, 8\)",
        ),
        (
            lambda: modulated_norm(x, row.repeat(2, 1), row.repeat(2, 1), **options),
            "6 tokens are not 4 samples of one length",
        ),
        (lambda: modulated_norm(x, row, row, kind="rms", eps=1e-5), "takes a weight; pass weight=a tensor of 8"),
        (lambda: gated_add_norm(x, x[:1], row, row, row, **options), r"branch has shape \(1, 3, 8\); expected x's"),
        (lambda: modulated_norm(x[0, 0, 0], row, row, **options), r"x has shape \(\)"),
        (lambda: modulated_norm(x, None, row, **options), "shift is of type NoneType; pass a tensor"),
        (lambda: gated_add_norm(x, x.numpy(), row, row, row, **options), "branch is of type ndarray"),
        (lambda: modulate(x, row[:, :5], row), r"shift has shape \(2, 5\); expected samples, width \(2, 8\)"),
        (lambda: modulate(x, row, row[:1]), r"modulate: scale has shape \(1, 8\)"),
        (lambda: modulate(x, row[0], row[0]), r"shift has shape \(8,\)"),
        (lambda: modulate(x, row[0, 0], row), r"shift has shape \(\)"),
        (lambda: modulate(x, row.repeat(2, 1), row.repeat(2, 1)), "6 tokens are not 4 samples"),
        (lambda: modulate(x[0, 0, 0], row, row), r"x has shape \(\); expected \[B, N, W\]"),
        (lambda: modulate(x.numpy(), row, row), "x is of type ndarray"),
        (lambda: gated_add(x, None, row), "branch is of type NoneType"),
        (lambda: gated_add(x, x, row.numpy()), "gate is of type ndarray"),
        (lambda: gated_add(x, x, row[:, :5]), r"gate has shape \(2, 5\)"),
        (lambda: gated_add(x[0, 0, 0], x[0, 0, 0], row), r"x has shape \(\)"),
        (lambda: gated_add(x, x[:1], row), r"branch has shape \(1, 3, 8\); expected x's"),
        (lambda: gated_add(x, x, row[:0]), "not 0 samples"),
        (lambda: gated_add(x, x, row, backend="triton"), "tensors on a CPU .*; use backend='auto'"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


# No tokens, one, widths that are no power of two, several tiles and a ragged last one, many samples.
SHAPES = [(2, 0, 24), (1, 1, 5), (3, 5, 24), (35, 1, 40), (2, 9, 700)]


@inside
@pytest.mark.parametrize(
    ("shape", "kind"), [*((s, "layer") for s in SHAPES), *((s, k) for s in SHAPES[2::2] for k in ("srms", "rms"))]
)
def test_table(shape, kind):
    table.check_modulation(kind, shape, torch.float32, flat=shape[0] == 3, stacked=shape[0] != 35)


@inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision(kind, dtype):
    table.check_modulation(kind, (3, 20, 200), dtype)


@inside
def test_mixed_dtypes_follow_promotion():
    table.check_modulation("layer", (2, 9, 24), torch.float32, branch_dtype=torch.bfloat16)
    table.check_modulation("srms", (2, 9, 24), torch.bfloat16, branch_dtype=torch.float32)


@inside
@pytest.mark.parametrize("layout", [lambda x: x[:1, :1].expand_as(x), lambda x: x.mT.contiguous().mT])
def test_gradients_of_other_layouts(layout):
    table.check_modulation("layer", (2, 9, 24), torch.float32, grad_layout=layout)


@inside
def test_programs_that_take_several_blocks(monkeypatch):
    from lightnet_kernels import triton_modulation

    monkeypatch.setattr(triton_modulation, "FORWARD", 5)  # two programs a sample
    monkeypatch.setattr(triton_modulation, "BACKWARD", 75)  # 37 a sample, or 18
    table.check_modulation("layer", (2, 47, 1100), torch.float32)


@inside
@pytest.mark.parametrize("index", [0, 1])
def test_only_one_result_is_used(index):
    leaves = [companion_table.draw(2, 5, 24, seed=i).requires_grad_() for i in range(2)]
    leaves += [companion_table.draw(2, 24, seed=i).requires_grad_() for i in range(3)]
    results = []
    for backend in ("torch", "triton"):
        y = gated_add_norm(*leaves, kind="srms", eps=1e-5, backend=backend)[index]
        used = leaves[: 5 if index else 3]
        results.append(torch.autograd.grad(y.square().sum(), used))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=2e-5)


def calls():
    """Each as a function of x, branch [2, 5, 24] and gate, shift, scale [2, 24]."""
    weights = companion_table.norm_weights("layer", 24, torch.float32)
    options = {**weights, "kind": "layer", "eps": 1e-5, "backend": "triton"}
    return {
        "modulated_norm": lambda x, y, a, b, c: modulated_norm(x, b, c, **options) + y * a[:, None],
        "gated_add_norm": lambda *x: sum(gated_add_norm(*x, **options)),
        "gated_add": lambda x, y, a, b, c: gated_add(x, y, a, backend="triton") * (b + c)[:, None],
    }


@inside
@pytest.mark.parametrize("name", calls())
def test_compile_and_checkpoint(name):
    leaves = [companion_table.draw(2, 5, 24, seed=i).requires_grad_() for i in range(2)]
    leaves += [companion_table.draw(2, 24, seed=i).requires_grad_() for i in range(3)]
    companion_table.check_compiled_and_checkpointed(calls()[name], leaves)


@inside
def test_operators_are_sound():
    x, y = (companion_table.draw(2, 5, 24, seed=i).requires_grad_() for i in range(2))
    a, b, c = (companion_table.draw(2, 24, seed=i).requires_grad_() for i in range(3))
    w, v = (companion_table.draw(24, seed=i).requires_grad_() for i in range(2))
    ops, root = torch.ops.lightnet, torch.ones(2, 5)
    for given in ((x, y, a, b, c, w, v, True, 1e-5), (x, None, None, b, c, w, None, False, 1e-5),
                  (x, y, a, None, None, None, None, False, 0.0)):  # fmt: skip
        torch.library.opcheck(ops.modulate.default, given)
    for given in ((x, y, a, c, w, v, root, x, y, True), (x, None, None, c, None, None, root, x, None, False),
                  (None, y, a, None, None, None, None, None, x, False)):  # fmt: skip
        torch.library.opcheck(ops.modulate_backward.default, given, test_utils=("test_schema", "test_faketensor"))
