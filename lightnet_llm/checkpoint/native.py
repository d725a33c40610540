"""Reading DeepSpeed's native optimiser files without the ranks that wrote them.

A reader gives, for one pipeline stage and tensor-parallel rank, the fp32 value and the Adam moments of each of its
parameters, joined over the data-parallel partitions. Files are memory-mapped: only what is asked for is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

FP32, MOMENTS, STEP = "fp32", ("exp_avg", "exp_avg_sq"), "step"
EMA = "ema"  # the exponential average of a run that keeps one: a third moment to the optimiser
# (parameter, key) -> flat fp32 tensor of this tensor-parallel rank's part; for STEP the optimiser's count of steps.
Reader = Callable[[str, str], Tensor]
OPTIMIZER_NAMES = "optimizer_parameters"  # client state at stage 0: names in the order of the optimiser's indices


class NotTrained(KeyError):
    """The optimiser does not know a parameter: it is as the run began, in ``weights/``."""


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path}: not readable ({str(error).splitlines()[0]})") from None
    return loaded


def _partitions(engine: Path, model_rank: int, size: int) -> list[dict[str, Any]]:
    """The optimiser states of every data-parallel rank, in order."""
    found = {}
    for path in engine.glob(f"*zero_pp_rank_*_mp_rank_{model_rank:02d}_optim_states.pt"):
        number = re.search(r"zero_pp_rank_(\d+)_mp_rank", path.name)
        assert number is not None
        found[int(number[1])] = path
    if sorted(found) != list(range(size)):
        raise UserError(
            f"{engine}: holds optimiser files of data-parallel ranks {sorted(found)} for model rank {model_rank}, "
            f"should be 0 to {size - 1}"
        )
    return [_load(found[rank])["optimizer_state_dict"] for rank in range(size)]


def _kept(states: dict[Any, dict[str, Tensor]], index: Any, key: str, value: Tensor) -> Tensor:
    """The step, or a moment as long as ``value``: zeros where every step so far was skipped, so that there is none yet."""
    if index not in states:
        return torch.zeros(()) if key == STEP else torch.zeros_like(value)
    return torch.as_tensor(states[index][key])


def _zero12(partitions: list[dict[str, Any]]) -> Reader:
    """Stages 1 and 2: each group is one flat vector cut into equal pieces; mappings say what lies where."""
    where: dict[str, list[tuple[dict[str, Any], int, Any]]] = {}
    for partition in partitions:
        for group, mapping in enumerate(partition["param_slice_mappings"]):
            for name, address in mapping.items():
                where.setdefault(name, []).append((partition, group, address))

    def read(name: str, key: str) -> Tensor:
        if name not in where:
            raise NotTrained(name)
        pieces = []
        for partition, group, address in where[name]:
            flat = partition["single_partition_of_fp32_groups"][group]
            if key != FP32:
                flat = _kept(partition["base_optimizer_state"]["state"], group, key, flat)
            if key == STEP:
                return flat
            pieces.append(flat.narrow(0, address.start, address.numel))
        return torch.cat(pieces)

    return read


def _zero3(partitions: list[dict[str, Any]], shapes: list[dict[str, tuple[int, ...]]]) -> Reader:
    """Stage 3: each parameter is cut into equal pieces, the last one padded; a group's pieces lie one after another."""
    where: dict[str, tuple[int, int, int, int]] = {}
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            total = math.prod(shape)
            piece = -(-total // len(partitions))
            where[name] = (group, offset, piece, total)
            offset += piece

    def read(name: str, key: str) -> Tensor:
        if name not in where:
            raise NotTrained(name)
        group, offset, piece, total = where[name]
        pieces = []
        for partition in partitions:
            flat = partition["fp32_flat_groups"][group]
            if key != FP32:
                flat = _kept(partition["optimizer_state_dict"]["state"], group, key, flat)
            if key == STEP:
                return flat
            pieces.append(flat.narrow(0, offset, piece))
        return torch.cat(pieces)[:total]

    return read


def _plain(saved: dict[str, Any], path: Path) -> Reader:
    """Stage 0: the model's own fp32 parameters and torch's optimiser state by index."""
    if OPTIMIZER_NAMES not in saved:
        raise UserError(
            f"{path}: written before checkpoints could move; resume it once on its own layout, save, and move that one"
        )
    index = {name: position for position, name in enumerate(saved[OPTIMIZER_NAMES])}

    def read(name: str, key: str) -> Tensor:
        if name not in index:
            raise NotTrained(name)
        value = saved["module"][name].flatten()
        if key == FP32:
            return value
        kept = _kept(saved["optimizer"]["state"], index[name], key, value)
        return kept if key == STEP else kept.flatten()

    return read


def open_reader(engine: Path, model_rank: int, data_size: int, zero_stage: int) -> Reader:
    """A reader of one model rank's parameters.

    Args:
        engine: the checkpoint's ``engine`` folder.
        model_rank: pipeline stage x tensor-parallel size + tensor-parallel rank.
        data_size: data x sequence size, over which ZeRO cut.
        zero_stage: the stage that wrote it.

    Raises:
        UserError: a file is missing or not readable.
    """
    if zero_stage == 0:
        path = engine / f"mp_rank_{model_rank:02d}_model_states.pt"
        return _plain(_load(path), path)
    partitions = _partitions(engine, model_rank, data_size)
    if zero_stage == 3:
        shapes = _load(engine / f"zero_pp_rank_0_mp_rank_{model_rank:02d}_model_states.pt")["param_shapes"]
        return _zero3(partitions, shapes)
    return _zero12(partitions)
