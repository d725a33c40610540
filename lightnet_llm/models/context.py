"""What one forward pass knows beside its activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from .dropout import DropoutKey


@dataclass(frozen=True)
class ForwardContext:
    """Shared by all blocks of a pass.

    Attributes:
        cu_seqlens: int [S + 1] segment boundaries over the flattened tokens; activations are then [1, B*N, d].
        key_mask: bool [B, N], true for real tokens.
        coordinates: int [N, axes] positions of a bidirectional model's tokens.
        dropout: key of the dropout masks, None outside training.
        exchange: over sequence-parallel ranks, None on one: ``scan(theta)`` and ``toeplitz(decay)`` give what the two
            scans take, ``sum(x)`` what a head sums over all tokens.
        modulation: [B, 6, width] of a denoiser with conditioning: adaln_single, what all its blocks share.
        decode: one token a row; states are ``DecodeState`` and ``ToeplitzState``, changed in place and not returned.
    """

    cu_seqlens: Tensor | None = None
    key_mask: Tensor | None = None
    coordinates: Tensor | None = None
    dropout: DropoutKey | None = None
    exchange: Any = None
    modulation: Tensor | None = None
    decode: bool = False

    def at(self, coordinates: Tensor) -> ForwardContext:
        """The same at other coordinates."""
        return replace(self, coordinates=coordinates)


class ModelState(NamedTuple):
    """Everything a causal model remembers of the tokens it has read: constant size, whatever their number.

    Attributes:
        tpe: state of the Toeplitz encoding (None without TPE).
        layers: one scan state per block.
    """

    tpe: Any
    layers: tuple[Any, ...]
