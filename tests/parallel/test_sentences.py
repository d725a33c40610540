"""The classifier of sentences trains alike in every layout, from a masked model's weights, and resumes exactly (laws 1 to 3)."""

from pathlib import Path

import pytest
import torch
import yaml

from lightnet_llm.checkpoint.store import resolve
from lightnet_llm.checkpoint.weights import AVERAGE, load_weights
from tests.conftest import Ranks, read_metrics, steps_of
from tests.parallel import sentences
from tests.parallel.sentences import HEADS

FIELDS = ("loss", "grad_norm", "samples", "batch_checksum")
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "micro1": (1, ["train.micro_batch=1"]),
    "dp2": (2, []),
    "dp2_zero3": (2, ["parallel.zero_stage=3"]),
    "tp2_dp2": (4, ["parallel.tensor=2"]),
    "dp2_zero0": (2, ["parallel.zero_stage=0", "train.micro_batch=4"]),
    "sp2": (2, ["parallel.sequence=2"]),
    "sp3": (3, ["parallel.sequence=3", "parallel.sequence_exchange=prefix", "train.micro_batch=1"]),
    "tp2_sp2_zero3": (4, ["parallel.tensor=2", "parallel.sequence=2", "parallel.zero_stage=3"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "tp2_pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2", "parallel.recompute_every=1"]),
    "pp2_sp2_dp2": (8, ["parallel.pipeline=2", "parallel.sequence=2", "train.micro_batch=1"]),
}
QUICK = [("classes", name) for name in ("micro1", "tp2_dp2", "sp2", "pp2")] + [("value", "dp2_zero3")]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {head: sentences.write_config(tmp_path_factory.mktemp(head), head) for head in HEADS}


@pytest.fixture(scope="module")
def one(ranks: Ranks, configs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tmp = tmp_path_factory.mktemp("one")
    for head in HEADS:
        ranks.train(1, configs[head], [], tmp, head)
    return {head: tmp / head for head in HEADS}


@pytest.mark.parametrize(
    ("head", "name"),
    [
        *QUICK,
        *(
            pytest.param(head, name, marks=pytest.mark.slow)
            for head in HEADS
            for name in LAYOUTS
            if (head, name) not in QUICK
        ),
    ],
)
def test_layouts(
    ranks: Ranks, configs: dict[str, Path], one: dict[str, Path], tmp_path: Path, head: str, name: str
) -> None:
    world, overrides = LAYOUTS[name]
    rows, wanted = ranks.train(world, configs[head], overrides, tmp_path, name), read_metrics(one[head])
    found, first = steps_of(rows, *FIELDS), steps_of(wanted, *FIELDS)
    assert [row[2:] for row in found.values()] == [row[2:] for row in first.values()]
    for step, row in first.items():
        assert found[step][0] == pytest.approx(row[0], abs=1e-5)
        assert found[step][1] == pytest.approx(row[1], rel=1e-4)
    validations = [[row["validation"]["dev"] for row in some if "validation" in row] for some in (rows, wanted)]
    assert len(validations[0]) == 2
    for mine, its in zip(*validations, strict=True):
        assert set(mine) == ({"loss", "accuracy"} if head == "classes" else {"loss"})
        assert mine == pytest.approx(its, abs=2e-5)
    assert first[20][0] < 0.8 * first[1][0]


MOVES = {
    "one": ((1, []), (1, [])),
    "pp2": ((2, ["parallel.pipeline=2"]), (2, ["parallel.pipeline=2"])),
    "sp2": ((2, ["parallel.sequence=2"]), (2, ["parallel.sequence=2"])),
    "pp2_to_sp2": ((2, ["parallel.pipeline=2"]), (2, ["parallel.sequence=2"])),
}


@pytest.mark.parametrize(
    "name", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in MOVES if name != "one")]
)
def test_a_stopped_run_goes_on(
    ranks: Ranks, configs: dict[str, Path], one: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Exactly where it stays on its layout, the average of its weights included."""
    (world, before), (after_world, after) = MOVES[name]
    kept = ["train.ema=0.9"]
    ranks.train(world, configs["classes"], [*kept, *before, "train.stop_at_step=7"], tmp_path, "halves")
    rows = ranks.train(after_world, configs["classes"], [*kept, *after, "train.resume=must"], tmp_path, "halves")
    found, wanted = steps_of(rows, *FIELDS), read_metrics(one["classes"])
    if before == after:
        wanted = ranks.train(world, configs["classes"], [*kept, *before], tmp_path, "whole")
        mine, theirs = (load_weights(resolve(tmp_path / run, print), AVERAGE) for run in ("halves", "whole"))
        assert mine.keys() == theirs.keys() and all(mine[name].equal(x) for name, x in theirs.items())
    expected = steps_of(wanted, *FIELDS)
    if before == after:
        assert found == expected
    for step, row in expected.items():
        assert found[step][2:] == row[2:]
        assert found[step][:2] == (pytest.approx(row[0], abs=1e-5), pytest.approx(row[1], rel=1e-4))


def test_a_rate_for_another_batch_is_scaled(
    ranks: Ranks, configs: dict[str, Path], one: dict[str, Path], tmp_path: Path
) -> None:
    scaled = ["optimizer.learning_rate=1.2e-2", "optimizer.rate_batch=16"]  # of 8
    rows = ranks.train(1, configs["classes"], [*scaled, "train.stop_at_step=5"], tmp_path, "scaled")
    fields = (*FIELDS, "learning_rate")
    wanted = {step: row for step, row in steps_of(read_metrics(one["classes"]), *fields).items() if step <= 5}
    assert steps_of(rows, *fields) == wanted


@pytest.mark.parametrize(
    ("tied", "stages"), [(True, 1), (True, 2), *(pytest.param(False, n, marks=pytest.mark.slow) for n in (1, 2))]
)
def test_it_starts_from_a_masked_models_weights(
    ranks: Ranks, configs: dict[str, Path], tiny: Path, tmp_path: Path, tied: bool, stages: int
) -> None:
    overrides = ["model.head=masked_lm", "model.causal=false", "model.vocab_size=300", "train.steps=2"]
    overrides += [f"model.tie_embeddings={str(tied).lower()}"]
    ranks.train(1, tiny, overrides, tmp_path, "masked")
    source = load_weights(resolve(tmp_path / "masked", lambda line: None))
    model = yaml.safe_load(tiny.read_text())["model"]
    tree = yaml.safe_load(configs["classes"].read_text())
    tree["model"] = {**model, "head": "sequence_classifier", "causal": False, "vocab_size": 300, "classes": 3}
    tree["optimizer"]["learning_rate"] = 1e-12
    tree["train"] |= {"steps": 1, "init_from": str(tmp_path / "masked")}
    config = tmp_path / "classes.yaml"
    config.write_text(yaml.safe_dump(tree))
    ranks.train(stages, config, [f"parallel.pipeline={stages}"], tmp_path, "tuned")
    found = load_weights(resolve(tmp_path / "tuned", lambda line: None))
    for name, tensor in found.items():
        if name.startswith("head."):
            assert tensor.abs().sum() > 0 or name.endswith("bias")
        else:
            torch.testing.assert_close(tensor, source[name], atol=1e-9, rtol=1e-6, msg=name)
    assert set(found) - set(source) == {name for name in found if name.startswith("head.")}
