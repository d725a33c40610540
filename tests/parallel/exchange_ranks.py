"""Scans over sequence-parallel ranks against the same scans on one: run by every rank, on CPUs or GPUs.

    python -m tests.parallel.exchange_ranks WORLD [DEVICE [BACKEND [DTYPE]]]   forks (CPU) or spawns WORLD ranks

Every rank draws the same inputs, runs its part with the exchange and all of it without, and compares output and gradients.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightnet_kernels import additive_scan, identity_state, toeplitz_scan
from lightnet_kernels.companions import kernels
from torch import Tensor

from lightnet_llm.parallel.fused_exchange import serves
from lightnet_llm.parallel.segments import SegmentPlan, SequencePlace, plan_segments
from lightnet_llm.parallel.sequence import SequenceExchange
from tests.parallel.on_ranks import attempt, on_ranks
from tests.unit.kernels.kernel_oracle import expected

HEADS, WIDTH, VALUES, CHANNELS, RANK = 6, 8, 6, 10, 3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 1e-2}

# Rows, tokens of a row, boundaries inside (besides rows' edges); None: rows are not cut into segments.
CASES: dict[str, tuple[int, int, list[int] | None]] = {
    "whole rows": (2, 48, []),
    "no segments": (2, 48, None),
    "anywhere": (2, 48, [3, 7, 30, 31, 50, 77]),
    "on ranks' edges": (1, 48, [12, 16, 24, 32, 36]),
    "empty ones": (2, 24, [0, 5, 5, 5, 12, 12, 24, 24, 47, 48]),
    "left over": (2, 43, [5, 11, 22, 43, 60]),
    "a rank of padding": (1, 5, [2]),
    "one token a rank": (2, 4, [3]),
}
LONG_CASE = (1, 1000, [150])  # some blocks of the Triton backend a rank, for `short_spans`


def close(name: str, one: Tensor, other: Tensor, tolerance: float, size: Tensor | None = None) -> None:
    """Relative Frobenius error; `size` where gradients cancel."""
    one, other, scale = (x.detach().double() for x in (one, other, other if size is None else size))
    error = float((one - other).norm()) / (float(scale.norm()) + 1e-12)
    assert error < tolerance, f"{name}: {error:.2e}"


def case_of(name: str) -> tuple[int, int, list[int] | None]:
    return LONG_CASE if name == "several spans" else CASES[name]


def bounds_of(case: str) -> Tensor | None:
    rows, tokens, inner = case_of(case)
    if inner is None:
        return None
    return torch.tensor(sorted([*inner, *(row * tokens for row in range(rows + 1))]), dtype=torch.int32)


def draw(case: str, shapes: dict[str, tuple[int, ...]], device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """[rows, tokens, ...] each, and the output's gradient."""
    rows, tokens, _ = case_of(case)
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, shape in shapes.items():
        x = torch.randn(rows, tokens, *shape, generator=generator, dtype=torch.float64)
        found[name] = (x * (3.0 if name == "key" else 1.0)).to(dtype).to(device)
    return found


