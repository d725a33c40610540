"""Tasks during training: the scores of every layout are those of `lightnet eval` on the checkpoint of that step."""

from pathlib import Path
from typing import Any

import pytest
from lightnet_eval.zero_shot import evaluate

from lightnet_llm.checkpoint import store
from lightnet_llm.inference import load_model
from tests.conftest import Ranks, read_metrics, steps_of
from tests.parallel.evaluated import noted
from tests.parallel.test_moves import layout
from tests.unit.eval import rows
from tests.unit.inference import toy

TASKS, SLOW = ["piqa", "sciq", "arc_easy"], pytest.mark.slow
CASES = [
    ("tp2 pp2", ["model.tie_embeddings=false"]),
    *(
        pytest.param(*case, marks=SLOW)
        for case in (
            ("pp2", []),
            ("z1", []),
            ("dp2 z1", []),
            ("dp2 z3", []),
            ("sp2", []),
            ("tp2 ts1", []),
            ("tp2", []),
            ("tp2 dp2 z3", []),
            ("pp2 dp2", ["train.precision=bf16"]),
            ("dp2 z2", ["train.precision=bf16"]),
        )
    ),
]


def prepared(factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A configuration on text with a tokenizer, and overrides that name tasks."""
    run = toy.build(factory)
    tasks = rows.write(factory.mktemp("tasks") / "data")
    common = ["train.steps=4", "train.global_batch=8", "train.micro_batch=2", "schedule.warmup_steps=0"]
    common += ["optimizer.learning_rate=1e-2", "validation.interval=0", "logging.interval=1", "checkpoint.interval=2"]
    common += ["model.width=64", "model.heads=4"]
    tasks_of = [f"evaluation.offline={tasks}", "evaluation.interval=2", f"evaluation.tasks=[{','.join(TASKS)}]"]
    return run / "config.yaml", [*common, *tasks_of]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    return prepared(tmp_path_factory)


def scores(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["step"]: row["evaluation"] for row in rows if "evaluation" in row}


@pytest.mark.parametrize(("text", "extra"), CASES)
def test_scores_are_those_of_the_checkpoint(
    text: str, extra: list[str], ranks: Ranks, given: tuple[Path, list[str]], tmp_path: Path
) -> None:
    config, common = given
    world, overrides = layout(text)
    metrics = ranks.train(world, config, [*common, *overrides, *extra], tmp_path, "run", "note_likelihoods")
    found = scores(metrics)
    assert list(found) == [2, 4]
    kinds = [kind for row in metrics for kind in ("evaluation", "event") if kind in row and row["step"] == 2]
    assert kinds == ["event", "evaluation"]  # saved, then measured
    for step, measured in found.items():
        loaded = load_model(tmp_path / "run" / "checkpoints" / store.step_name(step), "cpu")
        offline = next(item for item in common if "offline" in item).partition("=")[2]
        assert set(measured) == {*TASKS, "seconds"}
        for task in TASKS:
            nats: list[float] = []
            restore = noted(nats)
            wanted = evaluate(loaded, [task], offline=offline)["results"]
            restore()
            # Few questions hide wrong weights; log likelihoods do not.
            assert list(measured[task].pop("nats").values()) == pytest.approx(nats, rel=0, abs=1e-4), (step, task)
            assert len(nats) >= 5
            assert measured[task]["acc"] == wanted[task]["acc,none"], (step, task)
            assert measured[task]["acc_norm"] == wanted[task]["acc_norm,none"], (step, task)


def test_a_stop_is_not_kept_waiting(ranks: Ranks, given: tuple[Path, list[str]], tmp_path: Path) -> None:
    """It was asked for during step 8, at which tasks are due."""
    config, common = given
    overrides = [*common, "train.steps=20", "evaluation.interval=4", "checkpoint.interval=0", "parallel.tensor=2"]
    metrics = ranks.train(2, config, overrides, tmp_path, "run", "terminate_rank_one")
    assert list(scores(metrics)) == [4]
    assert [row["event"] for row in metrics if "event" in row and row["step"] == 8] == ["saved", "stopped"]


def test_training_goes_on_as_without_it(ranks: Ranks, given: tuple[Path, list[str]], tmp_path: Path) -> None:
    """lm-eval seeds every generator, and a pass in between changes nothing; a task that fails stops nothing."""
    config, common = given
    world, overrides = layout("tp2")
    every = [*common, *overrides, "model.dropout=0.2"]
    plant = "draw_from_global_generators"
    still = ranks.train(world, config, [*every, "evaluation.interval=0"], tmp_path, "still", plant)
    rows = ranks.train(
        world, config, [*every, "evaluation.interval=1"], tmp_path, "run", f"{plant},fail_task_on_rank_one"
    )
    assert steps_of(rows, "loss", "grad_norm") == steps_of(still, "loss", "grad_norm")
    assert list(scores(rows)) == [1, 2, 3, 4]
    assert set(scores(rows)[1]) == {"piqa", "arc_easy", "seconds"}
    log = (tmp_path / "run.log.rank0").read_text()
    assert log.count("warning: evaluation.tasks") == 4
    assert "warning: evaluation.tasks sciq at step 1: process 1: RuntimeError: planted; training goes on\n" in log
    failed = [row for row in read_metrics(tmp_path / "run") if row.get("event") == "evaluation failed"]
    assert [row["task"] for row in failed] == ["sciq"] * 4


@SLOW
@pytest.mark.parametrize("text", ["tp2", "dp2 z3"])
def test_texts_are_continued_too(text: str, ranks: Ranks, given: tuple[Path, list[str]], tmp_path: Path) -> None:
    config, common = given
    world, overrides = layout(text)
    metrics = ranks.train(world, config, [*common, *overrides], tmp_path, "run", "continue_in_evaluation")
    (written,) = {row["piqa"]["texts"] for step, row in scores(metrics).items() if step == 4}
    from tests.parallel.evaluated import continued

    loaded = load_model(tmp_path / "run" / "checkpoints" / store.step_name(4), "cpu")
    assert continued(loaded) == written


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("evaluation.tasks=[piqqa]", "no piqqa.*.jsonl"),
        (
            "evaluation.tasks=[piqa,piqqa] evaluation.offline=null",
            "lm-eval has no task or group piqqa (did you mean 'piqa'?)",
        ),
        ("evaluation.tasks=[]", "tasks names none"),
        ("evaluation.offline=nowhere", "nowhere"),
        ("model.causal=false", "causal language models"),
    ],
)
def test_what_could_never_run_is_refused(
    override: str, says: str, ranks: Ranks, given: tuple[Path, list[str]], tmp_path: Path
) -> None:
    config, common = given
    arguments = ["--config", str(config), f"train.output={tmp_path}", "train.name=run", *common, *override.split()]
    assert ranks.run(1, arguments, tmp_path / "log") == [1]
    (line,) = [x for x in (tmp_path / "log.rank0").read_text().splitlines() if x.startswith("error: ")]
    assert says in line and not (tmp_path / "run").exists()
