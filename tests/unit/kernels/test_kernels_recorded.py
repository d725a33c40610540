"""A recorded function gives the bits of the function, forward and backward, for whatever tensors, or is simply run."""

import itertools
import sys

import pytest
import torch
from lightnet_kernels import recorded
from lightnet_kernels.checks import check_cu_seqlens
from torch import nn

module = sys.modules["lightnet_kernels.recorded"]


@pytest.fixture(autouse=True)
def _nothing_recorded():
    module._recordings.clear()


def pairs() -> list:
    return [x for x in module._recordings.values() if isinstance(x, module._Pair)]


class Example(nn.Module):
    """Views, a tensor used twice, several results of one operator, weights in two dtypes and one without a gradient."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(12, 4, generator=generator))
        self.scale = nn.Parameter(torch.rand(4, generator=generator).double())
        self.fixed = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)

    def forward(self, x, cu_seqlens=None):
        one, two, three = (x @ self.first.t()).view(*x.shape[:-1], 3, 4).unbind(-2)
        mixed = one * torch.sigmoid(two) + (three @ self.fixed).tanh()
        mixed = mixed + x * self.scale.float()
        return mixed.sum(-1, keepdim=True) + mixed @ self.fixed.t()

    def call(self, x, opaque=(None,), again=False, key="example"):
        return recorded(self, [x], [*self.parameters()], opaque, key, again)


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, model, x, upstream):
    leaf = x.clone().requires_grad_()
    output = function(leaf)
    return [output, *torch.autograd.grad(output, [leaf, model.first, model.scale], upstream)]


def same(found, wanted):
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_bits_of_outputs_and_gradients(again):
    models = [Example(0), Example(1)]  # the layers of a model share a recording
    for seed in range(3):
        for model in models:
            x, upstream = draw(seed, 2, 5, 4), draw(seed + 10, 2, 5, 4)
            wanted = gradients(model, model, x, upstream)
            assert same(gradients(lambda y, m=model: m.call(y, again=again), model, x, upstream), wanted)
    assert len(pairs()) == 1


def test_a_gradient_of_another_layout():
    model = Example(0)
    for seed in range(3):
        x = draw(seed, 2, 5, 4)
        upstream = draw(seed, 5, 2, 4).transpose(0, 1)
        wanted = gradients(model, model, x, upstream.contiguous())
        assert same(gradients(model.call, model, x, upstream), wanted)
        wanted = gradients(model, model, x, torch.ones(2, 5, 4))
        assert same(gradients(model.call, model, x, torch.ones(()).expand(2, 5, 4)), wanted)
    assert len(pairs()) == 1


def test_memory_that_is_not_aligned():
    """Kernels are compiled for aligned addresses or for others: inputs are recorded apart, gradients are copied."""
    model = Example(0)
    x = draw(0, 41)[1:].view(2, 5, 4)
    assert x.data_ptr() & 15
    for seed in range(3):
        upstream = draw(seed, 41)[1:].view(2, 5, 4)
        assert same(gradients(model.call, model, x.contiguous(), upstream), gradients(model, model, x, upstream))
    for _ in range(3):
        assert same([model.call(x)], [model(x)])
    assert len(pairs()) == 2


def test_other_layouts_are_other_recordings():
    model = Example(0)
    for x in (draw(0, 2, 5, 4), draw(1, 3, 4), draw(2, 4, 3).t(), draw(3, 6, 8)[:, ::2]):
        for _ in range(3):
            assert same([model.call(x)], [model(x)])
    assert len(pairs()) == 4
    model.scale.requires_grad_(False)
    for _ in range(3):
        leaf = draw(0, 2, 5, 4).requires_grad_()
        output = model.call(leaf)
        assert torch.equal(
            torch.autograd.grad(output.sum(), model.first)[0], torch.autograd.grad(model(leaf).sum(), model.first)[0]
        )
    assert len(pairs()) == 5


def test_without_gradients():
    model = Example(0)
    with torch.no_grad():
        for seed in range(4):
            x = draw(seed, 2, 5, 4)
            found = model.call(x)
            assert torch.equal(found, model(x)) and not found.requires_grad
    assert [x.backward for x in pairs()] == [None]


def test_what_is_kept_for_the_backward_pass():
    """The inputs alone where all is computed again; else no tensor twice and no weight's copy."""
    model, sizes = Example(0), {}
    for again in (False, True):
        for _ in range(3):
            kept: dict = {}

            def pack(x, kept=kept):
                kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
                return x

            x = draw(0, 64, 4).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                output = model.call(x, again=again)
            output.sum().backward()
        sizes[again] = sum(kept.values())
    weights = sum(x.untyped_storage().nbytes() for x in model.parameters())
    assert sizes[True] == 64 * 4 * 4 + weights
    assert sizes[False] < 64 * 4 * 4 * 9 + weights + 64


