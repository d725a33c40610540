"""Kernels of LightNet: the additive scan, the Toeplitz scan of MD-TPE, their states, and the scan's companions."""

from .linear_cross_entropy import linear_cross_entropy
from .norms import add_norm, gated_norm, norm
from .scan import ScanExchange, additive_scan, backends
from .state import (
    ScanState,
    ToeplitzState,
    identity_state,
    merge_states,
    merge_toeplitz_states,
    shift_state,
)
from .swiglu import swiglu
from .toeplitz import ToeplitzExchange, toeplitz_scan

__all__ = [
    "ScanExchange",
    "ScanState",
    "ToeplitzExchange",
    "ToeplitzState",
    "add_norm",
    "additive_scan",
    "backends",
    "gated_norm",
    "identity_state",
    "linear_cross_entropy",
    "merge_states",
    "merge_toeplitz_states",
    "norm",
    "shift_state",
    "swiglu",
    "toeplitz_scan",
]
