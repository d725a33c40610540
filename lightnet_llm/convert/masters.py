"""The fp32 master weights of a bf16 run, one tensor at a time: from its universal form, or from DeepSpeed's own files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checkpoint import universal
from ..checkpoint.native import FP32, NotTrained, Reader, open_reader
from ..checkpoint.weights import Part, describe_part, part_file
from ..errors import UserError
from ..models.parameters import unshard


class Weights(Protocol):
    """Full tensors by name."""

    shapes: dict[str, tuple[int, ...]]

    def read(self, name: str) -> Tensor:
        """A tensor in memory of its own."""
        ...


class Masters:
    """Opened when the first tensor is read.

    Args:
        checkpoint: a verified checkpoint folder.
        manifest: its manifest.
        trust_pickle: whether DeepSpeed's files, which are pickles, are read.
        weights: as trained; what is frozen has no master.
    """

    def __init__(self, checkpoint: Path, manifest: dict[str, Any], trust_pickle: bool, weights: Weights):
        self.checkpoint, self.manifest, self.trust_pickle = checkpoint, manifest, trust_pickle
        self.weights, self.shapes = weights, weights.shapes
        self._stages: dict[str, tuple[list[Reader], list[Part]]] | None = None

    def read(self, name: str) -> Tensor:
        """A full fp32 tensor without padding.

        Raises:
            UserError: its files are missing, or pickles that are not trusted.
        """
        made = universal.whole(self.checkpoint)
        if made is not None:
            path = made / "zero" / name / f"{FP32}.pt"
            try:  # tensors only
                full: Tensor = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["param"]
            except (OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
                raise UserError(f"{path}: not readable ({str(error).splitlines()[0]})") from None
            return full.clone()
        if self._stages is None:
            self._stages = self._open()
        readers, parts = self._stages[name]
        try:
            local = [reader(name, FP32).view(part.local_shape) for reader, part in zip(readers, parts, strict=True)]
        except NotTrained:
            return self.weights.read(name)
        return unshard(local, parts[0].shape, parts[0].dim).clone()

    def _open(self) -> dict[str, tuple[list[Reader], list[Part]]]:
        if not self.trust_pickle:
            raise UserError(
                f"{self.checkpoint / 'engine'}: the fp32 master weights are in DeepSpeed's pickled files, which can run code "
                "when they are loaded; pass --trust-pickle for a checkpoint of your own, or leave --dtype out"
            )
        layout = self.manifest["layout"]
        tensor, data = layout["tensor"], layout["data"] * layout["sequence"]
        stages = {}
        for stage in range(layout["pipeline"]):
            parts = [describe_part(part_file(self.checkpoint, stage, rank)) for rank in range(tensor)]
            readers = [
                open_reader(self.checkpoint / "engine", stage * tensor + rank, data, self.manifest["zero_stage"])
                for rank in range(tensor)
            ]
            for name in parts[0]:
                stages[name] = readers, [part[name] for part in parts]
        return stages
