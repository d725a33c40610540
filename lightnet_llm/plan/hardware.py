"""What a card and its links do: shipped measurements, or those of `lightnet plan --calibrate`.

One JSON file, cards by name. Each figure has value, unit, source, card, date, and whether it is assumed. A card that is `like`
another takes that one's figures, scaled by peak rate (products), by copy rate (what reads and writes memory) or by the host's
time for a block (that with ZeRO-3, tensor or sequence parallelism).
"""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..errors import UserError, nearest
from ..training.metrics import PEAK_FLOPS

SHIPPED = Path(__file__).parent / "measurements.json"
FORMAT = 1
BY_PEAK = ("gemm_flop_s", "loss_flop_s")
BY_HOST = ("host_stage_3_s", "host_tensor_s", "host_shared_s", "host_sequence_s")
BY_COPY = ("scan_lrpe_s", "scan_s", "scan_torch_s", "norm_s", "gated_norm_s", "swiglu_s", "toeplitz_s")
FIGURES = (
    *BY_PEAK, *BY_COPY, "memory_bytes", "context_bytes", "fragmentation", "copy_bytes_s", "sustained", "host_block_s",
    *BY_HOST, "host_step_s", "per_node", "nvlink_bytes_s", "nvlink_latency_s", "infiniband_bytes_s",
    "infiniband_latency_s",
)  # fmt: skip
PERHAPS_ZERO = ("context_bytes", "fragmentation")
MEND = "mend it there, or write the file with lightnet plan --calibrate"


@dataclass(frozen=True)
class Link:
    """Between the ranks of a group. Bytes a rank sends per second, and seconds of one step of a collective."""

    name: str
    bytes_s: float
    latency_s: float


