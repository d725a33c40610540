"""Which rank holds what: known without any ranks, for `lightnet train --dry-run`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..config.deepspeed import effective_zero_stage
from ..config.run import RunConfig
from ..models.parameters import spec_of
from . import stages
from .layout import Layout

MOMENTS = 8  # bytes of Adam's two moments, fp32


@dataclass(frozen=True)
class Holding:
    """A rank's part of the model.

    Attributes:
        holds: its layers, in words.
        parameters: elements of its part, padding included; of a tied embedding on both ends of a pipeline, each counts.
        weight_bytes, gradient_bytes, optimizer_bytes: of what stays in memory between layers and steps, ZeRO's cutting
            counted; without activations and buffers.
    """

    holds: str
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def stage_holdings(config: RunConfig, layout: Layout, bounds: list[int] | None = None) -> list[Holding]:
    """What a rank of each pipeline stage holds.

    Args:
        bounds: of the stages; None: as the configuration asks for, with ``time`` as if by parameters.
    """
    model, zero, bf16 = config.model, effective_zero_stage(config), config.train.precision == "bf16"
    if layout.pipeline == 1:
        bounds = [0, len(stages.units(model))]
    elif bounds is None and config.parallel.pipeline_partition == "uniform":
        bounds = stages.uniform(model, layout.pipeline)
    elif bounds is None:
        bounds = stages.balanced(stages.counts(model, layout.tensor), layout.pipeline)
    parts, ranks = stages.unit_parameters(model, layout.tensor), layout.data * layout.sequence
    average = 4 if config.train.ema is not None else 0
    found = []
    for stage in range(layout.pipeline):
        held = {id(p): p for part in parts[bounds[stage] : bounds[stage + 1]] for p in part}.values()
        trained = sum(p.numel() for p in held if p.requires_grad)
        # ZeRO-3 keeps fp32 parameters, which autocast computes with in bf16.
        narrow = bf16 and zero < 3
        weights = sum(p.numel() * (2 if narrow and not spec_of(p).keep_fp32 else 4) for p in held)
        masters = 4 if zero else 0  # without ZeRO a parameter is its own
        found.append(
            Holding(
                stages.describe(model, bounds, stage),
                sum(p.numel() for p in held),
                -(-weights // ranks) if zero == 3 else weights,
                -(-4 * trained // (ranks if zero >= 2 else 1)),
                -(-(MOMENTS + masters + average) * trained // (ranks if zero else 1)),
            )
        )
    return found


def rank_table(config: RunConfig, layout: Layout) -> list[dict[str, Any]]:
    """One mapping a rank: its coordinates and what it holds."""
    held = stage_holdings(config, layout)
    places = [layout.coordinates(rank) for rank in range(layout.world)]
    return [{**place, **asdict(held[place["pipeline"]])} for place in places]


def lines(table: list[dict[str, Any]]) -> list[str]:
    """The table as text."""
    mib = 2**20
    head = ["rank", "stage", "tensor", "sequence", "data", "parameters", "weights", "gradients", "optimizer", "holds"]
    rows = [
        [
            *map(str, (rank, row["pipeline"], row["tensor"], row["sequence"], row["data"])),
            f"{row['parameters']:,}",
            *(f"{row[f'{what}_bytes'] / mib:,.1f} MiB" for what in ("weight", "gradient", "optimizer")),
            row["holds"],
        ]
        for rank, row in enumerate(table)
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            text.ljust(width) if column == len(head) - 1 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
