"""What a call compiles that earlier ones of the same heads and widths have not: counted where there is no card, nothing compiled.

python -m tests.unit.kernels.recompiled      a line of JSON a call: its case, batch, tokens, and names of kernels
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from .compiled import back, drawn, no_card_needed, only_counted

SHAPES = [(2, 256), (1, 37), (3, 320), (1, 321), (1, 1), (1, 4160), (5, 777), (1, 9001)]


def causal(heads: int, width: int, cuda: bool) -> Any:
    from lightnet_kernels import additive_scan, cuda_chains

    def call(batch: int, tokens: int) -> None:
        cuda_chains.runs = lambda *_: cuda  # type: ignore[assignment]
        parts, theta = [drawn(batch, tokens, heads, width) for _ in range(3)], torch.rand(heads, width).requires_grad_()
        back(additive_scan(*parts, theta=theta, activation="silu", backend="triton"))

    return call


def bidirectional(heads: int, width: int) -> Any:
    """By Triton, packed or not. 72 wide the state is cut by pieces of sequences at any length; 6 heads are no 16 of anything."""
    from lightnet_kernels import additive_scan, cuda_bidirectional

    def call(batch: int, tokens: int) -> None:
        cuda_bidirectional.runs = lambda *_: False  # type: ignore[assignment]
        parts, theta = [drawn(batch, tokens, heads, width) for _ in range(3)], torch.rand(heads, width).requires_grad_()
        mask = torch.ones(batch, tokens, dtype=torch.bool)
        options: dict[str, Any] = {"theta": theta, "activation": "silu", "causal": False, "backend": "triton"}
        back(additive_scan(*parts, **options), additive_scan(*parts, **options, key_mask=mask))

    return call


def companions(batch: int, tokens: int) -> None:
    from lightnet_kernels import gated_norm, norm, swiglu, toeplitz_scan

    options: dict[str, Any] = {"kind": "rms", "eps": 1e-5, "backend": "triton"}
    rows = batch * tokens + 15  # fewer rows than a tile has are a smaller tile
    scale = torch.rand(256).requires_grad_()
    back(
        norm(drawn(rows, 256), scale, **options),
        gated_norm(drawn(rows, 2, 128), drawn(rows, 2, 128), scale.view(2, 128), **options),
        swiglu(drawn(rows, 256), drawn(rows, 256), backend="triton"),
        toeplitz_scan(
            drawn(batch, tokens, 64), *(torch.rand(64, 16).requires_grad_() for _ in range(2)), backend="triton"
        ),
    )


def main() -> int:
    no_card_needed()
    from lightnet_kernels import triton_ops

    made, chains = only_counted()

    def together(key: Any, _device: Any, *runs: Any) -> None:
        if key not in met:
            met.append(key)
            for run in runs:
                run()

    met: list[Any] = []
    triton_ops.compiled_together = together
    cases: dict[str, Any] = {f"causal, {heads} heads, CUDA": causal(heads, 128, True) for heads in (16, 8, 6)}
    cases |= {"causal, 72": causal(16, 72, False), "bidirectional, 72": bidirectional(6, 72), "companions": companions}
    for case, call in cases.items():
        chains.clear()
        for batch, tokens in SHAPES:
            made.clear()
            call(batch, tokens)
            print(json.dumps([case, batch, tokens, sorted(made)]), flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main())
