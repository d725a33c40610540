"""Every legal layout of a run on so many cards: does it fit, how long does a step take, and which to choose."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tqdm import tqdm

from ..config.run import RunConfig
from ..errors import UserError
from ..parallel.legality import Choice, choice_of, choices, legal_layout, problem
from ..training.metrics import flops_per_token
from .hardware import Hardware
from .memory import Parts, with_choice
from .rows import CLOSE, Row, row_of

ALIKE = 1.02  # step times that differ by less are taken as equal, and the simpler layout is preferred


@dataclass(frozen=True)
class Plan:
    """What was found for one number of cards.

    Attributes:
        rows: every legal layout, those that fit first, shortest step first.
        configured: the configuration's own, with its micro-batch and recomputation; None where it is not legal.
        problem: why not.
    """

    config: RunConfig
    hardware: Hardware
    world: int
    model_parameters: int
    rows: list[Row]
    configured: Row | None
    problem: str | None

    @cached_property
    def fitting(self) -> list[Row]:
        """Rows that fit."""
        return [row for row in self.rows if row.refused is None]

    @property
    def recommended(self) -> Row:
        """The simplest of the fastest that leave some memory, or of all where none does.

        Raises:
            UserError: none fits; names the limit.
        """
        if not self.fitting:
            raise UserError(self._none_fits())
        return min(
            (row for row in self.roomy if row.time.total <= ALIKE * self.roomy[0].time.total),
            key=lambda row: row.simplicity,
        )

    @cached_property
    def roomy(self) -> list[Row]:
        """Rows that fit with some memory to spare, all that fit where there is none."""
        return [row for row in self.fitting if not row.close] or self.fitting

    def tokens_per_second(self, row: Row) -> float:
        """Of the whole run."""
        return self.config.train.global_batch * self.config.data.sequence_length / row.time.total

    def utilisation(self, row: Row) -> float:
        """Model FLOP over the data sheet's, 0 to 1."""
        flops = flops_per_token(self.config.model, self.model_parameters) * self.tokens_per_second(row)
        return flops / (self.world * self.hardware.peak_flop_s)

    @property
    def hours(self) -> float | None:
        """Budget of a run that has one of time alone (``train.hours``), else None."""
        train = self.config.train
        return None if train.tokens or train.steps else train.hours

    def tokens(self, row: Row) -> int:
        """Budget of the run, or what a layout comes to in its hours."""
        train, hours = self.config.train, self.hours
        if hours is not None:
            return int(3600 * hours * self.tokens_per_second(row))
        return train.tokens or (train.steps or 0) * train.global_batch * self.config.data.sequence_length

    def days(self, row: Row) -> float:
        """To the end of the budget, without saving and validation."""
        return self.tokens(row) / self.tokens_per_second(row) / 86400 if self.hours is None else self.hours / 24

    def overrides(self, row: Row) -> list[str]:
        """What of the configuration has to change for a layout, as arguments of ``lightnet train``."""
        config = self.config
        now = {f"parallel.{key}": value for key, value in vars(choice_of(config)).items()}
        now |= {
            "parallel.recompute_every": config.parallel.recompute_every,
            "train.micro_batch": config.train.micro_batch,
        }
        new = {f"parallel.{key}": value for key, value in vars(row.choice).items()}
        new |= {"parallel.recompute_every": row.recompute_every, "train.micro_batch": row.micro_batch}
        return [f"{key}={str(value).lower()}" for key, value in new.items() if value != now[key]]

    def reason(self) -> str:
        """Why the recommended layout, in one sentence."""
        row = self.recommended
        others = [other for other in self.roomy if other.sizes != row.sizes]
        room = f" with {100 * CLOSE:.0f} % of the memory to spare" if not row.close else ""
        start = f"of {len(self.roomy)} layouts that fit{room} ({len(self.rows)} are legal) {row.name()} has the shortest step"
        if self.roomy[0] is not row:
            start = (
                f"{row.name()} is the simplest of those within 2 % of the shortest step ({len(self.roomy)} fit{room})"
            )
        if row.close:
            start = f"no layout leaves {100 * CLOSE:.0f} % of the memory free, so try it before you trust it; {start}"
        if not others:
            return f"{start}, {row.time.total:.3g} s."
        other = others[0]
        more = other.time.total / row.time.total - 1
        what, seconds = max(_differences(row, other).items(), key=lambda item: item[1], default=("", 0.0))
        why = f", most of it {what} (+{seconds:.2g} s)" if seconds > 0 and more > 0 else ""
        longer = (
            f"{100 * more:.1f} % longer{why}"
            if more >= 5e-4
            else "as long"
            if more > -5e-4
            else f"{-100 * more:.1f} % less"
        )
        return f"{start}, {row.time.total:.3g} s; {other.name()}, the next in other sizes, takes {longer}."

    def _none_fits(self) -> str:
        least = min(self.rows, key=lambda row: row.memory.total)
        text = f"no layout of this run fits {self.world} x {self.hardware.key}: the smallest, {least.name()}, {least.refused}"
        parts = Parts(self.config)
        for times in (2, 4, 8, 16, 32, 64):
            more = find(self.config, self.world * times, self.hardware, parts)
            if more is not None and more.fitting:
                return f"{text}; it fits from --gpus {self.world * times} on, as {more.recommended.name()}"
        return f"{text}; use a smaller data.sequence_length or a card with more memory"


