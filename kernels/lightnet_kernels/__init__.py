"""Kernels of LightNet: the additive scan, the Toeplitz scan of MD-TPE, their states, and the scan's companions."""

from .ahead import compile_ahead
from .decode import DecodeState, decode_state, decode_step, scan_state, toeplitz_step
from .linear_cross_entropy import linear_cross_entropy
from .modulation import gated_add, gated_add_norm, modulate, modulated_norm
from .norms import add_norm, gated_norm, norm, norm_beside
from .recorded import recordable, recorded
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
from .toeplitz_grid import toeplitz_grid

__all__ = [
    "DecodeState",
    "ScanExchange",
    "ScanState",
    "ToeplitzExchange",
    "ToeplitzState",
    "add_norm",
    "additive_scan",
    "backends",
    "compile_ahead",
    "decode_state",
    "decode_step",
    "gated_add",
    "gated_add_norm",
    "gated_norm",
    "identity_state",
    "linear_cross_entropy",
    "merge_states",
    "merge_toeplitz_states",
    "modulate",
    "modulated_norm",
    "norm",
    "norm_beside",
    "recordable",
    "recorded",
    "scan_state",
    "shift_state",
    "swiglu",
    "toeplitz_grid",
    "toeplitz_scan",
    "toeplitz_step",
]
