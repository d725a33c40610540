"""What a model has read, as an object of constant size: kept, forked, saved and continued.

A prompt that many requests share is read once (``read``), forked (``StateCache.fork``) and continued by each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightnet_kernels import ScanState, ToeplitzState, identity_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..models import CausalLM, ForwardContext, ModelState
from ..models.decoding import select_rows, to_scan

PIECE = 2048  # tokens of a prompt read at once: memory stays constant for prompts of any length
FORMAT = "lightnet-state"
FINGERPRINT_ELEMENTS = 1024  # of each parameter that count towards a model's fingerprint


class StateCache(NamedTuple):
    """What a model makes of the tokens it has read, for B rows.

    Nothing ever changes it, so it can be continued any number of times.

    Attributes:
        logits: [B, V] of the next token, without the padded rows of the vocabulary.
        state: of all tokens read, by row; its size does not depend on their number. Scan states are fp64.
    """

    logits: Tensor
    state: ModelState

    @property
    def rows(self) -> int:
        """B."""
        return int(self.logits.shape[0])

    def fork(self, copies: int) -> StateCache:
        """[B * copies] rows: every row ``copies`` times, one after the other."""
        if copies < 1:
            raise ValueError(f"fork: copies {copies} must be at least 1")
        return self.select([row for row in range(self.rows) for _ in range(copies)])

    def select(self, rows: Sequence[int] | Tensor) -> StateCache:
        """The named rows, in that order; a row may be named more than once."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.logits.device)
        return StateCache(self.logits[index], select_rows(self.state, index))

    def save(self, path: str | Path, model: CausalLM) -> None:
        """Write it as one safetensors file that only the same weights continue.

        Raises:
            UserError: the file cannot be written.
        """
        tensors = {"logits": self.logits.contiguous()}
        for name, part in _parts(self.state):
            tensors |= {f"{name}.{field}": value.contiguous() for field, value in part._asdict().items()}
        facts = {"format": FORMAT, "version": "1", "model": fingerprint(model), "layers": str(len(self.state.layers))}
        partial = Path(path).with_name(f".{Path(path).name}.partial")
        try:  # an older state stays until this one is whole
            save_file(tensors, partial, facts)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be written ({error}); name a file in an existing folder") from None
        finally:
            with suppress(OSError):
                partial.unlink()

    @classmethod
    def load(cls, path: str | Path, model: CausalLM) -> StateCache:
        """Read a saved cache onto the model's device.

        Raises:
            UserError: no such file, not a state, or that of other weights.
        """
        try:
            with safe_open(path, framework="pt", device=str(next(model.parameters()).device)) as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; save a state first") from None
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: not a saved state ({error}); save it again") from None
        if facts.get("format") != FORMAT or facts.get("version") != "1":
            raise UserError(f"{path}: not a saved state of this version; save it again")
        if facts.get("model") != fingerprint(model):
            raise UserError(f"{path}: a state of other weights; continue it with the checkpoint that wrote it")

        def taken(name: str) -> Tensor:
            if name not in tensors:
                raise UserError(f"{path}: has no tensor '{name}', so this is half a state; save it again")
            return tensors[name]

        def part(kind: Any, name: str) -> Any:
            return kind(*(taken(f"{name}.{field}") for field in kind._fields))

        layers = tuple(part(ScanState, f"layers.{index}") for index in range(len(model.layers)))
        tpe = None if model.tpe is None else part(ToeplitzState, "tpe")
        return cls(taken("logits"), ModelState(tpe, layers))


@torch.inference_mode()
def read(model: CausalLM, ids: Tensor | Sequence[Sequence[int]], state: ModelState | None = None) -> StateCache:
    """Read tokens in parallel.

    Args:
        ids: integer [B, N], N >= 1, on any device; or B lists of unlike lengths, each of at least one token, which are
            packed and not padded.
        state: of the tokens before, by row, as a ``StateCache`` has it; None at the start of a document.
    """
    if not isinstance(ids, Tensor) and len({len(row) for row in ids}) > 1:
        return _read_packed(model, [list(row) for row in ids], state)
    ids = torch.as_tensor(ids)
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"read: ids has shape {tuple(ids.shape)}; expected [B, N] with at least one token")
    device = next(model.parameters()).device
    for piece in ids.to(device).split(PIECE, dim=1):
        hidden, after = model.hidden(piece, state=state, return_state=True)
        assert after is not None
        state = to_scan(after)
    assert state is not None
    return StateCache(_next_logits(model, hidden[:, -1]), state)


def _read_packed(model: CausalLM, rows: list[list[int]], state: ModelState | None) -> StateCache:
    """Rows of unlike lengths as segments of one sequence, a piece of each at a time."""
    lengths = [len(row) for row in rows]
    if not min(lengths):
        raise ValueError(f"read: row {lengths.index(0)} of ids holds no token; give each at least one")
    device = next(model.parameters()).device
    if state is None:
        state = empty_state(model, len(rows))
    size = max(64, 8 * PIECE // len(rows))
    last: list[Tensor] = [torch.empty(0)] * len(rows)
    for start in range(0, max(lengths), size):
        pieces = [row[start : start + size] for row in rows]  # empty for rows that have ended: their states stay
        bounds = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
        packed = torch.tensor([[token for piece in pieces for token in piece]], device=device)
        hidden, after = model.hidden(packed, ForwardContext(cu_seqlens=bounds), state, return_state=True)
        assert after is not None
        state = to_scan(after)
        for row, piece in enumerate(pieces):
            if piece:
                last[row] = hidden[0, int(bounds[row + 1]) - 1]
    return StateCache(_next_logits(model, torch.stack(last)), state)


def _next_logits(model: CausalLM, hidden: Tensor) -> Tensor:
    """[B, width] to [B, V]."""
    return model.layers_set.gather_logits(model.logits(hidden[:, None]), model.config.vocab_size)[:, 0]


def empty_state(model: CausalLM, rows: int) -> ModelState:
    """The state of ``rows`` documents before their first token."""
    device = next(model.parameters()).device
    layers = []
    for block in model.layers:
        attention: Any = block.attention
        shape = rows, attention.heads, attention.head_width, attention.head_width
        lrpe = attention.lrpe is not None
        layers.append(identity_state(*shape, lrpe=lrpe, dtype=torch.float64, device=device))
    tpe = None
    if model.tpe is not None:
        hidden = torch.zeros(rows, *model.tpe.raw.shape[1:], device=device)
        tpe = ToeplitzState(hidden, torch.zeros(rows, dtype=torch.int64, device=device))
    return ModelState(tpe, tuple(layers))


def fingerprint(model: CausalLM) -> str:
    """Of architecture and weights, in hex: of a part of each parameter, so that it is quick for any size."""
    digest = hashlib.sha256(json.dumps(model.config.model_dump(), sort_keys=True).encode())
    for name, parameter in model.named_parameters():
        part = parameter.detach().reshape(-1)[:FINGERPRINT_ELEMENTS].float().cpu()
        digest.update(name.encode() + part.numpy().tobytes())
    return digest.hexdigest()


def _parts(state: ModelState) -> list[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = [(f"layers.{index}", layer) for index, layer in enumerate(state.layers)]
    return parts if state.tpe is None else [("tpe", state.tpe), *parts]
