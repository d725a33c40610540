"""Eight tasks end to end from the files of `make eval-data`, against lm-eval's own model on an exported folder."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from lightnet_eval import offline
from lightnet_eval.zero_shot import evaluate

from lightnet_llm.convert import convert
from lightnet_llm.inference import load_model
from tests.unit.eval import rows
from tests.unit.inference import toy

EIGHT = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa", "boolq", "sciq"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.build(tmp_path_factory)


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exported") / "hf"
    convert(str(run), str(target), "hf")
    return target


def hugging_face(exported: Path, folder: Path, work: Path, limit: int | None, batch_size: int) -> dict[str, Any]:
    """``lm_eval --model hf`` on the exported folder."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    offline.write_tasks(folder, EIGHT, work)
    manager = TaskManager(include_path=str(work), include_defaults=False)
    tasks = list(manager.load(EIGHT)["tasks"].values())
    # Left alone it cuts requests to 2048 tokens, which some passages of BoolQ have with a small vocabulary.
    options = {"dtype": "float32", "device": "cpu", "batch_size": batch_size, "max_length": 100_000}
    model = HFLM(pretrained=str(exported), **options)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model, tasks=tasks, task_manager=manager, limit=limit, bootstrap_iters=0
    )
    return found


def check(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Accuracies, and every request's log likelihood and greediness."""
    for task in EIGHT:
        for metric in ("acc,none", "acc_norm,none"):
            assert ours["results"][task].get(metric) == pytest.approx(theirs["results"][task].get(metric)), (
                task,
                metric,
            )
        others = {sample["doc_id"]: sample for sample in theirs["samples"][task]}
        assert len(others) == len(ours["samples"][task])
        for sample in ours["samples"][task]:
            other = others[sample["doc_id"]]
            assert [list(pair) for pair in sample["arguments"]] == [list(pair) for pair in other["arguments"]]
            for one, two in zip(sample["filtered_resps"], other["filtered_resps"], strict=True):
                assert one[0] == pytest.approx(two[0], abs=1e-4, rel=1e-5) and one[1] == two[1], (
                    task,
                    sample["doc_id"],
                )


def test_scores_are_those_of_lm_eval_on_the_exported_folder(run: Path, exported: Path, tmp_path: Path) -> None:
    """On made-up rows of the eight tasks; from the checkpoint and from the exported folder."""
    folder = rows.write(tmp_path / "data")
    (tmp_path / "tasks").mkdir()
    theirs = hugging_face(exported, folder, tmp_path / "tasks", None, 4)
    for source in (run, exported):
        check(evaluate(load_model(source, "cpu"), EIGHT, offline=str(folder), log_samples=True), theirs)


@pytest.mark.slow
def test_eight_tasks_from_the_package(run: Path, exported: Path, tmp_path: Path) -> None:
    """The first 200 questions of each, at another batch size of ours and of the peer's."""
    folder = Path(__file__).resolve().parents[2] / "data" / "eval"
    assert set(EIGHT) <= set(offline.files_of(folder)), "make eval-data first"
    (tmp_path / "tasks").mkdir()
    theirs = hugging_face(exported, folder, tmp_path / "tasks", 200, 16)
    loaded = load_model(run, "cpu")
    for batch_tokens in (700, None):
        found = evaluate(loaded, EIGHT, offline=str(folder), log_samples=True, limit=200, batch_tokens=batch_tokens)
        check(found, theirs)
