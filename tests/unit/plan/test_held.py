"""Weights, gradients, optimiser and states sent: the planner's bytes are those of real engines, rank by rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lightnet_llm.config import load_config
from lightnet_llm.config.run import RunConfig
from lightnet_llm.parallel.legality import choice_of
from lightnet_llm.plan.hardware import load_hardware
from lightnet_llm.plan.memory import Part, Parts
from lightnet_llm.plan.traffic import traffic
from tests.conftest import ROOT

BF16 = "train.precision=bf16"


def stage_3(ahead: int, live: int, reuse: int) -> list[str]:
    """Limits of what is gathered; no parameter is small enough to stay so always."""
    limits = {"prefetch_bucket_size": ahead, "max_live_parameters": live, "max_reuse_distance": reuse}
    limits["param_persistence_threshold"] = 0
    given = [f"deepspeed.zero_optimization.stage3_{name}={limit}" for name, limit in limits.items()]
    return ["parallel.zero_stage=3", "model.layers=6", *given]


CASES = [
    (1, ["parallel.zero_stage=0"]),
    (2, ["parallel.zero_stage=1"]),
    (2, ["parallel.zero_stage=2"]),
    (2, [BF16]),
    (2, [BF16, "parallel.zero_stage=2"]),
    (3, [BF16, "parallel.zero_stage=3", "train.global_batch=6"]),
    (2, stage_3(100_000, 10**9, 10**9)),
    (2, stage_3(50_000, 10**9, 60_000)),
    (2, stage_3(100_000, 200_000, 60_000)),
    (2, stage_3(0, 10**9, 90_000)),
    (2, [BF16, "parallel.pipeline=2", "model.tie_embeddings=false"]),
    (4, [BF16, "parallel.pipeline=2", "parallel.tensor=2"]),
    (4, [BF16, "parallel.tensor=2", "parallel.sequence=2", "parallel.tensor_sequence_parallel=true"]),
    (2, ["parallel.sequence=2", "parallel.sequence_exchange_dtype=bf16", "model.causal=false"]),
    (3, ["parallel.sequence=3", "parallel.sequence_exchange=prefix", "parallel.recompute_every=2"]),
    (3, ["parallel.sequence=3", "parallel.recompute_every=1"]),
]
KINDS = ("weights", "gradients", "optimizer")


def _states_sent(part: Part, config: RunConfig, every: int) -> int:
    accumulation = config.train.global_batch // (config.train.micro_batch * part.data)
    moved = traffic(part, config.train.micro_batch, every, accumulation, load_hardware("h100"))
    return sum(one.bytes for one in moved if one.axis == "sequence")


def test_every_rank_holds_what_the_planner_says(tiny: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.unit.plan.held_ranks", str(tiny), json.dumps(CASES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(answers) == len(CASES)
    for (world, overrides), ranks in zip(CASES, answers, strict=True):
        config = load_config(str(tiny), overrides)
        parts = Parts(config).of(choice_of(config), world)
        assert len(ranks) == world
        every = config.parallel.recompute_every
        states = {stage: _states_sent(part, config, every) for stage, part in enumerate(parts)}
        for stage in states:
            sent = [held["states_sent"] for held in ranks if held["stage"] == stage]
            assert max(sent) == states[stage], f"{overrides} on {world} ranks: {sent} bytes of states, {states[stage]}"
        for held in ranks:
            part = parts[held["stage"]]
            # ZeRO-3 cuts each of some 40 parameters by itself and rounds up; the others round two groups up to 2 x ranks.
            slack = 12 * 40 if part.zero == 3 else 12 * 2 * 2 * part.ranks if part.ranks == 3 else 0
            if part.zero == 3:  # limits are passed by a parameter at most
                more, largest = held["gathered"] - part.gathered(), config.model.width * 256
                assert -100 * part.model.layers <= more <= largest, f"{overrides}: {more:+} parameters gathered"
            for kind in KINDS:
                more = held[kind] - getattr(part, kind)
                assert 0 <= more <= slack, f"{overrides} on {world} ranks, stage {held['stage']}: {kind} {more:+} bytes"
