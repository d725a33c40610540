"""What `generate()` carries from step to step: a state of constant size in place of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.causal_lm import CausalLM
from ..models.context import ModelState
from ..models.decoding import select_rows, to_decode, to_scan


class LightNetCache:
    """The state of a batch's rows, by whose side Transformers only counts positions.

    Attributes:
        state: None before any token; of blocks either in the form that scans continue or in that of decoding.
        decoding: whether it is the latter.
        positions: columns of ``input_ids`` read, padding included.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = (False,)
    is_linear = (False,)  # positions are counted, so that a whole text may be given again with the cache of its start
    _is_user_defined = False

    def __init__(self) -> None:
        self.state: ModelState | None = None
        self.decoding = False
        self.positions = 0

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def for_scan(self) -> ModelState | None:
        """The state for any number of further tokens."""
        return None if self.state is None else to_scan(self.state)

    def for_decode(self, model: CausalLM) -> ModelState:
        """The state for one more token a row, which is changed in place."""
        assert self.state is not None
        if not self.decoding:
            self.state, self.decoding = to_decode(model, self.state), True
        return self.state

    def set(self, state: ModelState) -> None:
        """Take the state that a scan returned."""
        self.state, self.decoding = to_scan(state), False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions read."""
        return self.positions

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from what row beam_idx[i] was."""
        if self.state is not None:
            self.state = select_rows(self.state, beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other."""
        if self.state is not None:
            rows = self.state.layers[0].length.shape[0]
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, object]) -> LightNetCache:
        """A fork: both go on by themselves, and no gradient goes back through the copy."""
        copied = LightNetCache()
        copied.decoding, copied.positions = self.decoding, self.positions
        if self.state is not None:  # tables of the weights are never changed, and stay shared
            rows = torch.arange(self.state.layers[0].length.shape[0])
            with torch.no_grad():
                copied.state = select_rows(self.state, rows)
        return copied

    def __copy__(self) -> LightNetCache:
        """As deepcopy: decoding changes a state in place."""
        return self.__deepcopy__({})

    def crop(self, max_length: int) -> None:
        """A state of constant size cannot forget its last tokens."""
        raise ValueError(
            "LightNetCache.crop: a state of constant size cannot drop tokens; assisted and contrastive decoding need that"
        )

    def reset(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]
