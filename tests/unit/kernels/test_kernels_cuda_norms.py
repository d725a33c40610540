"""The CUDA kernels of the norms without a card."""

import pytest
import torch

pytest.importorskip("triton")
from lightnet_kernels import companions, cuda_launch, cuda_norms

from . import companion_table as table
from .lanes import launcher, needs_compiler, uninitialized_memory_holds_nan

pytestmark = needs_compiler
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def launched(monkeypatch, tmp_path_factory):
    """Names of the kernels that ran."""
    names = []
    launch = launcher(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(cuda_launch, "launch", lambda name, *rest: (names.append(name), launch(name, *rest)))
    monkeypatch.setattr(cuda_launch, "available", lambda: True)
    monkeypatch.setattr(cuda_norms, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_norms, "_multiprocessors", lambda device: 2)
    monkeypatch.setattr(companions, "_unsupported", lambda tensors, module: None)
    with uninitialized_memory_holds_nan(monkeypatch):
        yield names
    assert {"norm_rows_forward", "norm_rows_backward"} <= set(names)


@pytest.mark.parametrize(("shape", "kind"), [((3, 9, 72), "layer"), ((1, 264), "rms"), ((21, 1152), "layer")], ids=str)
def test_norms(shape, kind):
    """Rows that a warp's lanes have one chunk of, two and five, and more than the blocks take at once."""
    table.check_norm(kind, shape, BF16)
    table.check_add_norm(kind, shape, BF16)
    table.check_norm_beside(kind, shape, BF16)


@pytest.mark.parametrize(
    ("shape", "kind"), [((2, 9, 3, 24), "srms"), ((3, 40, 8), "rms"), ((19, 16, 72), "layer")], ids=str
)
def test_gated_norm(shape, kind):
    table.check_gated_norm(kind, shape, BF16)


def test_layouts():
    """Tokens that do not lie side by side."""
    apart = {name: lambda x: torch.stack([x, x + 1], 1)[:, 0] for name in ("layout", "grad_layout")}
    table.check_add_norm("rms", (6, 72), BF16, **apart)
    table.check_gated_norm("rms", (5, 3, 24), BF16, **apart)