def test_tensors_go_with_the_graph():
    import gc
    import weakref

    model, x = Example(0), draw(0, 8, 4).requires_grad_()
    for _ in range(3):
        output = model.call(x)
    reference = weakref.ref(output)
    output.sum().backward()
    del output
    gc.collect()
    assert reference() is None


def test_no_second_derivative():
    model = Example(0)
    x = draw(0, 8, 4).requires_grad_()
    model.call(x), model.call(x)
    with pytest.raises(RuntimeError, match="no second derivative; call the function itself"):
        torch.autograd.grad(model.call(x).sum(), x, create_graph=True)


CONSTANT = torch.arange(4.0)


@pytest.mark.parametrize(
    "run",
    [
        lambda x, cu: x * CONSTANT,
        lambda x, cu: x * 2 if float(x.detach().sum()) > 0 else x * 3,
        lambda x, cu: x * cu.diff().sum(),
        lambda x, cu: x * check_cu_seqlens("test", cu, 1, 5)[1],
        lambda x, cu: x,
        lambda x, cu: torch.nn.functional.dropout(x, 0.0) * torch.tensor(2.0),
        lambda x, cu: x * torch.ones(torch.nonzero(x.detach() > 0).shape[0]).sum(),
    ],
    ids=["constant", "looks", "opaque", "bounds", "itself", "lifted", "shape"],
)
def test_what_cannot_be_repeated_is_run(run):
    for seed in range(4):
        x, cu = draw(seed, 3, 4).requires_grad_(), torch.tensor([0, seed, 5])
        assert torch.equal(recorded(run, [x], [], [cu], "odd"), run(x, cu))
    assert not pairs()


def test_several_inputs_and_outputs():
    """Also where the loss reads only one of them."""
    model = Example(0)

    def run(x, y):
        return (x @ model.first.t()) * y.sum(), x * y.sigmoid()

    for seed in range(3):
        x, y = draw(seed, 3, 4).requires_grad_(), draw(seed + 5, 3, 4).requires_grad_()
        for use in (lambda a, b: a.sum() + (b * b).sum(), lambda a, b: b.sum(), lambda a, b: a.square().sum()):
            leaves = [x, y, model.first]
            wanted = torch.autograd.grad(use(*run(x, y)), leaves, allow_unused=True, materialize_grads=True)
            got = torch.autograd.grad(use(*recorded(run, [x, y], [model.first], [], "two")), leaves)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert len(pairs()) == 1


def test_an_output_that_is_not_dense():
    model = Example(0)

    def run(x):
        return (x @ model.first.t()).tanh()[:, :5].t()

    for seed in range(4):
        x = draw(seed, 5, 4).requires_grad_()
        outputs = run(x), recorded(run, [x], [model.first], [], "sparse")
        one, two = ([y, *torch.autograd.grad(y.square().sum(), [x, model.first])] for y in outputs)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert len(pairs()) == 1


