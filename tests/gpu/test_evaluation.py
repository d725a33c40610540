"""On GPUs: tasks during training score as `lightnet eval` on the checkpoint, and leave training alone; the kept average."""

from pathlib import Path

import pytest
import torch

from lightnet_llm.checkpoint import store
from lightnet_llm.checkpoint.weights import AVERAGE, load_weights
from lightnet_llm.inference import load_model
from tests.conftest import Ranks, steps_of
from tests.parallel import test_ema as ema

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYOUTS = [(1, []), (2, ["parallel.tensor=2"]), (2, ["parallel.pipeline=2"]), (2, ["parallel.zero_stage=3"])]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    pytest.importorskip("lm_eval")
    from tests.parallel.test_evaluation import prepared

    return prepared(tmp_path_factory)


@pytest.mark.parametrize(("world", "overrides"), LAYOUTS)
def test_scores_are_those_of_the_checkpoint(
    world: int, overrides: list[str], ranks: Ranks, given: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """In bf16, the dtype of the run on GPUs; what training saves for backward is none of an evaluation's tensors."""
    from lightnet_eval.zero_shot import evaluate

    from tests.parallel.test_evaluation import TASKS, scores

    config, common = given
    every = [*common, *overrides, "train.precision=bf16"]
    rows = ranks.train(world, config, every, tmp_path, "run")
    still = ranks.train(world, config, [*every, "evaluation.interval=0"], tmp_path, "still")
    losses = [steps_of(found, "loss") for found in (rows, still)]
    assert list(losses[0]) == list(losses[1])
    assert max(abs(losses[0][step][0] - losses[1][step][0]) for step in losses[0]) < 2e-3
    assert list(scores(rows)) == [2, 4]
    offline = next(item for item in common if "offline" in item).partition("=")[2]
    for step, measured in scores(rows).items():
        loaded = load_model(tmp_path / "run" / "checkpoints" / store.step_name(step), "cuda")
        wanted = evaluate(loaded, TASKS, offline=offline)["results"]
        for task in TASKS:
            assert measured[task]["acc"] == wanted[task]["acc,none"], (step, task)


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (1, ["parallel.zero_stage=0"]),
        (1, ["train.precision=bf16"]),
        (1, ["train.precision=bf16", "parallel.zero_stage=3"]),
        (2, ["parallel.pipeline=2"]),
    ],
)
def test_the_kept_average_is_the_plain_formula(
    world: int, overrides: list[str], ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    ranks.train(world, tiny, [*ema.KEEP, *ema.EACH, *overrides], tmp_path, "run")
    found = load_weights(ema.folder_of(tmp_path / "run", ema.STEPS), AVERAGE)
    bound = 5e-3 if "train.precision=bf16" in overrides else 1e-6
    assert ema.furthest(ema.plain(tmp_path / "run"), found) < bound
