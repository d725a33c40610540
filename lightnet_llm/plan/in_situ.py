"""What parts of a training step do together, which their single figures do not tell: a card under load for seconds, and the
host with hooks around every block.

Work of its own sizes: no configuration is measured that a plan may be asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import validate
from ..config.model import ModelConfig
from ..models.block import Block
from ..models.context import ForwardContext
from ..models.layers import PlainLayers
from ..models.parameters import initialize, spec_of
from .activations import Work
from .hardware import Hardware
from .step_time import block_seconds

BLOCKS, HELD = 4, 3.0  # of a stack under load, and the seconds of it
FEW = 64  # tokens with which the device waits for the host
NARROW = {"width": 512, "heads": 4, "glu_width": 1344, "vocab_size": 512, "tpe": False}  # so that the host is slower
SHORT, LONG = 2, 8  # blocks, whose difference is without the rest of a step


class Stack:
    """Blocks in bf16 on a row of packed sequences, forward and backward.

    Args:
        config: with as many layers.
        rows, length: sequences and tokens of each.
    """

    def __init__(self, config: ModelConfig, device: torch.device, rows: int, length: int):
        self.device, self.work = device, Work(config, rows, length)
        self.blocks = [Block(config, PlainLayers(), index) for index in range(config.layers)]
        for block in self.blocks:
            initialize(block, 1)
            block.to(device)
            for parameter in block.parameters():
                if not spec_of(parameter).keep_fp32:
                    parameter.data = parameter.data.bfloat16()
        shape = (1, rows * length, config.width)
        self.x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        self.upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)
        self.context = ForwardContext(cu_seqlens=torch.arange(0, rows * length + 1, length, dtype=torch.int32))

    def step(self) -> None:
        """Both passes; gradients go at once."""
        x = self.x
        for block in self.blocks:
            x = block(x, self.context)[0]
        x.backward(self.upstream)
        self.x.grad = None
        for block in self.blocks:
            for parameter in block.parameters():
                parameter.grad = None

    def seconds(self, held: float, repeats: int) -> float:
        """Of a step of the last third, when they went on for ``held`` seconds and at least ``repeats`` times."""
        for _ in range(5):
            self.step()
        wait(self.device)
        marks, end = [self._mark()], time.perf_counter() + held
        while len(marks) <= repeats or time.perf_counter() < end:
            self.step()
            marks.append(self._mark())
            if len(marks) > 4 and self.device.type == "cuda":
                marks[-4].synchronize()  # a host that runs ahead would go on after the end
        wait(self.device)
        first = 2 * len(marks) // 3 - 1
        passed = (
            marks[-1] - marks[first] if isinstance(marks[0], float) else 1e-3 * marks[first].elapsed_time(marks[-1])
        )
        return float(passed) / (len(marks) - 1 - first)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def wait(device: torch.device) -> None:
    """For all that was asked of a card."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_block(config: ModelConfig, device: torch.device, repeats: int) -> float:
    """Seconds of the host for a block, which has so few tokens that the device waits."""
    return Stack(config, device, 1, FEW).seconds(0.0, 3 * repeats) / config.layers


def sustained(config: ModelConfig, device: torch.device, rows: int, length: int, hardware: Hardware) -> float:
    """Seconds of real blocks after seconds of load, over those of their parts, measured one at a time on a cool card.

    Clocks fall when all of a card works at once, and what lies between kernels counts, too. Figures of ``hardware`` are
    those of the parts; a host that is slower than the device is not the device's.
    """
    stack = Stack(config, device, rows, length)
    found = stack.seconds(HELD if device.type == "cuda" else 0.0, 3)
    parts = sum(block_seconds(stack.work, hardware))
    return found / (config.layers * max(parts, hardware.host_block_s))


def host_among_ranks(device: torch.device, repeats: int, **parallel: int) -> float:
    """Seconds of the host for a block's passes, with ZeRO-3 its update too; called on every rank of the started group.

    Args:
        parallel: fields of a run's ``parallel``: tensor, tensor_sequence_parallel, sequence, zero_stage.
    """
    from megatron.core import parallel_state

    from ..parallel.layout import Groups, Layout

    tensor, sequence = parallel.get("tensor", 1), parallel.get("sequence", 1)
    groups = Groups(Layout(tensor, 1, sequence, dist.get_world_size() // (tensor * sequence)))
    short, long = (_step_among_ranks(layers, groups, device, repeats, parallel) for layers in (SHORT, LONG))
    parallel_state.destroy_model_parallel()  # for the next layout
    return max(0.0, long - short) / (LONG - SHORT)


def _step_among_ranks(layers: int, groups: Any, device: torch.device, repeats: int, parallel: dict[str, int]) -> float:
    from ..training.engine import build_engine

    batch = groups.layout.data
    config = validate(
        {
            "model": {**NARROW, "layers": layers},
            "data": {"path": "none", "sequence_length": FEW},
            "train": {"steps": 1000, "global_batch": batch, "micro_batch": 1, "precision": "bf16"},
            "parallel": parallel,
        },
        "calibration",
    )
    engine = build_engine(config, groups, device)
    engine.set_rate(1.0)
    batches = _batches(config.model.vocab_size)
    times = []
    for step in range(5 + repeats):
        wait(device)
        began = time.perf_counter()
        engine.train_step(batches, step, batch)
        wait(device)
        times.append(time.perf_counter() - began)
    engine.engine.destroy()
    return sorted(times[5:])[repeats // 2]


def _batches(vocabulary: int) -> Iterator[dict[str, Tensor]]:
    ids = torch.arange(FEW)[None] % vocabulary
    bounds = torch.tensor([0, FEW], dtype=torch.int32)
    while True:
        yield {"input_ids": ids, "labels": ids, "cu_seqlens": bounds, "sample_ids": torch.zeros(1, dtype=torch.int64)}