class Hardware:
    """One card. Figures are attributes, in SI units, by the names of :data:`FIGURES`.

    Args:
        key: as on the command line.
        card: the card's name.
        peak_flop_s: dense bf16, of the data sheet.
        figures: see the module.
    """

    memory_bytes: int
    context_bytes: int
    fragmentation: float
    copy_bytes_s: float
    loss_flop_s: float
    scan_lrpe_s: float
    scan_s: float
    scan_torch_s: float
    norm_s: float
    gated_norm_s: float
    swiglu_s: float
    toeplitz_s: float
    sustained: float
    host_block_s: float
    host_stage_3_s: float
    host_tensor_s: float
    host_shared_s: float
    host_sequence_s: float
    host_step_s: float
    per_node: int

    def __init__(self, key: str, card: str, peak_flop_s: float, figures: dict[str, dict[str, Any]], link: str):
        self.key, self.card, self.peak_flop_s, self.figures, self.link = key, card, peak_flop_s, figures, link
        for name, figure in figures.items():
            if name != "gemm_flop_s" and not name.startswith(("nvlink", "infiniband")):
                setattr(self, name, figure["value"])

    def in_hosts_of(self, cards: int) -> Hardware:
        """The same card in hosts of so many."""
        found = copy.copy(self)
        found.per_node = cards
        return found

    @cached_property
    def nvlink(self) -> Link:
        """Inside a host; PCIe of cards that have no NVLink."""
        return Link(self.link, self.figures["nvlink_bytes_s"]["value"], self.figures["nvlink_latency_s"]["value"])

    @cached_property
    def infiniband(self) -> Link:
        """Between hosts."""
        return Link(
            "InfiniBand", self.figures["infiniband_bytes_s"]["value"], self.figures["infiniband_latency_s"]["value"]
        )

    @cached_property
    def _rates(self) -> list[tuple[float, float]]:
        return [(math.log(flop), math.log(rate)) for flop, rate in sorted(self.figures["gemm_flop_s"]["value"])]

    def gemm_flop_s(self, flop: float) -> float:
        """Rate of a product of so many FLOP: between measured sizes by logarithms, beyond them as at the nearest."""
        points, at = self._rates, math.log(max(flop, 1.0))
        if at <= points[0][0]:  # so small that its launch takes the time
            return math.exp(points[0][1]) * flop / math.exp(points[0][0])
        for (x0, y0), (x1, y1) in pairwise(points):
            if at <= x1:
                return math.exp(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
        return math.exp(points[-1][1])

    @property
    def assumed(self) -> list[str]:
        """Names of figures that nobody measured on this card."""
        return [name for name, figure in self.figures.items() if figure["assumed"]]


def cards(path: Path | None = None) -> list[str]:
    """Names that ``--gpu`` takes."""
    return list(_read(path or SHIPPED))


def load_hardware(name: str, path: Path | None = None) -> Hardware:
    """The card of this name, from a calibration's file or the shipped one.

    Raises:
        UserError: no such card, or a file that does not hold one.
    """
    found = _read(path or SHIPPED)
    shipped = _read(SHIPPED)
    name = next((one for one in found if one.lower() == name.lower()), name)
    if name not in found:
        # A family's name, such as a100, means one of its cards.
        family = [f"'{one}'" for one in found if name and one.lower().startswith(name.lower())]
        hint = f" (did you mean {' or '.join(family)}?)" if family else nearest(name, list(found))
        where, names = f" in {path}" if path else "", ", ".join(found) or "none"
        raise UserError(f"--gpu {name}: no figures{where}{hint}; there are {names}; others by --calibrate")
    try:
        return _hardware(name, found, shipped)
    except RecursionError:
        problem = f"card '{name}' is like cards that are like it"
    except (TypeError, ValueError, ArithmeticError) as error:
        problem = str(error)
    raise UserError(f"{path or SHIPPED}: not as --calibrate writes it: {problem}; {MEND}")


def _hardware(name: str, found: dict[str, Any], shipped: dict[str, Any]) -> Hardware:
    entry = found[name]
    _check(name, entry)
    own: dict[str, dict[str, Any]] = entry["figures"]
    peak = float(entry["peak_flop_s"]) if "peak_flop_s" in entry else PEAK_FLOPS[entry["peak"]]
    figures, link = dict(own), "NVLink"
    if "like" in entry:
        # A calibrated card is like the shipped one of its own name.
        others = shipped if entry["like"] == name else {**shipped, **found}
        if entry["like"] not in others:
            raise ValueError(f"card '{name}' is like '{entry['like']}', a card that has no figures")
        other = _hardware(entry["like"], others, shipped)
        link = other.link
        peaks = peak / other.peak_flop_s
        copy, host = (
            own[key]["value"] / other.figures[key]["value"] if key in own else 1.0
            for key in ("copy_bytes_s", "host_block_s")
        )
        for key, figure in other.figures.items():
            figures.setdefault(key, _scaled(key, figure, peaks, copy, host, other.card))
    missing = [key for key in FIGURES if key not in figures]
    if missing:
        raise ValueError(f"card '{name}' has no figure '{missing[0]}', and is like no card that has")
    return Hardware(name, entry["card"], peak, figures, entry.get("link", link))


def _check(name: str, entry: Any) -> None:
    """Every part of an entry is there and can be computed with, or a ValueError says which is not and why."""
    where = f"card '{name}'"
    if not isinstance(entry, dict) or not isinstance(entry.get("figures"), dict):
        raise ValueError(f"{where} is not a mapping that holds figures")
    for key in ("card", "like", "link"):
        if not isinstance(entry.get(key, None if key == "card" else ""), str):
            raise ValueError(f"{where} has {key} {_shown(entry.get(key))}, not a name")
    if "peak_flop_s" in entry:
        if not _positive(entry["peak_flop_s"]):
            raise ValueError(f"{where} has peak_flop_s {_shown(entry['peak_flop_s'])}, not a finite positive number")
    elif not isinstance(entry.get("peak"), str) or entry["peak"] not in PEAK_FLOPS:
        raise ValueError(f"{where} has no peak_flop_s, nor a peak among {', '.join(PEAK_FLOPS)}")
    for key, figure in entry["figures"].items():
        where = f"card '{name}', figure '{key}'"
        if key not in FIGURES:
            raise ValueError(f"{where}: no figure has this name{nearest(key, list(FIGURES))}")
        missing = [part for part in ("value", "unit", "assumed") if not isinstance(figure, dict) or part not in figure]
        if missing:
            raise ValueError(f"{where} has no {missing[0]}")
        if not isinstance(figure["assumed"], bool):
            raise ValueError(f"{where}: assumed is {_shown(figure['assumed'])}, not true or false")
        if (wanted := _unlike(key, figure["value"])) is not None:
            raise ValueError(f"{where}: value is {_shown(figure['value'])}, not {wanted}")


def _unlike(key: str, value: Any) -> str | None:
    """What the value of this figure should be, None where it is."""
    if key == "gemm_flop_s":
        pairs = value if isinstance(value, list) else []
        fits = all(isinstance(pair, list) and len(pair) == 2 and all(map(_positive, pair)) for pair in pairs)
        return None if pairs and fits else "a list of pairs [FLOP, FLOP/s] of finite positive numbers"
    if key == "per_node":
        return None if _positive(value) and isinstance(value, int) else "a whole number from 1 on"
    if key in PERHAPS_ZERO and value == 0 and not isinstance(value, bool):
        return None
    return None if _positive(value) else "a finite positive number"


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _scaled(key: str, figure: dict[str, Any], peak: float, copy: float, host: float, card: str) -> dict[str, Any]:
    value = figure["value"]
    if key == "gemm_flop_s":
        value = [[flop, rate * peak] for flop, rate in value]
    elif key in BY_PEAK:
        value = value * peak
    elif key in BY_COPY:
        value = value / copy
    elif key in BY_HOST:
        value = value * host
    by = "peak" if key in BY_PEAK else "copy rate" if key in BY_COPY else "host" if key in BY_HOST else ""
    source = f"as of {card}" + (f", scaled by {by}" if by else "")
    return {"value": value, "unit": figure["unit"], "source": source, "card": None, "date": None, "assumed": True}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); write one with lightnet plan --calibrate"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); write one with lightnet plan --calibrate") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("cards"), dict):
        raise UserError(f"{path}: not a file of lightnet plan --calibrate (format {FORMAT}); write one with it")
    return data["cards"]
