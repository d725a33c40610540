"""Weights of a checkpoint in a form that no layout owns: safetensors under the project's parameter names.

Every pipeline stage and tensor-parallel rank writes its part with a description of how the parts join; readers get
full tensors without padding, whatever wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import UserError, nearest
from ..models.parameters import shard, spec_of, unshard

FOLDER, AVERAGE = "weights", "ema"  # as trained; the exponential average, in fp32, of a run that keeps one


def gathered(parameter: nn.Parameter, zero_stage: int) -> AbstractContextManager[Any]:
    """A parameter is whole inside, where ZeRO-3 has cut it; every data-parallel rank enters."""
    if zero_stage < 3:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([parameter])


def gather_weights(
    model: nn.Module, zero_stage: int, writes: bool, instead: Callable[[nn.Parameter], Tensor | None] | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's part of the weights on the CPU, and how the parts join; empty where this rank does not write.

    Every data-parallel rank calls it, because ZeRO gathers.

    Args:
        instead: gives what is written in a parameter's place, None for the parameter itself.
    """
    tensors: dict[str, Tensor] = {}
    joins: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "ds_pipe_replicated", False):
            continue  # the copy of a tied weight; its owner writes it
        other = None if instead is None else instead(parameter)
        with gathered(parameter, zero_stage) if other is None else nullcontext():
            if writes:
                spec = spec_of(parameter)
                tensors[name] = (parameter if other is None else other).detach().to("cpu", copy=True).contiguous()
                joins[name] = {"dim": spec.partition_dim, "shape": list(spec.shape)}
    return tensors, joins


def part_file(folder: Path, stage: int, tensor_rank: int, which: str = FOLDER) -> Path:
    """The weights file of a pipeline stage and tensor-parallel rank."""
    return folder / which / f"stage{stage:03d}_tensor{tensor_rank:03d}.safetensors"


def write_weights(
    path: Path, tensors: dict[str, Tensor], joins: dict[str, Any], tensor_rank: int, tensor_size: int
) -> None:
    """Write what :func:`gather_weights` gave.

    Raises:
        OSError: the file cannot be written.
    """
    metadata = {"joins": json.dumps(joins), "tensor_rank": str(tensor_rank), "tensor_size": str(tensor_size)}
    path.parent.mkdir(exist_ok=True)
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from None


def folder_of(weights: str) -> str:
    """The folder in a checkpoint of what ``--weights`` names: ``trained``, or ``ema``, the exponential average.

    Raises:
        UserError: it is neither.
    """
    folders = {"trained": FOLDER, "ema": AVERAGE}
    if weights not in folders:
        raise UserError(f"--weights {weights}: must be trained or ema{nearest(weights, list(folders))}")
    return folders[weights]


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor in memory of its own; the file is not kept open, so that its pages do not pile up."""
    with safe_open(path, framework="pt") as reader:
        return reader.get_tensor(name).clone()


def weights_files(folder: Path, which: str = FOLDER) -> list[Path]:
    """The files of a checkpoint's weights, or of its exponential average.

    Raises:
        UserError: there are none.
    """
    files = sorted((folder / which).glob("*.safetensors"))
    if not files and which == AVERAGE:
        raise UserError(f"{folder}: holds no exponential average; it is kept by runs with train.ema=0.999, say")
    if not files:
        raise UserError(f"{folder}: holds no {which}/*.safetensors; name a checkpoint folder such as .../step_00000100")
    return files


def load_weights(folder: Path, which: str = FOLDER) -> dict[str, Tensor]:
    """Full tensors by name, on the CPU, in the dtype they were trained in.

    Args:
        folder: a checkpoint folder (``.../step_00000100``).
        which: ``weights`` or ``ema``, its exponential average, which is fp32.

    Raises:
        UserError: no weights there, a part is missing or a file is damaged.
    """
    files = weights_files(folder, which)
    parts: dict[str, dict[int, Tensor]] = {}
    joins: dict[str, Any] = {}
    size = 1
    for path in files:
        try:
            with safe_open(path, framework="pt") as reader:
                metadata = reader.metadata()
                joins.update(json.loads(metadata["joins"]))
                rank, size = int(metadata["tensor_rank"]), int(metadata["tensor_size"])
                for name in reader.keys():  # noqa: SIM118  (not a mapping)
                    parts.setdefault(name, {})[rank] = reader.get_tensor(name)
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise UserError(f"{path}: not a readable weights file ({error})") from None
    full = {}
    for name, ranks in parts.items():
        missing = sorted(set(range(size)) - set(ranks))
        if missing:
            raise UserError(f"{folder / which}: the part of tensor-parallel rank {missing[0]} of '{name}' is missing")
        full[name] = unshard([ranks[r] for r in range(size)], tuple(joins[name]["shape"]), joins[name]["dim"])
    return full


@dataclass(frozen=True)
class Part:
    """How one parameter lies in one weights file.

    Attributes:
        local_shape: of this tensor-parallel rank's part, padding included.
        shape: of the full parameter without padding.
        dim: along which the parts join; None where every rank holds all of it.
    """

    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None


def describe_part(path: Path) -> dict[str, Part]:
    """Names and shapes in a weights file; reads no tensor."""
    with safe_open(path, framework="pt") as reader:
        joins = json.loads(reader.metadata()["joins"])
        return {
            name: Part(tuple(reader.get_slice(name).get_shape()), tuple(joins[name]["shape"]), joins[name]["dim"])
            for name in reader.keys()  # noqa: SIM118  (not a mapping)
        }


@torch.no_grad()
def load_into(model: nn.Module, weights: dict[str, Tensor], source: str, tensor_rank: int = 0) -> None:
    """Copy full tensors into a model of any tensor-parallel layout; its dtype is kept.

    A model with a ``fresh`` head (names that begin so) keeps its own where the weights are those of another model on the
    same blocks.

    Raises:
        UserError: a tensor is missing, left over or of another shape; the message names the first.
    """
    wanted = dict(model.named_parameters())
    fresh = getattr(model, "fresh", None)
    if fresh is not None and not any(name.startswith(fresh) and name in weights for name in wanted):
        wanted = {name: parameter for name, parameter in wanted.items() if not name.startswith(fresh)}
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith(fresh)}
    for name, parameter in wanted.items():
        if name not in weights:
            raise UserError(f"{source}: has no tensor '{name}'{nearest(name, list(weights))}; it is another model")
        shape = spec_of(parameter).shape
        if tuple(weights[name].shape) != shape:
            raise UserError(
                f"{source}: '{name}' is {list(weights[name].shape)}, this model needs {list(shape)}; it is another model"
            )
    partial = any(getattr(p, "ds_pipe_replicated", None) is not None for p in wanted.values())
    left = sorted(set(weights) - set(wanted))
    if left and not partial:  # a pipeline stage holds only its own part
        raise UserError(f"{source}: tensor '{left[0]}' has no place in this model; it is another model")
    for name, parameter in wanted.items():
        part = shard(weights[name], spec_of(parameter), tuple(parameter.shape), tensor_rank)
        parameter.copy_(part.to(parameter.dtype))
