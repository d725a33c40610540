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

BETWEEN = 32  # numbers of cards that are tried below a doubling
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
            raise UserError(str(self.none_fits))
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

    @property
    def budget(self) -> int:
        """Tokens of the run; 0 where it has hours alone."""
        train = self.config.train
        return train.tokens or (train.steps or 0) * train.global_batch * self.config.data.sequence_length

    def tokens(self, row: Row) -> int:
        """Budget of the run, or what a layout comes to in its hours."""
        return self.budget if self.hours is None else int(3600 * self.hours * self.tokens_per_second(row))

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
        slower, why = other.time.total - row.time.total, ""
        if 0 < seconds <= slower:
            why = f", most of it {what} (+{seconds:.2g} s)"
        elif seconds > slower > 0:
            why = f" ({what} +{seconds:.2g} s, less of others)"
        longer = (
            f"{100 * more:.1f} % longer{why}"
            if more >= 5e-4
            else "as long"
            if more > -5e-4
            else f"{-100 * more:.1f} % less"
        )
        return f"{start}, {row.time.total:.3g} s; {other.name()}, the next in other sizes, takes {longer}."

    @cached_property
    def none_fits(self) -> str | None:
        """Why no layout does and what would help, in one line; None where one fits."""
        if self.fitting:
            return None
        least = min(self.rows, key=lambda row: row.memory.total)
        text = f"no layout of this run fits {self.world} x {self.hardware.key}: the smallest, {least.name()}, {least.refused}"
        more = self._fewest()
        if more is not None:
            return f"{text}; it fits on {more.world} (--gpus {more.world}), as {more.recommended.name()}"
        return f"{text}; use a smaller data.sequence_length or a card with more memory"

    def _fewest(self) -> Plan | None:
        """The plan on the next larger number of cards that one fits, of several hosts in whole ones; None up to 64 times."""
        parts = Parts(self.config)

        def fits(world: int) -> Plan | None:
            found = find(self.config, world, self.hardware, parts)
            return found if found is not None and found.fitting else None

        low = self.world
        for high in (self.world * 2**power for power in range(1, 7)):
            found = fits(high)
            if found is not None:
                step = 1 if high <= self.hardware.per_node else self.hardware.per_node
                between = range((low // step + 1) * step, high, step)[:BETWEEN]
                return next((one for one in map(fits, between) if one is not None), found)
            low = high
        return None


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
    """As :func:`find`; see :attr:`Plan.none_fits`.

    Raises:
        UserError: no layout is legal.
    """
    if config.model.head not in ("causal_lm", "masked_lm"):
        raise UserError(
            f"model.head: {config.model.head}: lightnet plan knows the memory and time of causal_lm and masked_lm alone; start "
            "the run with train.stop_at_step=20: its metrics tell both"
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