def find(
    config: RunConfig,
    world: int,
    hardware: Hardware,
    parts: Parts | None = None,
    wanted: Callable[[Choice], bool] | None = None,
) -> Plan | None:
    """The plan on ``world`` cards, or None where no layout is legal.

    Args:
        parts: of the same model, to share what was worked out for another number of cards.
        wanted: may leave choices out.
    """
    parts, hardware = parts or Parts(config), hardware.in_hosts_of(per_host(config, world, hardware))
    legal = list(legal_choices(config, world, wanted))
    rows = [
        row_of(config, parts, choice, micros, world, hardware)
        for choice, micros in tqdm(
            legal, f"layouts on {world} cards", leave=False, delay=3, disable=None, file=sys.stderr
        )
    ]
    if not rows:
        return None
    rows.sort(
        key=lambda row: (
            row.refused is not None, row.time.total if row.refused is None else row.memory.total, row.simplicity
        )
    )  # fmt: skip
    own = choice_of(config)
    wrong = problem(config, own, world)
    configured = None
    if wrong is None:
        micro, every = config.train.micro_batch, config.parallel.recompute_every
        configured = row_of(config, parts, own, [micro], world, hardware, [every])
    return Plan(config, hardware, world, parts.model_parameters, rows, configured, wrong)


def plan(config: RunConfig, world: int, hardware: Hardware) -> Plan:
    """As :func:`find`.

    Raises:
        UserError: no layout is legal, or none fits.
    """
    if config.model.head not in ("causal_lm", "masked_lm"):
        raise UserError(
            f"model.head: {config.model.head}: lightnet plan knows the memory and time of head: causal_lm and masked_lm"
        )
    zero = config.deepspeed.get("zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        given = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(given, dict) and given.get("device", "none") != "none":
            field = f"deepspeed.zero_optimization.{key}"
            raise UserError(
                f"{field}: lightnet plan does not know what lies outside the card, nor how long the way there takes; plan "
                f"without it ({field}=null), or try the run"
            )
    found = find(config, world, hardware)
    if found is None:
        legal_layout(config, world)
        raise AssertionError("a legal layout was not found")
    _ = found.recommended
    return found


def per_host(config: RunConfig, world: int, hardware: Hardware) -> int:
    """GPUs of a host: as many as the configuration and the card have, of several hosts all the same number."""
    most = min(config.launch.gpus_per_node, hardware.per_node)
    return most if world <= most else max(size for size in range(1, most + 1) if world % size == 0)


def legal_choices(
    config: RunConfig, world: int, wanted: Callable[[Choice], bool] | None = None
) -> Iterator[tuple[Choice, list[int]]]:
    """Layouts that are legal with some micro-batch, and these micro-batches, ascending.

    Sharing tokens is left out where there is nothing to share.
    """
    both = with_choice(config, replace(choice_of(config), tensor_sequence_parallel=True))
    batches = [config.train.global_batch, *(point.batch for point in config.train.batch_ramp)]
    common = math.gcd(*batches)
    trials = {micro: _with_micro(config, micro) for micro in _divisors(common)}
    for choice in choices(both, world):
        if choice.tensor == 1 and choice.tensor_sequence_parallel:
            continue
        if world % choice.model or common % (world // choice.model) or (wanted is not None and not wanted(choice)):
            continue
        micros = [m for m in _divisors(common // (world // choice.model)) if problem(trials[m], choice, world) is None]
        if micros:
            yield choice, micros


def _with_micro(config: RunConfig, micro_batch: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": micro_batch})})


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _differences(row: Row, other: Row) -> dict[str, float]:
    """Seconds that another layout's parts take more."""

    def named(one: Row) -> dict[str, float]:
        return {**one.time.computation(), **{f"{axis} traffic": t for axis, t in one.time.communication.items()}}

    mine, theirs = named(row), named(other)
    return {key: theirs.get(key, 0.0) - mine.get(key, 0.0) for key in {*mine, *theirs}}
