"""A plan as text, and as plain values for JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..parallel.layout import Layout
from .planner import Plan
from .rows import CLOSE, GIB, Row

SHOWN = 12
FORMAT = 1  # of the JSON: raised when a field changes its meaning or goes
GB = 1e9


def as_dict(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """Everything that is known, for programs; docs/plan.md says what its fields are. Where no layout fits ``recommended`` is
    None, and ``problem`` says why."""
    hardware = plan.hardware
    recommended = plan.recommended if plan.fitting else None
    return {
        "format": FORMAT,
        "name": plan.config.train.name,
        "parameters": plan.model_parameters,
        "precision": plan.config.train.precision,
        "tokens": plan.tokens(recommended) if recommended is not None else plan.budget or None,
        "hours": plan.hours,
        "tokens_per_step": plan.config.train.global_batch * plan.config.data.sequence_length,
        "gpus": plan.world,
        "gpu": {
            "name": hardware.key,
            "card": hardware.card,
            "memory_bytes": hardware.memory_bytes,
            "peak_flop_s": hardware.peak_flop_s,
            "assumed": hardware.assumed,
        },
        "price": price,
        "layouts": [_row(plan, row, price) for row in plan.rows],
        "problem": plan.none_fits,
        "recommended": None
        if recommended is None
        else {
            **_row(plan, recommended, price),
            "reason": plan.reason(),
            "overrides": plan.overrides(recommended),
        },
        "configured": _row(plan, plan.configured, price) if plan.configured is not None else {"refused": plan.problem},
    }


def _row(plan: Plan, row: Row, price: float | None) -> dict[str, Any]:
    choice = row.choice
    layout = Layout(choice.tensor, choice.pipeline, choice.sequence, row.data)
    memory = {**row.memory.kinds(), "total": row.memory.total, "stage": row.stage, "peak": row.memory.peak}
    return {
        "layout": layout.as_dict(),
        "zero_stage": choice.zero_stage,
        "tensor_sequence_parallel": choice.tensor_sequence_parallel,
        "fits": row.refused is None,
        "close": row.close,
        "refused": row.refused,
        "parameters_per_rank": row.parameters,
        "micro_batch": row.micro_batch,
        "gradient_accumulation_steps": row.accumulation,
        "recompute_every": row.recompute_every,
        "largest_micro_batch": {str(every): largest for every, largest in row.largest_micro_batch.items()},
        "memory_bytes": memory,
        "block_bytes": {"kept": row.block, "recomputed": row.block_again},
        "moved_per_step": [asdict(one) for one in row.moved],
        "step_seconds": {**row.time.computation(), "communication": row.time.communication, "total": row.time.total},
        "tokens_per_second": plan.tokens_per_second(row),
        "model_flop_utilisation": plan.utilisation(row),
        "days": plan.days(row),
        "cost": cost(plan, row, price),
    }


def cost(plan: Plan, row: Row, price: float | None) -> float | None:
    """Of all cards to the end of the budget, at a price of a card and hour."""
    return None if price is None else plan.days(row) * 24 * plan.world * price


def _money(cost: float | None) -> str:
    return "" if cost is None else f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}"


def command(plan: Plan, row: Row, given: Sequence[str] | None = None) -> str:
    """What starts a layout: on one host at once, on several by a script of ``lightnet launch``."""
    config, *further = given or [str(plan.config.train.name)]
    new = plan.overrides(row)  # in place of those given
    own = ("launch.nodes=", "launch.gpus_per_node=", *(f"{one.split('=')[0]}=" for one in new))
    overrides = [*(one for one in further if not one.startswith(own)), *new]
    if plan.world <= plan.hardware.per_node:
        return f"lightnet train {shlex.join([config, *overrides])} --gpus {plan.world}"
    each = plan.hardware.per_node
    hosts = [f"launch.nodes={plan.world // each}", f"launch.gpus_per_node={each}"]
    return f"lightnet launch {shlex.join([config, *overrides, *hosts])} --emit slurm"


def lines(
    plan: Plan, given: Sequence[str] | None = None, price: float | None = None, every_row: bool = False
) -> list[str]:
    """For people.

    Args:
        given: CONFIG and overrides of the command line, to which the recommendation's are added.
        every_row: list the layouts that do not fit, too.
    """
    hardware, config = plan.hardware, plan.config
    best = plan.recommended if plan.fitting else None
    tokens = plan.budget if best is None else plan.tokens(best)
    budget = f"{tokens:,} tokens" if plan.hours is None else f"{plan.hours:g} hours"
    found = [
        f"{config.train.name}: {plan.model_parameters:,} parameters, {config.train.precision}, "
        f"{config.train.global_batch} x {config.data.sequence_length:,} tokens a step, {budget}, on "
        f"{plan.world} x {hardware.key} ({hardware.card}, {hardware.memory_bytes / GIB:.1f} GiB)",
        "",
        *_table(plan, price, every_row),
        "",
        *(_recommendation(plan, best, given) if best is not None else []),
    ]
    own = plan.configured
    if own is None:
        found.append(f"as configured: refused: {plan.problem}")
    elif own.refused:
        found.append(f"as configured ({own.name()}): {own.refused}")
    else:
        found.append(
            f"as configured ({own.name()}, micro_batch {own.micro_batch}, recompute_every {own.recompute_every}): "
            f"{own.memory.total / GIB:.1f} GiB, {own.time.total:.3g} s a step, {plan.days(own):.3g} days"
            + (f", cost {_money(cost(plan, own, price))}" if price is not None else "")
        )
    if hardware.assumed:
        found.append(f"assumed, not measured on this card: {', '.join(hardware.assumed)}; lightnet plan --calibrate")
    return found


def _recommendation(plan: Plan, best: Row, given: Sequence[str] | None) -> list[str]:
    """The layout to take: why, the command, where its memory and time go."""
    found = [
        f"recommended: {plan.reason()}",
        f"  {command(plan, best, given)}",
        *([f"  in {plan.hours:g} hours: {plan.tokens(best):,} tokens"] if plan.hours is not None else []),
        f"  memory of a card, {_stage(best)}GiB: {_kinds(best)}, together {best.memory.total / GIB:.1f} of "
        f"{plan.hardware.memory_bytes / GIB:.1f}; peak in {best.memory.peak}",
        f"  a step, s: {_times(best)}",
    ]
    for one in best.moved:
        found.append(
            f"  {one.axis}: {one.bytes / GB:.3g} GB a card and step over {one.link}, {one.calls} messages, {one.seconds:.3g} s"
        )
    return found


def _table(plan: Plan, price: float | None, every_row: bool) -> list[str]:
    head = ["layout", "parameters", "micro (largest)", "recompute", "GiB", "step s", "tokens/s", "MFU", "days"]
    head += ["cost"] if price is not None else []
    shown = plan.rows if every_row else _best_of_each(plan.fitting)[:SHOWN]
    rows = []
    for row in shown:
        total, fits = row.memory.total / GIB, row.refused is None
        largest = max(row.largest_micro_batch.get(row.recompute_every, 0), row.micro_batch if fits else 0)
        times = [
            f"{row.time.total:.3g}", f"{plan.tokens_per_second(row):,.0f}", f"{100 * plan.utilisation(row):.2g} %",
            f"{plan.days(row):.3g}",
        ]  # fmt: skip
        rows.append(
            [
                row.name(),
                f"{max(row.parameters):,}",
                f"{row.micro_batch} ({largest})",
                str(row.recompute_every),
                f"{total:.1f}{' !' if row.close else ''}",
                *(times if fits else ["does not fit", "", "", ""]),
                *(
                    [_money(cost(plan, row, price))]
                    if price is not None and fits
                    else [""]
                    if price is not None
                    else []
                ),
            ]
        )
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    text = [
        "  ".join(
            cell.ljust(w) if not i else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    if any(row.close for row in shown):
        text.append(f"!: fits, with less than {100 * CLOSE:.0f} % of the memory to spare")
    left = len(plan.rows) - len(shown)
    fitting = len(plan.fitting) - len(shown)
    if left:
        text.append(f"{left} more legal layouts ({fitting} of them fit): --all")
    return [line.rstrip() for line in text]


def _best_of_each(rows: list[Row]) -> list[Row]:
    """The first of each sizes: ZeRO stages often differ little."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        choice = row.choice
        found.setdefault((choice.tensor, choice.pipeline, choice.sequence, choice.tensor_sequence_parallel), row)
    return list(found.values())


def _stage(row: Row) -> str:
    return f"pipeline stage {row.stage}, " if row.choice.pipeline > 1 else ""


def _kinds(row: Row) -> str:
    return ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in row.memory.kinds().items() if size)


def _times(row: Row) -> str:
    parts = {**row.time.computation(), **{f"{axis} traffic": t for axis, t in row.time.communication.items()}}
    return ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts.items() if seconds)
