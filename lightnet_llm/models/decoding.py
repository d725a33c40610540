"""Between the two forms of a causal model's state: one that scans continue, and one that decoding changes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightnet_kernels import ScanState, ToeplitzState
from lightnet_kernels.decode import DecodeState, decode_state, scan_state
from torch import Tensor

from .causal_lm import CausalLM
from .context import ModelState

TABLES = ("theta", "angles", "turn")  # of a DecodeState: made of the weights, the same for all rows


def can_decode(model: CausalLM) -> bool:
    """Whether single tokens are decoded in place; the step knows no separate log mass ("no share")."""
    return model.config.decay != "independent"


def to_decode(model: CausalLM, state: ModelState) -> ModelState:
    """A copy of a scanned state to decode from, of ``DecodeState`` per block."""
    layers = []
    for block, layer in zip(model.layers, state.layers, strict=True):
        attention: Any = block.attention
        theta = None if attention.lrpe is None else attention.lrpe()
        layers.append(decode_state(layer, theta, attention.qkv.weight.dtype))
    # What a scan leaves may be strided; what is changed in place may not.
    tpe = None if state.tpe is None else ToeplitzState(*(_contiguous_copy(x) for x in state.tpe))
    return ModelState(tpe, tuple(layers))


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def to_scan(state: ModelState) -> ModelState:
    """A copy that scans continue, in fp64: added to one token at a time, an fp32 normaliser stops growing once a single
    key lies 17 nats above very many others, and rotating kv at every token drifts (model-spec 1 and 2)."""

    def widened(layer: Any) -> Any:
        layer = scan_state(layer) if isinstance(layer, DecodeState) else layer
        # Not by _replace, whose result torch.compile of torch 2.11 cannot hand out.
        return ScanState(layer.max.double(), layer.sum.double(), layer.kv.double(), layer.length)

    tpe = None if state.tpe is None else ToeplitzState(*(x.clone() for x in state.tpe))
    return ModelState(tpe, tuple(map(widened, state.layers)))


def select_rows(state: ModelState, index: Tensor) -> ModelState:
    """The named rows, int64 [R], of a state of either form, as a copy; a row may be named more than once."""

    def chosen(part: Any) -> Any:
        fields = {name: value for name, value in part._asdict().items() if name not in TABLES}
        return part._replace(**{name: value.index_select(0, index.to(value.device)) for name, value in fields.items()})

    return ModelState(None if state.tpe is None else chosen(state.tpe), tuple(map(chosen, state.layers)))


def join_rows(states: Sequence[ModelState]) -> ModelState:
    """All rows of some states of one form, in order: a copy, unless there is only one."""
    if len(states) == 1:
        return states[0]

    def joined(*parts: Any) -> Any:
        fields = [name for name in parts[0]._fields if name not in TABLES]
        return parts[0]._replace(**{name: torch.cat([getattr(part, name) for part in parts]) for name in fields})

    tpe = None if states[0].tpe is None else joined(*(state.tpe for state in states))
    layers = zip(*(state.layers for state in states), strict=True)
    return ModelState(tpe, tuple(joined(*parts) for parts in layers))
