"""Kernels of LightNet: the additive scan, the Toeplitz scan of MD-TPE, and their states."""

from .scan import ScanExchange, additive_scan, backends
from .state import (
    ScanState,
    ToeplitzState,
    identity_state,
    merge_states,
    merge_toeplitz_states,
    shift_state,
)
from .toeplitz import ToeplitzExchange, toeplitz_scan

__all__ = [
    "ScanExchange",
    "ScanState",
    "ToeplitzExchange",
    "ToeplitzState",
    "additive_scan",
    "backends",
    "identity_state",
    "merge_states",
    "merge_toeplitz_states",
    "shift_state",
    "toeplitz_scan",
]
