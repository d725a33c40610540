"""The CUDA chains of the causal scan without a card: compiled for the CPU, a thread a lane (`lanes.h`)."""

import pytest
import torch

pytest.importorskip("triton")
from lightnet_kernels import cuda_chains, triton_replay, triton_tables

from tests.gpu import test_scan as on_card

from . import triton_table as table
from .interpreter import INSIDE, inside, outside, run_inside
from .kernel_oracle import make
from .lanes import needs_compiler, scans_on_lanes

pytestmark = needs_compiler
BF16 = torch.bfloat16


@outside
@pytest.mark.parametrize("which", ["spans", "warps", "states", "not (spans or warps or states)"])
def test_table_under_the_interpreter(which):
    """Of Triton, whose kernels do the rest of the scan."""
    run_inside(__file__, "-x", "-k", which)


@outside
@pytest.mark.slow
def test_the_rest_of_it():
    run_inside(__file__, "-m", "slow")


@pytest.fixture(autouse=True)
def launched(monkeypatch, tmp_path_factory):
    """What ran: of both passes, in each test."""
    if not INSIDE:
        yield
        return
    with scans_on_lanes(monkeypatch, tmp_path_factory.getbasetemp()) as seen:
        yield seen
    assert {backward for backward, *_ in kinds(seen)} == {0, 1}


def kinds(seen):
    """(backward, LRPE, sums) of the chains."""
    return {tuple(given[x] for x in ("BACKWARD", "LRPE", "SUMS")) for name, given in seen if name == "causal_chain"}


@inside
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "value_width", "theta"),
    [(2, 130, 1, 64, 64, True), (1, 65, 2, 128, 64, False), (1, 70, 2, 64, 128, True), (1, 1, 1, 128, 128, True)],
)
def test_shapes(batch, tokens, heads, width, value_width, theta, launched):
    table.check(make(batch, tokens, heads, width, value_width, theta=theta), BF16, "cpu")
    assert kinds(launched) == {(0, int(theta), 0), (1, int(theta), 0)}


@inside
@pytest.mark.parametrize(("height", "theta"), [(60, True), (60, False), (400, True)])
def test_spikes(height, theta):
    """Units that leave a block otherwise than they enter it."""
    table.check(table.spiked(make(1, 200, 1, 64, 64, theta=theta), height), BF16, "cpu")


@inside
def test_keys_of_any_size():
    inputs = make(1, 150, 1, 64, 64, scale=1e4)
    inputs["key"][:, 0] = 1e4
    table.check(inputs, BF16, "cpu")


@inside
def test_keys_far_below_zero():
    """Rows of no token have key 0 on chip: 200 above all others, and must not count."""
    inputs = make(1, 70, 1, 64, 64)
    inputs["key"] -= 200
    table.check(inputs, BF16, "cpu")


@inside
@pytest.mark.parametrize("theta", [True, False])
def test_segments(theta):
    table.check_segments([3, 0, 64, 1, 260, 70], BF16, "cpu", heads=1, width=64, value_width=64, theta=theta)


@inside
@pytest.mark.parametrize("theta", [True, False])
@pytest.mark.parametrize("pieces", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_spans(theta, pieces, launched, monkeypatch):
    """A sequence cut into spans, whose chains begin with what their pieces find; keys climb; the last block is short."""
    monkeypatch.setattr(triton_tables, "pieces_of", lambda *_: pieces)
    table.forget()
    assert len(triton_tables.tables(1, 1100, None, 64, 1, 1, torch.device("cpu")).pieces) > pieces
    table.check_segments([1100, 40], BF16, "cpu", heads=1, width=64, value_width=64, theta=theta, lift=150.0)
    assert {(backward, int(theta), sums) for backward in (0, 1) for sums in (0, 1)} == kinds(launched)
    table.forget()


@inside
@pytest.mark.parametrize(
    ("theta", "warps", "grouped"),
    [(True, 8, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, 4, False), (False, 4, True)])],
)
def test_warps(theta, warps, grouped, monkeypatch):
    """Chains and sums by tiles of 16 or 8 features a warp, and by four warps together; keys climb, so that units leave blocks
    otherwise than they enter."""
    for rule in cuda_chains.RULES.values():
        monkeypatch.setitem(rule, theta, (warps, 2, 3))
    monkeypatch.setattr(cuda_chains, "grouped", lambda device: grouped)
    table.forget()
    table.check_segments([1100], BF16, "cpu", heads=1, width=64, value_width=128, theta=theta, lift=150.0)


@inside
@pytest.mark.parametrize(
    ("theta", "case"),
    [
        (True, {"cuts": [5, 64, 60]}),
        (False, {"cuts": [70, 3]}),
        (True, {"cuts": [70, 3], "begun": False}),
        (True, {"cuts": [1100]}),
        (True, {"cuts": [140], "cu_seqlens": [0, 0, 5, 69, 70, 140, 140]}),
    ],
)
def test_gradients_of_states(theta, case, monkeypatch):
    monkeypatch.setattr(on_card, "DEVICE", "cpu")
    on_card.state_case(BF16, theta, width=64, **case)


@inside
@pytest.mark.parametrize("lift", [(), (0, 60)])
def test_ranks(lift):
    table.check_ranks([130, 70], BF16, "cpu", heads=1, width=64, value_width=64, lift=lift)


@inside
def test_strides():
    """Heads before tokens, an upstream gradient that is one token's, rows that do not begin at 16 bytes."""

    def layout(name, x):
        if name == "theta":
            return x
        if name == "value":
            return torch.cat([x[..., :1], x], 3)[..., 1:]
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    table.check(make(2, 70, 2, 64, 64), BF16, "cpu", layout=layout, grad_layout=lambda x: x[:, :1].expand_as(x))


@inside
def test_repeated():
    """The third call of a layout is a recording's."""
    table.forget()
    for seed in range(3):
        table.check(make(1, 70, 2, 64, 64, seed=seed), BF16, "cpu")
    assert recorded() == 2


def recorded():
    """How many calls are recordings; none could not be recorded."""
    calls = [*triton_replay._recordings.values()]
    assert "plain" not in calls
    return sum(call != "met" for call in calls)


@inside
def test_other_documents():
    """With as many blocks: forward and backward calls of other bounds are recorded at once."""
    table.forget()
    for lengths in ([10, 182], [70, 122]):
        table.check_segments(lengths, BF16, "cpu", heads=1, width=64, value_width=64)
    assert recorded() == 2


@inside
@pytest.mark.parametrize("theta", [True, False])
def test_more_chains_than_multiprocessors(theta, monkeypatch):
    monkeypatch.setattr(cuda_chains, "MULTIPROCESSORS", 0)
    table.forget()
    table.check(make(1, 200, 1, 64, 64, theta=theta), BF16, "cpu")