@pytest.mark.parametrize("constant", [True, False])
def test_a_recording_keeps_no_tensor_of_its_call(constant):
    import gc
    import weakref

    model, made = Example(0), []

    def run(x):
        inner = (x @ model.first.t()).tanh()
        made.append(weakref.ref(inner))
        return inner * (torch.arange(12.0) if constant else 2.0) * (CONSTANT[0] if constant else 1.0)

    for _ in range(3):
        x = draw(0, 5, 4).requires_grad_()
        recorded(run, [x], [model.first], [], "leak").sum().backward()
    gc.collect()
    assert made and all(one() is None for one in made) and bool(pairs()) is not constant


def test_hooks_of_weights_wait_for_replays():
    """They see a gradient once a pass, and what they make of it counts; they are no steps of a recording."""
    model, seen = Example(0), []
    model.first.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    for calls in range(1, 5):
        model.first.grad = None
        model.call(draw(0, 2, 4).requires_grad_()).sum().backward()
        assert len(seen) == calls and torch.equal(model.first.grad, 2 * seen[-1])
    assert all(torch.equal(x, seen[0]) for x in seen) and len(pairs()) == 1


def test_hooks_of_computed_weights_are_run():
    """Their nodes keep them, where nothing lifts them."""
    base = draw(0, 4, 4).requires_grad_()
    for _ in range(4):
        base.grad = None
        weight = base * 2
        weight.register_hook(lambda grad: 3 * grad)
        x = draw(1, 5, 4).requires_grad_()
        recorded(lambda x, _, weight=weight: x @ weight, [x], [weight], [None], "computed").sum().backward()
        torch.testing.assert_close(base.grad, 6 * x.detach().t() @ torch.ones(5, 4))
    assert not pairs()


def test_recordings_of_ones_own():
    store = type(module._recordings)()
    for _ in range(3):
        recorded(lambda x, _: x + 1, [torch.ones(3)], [], [None], "own", store=store)
    assert [type(x) for x in store.values()] == [module._Pair] and not module._recordings


def test_hooks_of_inputs_are_run():
    model, seen = Example(0), []
    for calls in range(1, 5):
        x = draw(0, 2, 4).requires_grad_()
        x.register_hook(seen.append)
        model.call(x).sum().backward()
        assert len(seen) == calls
    assert not pairs()


def test_a_failure_leaves_no_recording():
    def fails(x, _):
        raise RuntimeError("here")

    for _ in range(3):
        with pytest.raises(RuntimeError, match="here"):
            recorded(fails, [torch.ones(2)], [], [None], "fails")
    assert not pairs() and torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_recordings_are_few():
    with torch.no_grad():
        for size in range(module.RECORDINGS + 5):
            recorded(lambda x, _: x + 1, [torch.ones(size + 1)], [], [None], "few")
    assert len(module._recordings) == module.RECORDINGS


def peak(do):
    """Most bytes that PyTorch held beyond those of the start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        do()
    events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
    return max(itertools.accumulate(x.nbytes() for x in sorted(events, key=lambda x: x.start_ns())))


@pytest.mark.parametrize("again", [False, True])
def test_the_backward_pass_lets_go_of_each_saved_tensor(again):
    """What comes last in it takes memory that what came first has given back."""

    def run(x):
        wide = x.repeat(8, 1)
        narrow = (wide * wide).view(8, *x.shape).sum(0)
        for _ in range(8):
            narrow = narrow.sin()
        return narrow

    x = torch.randn(64, 4096, requires_grad=True)
    grad = torch.ones_like(x)

    def step(call):
        return torch.autograd.grad(call(x), x, grad)[0]

    def replay(x):
        return recorded(run, [x], [], [], "memory", again)

    wanted = step(run)
    for _ in range(2):
        step(replay)
    assert torch.equal(step(replay), wanted) and len(pairs()) == 1
    assert peak(lambda: step(replay)) < 1.03 * peak(lambda: step(run))
    output = replay(x)
    first, second = (torch.autograd.grad(output, x, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, wanted) and torch.equal(second, wanted)
