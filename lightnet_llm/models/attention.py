"""LightNet attention, LNA (model-spec section 1; paper section 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from lightnet_kernels import additive_scan
from lightnet_kernels.decode import decode_step
from torch import Tensor, nn

from ..config.model import ModelConfig
from .context import ForwardContext
from .layers import PlainLayers
from .lrpe import LRPE
from .norms import GatedNorm
from .softmax import softmax_attention


class LightNetAttention(nn.Module):
    """y = (Norm(o) * sigmoid(U)) Wo, where o is the additive scan of Q, K, V and U = X Wu1 Wu2.

    The fused projection's rows are ordered head by head, [H, (q, k, v), D], so that splitting rows over tensor-parallel
    ranks splits heads. ``decay: independent`` adds the log mass f = X Wf1 Wf2.
    """

    def __init__(self, config: ModelConfig, layers: PlainLayers):
        super().__init__()
        width, std = config.width, config.initializer_std
        self.layers_set, self.config = layers, config
        self.heads, self.head_width = layers.split(config.heads), config.head_width
        self.qkv = layers.column(width, 3 * width, std)
        self.gate_down = layers.linear(width, config.gate_rank, std)
        self.gate_up = layers.column(config.gate_rank, width, std)
        if config.decay == "independent":
            self.decay_down = layers.linear(width, config.decay_rank, std)
            self.decay_up = layers.column(config.decay_rank, width, std)
        self.lrpe = LRPE(config, layers) if config.lrpe else None
        eps = config.norm_eps if config.scan_norm_eps is None else config.scan_norm_eps
        self.norm = GatedNorm(config.norm, width, eps, local_width=self.heads * self.head_width)
        self.output = layers.row(width, width, std / (2 * config.layers) ** 0.5)

    def forward(
        self, x: Tensor, context: ForwardContext, state: Any = None, return_state: bool = False
    ) -> tuple[Tensor, Any]:
        """[B, N, width] to the same, and the scan state after the last token (None unless asked for)."""
        out, gate, after = self.mix(self.project(x), self.gate, context, state, return_state)
        return self.finish(out, gate), after

    @property
    def projections(self) -> list[nn.Module]:
        """The layers of `project`."""
        masses = [self.decay_down, self.decay_up] if self.config.decay == "independent" else []
        return [self.qkv, self.gate_down, *masses]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, N, width] to queries, keys and values of this rank's heads, [B, N, heads x 3 x head width]; what the gate is made
        of, [B, N, gate rank]; and with ``decay: independent`` the log masses, [B, N, heads x head width]."""
        inside = self.layers_set.enter(x)
        both = (
            self.layers_set.pair(x, self.qkv, self.gate_down) if inside is x else (self.qkv(inside), self.gate_down(x))
        )
        if self.config.decay == "independent":
            return *both, self.decay_up(self.layers_set.enter(self.decay_down(x)))
        return both

    def gate(self, low: Tensor) -> Tensor:
        """X Wu1 [B, N, gate rank] to U, [B, N, heads, head width]."""
        gate: Tensor = self.gate_up(self.layers_set.enter(low))
        return gate.view(*gate.shape[:2], self.heads, -1)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """[B, N, heads, head width], both, to [B, N, width]."""
        finished: Tensor = self.output(self.norm(out, gate).flatten(-2))
        return finished

    def mix(
        self,
        projections: tuple[Tensor, ...],
        gate: Callable[[Tensor], Tensor],
        context: ForwardContext,
        state: Any,
        return_state: bool,
    ) -> tuple[Tensor, Tensor, Any]:
        """What of attention tokens do together.

        Args:
            projections: of `project`.
            gate: `gate`, or what does the same.

        Returns:
            (out, gate, both [B, N, heads, head width], and the state as `forward` does).
        """
        projected, low, *mass = projections
        joint = projected.view(*projected.shape[:2], self.heads, 3, self.head_width)  # queries, keys and values
        gates: list[Tensor] = []
        cast, to = torch.is_autocast_enabled(low.device.type), torch.get_autocast_dtype(low.device.type)

        def meanwhile() -> None:  # needs nothing of other ranks, so it is computed while their states are on the way
            with torch.autocast(low.device.type, to) if cast else nullcontext():  # which PyTorch's scan turns off
                gates.append(gate(low))

        if context.exchange is None:
            meanwhile()
        if context.decode:
            return decode_step(state, *joint[:, 0].unbind(-2))[:, None], gates[0], None
        decay = None
        if mass:
            decay = mass[0].view(*mass[0].shape[:2], self.heads, -1)
        if self.config.mixer == "softmax":
            if state is not None or return_state:
                raise ValueError("mixer: softmax has no state to continue from or to return")
            query, key, value = joint.unbind(-2)
            return softmax_attention(query, key, value, context, self.config.causal), gates[0], None
        theta = self.lrpe() if self.lrpe is not None else None
        result = additive_scan(
            joint,
            theta=theta,
            coordinates=context.coordinates,
            decay=decay,
            cu_seqlens=context.cu_seqlens,
            key_mask=context.key_mask,
            initial_state=state,
            causal=self.config.causal,
            return_state=return_state,
            exchange=context.exchange and context.exchange.scan(theta, meanwhile=meanwhile),
        )
        out, after = result if return_state else (result, None)
        return out, gates[0], after
