"""Writes the table of predicted layouts in parallel.md, between its two marks, as `lightnet plan` gives it today.

python docs/make_layouts.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

from lightnet_llm.config import load_config
from lightnet_llm.plan import Row, planner
from lightnet_llm.plan.hardware import load_hardware

PAGE = Path(__file__).with_name("parallel.md")
BEGIN, END = "<!-- made by docs/make_layouts.py -->\n", "<!-- end -->\n"
CASES = [("pile_150m", 2048), ("pile_379m", 2048), ("pile_1b", 2048), ("pile_2.9b", 2048), ("pile_379m", 32_768),
         ("pile_2.9b", 32_768), ("pile_379m", 262_144), ("pile_2.9b", 1_048_576)]  # fmt: skip
GPUS, CARDS, OTHERS = (2, 4, 8), ("h100", "h200"), 2


def cell(name: str, length: int, gpus: int, card: str) -> str:
    """The recommended layout, its tokens/s, and how much longer the next others in other sizes take."""
    long = [f"data.sequence_length={length}", "train.global_batch=8"] if length != 2048 else []
    found = planner.find(load_config(name, long), gpus, load_hardware(card))
    assert found is not None
    if not found.fitting:
        return "none fits"
    best = found.recommended
    again = ", computed again" if best.recompute_every else ""
    others, seen = [], {named(best)}
    for row in found.roomy:
        if named(row) not in seen and len(others) < OTHERS:
            seen.add(named(row))
            more = 100 * (row.time.total / best.time.total - 1)
            others.append(f"{named(row)}{', computed again' if row.recompute_every else ''} {more:+.0f} %")
    return f"{best.name()}{again}: {found.tokens_per_second(best):,.0f} ({'; '.join(others)})"


def named(row: Row) -> str:
    """Sizes, without the ZeRO stage."""
    return row.name().split(",")[0]


def table() -> str:
    """Markdown."""
    lines = ["| model | tokens a row | card | two GPUs | four GPUs | eight GPUs |", "|---|---|---|---|---|---|"]
    for (name, length), card in itertools.product(CASES, CARDS):
        cells = " | ".join(cell(name, length, gpus, card) for gpus in GPUS)
        lines.append(f"| `{name}` | {length:,} | {card} | {cells} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
