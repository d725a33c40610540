"""Where weights are written: shards of a bounded size, one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint.weights import part_file, write_weights
from ..errors import UserError
from ..models.parameters import ParameterSpec
from .source import INDEX

SHARD_BYTES = 1_000_000_000
Read = Callable[[str], Tensor]


def plan(specs: dict[str, ParameterSpec], dtypes: dict[str, torch.dtype]) -> list[list[str]]:
    """Names by shard, in order; a shard holds at most SHARD_BYTES, or one tensor."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        count = torch.Size(spec.shape).numel() * dtypes[name].itemsize
        if shards[-1] and size + count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    return shards


def write_safetensors(folder: Path, shards: list[list[str]], read: Read, rename: Callable[[str], str]) -> int:
    """Write ``model.safetensors``, or shards and their index, as Transformers names them.

    Returns:
        Bytes of the tensors.
    """
    index: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {rename(name): read(name).contiguous() for name in names}
        with _readable(folder):
            save_file(tensors, folder / file, {"format": "pt"})
        (folder / file).chmod(0o644)  # the library writes for the owner alone
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        tree = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    return total


def write_training(folder: Path, shards: list[list[str]], read: Read, specs: dict[str, ParameterSpec]) -> int:
    """Write a checkpoint's ``weights``, which any layout reads. Returns the bytes of the tensors."""
    total = 0
    for number, names in enumerate(shards):
        tensors = {name: read(name).contiguous() for name in names}
        joins = {name: {"dim": specs[name].partition_dim, "shape": list(specs[name].shape)} for name in names}
        with _readable(folder):
            write_weights(part_file(folder, number, 0), tensors, joins, 0, 1)
        part_file(folder, number, 0).chmod(0o644)
        total += sum(tensor.nbytes for tensor in tensors.values())
    return total


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """What goes wrong while writing, in one line."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder}: cannot be written ({error}); nothing is left there") from None
