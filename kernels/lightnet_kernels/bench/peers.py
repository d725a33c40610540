"""Other ways to do the same work, on the same inputs and clock: `python -m lightnet_kernels.bench.peers REQUEST`.

sdpa          PyTorch's scaled_dot_product_attention, by the kernel that it chooses itself. It is given [B, H, N, D], its own
              layout. sdpa-flash, sdpa-cudnn: by one kernel, on a GPU.
fla-lightnet  flash-linear-attention's LightNet path: SiLU, its gate, chunk_gla. It has no LRPE: cases with LRPE are
              run without.
fla-gla       only its chunk_gla, on keys and gates made beforehand. Candidates of its tuners are compiled in threads.
eager         bidirectional: one scan in plain PyTorch, softmax over tokens and two products. Causal: the PyTorch
              backend of this package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..scan import additive_scan
from .cases import Inputs, ScanCase, make_inputs
from .children import packed, run_child, unpacked
from .measure import Clock, peak_extra
from .tuned import compile_candidates_together

Peer = tuple[Callable[[], Tensor], list[Tensor], Tensor]  # the call, its leaves, its upstream gradient


def peers_of(case: ScanCase) -> list[str]:
    """Names of the peers that do this case on this machine."""
    names = ["sdpa", "eager", *(["sdpa-flash", "sdpa-cudnn"] if torch.cuda.is_available() else [])]
    if case.causal and importlib.util.find_spec("fla") is not None:
        names += ["fla-gla", "fla-lightnet"]
    return names


def run_peers(case: ScanCase, device: torch.device, limit: float, only: list[str] | None = None) -> dict[str, Any]:
    """Each peer's times, or {"error": why}; each has `limit` seconds, its tuning included."""
    request = {"case": packed(case), "device": str(device)}
    chosen = peers_of(case) if only is None else [name for name in only if name in peers_of(case)]
    tuned = {"TRITON_CACHE_AUTOTUNING": "1"}  # what one shape's tuning found serves the next
    return {name: run_child("peers", {**request, "peer": name}, limit, tuned) for name in chosen}


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def _sdpa(case: ScanCase, inputs: Inputs, kernel: SDPBackend | None = None) -> Peer:
    names = ("query", "key", "value")
    query, key, value = (_leaf(inputs.leaves[name].transpose(1, 2).contiguous()) for name in names)
    upstream = inputs.grad.transpose(1, 2).contiguous()

    def call() -> Tensor:
        with sdpa_kernel(kernel) if kernel is not None else contextlib.nullcontext():
            return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

    return call, [query, key, value], upstream


def _eager(case: ScanCase, inputs: Inputs) -> Peer:
    if case.causal:
        leaves = inputs.leaves

        def scan() -> Tensor:
            output = additive_scan(**leaves, backend="torch")
            assert isinstance(output, Tensor)
            return output

        return scan, list(leaves.values()), inputs.grad
    query, key, value = (_leaf(inputs.leaves[name]) for name in ("query", "key", "value"))
    theta = _leaf(inputs.leaves["theta"]) if case.lrpe else None

    def one_scan() -> Tensor:
        phi, weight = F.silu(query), key.float().softmax(1).to(key.dtype)
        if theta is not None:
            angle = torch.arange(case.tokens, device=key.device)[:, None, None] * theta
            cos, sin = angle.cos().to(key.dtype), angle.sin().to(key.dtype)
            phi, weight = (torch.cat([x * cos, x * sin], -1) for x in (phi, weight))
        state = torch.einsum("bnhd,bnhv->bhdv", weight, value)
        return torch.einsum("bnhd,bhdv->bnhv", phi, state)

    leaves_ = [query, key, value, *([] if theta is None else [theta])]
    return one_scan, leaves_, inputs.grad


def _gate(key: Tensor) -> tuple[Tensor, Tensor]:
    """The LightNet layer's keys and log decays: e^k / s and log(s_{t-1} / s_t), the library's own kernel where it has
    one."""
    try:
        fused = importlib.import_module("fla.ops.lightnet.gate").fused_lightnet_gate
    except ImportError:
        z = key.float().logcumsumexp(1)
        return torch.exp(key - z).to(key.dtype), (torch.cat([z[:, :1], z[:, :-1]], 1) - z).to(key.dtype)
    weight, decay = fused(x=key)[:2]
    return weight, decay


def _fla(case: ScanCase, inputs: Inputs, whole: bool) -> Peer:
    if inputs.grad.is_cuda:
        compile_candidates_together()
    chunk_gla = importlib.import_module("fla.ops.gla").chunk_gla
    query, key, value = (_leaf(inputs.leaves[name]) for name in ("query", "key", "value"))
    if whole:

        def path() -> Tensor:
            weight, decay = _gate(key)
            output: Tensor = chunk_gla(q=F.silu(query), k=weight, v=value, g=decay)[0]
            return output

        return path, [query, key, value], inputs.grad
    with torch.no_grad():
        weight, decay = _gate(key)
    weight, decay = _leaf(weight), _leaf(decay)
    return lambda: chunk_gla(q=query, k=weight, v=value, g=decay)[0], [query, weight, value, decay], inputs.grad


PEERS: dict[str, Callable[[ScanCase, Inputs], Peer]] = {
    "sdpa": _sdpa,
    "sdpa-flash": functools.partial(_sdpa, kernel=SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": functools.partial(_sdpa, kernel=SDPBackend.CUDNN_ATTENTION),
    "eager": _eager,
    "fla-gla": functools.partial(_fla, whole=False),
    "fla-lightnet": functools.partial(_fla, whole=True),
}


def measure_peer(name: str, case: ScanCase, device: torch.device) -> dict[str, Any]:
    """Times and memory of one peer, here. Slow calls are repeated less."""
    clock = Clock(device)
    call, leaves, upstream = PEERS[name](case, make_inputs(case, device))

    def forward() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        torch.autograd.grad(call(), leaves, upstream)

    first = clock.once(both)
    guess = clock.once(both)
    repeats = int(max(5, min(clock.repeats, 2500 / max(guess, 1e-3))))
    return {
        "forward": clock.time(forward, repeats),
        "forward_backward": clock.time(both, repeats),
        "first_call_s": first / 1e3,
        "extra_bytes": peak_extra(clock, both),
        "library": f"fla {importlib.metadata.version('flash-linear-attention')}" if name.startswith("fla") else "torch",
    }


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(measure_peer(asked["peer"], unpacked(asked["case"]), torch.device(asked["device"]))))
