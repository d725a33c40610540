"""The exponential average kept in training: its plain formula over the saved weights, in every layout, over resumes and moves."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightnet_llm.checkpoint import store, universal
from lightnet_llm.checkpoint.weights import AVERAGE, load_weights
from lightnet_llm.convert import convert, open_source
from lightnet_llm.errors import UserError
from lightnet_llm.inference import load_model
from tests.conftest import Ranks
from tests.parallel.test_moves import layout

DECAY, STEPS = 0.8, 8
KEEP = [f"train.ema={DECAY}", f"train.stop_at_step={STEPS}", "train.resume=auto", "validation.interval=0"]
EACH = ["checkpoint.interval=1", "checkpoint.keep_last=99"]
BF16, SLOW = "train.precision=bf16", pytest.mark.slow
# The weights that a bf16 run saves are rounded; its average is of the masters.
CASES = [
    ("z0", []),
    *(
        pytest.param(*case, marks=SLOW)
        for case in (
            ("dp2 z3", []),
            ("tp2 pp2", []),
            ("dp2 z1", [BF16]),
            ("dp2 z1", ["model.tie_embeddings=false", "model.lrpe_learnable=false"]),
            ("dp2 z2", []),
            ("sp2 tp2", ["model.dropout=0.2"]),
            ("pp2", [BF16]),
            ("dp2 z2", [BF16]),
            ("dp2 z3", [BF16]),
            ("z0", ["model.lrpe_learnable=false"]),
        )
    ),
]


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / store.step_name(step)


def plain(run: Path, steps: int = STEPS, skipped: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """The formula, on one process, from the weights saved at every step."""
    average: dict[str, Tensor] = {}
    for step in range(1, steps + 1):
        if step in skipped:
            continue
        for name, weight in load_weights(folder_of(run, step)).items():
            average[name] = DECAY * average[name] + (1 - DECAY) * weight.double() if step > 1 else weight.double()
    return average


def furthest(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, in units of its own largest value."""
    assert set(first) == set(second)
    return max(float((first[n] - second[n]).abs().max() / first[n].abs().max().clamp_min(1e-3)) for n in first)


