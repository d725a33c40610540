"""The universal form of a checkpoint: every parameter's fp32 value and Adam moments, full, without padding.

It lies in the checkpoint's folder as ``universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt`` (and ``ema.pt`` where the run
keeps an exponential average), which is how DeepSpeed
lays its universal checkpoints out, and is made from the native files when a run resumes on another layout. DeepSpeed's
own converter and loader (0.19.8) are not used: they know no stage 0, join the padding of the GLU's width as if it were
columns, and cut for tensor parallelism under ZeRO-3 only with its AutoTP. How parts join is told by ``weights/``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import UserError
from ..models.parameters import ParameterSpec, shard, unshard
from . import store
from .native import EMA, FP32, MOMENTS, STEP, NotTrained, Reader, open_reader
from .weights import Part, describe_part, part_file, read_tensor

FOLDER = "universal"
Progress = Callable[[int, int], None]


def whole(checkpoint: Path) -> Path | None:
    """The universal form beside a checkpoint if it is there; a folder of that name was renamed to it when whole."""
    folder = checkpoint / FOLDER
    return folder if (folder / store.MANIFEST).is_file() else None


def make(checkpoint: Path, manifest: dict[str, Any], progress: Progress) -> Path:
    """Make the universal form; it appears whole or not at all. One process calls this.

    Args:
        checkpoint: a verified checkpoint folder.
        manifest: its manifest.
        progress: told (parameters done, parameters in all).

    Raises:
        UserError: a file cannot be read or written.
    """
    partial = checkpoint / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed conversion left
    try:
        _write(checkpoint, manifest, partial / "zero", progress)
        facts = {"format": 1, "state": manifest["state"], "made_from": manifest["layout"]}
        store.seal(partial, checkpoint / FOLDER, facts)
    except UserError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except (OSError, RuntimeError, KeyError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(checkpoint).free / 2**20
        raise UserError(
            f"{checkpoint}: its universal form could not be made ({str(error).splitlines()[0]}; {free:.0f} MiB free); "
            "the checkpoint itself is intact and resumes on the layout that wrote it"
        ) from None
    return checkpoint / FOLDER


def _write(checkpoint: Path, manifest: dict[str, Any], target: Path, progress: Progress) -> None:
    layout = manifest["layout"]
    tensor, data = layout["tensor"], layout["data"] * layout["sequence"]
    parts = {
        (stage, rank): describe_part(part_file(checkpoint, stage, rank))
        for stage in range(layout["pipeline"])
        for rank in range(tensor)
    }
    keys = [FP32, *MOMENTS, *([EMA] if manifest.get("ema") else [])]
    total, done = sum(len(parts[stage, 0]) for stage in range(layout["pipeline"])), 0
    for stage in range(layout["pipeline"]):
        readers = [
            open_reader(checkpoint / "engine", stage * tensor + rank, data, manifest["zero_stage"])
            for rank in range(tensor)
        ]
        for name in parts[stage, 0]:
            progress(done, total)
            described = [parts[stage, rank][name] for rank in range(tensor)]
            try:
                _write_parameter(name, keys, readers, described, target / name)
            except NotTrained:  # such as a frozen theta, which is fp32 in any run
                local = [read_tensor(part_file(checkpoint, stage, rank), name) for rank in range(tensor)]
                _write_value(local, described[0], target / name / f"{FP32}.pt")
            done += 1
    progress(total, total)


def _write_parameter(name: str, keys: list[str], readers: list[Reader], parts: list[Part], folder: Path) -> None:
    folder.mkdir(parents=True)
    for key in keys:
        local = [reader(name, key).view(part.local_shape) for reader, part in zip(readers, parts, strict=True)]
        _write_value(local, parts[0], folder / f"{key}.pt")
    torch.save(readers[0](name, STEP).clone(), folder / f"{STEP}.pt")


def _write_value(local: list[Tensor], part: Part, path: Path) -> None:
    full = unshard(local, part.shape, part.dim)
    # clone: a view would be written with the whole file that it is mapped from
    torch.save({"param": full.clone(), "cat_dim": part.dim or 0}, path)


class UniversalForm:
    """Reads parts of a universal form for one rank of any layout.

    Args:
        folder: ``.../universal``.
        tensor_rank: this rank among those that share each layer.
    """

    def __init__(self, folder: Path, tensor_rank: int):
        self.folder, self.tensor_rank = folder / "zero", tensor_rank

    def _load(self, name: str, key: str) -> Any:
        path = self.folder / name / f"{key}.pt"
        try:
            return torch.load(path, map_location="cpu", mmap=True)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{path}: not readable ({str(error).splitlines()[0]}); it is another model") from None

    def part(self, name: str, key: str, spec: ParameterSpec, local_shape: tuple[int, ...]) -> Tensor:
        """This rank's fp32 part of a parameter's value or moment, zero where the padded shape exceeds it."""
        full = self._load(name, key)["param"]
        if tuple(full.shape) != spec.shape:
            raise UserError(f"{self.folder / name}: is {list(full.shape)}, this model needs {list(spec.shape)}")
        return shard(full, spec, local_shape, self.tensor_rank)

    def keys(self, name: str) -> tuple[str, ...]:
        """What is kept of a parameter beside its steps."""
        # An average of no step yet, as where the first was skipped, begins anew.
        averaged = (self.folder / name / f"{EMA}.pt").is_file() and self.step(name) > 0
        return (FP32, *MOMENTS, *([EMA] if averaged else []))

    def step(self, name: str) -> float:
        """Steps the optimiser has taken with a parameter."""
        return float(self._load(name, STEP))
