"""A part of the parity matrix (`make parity` runs all of it), and what it does not look at."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks, steps_of
from tests.parallel.matrix import FAULTS, FIELDS, QUICK, Case, Matrix, differences
from tests.parallel.matrix import Matrix as Baselines

__all__ = ["FIELDS", "Baselines", "differences"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def baselines(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(ranks, tiny, tmp_path_factory.mktemp("baselines"))


ZERO_3 = [
    pytest.param(Case(data=2, zero=3, precision="bf16"), marks=SLOW), Case(sequence=2, zero=3, precision="bf16")
]  # fmt: skip


@pytest.mark.parametrize("case", [*QUICK, *ZERO_3], ids=lambda case: case.name)
def test_layout_equals_one_process(case: Case, baselines: Matrix) -> None:
    result = baselines.run(case)
    assert not result.problem, result


QUICK_FAULTS = ("drop_row_reduction", "double_replicated_norm", "drop_state_merge", "drop_shared_sum")


@pytest.mark.parametrize("fault", [pytest.param(f, marks=() if f in QUICK_FAULTS else SLOW) for f in FAULTS])
def test_planted_fault_is_seen(fault: str, baselines: Matrix) -> None:
    assert baselines.run(FAULTS[fault], fault).problem.startswith("loss"), f"{fault} went unnoticed"


def test_validation_ramp_and_group_norms_agree(ranks: Ranks, tiny: Path, tmp_path: Path, baselines: Baselines) -> None:
    """Held-out loss weighs every sample alike, ramps count alike, and kinds of parameters add up to the norm."""
    overrides = [
        "model.norm=rms",
        "train.batch_ramp=[{until_step: 4, batch: 4}]",
        "train.steps=10",
        "logging.groups_interval=5",
    ]
    layouts: dict[str, tuple[int, list[str]]] = {
        "one": (1, []),
        "dp2": (2, []),
        "tp2": (2, ["parallel.tensor=2"]),
        "pp2": (2, ["parallel.pipeline=2"]),
        "shared": (4, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.tensor_sequence_parallel=true"]),
    }
    found = {}
    for name, (world, extra) in layouts.items():
        rows = ranks.train(world, tiny, overrides + extra, tmp_path, name)
        held = [row["validation"]["heldout"]["loss"] for row in rows if "validation" in row]
        norms = [row["norms"] for row in rows if "norms" in row]
        assert len(held) == 1 and len(norms) == 2
        steps = steps_of(rows, "grad_norm")
        for row, step in zip(norms, (5, 10), strict=True):
            assert abs(sum(v * v for v in row["gradient"].values()) ** 0.5 / steps[step][0] - 1) < 1e-4
        found[name] = (held[0], steps_of(rows, *FIELDS), norms[-1]["weight"])
    for name in layouts:
        assert abs(found[name][0] - found["one"][0]) < 1e-5, name
        for step, values in found["one"][1].items():
            assert abs(found[name][1][step][0] - values[0]) < 1e-5 and found[name][1][step][2:] == values[2:]
        for kind, value in found["one"][2].items():
            assert abs(found[name][2][kind] / value - 1) < 1e-4, (name, kind)


def test_theta_stays_fp32_in_bf16(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    from lightnet_llm.checkpoint.store import resolve
    from lightnet_llm.checkpoint.weights import load_weights

    ranks.train(1, tiny, ["train.precision=bf16", "train.steps=1"], tmp_path, "run")
    weights = load_weights(resolve(tmp_path / "run", print))
    kinds = {name: str(tensor.dtype) for name, tensor in weights.items()}
    fp32 = {name for name, kind in kinds.items() if kind == "torch.float32"}
    assert fp32 == {name for name in kinds if "theta" in name or "tpe." in name}
    assert set(kinds.values()) == {"torch.float32", "torch.bfloat16"}


def test_several_named_validation_sets(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    data = tiny.parent / "data"
    overrides = [f"data.validation.again={data}", f"data.validation.seen={data}/train", "train.steps=1"]
    rows = ranks.train(1, tiny, overrides, tmp_path, "run")
    found: dict[str, Any] = {}
    for row in rows:
        found.update(row.get("validation", {}))
    assert set(found) == {"heldout", "again", "seen"}
    assert found["again"] == found["heldout"] and found["seen"]["loss"] != found["heldout"]["loss"]
