"""Calls repeated from a recording give what the call itself gives, for whatever tensors, and forget what they need not keep."""

import gc
import itertools
import sys
import weakref

import pytest
import torch
from lightnet_kernels import add_norm, additive_scan, gated_norm, norm, swiglu, toeplitz_scan
from torch._subclasses import FakeTensorMode

pytest.importorskip("triton")
from lightnet_kernels import triton_replay
from lightnet_kernels.recording import Recording
from lightnet_kernels.triton_replay import replayed

from .interpreter import inside, kernels_on_cpu, outside, run_inside


@pytest.fixture(autouse=True)
def _nothing_recorded():
    triton_replay._recordings.clear()
    triton_replay._layouts.clear()


def recorded() -> list[Recording]:
    return [x for x in triton_replay._recordings.values() if isinstance(x, Recording)]


def draw(seed, *shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def example(x, y, start, times):
    """Views, in place, constants, several results, one of them none, and Python in between."""
    total = x.new_zeros(x.shape)
    total += x
    total[start:].mul_(times)
    first, second = torch.stack([total, y]).unbind(0)
    return first @ second.t(), None, torch.cat([y, y[:start]])


def test_a_function_is_replayed():
    run = replayed(example)
    for seed in range(5):
        x, y = draw(seed, (4, 3), (4, 3))
        one, none, two = run(x, y, 1, 2.5)
        wanted, _, other = example(x, y, 1, 2.5)
        assert torch.equal(one, wanted) and none is None and torch.equal(two, other)
    assert len(recorded()) == 1
    for arguments in ((x[:, :2], y[:, :2], 1, 2.5), (x, y, 2, 2.5), (x.double(), y.double(), 1, 2.5), (x, y, 1, 3.0)):
        for _ in range(3):
            assert torch.equal(run(*arguments)[0], example(*arguments)[0])
    assert len(recorded()) == 5


def test_one_tensor_given_twice_is_no_pattern_for_two():
    run = replayed(lambda x, y: x - y)
    (x, y) = draw(0, (3,), (3,))
    for _ in range(3):
        assert not run(x, x).any()
    for _ in range(3):
        assert torch.equal(run(x, y), x - y)


def test_values_that_python_looks_at_are_looked_at_each_time():
    run = replayed(lambda x: x * 2 if x.sum() > 0 else x.clone())
    for value in (1.0, -1.0, 1.0, -1.0):
        x = torch.full((2,), value)
        assert torch.equal(run(x), x * 2 if value > 0 else x)
    assert not recorded()


def test_a_failure_leaves_no_recording():
    def fails(x):
        raise RuntimeError("here")

    run = replayed(fails)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="here"):
            run(torch.ones(1))
    assert not recorded() and triton_replay.active() is None


def test_tensors_go_after_their_last_use():
    seen = []

    def middle(x):
        y = x + 1
        z = y * 2
        return z + 3

    run = replayed(middle)
    x = torch.ones(3)
    run(x), run(x)
    (recording,) = recorded()
    alive: list = []

    def watched(do):
        def call(*args, **kwargs):
            gc.collect()
            seen.append([ref() is not None for ref in alive])
            out = do(*args, **kwargs)
            alive.append(weakref.ref(out))
            return out

        return call

    names = recording.replay.__globals__
    names.update({name: watched(value) for name, value in names.items() if name[0] == "c"})
    assert run(x).tolist() == [7.0] * 3
    assert seen == [[], [True], [False, True]]


def test_a_tensor_with_the_id_of_a_dead_one_is_another():
    def run(x):
        y = x + 1
        z = y * 2
        del y, z
        return x * torch.as_tensor([1.0, 2.0, 3.0])  # made without an operator

    call = replayed(run)
    for value in (1.0, 1.0, 2.0, 3.0):
        x = torch.full((3,), value)
        assert torch.equal(call(x), x * torch.tensor([1.0, 2.0, 3.0]))


