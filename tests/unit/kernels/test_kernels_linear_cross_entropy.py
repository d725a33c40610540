"""The head's loss: one rank and two, PyTorch here and Triton under its interpreter; tests/gpu has the rest."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightnet_kernels import linear_cross_entropy
from lightnet_kernels.linear_cross_entropy import _losses, _losses_backward, _sum, reference
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from . import companion_table as table
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import relative

BACKEND = "triton" if INSIDE else "torch"
REDUCTIONS = ["none", "sum"]

# Tokens, width, rows of the weight, vocabulary, chunk: one chunk, many, a ragged last one, no padding, almost only
# padding, one token, none.
SHAPES = [(20, 24, 128, 50, 4096), (23, 16, 64, 64, 8), (7, 12, 256, 3, 1), (1, 8, 40, 33, 2), (0, 8, 40, 33, 2)]


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradients(shape, reduction):
    *shape, chunk = shape
    for dtype in (torch.float32,) if INSIDE else (torch.float32, torch.float64):
        table.check_linear_cross_entropy(*shape, dtype, reduction, backend=BACKEND, chunk=chunk)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, reduction):
    table.check_linear_cross_entropy(64, 32, 128, 100, dtype, reduction, backend=BACKEND, chunk=24)


@inside
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_of_several_blocks(reduction, monkeypatch):
    from lightnet_kernels import triton_cross_entropy

    monkeypatch.setattr(triton_cross_entropy, "BLOCK", 32)
    monkeypatch.setattr(triton_cross_entropy, "COLUMNS", 16)
    table.check_linear_cross_entropy(9, 8, 160, 131, torch.float32, reduction, chunk=4)


@outside  # 600 chunks take the interpreter long
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_small_weight_gradients_do_not_vanish_in_the_sum(reduction):
    """fp32 accumulation: chunk after chunk of the same small gradient, which bf16 would stop adding."""
    hidden = torch.ones(600, 8, dtype=torch.bfloat16)
    weight = torch.zeros(16, 8, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(600, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=1, backend=BACKEND)
    (grad,) = torch.autograd.grad(loss.sum(), weight)
    assert relative(grad[1:], torch.full((15, 8), 600 / 16)) < 4e-3


def test_reference_is_the_definition():
    hidden, weight, labels = table.head(12, 8, 64, 50, torch.float64)
    labels = labels.clamp(min=-1)
    wanted = table.loss_definition(hidden, weight, labels, 50)
    assert relative(reference(hidden, weight, labels, 50), wanted) < 1e-12
    assert relative(linear_cross_entropy(hidden, weight, labels, vocab_size=50, backend="torch"), wanted) < 1e-6


def test_extreme_logits_and_labels():
    """Logits of any size stay finite, a label that is no token has loss infinity, and NaN is not hidden."""
    hidden = torch.tensor([[1e4], [-1e4], [1.0], [float("nan")]])
    weight = torch.tensor([[1.0], [0.5], [-3.0], [0.0]])
    labels = torch.tensor([0, 0, 3, 1])
    nll = linear_cross_entropy(hidden, weight, labels, vocab_size=3, backend=BACKEND)
    assert nll[0] == 0 and nll[1] == 4e4 and nll[2] == torch.inf and nll[3].isnan()
    labels[3] = -100
    assert linear_cross_entropy(hidden, weight, labels, vocab_size=3, backend=BACKEND)[3] == 0


def test_ignored_tokens_give_no_gradient_even_if_they_are_nan():
    hidden = table.draw(4, 8)
    hidden[1] = float("nan")
    weight = table.draw(16, 8, seed=1)
    labels = torch.tensor([0, -1, 3, 15])
    for reduction in REDUCTIONS:
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = linear_cross_entropy(*leaves, labels, reduction=reduction, backend=BACKEND).sum()
        assert loss.isfinite()
        assert bool((torch.autograd.grad(loss, leaves)[0][1] == 0).all())


def test_leading_shape_strides_and_expanded_gradient():
    hidden, weight, labels = table.head(24, 16, 64, 50)
    shaped = torch.stack([hidden.view(4, 6, 16)] * 2, 2)[:, :, 0].requires_grad_()
    spaced = torch.stack([labels, labels], 1)[:, 0].view(4, 6)
    loss = linear_cross_entropy(shaped, weight, spaced, vocab_size=50, chunk=5, backend=BACKEND)
    assert loss.shape == (4, 6)
    (grad,) = torch.autograd.grad(loss.mean(), shaped)
    exact = hidden.double().requires_grad_()
    wanted = table.loss_definition(exact, weight.double(), labels, 50)
    assert relative(loss.flatten(), wanted) < 1e-6
    assert relative(grad.reshape(24, 16), torch.autograd.grad(wanted.mean(), exact)[0]) < 1e-6


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tied_accumulated_checkpointed_and_frozen(reduction):
    """One weight as embedding and head, two micro-batches, recomputation: the gradients of the definition."""
    weight = table.draw(64, 8, seed=1).requires_grad_()
    ids = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))

    def loss_of(hidden, weight, labels):
        return linear_cross_entropy(
            hidden, weight, labels, vocab_size=50, reduction=reduction, chunk=5, backend=BACKEND
        ).sum()  # fmt: skip

    for row in ids:
        hidden = torch.tanh(weight[row])
        (checkpoint(loss_of, hidden, weight, row.roll(1), use_reentrant=False) / 12).backward()
    exact = weight.detach().double().requires_grad_()
    for row in ids:
        (table.loss_definition(torch.tanh(exact[row]), exact, row.roll(1), 50).sum() / 12).backward()
    assert relative(weight.grad, exact.grad) < 1e-6
    frozen = loss_of(torch.tanh(weight[ids[0]]), weight.detach(), ids[0])
    assert torch.autograd.grad(frozen, weight)[0].isfinite().all()
    with torch.no_grad():
        assert torch.equal(loss_of(hidden, weight, ids[1]), loss_of(hidden.detach(), weight.detach(), ids[1]))


def test_autocast_casts_as_a_linear_layer():
    hidden, weight, labels = table.head(20, 16, 64, 50)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*leaves, labels, vocab_size=50, reduction="sum", backend=BACKEND)
    halves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    wanted = linear_cross_entropy(*halves, labels, vocab_size=50, reduction="sum", backend=BACKEND)
    assert torch.equal(loss, wanted)
    for one, two in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, halves), strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, two.float())


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *made])
        return results


@outside  # the interpreter copies whole storages as bytes
def test_all_logits_are_never_held():
    tokens, width, rows, chunk = 512, 8, 4096, 16
    hidden, weight, labels = table.head(tokens, width, rows, rows)
    bound = max(chunk * rows, width * rows)
    place = (0, rows, rows, "", chunk, False)
    with torch.no_grad(), Largest() as seen:  # the operators' own bodies: dispatch modes see operators from outside
        _sum._init_fn(hidden, weight, labels, *place, True)
        nll, lse = _losses._init_fn(hidden, weight, labels, *place)
        _losses_backward._init_fn(hidden, weight, labels, lse, torch.ones_like(nll), *place)
    assert chunk * rows <= seen.elements <= bound < tokens * rows
    with torch.no_grad(), Largest() as seen:
        reference(hidden, weight, labels.clamp(min=-1), rows)
    assert seen.elements >= tokens * rows, "the measure sees what it should"


def test_bad_input_says_a_way_out():
    hidden, weight, labels = table.head(6, 8, 16, 16)
    cases = [
        ((hidden, weight[:, :7], labels), {}, "do not fit"),
        ((hidden, weight.double(), labels), {}, "pass one floating-point dtype"),
        ((hidden, weight, labels[:5]), {}, r"labels have shape \(5,\); expected \(6,\)"),
        ((hidden, weight, labels.float()), {}, "pass int32 or int64"),
        ((hidden, weight, labels), {"reduction": "mean"}, "choose none or sum"),
        ((hidden, weight, labels), {"chunk": 0}, "pass at least 1"),
        ((hidden, weight, labels), {"vocab_size": 0}, "vocab_size is 0; pass 1 to 16"),
        ((hidden, weight, labels), {"vocab_size": -3}, "vocab_size is -3"),
        ((hidden, weight, labels), {"vocab_size": 17}, "vocab_size is 17; pass 1 to 16"),
        ((hidden[0, 0], weight, labels), {}, "do not fit"),
        ((hidden.numpy(), weight, labels), {}, "hidden is of type ndarray; pass a tensor"),
        ((hidden, weight, labels.tolist()), {}, "labels is of type list; pass a tensor"),
    ]
    for args, options, words in cases:
        with pytest.raises(ValueError, match=words) as caught:
            linear_cross_entropy(*args, **options)
        assert "\n" not in str(caught.value)


@inside
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compile(reduction):
    hidden, weight, labels = table.head(12, 8, 64, 50)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def call(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels, vocab_size=50, reduction=reduction, chunk=5, backend="triton"
        ).sum()  # fmt: skip

    results = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        loss = run(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@inside
def test_operators_are_sound():
    hidden, weight, labels = table.head(6, 8, 16, 10)
    hidden.requires_grad_(), weight.requires_grad_()
    place = (0, 10, 10, "", 4, True)
    torch.library.opcheck(torch.ops.lightnet.linear_cross_entropy.default, (hidden, weight, labels, *place))
    # Its further results are the gradients themselves, kept for the backward pass, and not differentiable.
    torch.library.opcheck(
        torch.ops.lightnet.linear_cross_entropy_sum.default, (hidden, weight, labels, *place, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    vectors = (torch.zeros(6), torch.ones(6))
    torch.library.opcheck(
        torch.ops.lightnet.linear_cross_entropy_backward.default, (hidden, weight, labels, *vectors, *place),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def _rank(rank, world, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.new_group(list(range(world)))
    found = {}
    for vocab_size in (200, 100):  # the second leaves the last rank nothing but padding
        hidden, weight, labels = table.head(40, 8, 128 * world, vocab_size)
        for reduction in REDUCTIONS:
            leaves = [hidden.clone().requires_grad_(), weight[128 * rank :][:128].clone().requires_grad_()]
            loss = linear_cross_entropy(
                *leaves, labels, vocab_size=vocab_size, group=group, reduction=reduction, chunk=16
            )  # fmt: skip
            grads = list(torch.autograd.grad((loss * torch.arange(loss.numel())).sum() + loss.sum(), leaves))
            dist.all_reduce(grads[0], group=group)
            found[vocab_size, reduction] = [loss.detach(), *grads]
    torch.save(found, f"{results}/{rank}.pt")
    dist.destroy_process_group()


@outside
def test_two_ranks_share_the_vocabulary(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(2, port, str(tmp_path)), nprocs=2)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for (vocab_size, reduction), found in parts[0].items():
        hidden, weight, labels = table.head(40, 8, 256, vocab_size)
        leaves = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
        nll = table.loss_definition(*leaves, labels, vocab_size)
        nll = nll.sum()[None] if reduction == "sum" else nll
        wanted = torch.autograd.grad((nll * torch.arange(nll.numel())).sum() + nll.sum(), leaves)
        other = parts[1][vocab_size, reduction]
        assert torch.equal(found[0], other[0]) and torch.equal(found[1], other[1])
        assert relative(found[0].reshape(nll.shape), nll.detach()) < 1e-6
        assert relative(found[1], wanted[0]) < 2e-6
        assert relative(torch.cat([found[2], other[2]]), wanted[1]) < 2e-6