class Rows:
    """Cutting [rows, tokens, ...] for a rank, and what a whole run takes."""

    def __init__(self, case: str, place: SequencePlace, device: str):
        self.rows, self.tokens, _ = case_of(case)
        self.place, self.bounds = place, bounds_of(case)
        self.plan: SegmentPlan = plan_segments(self.bounds, self.rows, self.tokens, place, torch.device(device))
        self.exchange = SequenceExchange(self.plan, place)

    def mine(self, x: Tensor) -> Tensor:
        """This rank's columns; padding holds ones: it must not matter."""
        flat = self.place.part(x.flatten(2).movedim(2, 0).flatten(0, 1), fill=1)
        part = flat.unflatten(0, (-1, self.rows)).movedim(0, 2).unflatten(2, x.shape[2:])
        return part.flatten(0, 1)[None] if self.bounds is not None else part

    def whole(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[None] if self.bounds is not None else x

    def options(self) -> dict[str, Any]:
        return {"cu_seqlens": self.plan.cu_seqlens, "key_mask": self.mask()}

    def mask(self) -> Tensor | None:
        """Rows without segments need their padding masked."""
        if self.bounds is not None or not self.place.padding(self.tokens):
            return None
        return self.place.part(torch.ones(self.rows, self.tokens, dtype=torch.int64)).bool()

    def compare(
        self, run: Callable[..., Tensor], one: Callable[..., Tensor], inputs: dict[str, Tensor],
        shared: dict[str, Tensor], tolerance: float, sizes: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Outputs, gradients of inputs, and the sum over ranks of the shared parameters' gradients.

        `sizes` of gradients whose terms cancel: their errors are measured against the terms.
        """
        upstream = inputs.pop("upstream")
        real = self._present(upstream)
        leaves = {name: self.mine(x).requires_grad_() for name, x in inputs.items()}
        parameters = {name: x.clone().requires_grad_() for name, x in shared.items()}
        output = run(**leaves, **parameters)
        grads = torch.autograd.grad(
            output, [*leaves.values(), *parameters.values()], (self.mine(upstream) * real).to(output.dtype)
        )
        double = {name: self.whole(x).double().requires_grad_() for name, x in inputs.items()}
        doubles = {name: x.double().requires_grad_() for name, x in shared.items()}
        wanted = one(**double, **doubles)
        wanted_grads = torch.autograd.grad(wanted, [*double.values(), *doubles.values()], self.whole(upstream).double())

        def mine(x: Tensor) -> Tensor:
            return self.mine(x.view(self.rows, self.tokens, *x.shape[2:]))

        close("output", output * real[..., :1], mine(wanted) * real[..., :1], tolerance, wanted)
        for name, grad, other in zip([*leaves, *parameters], grads, wanted_grads, strict=True):
            size = sizes[name] if name in sizes else other.norm()
            if name in parameters:
                grad = grad.clone()
                dist.all_reduce(grad, group=self.place.group)
                close(name, grad, other, tolerance, size)
            else:
                present = self._present(grad, like=grad)
                close(name, grad * present, mine(other) * present, tolerance, size)

    def _present(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """1 where a column is of the row, 0 in padding, shaped to multiply a part."""
        ones = self.place.part(torch.ones(self.rows, self.tokens, dtype=torch.int64)).to(x.device)
        extra = (like if like is not None else x).dim() - 2
        flat = ones.flatten()[None] if self.bounds is not None else ones
        return flat.view(*flat.shape, *[1] * extra).double().to(x.dtype)


def check_scan(
    case: str,
    place: SequencePlace,
    causal: bool,
    theta: bool,
    device: str,
    backend: str,
    dtype: Any,
    heads: int = HEADS,
) -> None:
    rows = Rows(case, place, device)
    shape = (heads, WIDTH)
    inputs = draw(
        case, {"query": shape, "key": shape, "value": (heads, VALUES), "upstream": (heads, VALUES)}, device, dtype
    )
    angles = torch.exp(-torch.arange(heads * WIDTH, dtype=torch.float64) / 12).view(shape).to(device)
    shared = {"theta": angles.to(torch.float32 if dtype == torch.bfloat16 else dtype)} if theta else {}
    width = place.width(rows.tokens)
    at = {} if causal else {"coordinates": torch.arange(place.rank * width, (place.rank + 1) * width)}
    if at and rows.bounds is not None:
        at["coordinates"] = at["coordinates"].repeat(rows.rows)

    def run(theta: Tensor | None = None, **x: Tensor) -> Tensor:
        exchange = rows.exchange.scan(theta)
        return additive_scan(
            **x, **at, **rows.options(), theta=theta, causal=causal, exchange=exchange, backend=backend
        )  # type: ignore[return-value, arg-type]

    def one(theta: Tensor | None = None, **x: Tensor) -> Tensor:
        return additive_scan(**x, theta=theta, causal=causal, cu_seqlens=rows.bounds, backend="torch")  # type: ignore

    rows.compare(run, one, inputs, shared, tolerance(dtype, place), sizes_of(rows, inputs, shared, causal))


def sizes_of(rows: Rows, inputs: dict[str, Tensor], shared: dict[str, Tensor], causal: bool) -> dict[str, Tensor]:
    """The oracle's yardsticks of key and theta, over all segments."""
    edges = torch.arange(rows.rows + 1) * rows.tokens if rows.bounds is None else rows.bounds
    flat = {name: x.double().cpu().flatten(0, 1) for name, x in inputs.items()}
    found: dict[str, list[Tensor]] = {}
    for start, end in pairwise(edges.tolist()):
        if start < end:
            part = {name: x[None, start:end] for name, x in flat.items()}
            upstream = part.pop("upstream")
            sizes = expected({**part, **{k: x.double().cpu() for k, x in shared.items()}}, upstream, causal)[2]
            for name in ("key", "theta") if shared else ("key",):
                found.setdefault(name, []).append(sizes[name])
    return {name: torch.stack(x).norm() for name, x in found.items()}


def check_toeplitz(case: str, place: SequencePlace, bidirectional: bool, device: str, backend: str, dtype: Any) -> None:
    rows = Rows(case, place, device)
    inputs = draw(case, {"x": (CHANNELS,), "upstream": (CHANNELS,)}, device, dtype)
    generator = torch.Generator().manual_seed(8)
    full = torch.float32 if dtype == torch.bfloat16 else dtype
    decay = torch.rand(CHANNELS, RANK, generator=generator, dtype=torch.float64).sqrt().to(full).to(device)
    gain = torch.randn(CHANNELS, RANK, generator=generator, dtype=torch.float64).to(full).to(device)

    def run(x: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        exchange = rows.exchange.toeplitz(decay)
        options = {**rows.options(), "bidirectional": bidirectional, "exchange": exchange, "backend": backend}
        return toeplitz_scan(x, decay, gain, **options)  # type: ignore

    def one(x: Tensor, decay: Tensor, gain: Tensor) -> Tensor:
        return toeplitz_scan(x, decay, gain, bidirectional=bidirectional, cu_seqlens=rows.bounds, backend="torch")  # type: ignore

    rows.compare(run, one, inputs, {"decay": decay, "gain": gain}, tolerance(dtype, place), {})


def tolerance(dtype: Any, place: SequencePlace) -> float:
    """bf16 in flight rounds states to 2^-9."""
    return max(TOLERANCE[dtype], 1e-2 if place.in_flight == torch.bfloat16 else 0.0)


def check_state(lengths: list[int], heads: int, width: int, theta: bool, device: str, dtype: Any) -> None:
    """The Triton backend's state without outputs is the chunked scan's, and so are its gradients; no other rank."""
    from lightnet_kernels import triton_ops

    generator = torch.Generator().manual_seed(3)
    shape = (1, sum(lengths), heads, width)
    key, value = (torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_() for _ in range(2))
    angles = torch.exp(-torch.arange(heads * width) / 12).view(heads, width).to(device).requires_grad_()
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    double = [x.detach().double().requires_grad_() for x in (key, value, angles)]
    state = triton_ops.causal_state(key, value, angles if theta else None, bounds.tolist())
    options = {"theta": double[2] if theta else None, "cu_seqlens": bounds, "return_state": True, "backend": "torch"}
    _, wanted = additive_scan(double[0], double[0], double[1], **options)  # type: ignore[arg-type, misc]
    assert torch.equal(state.length, wanted.length) and torch.equal(state.max.double(), wanted.max.double())
    weights = [torch.randn(x.shape, generator=generator).to(device) for x in (state.sum, state.kv)]
    used = 3 if theta else 2
    grads = torch.autograd.grad([state.sum, state.kv], [key, value, angles][:used], weights)
    expected = torch.autograd.grad([wanted.sum, wanted.kv], double[:used], [x.double() for x in weights])
    limit = TOLERANCE[dtype]
    close("sum", state.sum, wanted.sum, limit)
    close("kv", state.kv, wanted.kv, limit)
    for name, one, other in zip(("key", "value", "theta"), grads, expected, strict=False):
        close(f"gradient of {name}", one, other, limit)


def check_bytes(place: SequencePlace, device: str) -> None:
    """What a scan sends, forward and backward, whatever the length: a state without its gradient's constants."""
    found = []
    for tokens in (16, 64, 1024):
        mine = SequencePlace(place.rank, place.size, place.group, place.exchange)
        bounds = torch.tensor([0, tokens])
        plan = plan_segments(bounds, 1, tokens, mine, torch.device(device))
        exchange = SequenceExchange(plan, mine).scan
        theta = torch.rand(HEADS, WIDTH, device=device).requires_grad_()
        part = torch.randn(1, mine.width(tokens), HEADS, WIDTH, device=device).requires_grad_()
        output = additive_scan(
            part, part, part, theta=theta, cu_seqlens=plan.cu_seqlens, exchange=exchange(theta), backend="torch"
        )
        assert isinstance(output, Tensor)
        output.sum().backward()
        found.append(mine.traffic.bytes)
    assert len(set(found)) == 1, found
    kv, vectors = HEADS * 2 * WIDTH * WIDTH * 4, HEADS * WIDTH * 4
    fused = serves(identity_state(1, 1, 1, 1, device=device), mine)  # gradients travel beside the maxima they belong to
    forward, backward = kv + 2 * vectors + 8, kv + (2 if fused else 1) * vectors
    if mine.gathers:
        assert found[0] == (place.size - 1) * (forward + backward), found
    else:
        blocks = 3  # six heads in blocks of two; every block has the length
        forward += 8 * (blocks - 1)
        wanted = forward * (place.rank < place.size - 1) + backward * (place.rank > 0)
        assert found[0] == wanted, (found, wanted)


def check_meanwhile(place: SequencePlace, device: str) -> None:
    """Work beside the exchange runs once, with gradients."""
    x = torch.ones(1, 4, HEADS, WIDTH, device=device, requires_grad=True)
    kept: list[Tensor] = []
    bounds, tokens = torch.tensor([0, 4 * place.size]), 4 * place.size
    plan = plan_segments(bounds, 1, tokens, place, torch.device(device))
    beside = SequenceExchange(plan, place).scan(None, meanwhile=lambda: kept.append(x.square()))
    output = additive_scan(x, x, x, exchange=beside, backend="torch")
    assert isinstance(output, Tensor)
    (grad,) = torch.autograd.grad(kept[0].sum() + 0 * output.sum(), x)
    assert len(kept) == 1 and torch.equal(grad, 2 * x)


def plant(name: str) -> None:
    """A fault, planted to see that the comparison turns red."""
    from lightnet_llm.parallel import exchange, segments, sequence, states

    if name == "drop_merge":  # segments begin anew on every rank
        sequence._Chain._spread = lambda self, row_state, like, target: like  # type: ignore[method-assign]
    elif name == "keep_frame":  # a state is not turned by the tokens that it passes
        merge = states.SCAN.merge
        object.__setattr__(states.SCAN, "merge", lambda left, right, theta: merge(left, right, None))
    elif name == "drop_gradient":  # nothing comes back of what was sent
        original = exchange.gradients
        exchange.gradients = lambda *x: [g * (g.dim() < 3) for g in original(*x)]
    elif name == "shift_edge":  # segments that end on a rank's edge go on
        plan = segments.plan_segments

        def shifted(*arguments: Any, **options: Any) -> SegmentPlan:
            found = plan(*arguments, **options)
            object.__setattr__(found, "continues", torch.ones_like(found.continues))
            return found

        globals()["plan_segments"] = shifted
    else:
        raise ValueError(f"PLANT={name}: no such fault")
    if kernels("triton_exchange") is not None:
        _plant_in_kernels(name)


def _plant_in_kernels(name: str) -> None:
    """The same faults where kernels exchange states."""
    from lightnet_kernels import triton_exchange as exchange

    arrived, given = exchange.arrived, exchange.given
    if name == "drop_merge":
        exchange.arrived = lambda *x: arrived(*x[:2], (*x[2][:2], torch.full_like(x[2][2], -1)), *x[3:])
    elif name == "keep_frame":
        exchange.arrived = lambda *x: arrived(*x[:4], None, x[5])
    elif name == "drop_gradient":
        exchange.given = lambda *x: tuple(torch.zeros_like(y) for y in given(*x))


@contextlib.contextmanager
def short_spans() -> Iterator[None]:
    """Spans of the Triton backend have two blocks, and are summed one by one."""
    from lightnet_kernels import triton_tables

    cut = {"PROGRAMS": 10**6, "WINDOW": 1, "pieces_of": lambda *_: 2}
    before = {name: getattr(triton_tables, name) for name in cut}

    def use(values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(triton_tables, name, value)
        triton_tables.tables.cache_clear()

    use(cut)
    try:
        yield
    finally:
        use(before)


def run_all(device: str, backend: str, name: str) -> None:
    group, dtype = dist.group.WORLD, getattr(torch, name)
    rank, size = dist.get_rank(), dist.get_world_size()
    if os.environ.get("PLANT"):
        plant(os.environ["PLANT"])
    places = [SequencePlace(rank, size, group, method) for method in ("all_gather", "prefix")]  # type: ignore[arg-type]
    if backend == "triton":
        sizes = ([3, 0, 150, 64], 2, 24) if device == "cpu" else ([30, 0, 70_000, 64, 5000], 8, 128)
        for theta in (True, False):
            attempt(f"state theta={theta}", check_state, *sizes, theta, device, dtype)
        with short_spans():
            for theta in (True, False):
                label = f"several spans theta={theta}"
                attempt(label, check_scan, "several spans", places[0], True, theta, device, backend, dtype, 2)
    if os.environ.get("TRITON_INTERPRET") == "1" and backend == "torch":  # for the kernels of the exchange
        for case in CASES if size > 3 else ("whole rows", "anywhere", "left over", "a rank of padding"):
            for causal, theta in ((True, True), (True, False), (False, True)):
                label = f"all_gather {case} causal={causal} theta={theta}"
                attempt(label, check_scan, case, places[0], causal, theta, device, backend, dtype)
        attempt("all_gather bytes", check_bytes, places[0], device)
        attempt("all_gather meanwhile", check_meanwhile, places[0], device)
        return
    if device == "cpu" and backend == "triton":  # the interpreter is slow
        few = (device, backend, dtype, 2)  # heads
        for case in ("left over", "on ranks' edges"):
            attempt(f"{case} causal", check_scan, case, places[0], True, True, *few)
        attempt("toeplitz", check_toeplitz, "left over", places[0], True, device, backend, dtype)
        attempt("bidirectional", check_scan, "left over", places[0], False, True, *few)
        attempt("without LRPE", check_scan, "no segments", places[0], True, False, *few)
        return
    for place in places:
        for case, (_, tokens, inner) in CASES.items():
            if backend == "triton" and inner is None and place.padding(tokens):
                continue  # no masks
            for causal in (True, False):
                for theta in (True, False):
                    label = f"{place.exchange} {case} causal={causal} theta={theta}"
                    attempt(label, check_scan, case, place, causal, theta, device, backend, dtype)
                label = f"{place.exchange} {case} toeplitz bidirectional={not causal}"
                attempt(label, check_toeplitz, case, place, not causal, device, backend, dtype)
        attempt(f"{place.exchange} bytes", check_bytes, place, device)
        attempt(f"{place.exchange} meanwhile", check_meanwhile, place, device)
        half = place.using(place.exchange, torch.bfloat16)
        attempt(f"{place.exchange} bf16", check_scan, "anywhere", half, True, True, device, backend, torch.float32)
        attempt(
            f"{place.exchange} bf16 toeplitz", check_toeplitz, "anywhere", half, True, device, backend, torch.float32
        )


def main() -> int:
    given = (*sys.argv[2:], *("cpu", "torch", "float64")[len(sys.argv) - 2 :])
    return on_ranks("tests.parallel.exchange_ranks", run_all, int(sys.argv[1]), *given)


if __name__ == "__main__":
    sys.exit(main())