@pytest.fixture(scope="module")
def still(ranks: Ranks, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    tmp = tmp_path_factory.mktemp("ema")
    ranks.train(1, tiny, [*KEEP, *EACH, "parallel.zero_stage=0"], tmp, "run")
    return tmp / "run"


@pytest.mark.parametrize(("text", "extra"), CASES)
def test_it_is_the_plain_formula(
    text: str, extra: list[str], ranks: Ranks, tiny: Path, still: Path, tmp_path: Path
) -> None:
    world, overrides = layout(text)
    ranks.train(world, tiny, [*KEEP, *EACH, *overrides, *extra], tmp_path, "run")
    run = tmp_path / "run"
    found = load_weights(folder_of(run, STEPS), AVERAGE)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert furthest(plain(run), found) < (5e-3 if BF16 in extra else 1e-6)
    weights = load_weights(folder_of(run, STEPS))
    assert furthest(found, weights) > 1e-2, "an average that equals the weights shows nothing"
    if not extra:
        assert furthest(load_weights(folder_of(still, STEPS), AVERAGE), found) < 1e-3
    assert store.read_manifest(folder_of(run, STEPS))["ema"] == DECAY


@pytest.mark.slow
def test_it_is_exported_and_loaded_on_request(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    """In the dtype as trained, or exactly in fp32, and without pickles; what has none says so."""
    extra = [*KEEP, BF16, "parallel.tensor=2", "train.stop_at_step=3"]
    ranks.train(2, tiny, extra, tmp_path, "run")
    run = tmp_path / "run"
    average = load_weights(folder_of(run, 3), AVERAGE)
    for to, dtype in (("hf", None), ("training", "float32")):
        report = convert(run, tmp_path / to, to, dtype=dtype, weights="ema")
        assert report.dtype == (dtype or "bfloat16")
        weights = open_source(tmp_path / to).weights
        for name, tensor in average.items():
            found = weights.read(name)
            assert torch.equal(found, tensor.to(found.dtype)), name
            assert found.dtype == torch.float32 or dtype is None
    assert "| ema decay | 0.8 |" in (tmp_path / "hf" / "README.md").read_text()
    kept = load_model(run, "cpu", weights="ema").model.state_dict()
    assert all(torch.equal(kept[name][: len(tensor)], tensor) for name, tensor in average.items())
    with pytest.raises(UserError, match="--weights ema goes with a run"):
        load_model(tmp_path / "hf", weights="ema")
    with pytest.raises(UserError, match="both average"):
        convert(run, tmp_path / "no", "hf", average="last:1", weights="ema")
    with pytest.raises(UserError, match=r"--weights emma: must be trained or ema.*did you mean"):
        load_model(run, weights="emma")
    for open_it in (load_model, open_source):
        with pytest.raises(UserError, match="holds no exponential average; it is kept"):
            open_it(tmp_path / "training", weights="ema")


@pytest.mark.parametrize(
    "text", ["z0", *(pytest.param(text, marks=SLOW) for text in ("dp2 z1", "dp2 z2", "dp2 z3", "tp2 pp2"))]
)
def test_resumed_is_the_same_to_the_bit(text: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    world, overrides = layout(text)
    ranks.train(world, tiny, [*KEEP, *overrides], tmp_path, "whole")
    for stop in (1, 5, STEPS):
        ranks.train(world, tiny, [*KEEP, *overrides, f"train.stop_at_step={stop}"], tmp_path, "run")
    whole, pieces = (load_weights(folder_of(tmp_path / name, STEPS), AVERAGE) for name in ("whole", "run"))
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ("dp2 z3", "tp2 pp2", "z0"),
        pytest.param("z0", "dp2 z2", "dp2 z3", marks=SLOW),
        pytest.param("pp2 dp2", "tp2", "sp2", marks=SLOW),
    ],
)
def test_it_moves_with_the_run(
    first: str, second: str, third: str, ranks: Ranks, tiny: Path, still: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for text, stop in ((first, 3), (second, 5), (third, STEPS)):
        world, overrides = layout(text)
        ranks.train(world, tiny, [*KEEP, *overrides, f"train.stop_at_step={stop}"], tmp_path, "run")
    for step in (3, 5):  # what passed from one layout to the next is what was saved
        zero = folder_of(run, step) / universal.FOLDER / "zero"
        for name, tensor in load_weights(folder_of(run, step), AVERAGE).items():
            assert torch.equal(torch.load(zero / name / "ema.pt")["param"], tensor), name
    for step in (5, STEPS):
        wanted = load_weights(folder_of(still, step), AVERAGE)
        assert furthest(wanted, load_weights(folder_of(run, step), AVERAGE)) < 1e-3


@pytest.mark.parametrize("text", ["z0", pytest.param("dp2 z3", marks=SLOW), pytest.param("pp2", marks=SLOW)])
def test_a_skipped_step_does_not_count(text: str, ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    world, overrides = layout(text)
    every = [*KEEP, *EACH, *overrides]
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", *every]
    codes = ranks.run(world, arguments, tmp_path / "log", plant="nan_everywhere")
    assert codes == [0] * world, (tmp_path / "log.rank0").read_text()[-2000:]
    run = tmp_path / "run"
    assert not folder_of(run, 6).exists()
    assert furthest(plain(run, skipped=(6,)), load_weights(folder_of(run, STEPS), AVERAGE)) < 1e-6


def test_without_it_nothing_is_kept_and_a_resume_keeps_the_decay(ranks: Ranks, tiny: Path, tmp_path: Path) -> None:
    ranks.train(1, tiny, ["train.steps=2", "train.stop_at_step=1"], tmp_path, "run")
    assert not (folder_of(tmp_path / "run", 1) / AVERAGE).exists()
    arguments = ["--config", str(tiny), f"train.output={tmp_path}", "train.name=run", "train.resume=auto"]
    codes = ranks.run(1, [*arguments, "train.steps=2", "train.ema=0.9"], tmp_path / "log")
    assert codes == [1] and "train.ema was None" in (tmp_path / "log.rank0").read_text()
