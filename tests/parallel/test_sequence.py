"""Sequence parallelism: exchanges against one process, bytes that do not grow, lengths that the ranks do not divide."""

from pathlib import Path

import pytest

from tests.conftest import Ranks, steps_of
from tests.forks import Forks
from tests.parallel.test_parity import FIELDS, Baselines, baselines, differences

__all__ = ["baselines"]
SLOW = pytest.mark.slow


FORKS = {
    interpreted: Forks("tests.parallel.exchange_ranks", **({"TRITON_INTERPRET": "1"} if interpreted else {}))
    for interpreted in (False, True)
}


def exchange_ranks(*arguments: str, interpreted: bool = False, timeout: float = 240, **environment: str) -> None:
    """What `python -m tests.parallel.exchange_ranks ARGUMENTS` does; `interpreted`: with Triton's interpreter."""
    done = FORKS[interpreted].run("tests.parallel.exchange_ranks:main", *arguments, timeout=timeout, **environment)
    assert done.code == 0, done.output[-4000:]


@pytest.mark.parametrize("world", ["3", "4", *(pytest.param(world, marks=SLOW) for world in ("2", "5", "8"))])
def test_scans_over_ranks_equal_one(world: str) -> None:
    """Causal and bidirectional scans and MD-TPE, both exchanges, in float64: outputs and every gradient to 1e-10."""
    exchange_ranks(world)


@pytest.mark.parametrize("plant", ["drop_merge", "keep_frame", "drop_gradient", "shift_edge"])
def test_planted_fault_is_seen(plant: str) -> None:
    with pytest.raises(
        AssertionError, match=r"AssertionError: (all_gather|prefix) .*: (output|key|value|query|x|theta): "
    ):
        exchange_ranks("3", PLANT=plant)


def test_float32_states() -> None:
    exchange_ranks("3", "cpu", "torch", "float32")


def test_triton_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    exchange_ranks("2", "cpu", "triton", "float32", interpreted=True, timeout=290)


@pytest.mark.parametrize("world", ["3", pytest.param("5", marks=SLOW)])
def test_kernels_of_the_exchange(world: str) -> None:
    pytest.importorskip("triton")
    exchange_ranks(world, "cpu", "torch", "float32", interpreted=True, timeout=290)


@pytest.mark.parametrize(
    "plant",
    ["drop_merge", "drop_gradient", pytest.param("keep_frame", marks=SLOW), pytest.param("shift_edge", marks=SLOW)],
)
def test_a_fault_in_the_kernels_of_the_exchange_is_seen(plant: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(AssertionError, match=r"AssertionError: all_gather .*: (output|key|value|query|theta): "):
        exchange_ranks("3", "cpu", "torch", "float32", interpreted=True, PLANT=plant)


LAYOUTS = {
    "sp2_prefix": (2, ["parallel.sequence=2", "parallel.sequence_exchange=prefix"]),
    "sp3_recompute": (3, ["parallel.sequence=3", "parallel.recompute_every=1"]),  # 64 tokens: two columns of padding
    "sp3": (3, ["parallel.sequence=3"]),
    "sp3_pp2": (6, ["parallel.sequence=3", "parallel.pipeline=2"]),
    "sp3_dropout": (3, ["parallel.sequence=3", "model.dropout=0.2"]),
    "sp4_prefix_recompute": (
        4,
        ["parallel.sequence=4", "parallel.sequence_exchange=prefix", "parallel.recompute_every=1"],
    ),
    "sp3_tp2_zero3": (6, ["parallel.sequence=3", "parallel.tensor=2", "parallel.zero_stage=3"]),
    "sp5_no_lrpe": (5, ["parallel.sequence=5", "model.lrpe=false", "parallel.sequence_exchange=prefix"]),
    "sp3_bidirectional": (3, ["parallel.sequence=3", "model.causal=false"]),
    "sp4_bidirectional_prefix": (
        8,
        ["parallel.sequence=4", "model.causal=false", "parallel.sequence_exchange=prefix", "parallel.pipeline=2"],
    ),
    "sp3_no_tpe": (3, ["parallel.sequence=3", "model.tpe=false"]),
}


@pytest.mark.parametrize("name", [n if n == "sp3_recompute" else pytest.param(n, marks=SLOW) for n in LAYOUTS])
def test_training_equals_one_process(name: str, ranks: Ranks, tiny: Path, tmp_path: Path, baselines: Baselines) -> None:
    world, overrides = LAYOUTS[name]
    base = baselines.get([x for x in overrides if x.startswith("model.")])
    rows = ranks.train(world, tiny, overrides, tmp_path, "run")
    loss, norm = differences(steps_of(rows, *FIELDS), base)
    assert loss < 1e-5 and norm < 1e-4, f"{name}: loss {loss:.1e}, gradient norm {norm:.1e}"


def test_states_in_bf16_stay_close(ranks: Ranks, tiny: Path, tmp_path: Path, baselines: Baselines) -> None:
    overrides = ["parallel.sequence=2", "parallel.sequence_exchange_dtype=bf16"]
    rows = ranks.train(2, tiny, overrides, tmp_path, "run")
    loss, norm = differences(steps_of(rows, *FIELDS), baselines.get([]))
    assert 1e-7 < loss < 2e-3 and norm < 2e-2, f"loss {loss:.1e}, gradient norm {norm:.1e}"


def test_validation_of_padded_rows(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    common = ["train.steps=2", "validation.interval=2"]
    found = []
    for world, extra in ((1, []), (3, ["parallel.sequence=3"])):
        rows = ranks.train(world, tiny, common + extra, tmp_path, f"run{world}")
        found.append([row["validation"]["heldout"]["loss"] for row in rows if "validation" in row])
    assert len(found[0]) == 1 and found[0] == pytest.approx(found[1], abs=1e-5)
