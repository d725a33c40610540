"""MD-TPE: Toeplitz positional encoding by exponential sums along every axis (model-spec section 3)."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightnet_kernels import toeplitz_grid, toeplitz_scan
from lightnet_kernels.decode import toeplitz_step
from torch import Tensor, nn

from ..config.model import ModelConfig
from .context import ForwardContext
from .parameters import Initializer, ParameterSpec, declare, normal


def _draw_raw(length: int) -> Initializer:
    """sigmoid(raw) = exp(-1 / tau) with tau log-uniform from 1 to the axis length."""

    def draw(generator: torch.Generator, full: Tensor) -> Tensor:
        tau = torch.exp(torch.rand(full.shape, generator=generator, dtype=torch.float64) * math.log(length))
        decay = torch.exp(-1.0 / tau)
        return full.copy_(torch.log(decay / (1.0 - decay)))

    return draw


class ToeplitzEncoding(nn.Module):
    """x + sum over axes of y, y_n = sum_{m<=n} sum_i b_i lambda_i^(n-m) x_m per channel.

    Parameters ``raw`` and ``beta`` are [axes, width, rank]: lambda = sigmoid(raw), b = beta (1 - lambda), divided by
    (1 + lambda) when bidirectional. They stay fp32 and are not decayed.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        shape = (config.axes, config.width, config.tpe_rank)
        std = 0.1 / math.sqrt(config.tpe_rank * config.axes)
        raw = ParameterSpec(shape, _draw_raw(config.tpe_init_length), decay=False, keep_fp32=True)
        beta = ParameterSpec(shape, normal(std), decay=False, keep_fp32=True)
        self.raw = declare(nn.Parameter(torch.empty(shape)), raw)
        self.beta = declare(nn.Parameter(torch.empty(shape)), beta)
        mirrored = config.tpe_bidirectional
        self.bidirectional = (not config.causal) if mirrored is None else mirrored

    def forward(
        self,
        x: Tensor,
        context: ForwardContext,
        grid: tuple[int, ...] | None = None,
        state: Any = None,
        return_state: bool = False,
    ) -> tuple[Tensor, Any]:
        """Encode positions.

        Args:
            x: [B, N, width]; with ``grid`` N is its product, in row-major order.
            grid: sizes of the axes; None for one axis of length N.
            state: TPE state of the tokens before (one axis only).

        Returns:
            (encoded [B, N, width] of x's dtype, state after the last token or None).
        """
        decay = torch.sigmoid(self.raw)
        gain = self.beta * (1.0 - decay)
        if self.bidirectional:
            gain = gain / (1.0 + decay)
        if context.decode:
            return x + toeplitz_step(state, x[:, 0], decay[0], gain[0])[:, None], None
        if grid is None or len(grid) == 1:
            result = toeplitz_scan(
                x,
                decay[0],
                gain[0],
                bidirectional=self.bidirectional,
                cu_seqlens=context.cu_seqlens,
                key_mask=context.key_mask,
                initial_state=state,
                return_state=return_state,
                exchange=context.exchange and context.exchange.toeplitz(decay[0]),
            )
            y, after = result if isinstance(result, tuple) else (result, None)
            return x + y, after
        cube = x.view(len(x), *grid, x.shape[-1])
        return toeplitz_grid(cube, decay, gain, bidirectional=self.bidirectional).reshape(x.shape), None