def test_a_copy_that_may_be_a_view_is_a_copy():
    def run(x):
        y = x + 1
        return y, torch.ops.aten.to.dtype(y, y.dtype, False, True), torch.ops.aten.to.dtype(y, y.dtype)

    call = replayed(run)
    for _ in range(3):
        one, two, three = call(torch.ones(2))
        assert torch.equal(one, two) and one.data_ptr() != two.data_ptr() and three.data_ptr() == one.data_ptr()


def test_the_default_dtype_is_part_of_a_layout():
    call = replayed(lambda x: torch.zeros(2) + 0 * x.sum().float())
    for _ in range(3):
        assert call(torch.ones(1)).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert call(torch.ones(1)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_other_bounds_are_recorded_at_once():
    """After what depends on them is prepared."""
    prepared, ran = [], []

    def sums(x, bounds):
        ran.append(bounds)
        return torch.stack([x[one:two].sum() for one, two in itertools.pairwise(bounds)])

    run = replayed(sums, lambda x, bounds: prepared.append(bounds), shared=True)
    cuts = [(0, 3, 8), (0, 3, 8), (0, 5, 8), (0, 5, 8), (0, 1, 8), (0, 3, 8)]
    for seed, bounds in enumerate(cuts):
        (x,) = draw(seed, (8,))
        assert torch.equal(run(x, bounds), sums(x, bounds))
        ran.pop()
    assert prepared == [(0, 3, 8), (0, 5, 8), (0, 1, 8)] and ran == [(0, 3, 8), (0, 3, 8), (0, 5, 8), (0, 1, 8)]


def test_recordings_are_few():
    run = replayed(lambda x: x + 1)
    for size in range(triton_replay.RECORDINGS + 10):
        run(torch.ones(size + 1))
    assert len(triton_replay._recordings) == triton_replay.RECORDINGS


@outside
def test_table_under_the_interpreter():
    run_inside(__file__)


def scan(seed, causal, theta, bounds=None, state=False):
    shape = (1, 70, 1, 24)
    query, key, value, grad = draw(seed, *[shape] * 4, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    if theta:
        leaves.append(torch.rand(1, 24, generator=torch.Generator().manual_seed(seed)).requires_grad_())
    found = additive_scan(
        *leaves[:3],
        theta=leaves[3] if theta else None,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
        causal=causal,
        return_state=state,
        backend="triton",
    )
    outputs, upstream = ([found[0], found[1].kv], [grad, torch.ones_like(found[1].kv)]) if state else ([found], [grad])
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def norms(seed):
    x, other, weight, grad = draw(seed, (5, 2, 24), (5, 2, 24), (48,), (5, 2, 24))
    leaves = [t.requires_grad_() for t in (x, other, weight)]
    y = gated_norm(*leaves, kind="rms", eps=1e-6, backend="triton")
    total, normed = add_norm(x, other, kind="srms", eps=1e-6, backend="triton")
    outputs = [y, total, normed, swiglu(x, other, backend="triton")]
    return [*outputs, *torch.autograd.grad(outputs, leaves, [grad] * 4)]


def toeplitz(seed):
    x, gain, grad = draw(seed, (1, 70, 16), (16, 8), (1, 70, 16))
    decay = torch.rand(16, 8, generator=torch.Generator().manual_seed(seed))
    leaves = [t.requires_grad_() for t in (x, decay, gain)]
    y = toeplitz_scan(*leaves, backend="triton")
    return [y, *torch.autograd.grad(y, leaves, grad)]


@inside
def test_a_second_derivative_is_refused_and_fake_tensors_go_by_the_library():
    (x,) = draw(0, (3, 2, 24))
    x.requires_grad_()
    y = norm(x, kind="srms", eps=1e-6, backend="triton")
    with pytest.raises(RuntimeError, match="no second derivative; use backend='torch'"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    fake = FakeTensorMode().from_tensor(x.detach())
    assert norm(fake, kind="srms", eps=1e-6, backend="triton").shape == x.shape  # after the mode


@inside
@pytest.mark.parametrize(
    "call",
    [
        lambda seed: scan(seed, True, True),
        lambda seed: scan(seed, True, False, bounds=[0, 3, 3, 70]),
        lambda seed: scan(seed, False, False),
        lambda seed: scan(seed, False, True, bounds=[0, 3, 3, 70]),
        lambda seed: scan(seed, False, True, state=True),
        norms,
        toeplitz,
    ],
)
def test_replays_give_the_same_bits(call):
    wanted = [call(0), call(1)]  # run, recorded
    first = recorded()
    assert first
    for _ in range(2):
        for seed in (0, 1):
            assert all(torch.equal(x, y) for x, y in zip(call(seed), wanted[seed], strict=True))
    assert recorded() == first  # nothing was recorded again


@inside
@pytest.mark.parametrize(
    ("causal", "again", "modulated", "dtype"),
    [
        (True, False, False, torch.bfloat16),
        (False, True, False, torch.bfloat16),
        (False, False, True, torch.bfloat16),
        (False, True, True, torch.float32),
    ],
)
def test_blocks_are_recorded_whole(causal, again, modulated, dtype, monkeypatch):
    """Two blocks of other weights, batches of other packings or conditions: one recording, and the bits of their modules."""
    from lightnet_llm.config.model import ModelConfig
    from lightnet_llm.models import recorded as module
    from lightnet_llm.models.block import Block
    from lightnet_llm.models.context import ForwardContext
    from lightnet_llm.models.layers import PlainLayers
    from lightnet_llm.models.parameters import spec_of

    found = sys.modules["lightnet_kernels.recorded"]
    found._recordings.clear()
    kernels_on_cpu(monkeypatch.setattr)
    fields = {"layers": 2, "width": 32, "heads": 1, "glu_width": 40, "causal": causal, "norm": "layer"}
    if modulated:
        image = {"size": [4, 4], "patch": 2, "channels": 3, "classes": 5}
        fields |= {"head": "denoiser", "conditioning": "adaln_single", "axes": 2, "image": image, "tpe_init_length": 4}
    config = ModelConfig.model_validate({**fields, "vocab_size": 0 if modulated else 9})
    blocks = [Block(config, PlainLayers(), index).to(dtype) for index in range(2)]
    for number, block in enumerate(blocks):
        block.recompute = again
        for parameter, values in zip(block.parameters(), draw(number, *[x.shape for x in block.parameters()])):  # noqa: B905
            parameter.data = (0.2 * values).to(torch.float32 if spec_of(parameter).keep_fp32 else dtype)
    shape = (2, 6, 32) if modulated else (1, 70, 32)
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3)) + 1

    def both(seed, bounds):
        x, grad, shared = draw(seed, shape, shape, (2, 6, 32), dtype=dtype)
        shared = [shared.requires_grad_()] if modulated else []
        condition = shared[0] * 0.5 if modulated else None  # made of what comes before the blocks
        bounds = None if bounds is None else torch.tensor(bounds)
        context = ForwardContext(bounds, coordinates=places if modulated else None, modulation=condition)
        results = []
        for record in (False, True):
            monkeypatch.setattr(module, "recordable", lambda x, decided=None, record=record: record)
            leaf = x.clone().requires_grad_()
            output = leaf
            for block in blocks:
                output, _ = block(output, context)
            leaves = [leaf, *shared, *(x for block in blocks for x in block.parameters())]
            results.append([output, *torch.autograd.grad(output, leaves, grad, retain_graph=True)])
            assert all(x.any() for x in results[-1])
        return results

    packings = [[0, 70], [0, 30, 70], [0, 1, 1, 69, 70]] if causal else [None] * 3
    for seed, bounds in enumerate(packings):
        wanted, got = both(seed, bounds)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
    assert [type(x) for x in found._recordings.values()] == [found._Pair]
    kernels = found._recordings.popitem()[1].forward.source.count(", None, (v")
    assert kernels == (5 if modulated else 4)  # companions' among the steps
