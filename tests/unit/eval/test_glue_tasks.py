"""The nine tasks of GLUE: their files' layouts, labels and metrics; and how a grid is summed up."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from lightnet_data.sentences import Row
from lightnet_data.tokenizer import Tokenizer
from lightnet_eval.glue import average, summary
from lightnet_eval.glue_passages import write
from lightnet_eval.glue_run import Plan, encode
from lightnet_eval.glue_tasks import TASKS, correlations, f1_and_accuracy, find, matthews

from lightnet_llm.cli import main
from lightnet_llm.config import validate
from lightnet_llm.errors import UserError

# Folder, header (None: there is none), two lines, and the samples that they are.
TSV: list[tuple[str, str | None, list[str], list[Row]]] = [
    (
        "CoLA",
        None,
        ["gj04\t1\t\tA cat's \"here.", "gj04\t0\t*\tcat A."],
        [Row("A cat's \"here.", None, 1), Row("cat A.", None, 0)],
    ),
    ("SST-2", "sentence\tlabel", ["it 's fun \t1", "dull\t0"], [Row("it 's fun ", None, 1), Row("dull", None, 0)]),
    (
        "MRPC",
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        ['1\t7\t8\tHe said "a\tHe said b', "0\t9\t10\tc\td"],
        [Row('He said "a', "He said b", 1), Row("c", "d", 0)],
    ),
    (
        "QQP",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        ["1\t2\t3\tWhy?\tHow?\t0", "4\t5\t6\tWho?\tWho?\t1"],
        [Row("Why?", "How?", 0), Row("Who?", "Who?", 1)],
    ),
    (
        "STS-B",
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        ["0\tg\tf\ty\t1\tn\tn\ta b\tc\t3.800", "1\tg\tf\ty\t1\tn\tn\td\te\t0.000"],
        [Row("a b", "c", 3.8), Row("d", "e", 0.0)],
    ),
    (
        "MNLI",
        "index\tpromptID\tpairID\tgenre\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        ["0\t1\t1n\tg\t(a)\ta\tb\tneutral\tentailment", "1\t1\t1n\tg\t(a)\tc\td\tneutral\tcontradiction"],
        [Row("a", "b", 2), Row("c", "d", 0)],
    ),
    (
        "QNLI",
        "index\tquestion\tsentence\tlabel",
        ["0\tWhen?\tIn May.\tentailment", "1\tWho?\tIt.\tnot_entailment"],
        [Row("When?", "In May.", 1), Row("Who?", "It.", 0)],
    ),
    (
        "RTE",
        "index\tsentence1\tsentence2\tlabel",
        ["0\ta\tb\tnot_entailment", "1\tc\td\tentailment"],
        [Row("a", "b", 0), Row("c", "d", 1)],
    ),
    ("WNLI", "index\tsentence1\tsentence2\tlabel", ["0\ta\tb\t1", "1\tc\td\t0"], [Row("a", "b", 1), Row("c", "d", 0)]),
]
# The same in JSON lines as the usual data sets have them.
JSONL: dict[str, tuple[tuple[str, ...], list[Any]]] = {
    "cola": (("sentence", "label"), [1, 0]),
    "sst2": (("sentence", "label"), [1, 0]),
    "mrpc": (("sentence1", "sentence2", "label"), [1, 0]),
    "qqp": (("question1", "question2", "label"), [0, 1]),
    "stsb": (("sentence1", "sentence2", "label"), [3.8, 0.0]),
    "mnli": (("premise", "hypothesis", "label"), [0, 2]),
    "qnli": (("question", "sentence", "label"), [0, 1]),
    "rte": (("sentence1", "sentence2", "label"), [1, 0]),
    "wnli": (("sentence1", "sentence2", "label"), [1, 0]),
}


def lay(folder: Path, sets: tuple[str, ...], suffix: str, text: str) -> None:
    folder.mkdir(parents=True)
    for split in ("train", *sets):
        (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("name", "header", "lines", "rows"), TSV)
def test_the_layouts_of_the_archives(
    tmp_path: Path, name: str, header: str | None, lines: list[str], rows: list[Row]
) -> None:
    key = name.lower().replace("-", "")
    text = "\n".join([*([] if header is None else [header]), *lines, "few"]) + "\n"
    lay(tmp_path / name, TASKS[key].sets, "tsv", text)
    (found,) = find(tmp_path, None)
    assert found.key == key
    for split in ("train", *TASKS[key].sets):
        assert list(found.rows(split)) == rows and found.left_out[split] == 1


@pytest.mark.parametrize(("name", "header", "lines", "rows"), TSV)
def test_the_same_in_json_lines(
    tmp_path: Path, name: str, header: str | None, lines: list[str], rows: list[Row]
) -> None:
    key = name.lower().replace("-", "")
    fields, labels = JSONL[key]
    records = [
        dict(zip(fields, [x for x in (row.first, row.second) if x is not None] + [label], strict=True))
        for row, label in zip(rows, labels, strict=True)
    ]
    unlabelled = {**records[0], fields[-1]: -1}
    sets = tuple(split.replace("dev", "validation") for split in TASKS[key].sets)
    lay(tmp_path / key, sets, "jsonl", "\n".join(map(json.dumps, [*records, unlabelled])))
    (found,) = find(tmp_path, [name])
    assert list(found.rows("train")) == rows
    assert found.left_out["train"] == 1


PARSES = "( a )\t( b )\t(ROOT (NP (`` ``) (DT a)))\t(ROOT (NP (DT b)))"
# Files as the public archives and the usual download script leave them, byte for byte in form: header of the training file, of
# the held-out one, a line of each, and the samples that they are.
REAL: list[tuple[str, bytes, bytes, Row, Row]] = [
    (
        "MNLI",
        f"""index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t\
sentence1\tsentence2\tlabel1\tgold_label
0\t31193\t31193n\tgovernment\t{PARSES}\tA "plan  \tb \tneutral\tneutral
""".encode(),
        f"""index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t\
sentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label
0\t63735\t63735n\tslate\t{PARSES}\tThe rights\tEveryone \tneutral\tentailment\tneutral\tneutral\tneutral\tneutral
1\t63735\t63735c\tslate\t{PARSES}\tc\td\tneutral\tentailment\tentailment\tneutral\tcontradiction\t-
""".encode(),
        Row('A "plan  ', "b ", 1),
        Row("The rights", "Everyone ", 1),
    ),
    (  # the original's mark of its encoding and its line ends stay in what the script cuts out of it
        "MRPC",
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n".encode()
        + b'1\t702876\t702977\tHe, whom he called "the witness", did.\tReferring to "the witness, he did.\r\n',
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n".encode()
        + "0\t1\t2\tthe president\u2019s \u201ccoma\u201d\t'' Yes .\r\n".encode(),
        Row('He, whom he called "the witness", did.', 'Referring to "the witness, he did.', 1),
        Row("the president\u2019s \u201ccoma\u201d", "'' Yes .", 0),
    ),
    (  # lines that lack their end, and questions without a word, are in the archive
        "QQP",
        b"id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        b"133273\t213221\t213222\tHow is the life of a math student?\tWhich level?\t0\n247387\t1\t2\tWhat is\n",
        b"id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n363362\t1\t2\tWhat\xc2\x85 is \x0b it?\t\t1\n",
        Row("How is the life of a math student?", "Which level?", 0),
        Row("What\x85 is \x0b it?", "", 1),
    ),
    (
        "STS-B",
        b"index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        b"0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\tA plane is taking off.\tAn air plane.\t5.000\n",
        b"index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
        b'9\tmain-news\tMSRpar\t2012\t0\tnone\tnone\t"We" 100% "a.\tb\t0.000\n',
        Row("A plane is taking off.", "An air plane.", 5.0),
        Row('"We" 100% "a.', "b", 0.0),
    ),
    (
        "CoLA",
        b"gj04\t1\t\tOur friends won't buy this analysis, let alone the next one we propose.\n",
        b'l-93\t0\t*\tThe "sailors rode the breeze.\ngj04\t\t\tunlabelled\n',
        Row("Our friends won't buy this analysis, let alone the next one we propose.", None, 1),
        Row('The "sailors rode the breeze.', None, 0),
    ),
]


@pytest.mark.parametrize(("name", "train", "held_out", "first", "second"), REAL)
def test_files_as_the_archives_have_them(
    tmp_path: Path, name: str, train: bytes, held_out: bytes, first: Row, second: Row
) -> None:
    folder, key = tmp_path / name, name.lower().replace("-", "")
    folder.mkdir()
    (folder / "train.tsv").write_bytes(train)
    for split in TASKS[key].sets:
        (folder / f"{split}.tsv").write_bytes(held_out)
    for split in ("test", "test_matched"):  # without labels, and never read
        (folder / f"{split}.tsv").write_bytes(b"index\tsentence\n0\ta\n")
    for beside in ("SNLI", "diagnostic", "__MACOSX"):
        (tmp_path / beside).mkdir()
    (tmp_path / "SNLI" / "train.tsv").write_bytes(b"index\tcaptionID\n")
    (found,) = find(tmp_path, None)
    assert list(found.rows("train")) == [first]
    for split in TASKS[key].sets:
        assert list(found.rows(split)) == [second]


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    records = [{"sentence": "a", "label": "x"}, {"sentence": "b", "label": "w"}, {"sentence": "c", "label": "x"}]
    lay(tmp_path / "mine", ("dev",), "jsonl", "\n".join(map(json.dumps, records)))
    lay(
        tmp_path / "value",
        ("dev",),
        "jsonl",
        '{"sentence1": "a", "sentence2": "b", "label": 0.5}\n{"sentence1": "c", "sentence2": "d", "label": -1}\n',
    )
    lay(tmp_path / "RTE", ("dev",), "tsv", "index\tsentence1\tsentence2\tlabel\n")
    (tmp_path / "notes").mkdir()
    found = find(tmp_path, None)
    assert [task.key for task in found] == ["rte", "mine", "value"]
    assert found[1].task.classes == ("w", "x") and [row.label for row in found[1].rows("dev")] == [1, 0, 1]
    assert found[2].task.classes is None and list(found[2].rows("dev")) == [Row("a", "b", 0.5), Row("c", "d", -1)]


@pytest.mark.parametrize(
    ("name", "suffix", "text", "words"),
    [
        ("RTE", "tsv", "index\tsentence1\tlabel\n", "header has no column 'sentence2' .it has index, sentence1, label"),
        (
            "RTE",
            "tsv",
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tyes\n",
            "line 2: label 'yes' is none of not_entailment",
        ),
        ("STS-B", "jsonl", '{"sentence1": "a", "sentence2": "b", "label": "x"}\n', "line 1: label 'x' is no number"),
        ("WNLI", "jsonl", '{"sentence1": "a", "sentence2": "b", "label": 2}\n', "line 1: label '2' is none of 0, 1"),
        ("WNLI", "jsonl", '{"sentence1": "a", "label": 1}\n', "line 1 has no field 'sentence2'; wnli needs sentence1"),
        ("WNLI", "jsonl", "{}\nx\n", "line 1 has no field"),
        ("WNLI", "jsonl", "[1]\n", "line 1 is no JSON object"),
        ("WNLI", "jsonl", '{"sentence1": "a", "sentence2": null, "label": 1}\n', "line 1: 'sentence2' is null; give"),
        ("WNLI", "jsonl", '{"sentence1": "a", "sentence2": "b", "label": -1}\n', "no line with a label; is it a test"),
        ("WNLI", "jsonl", "", "train.jsonl: holds no line with a label"),
        ("STS-B", "jsonl", '{"sentence1": "a", "sentence2": "b", "label": NaN}\n', "line 1: label nan is no number"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, suffix: str, text: str, words: str) -> None:
    lay(tmp_path / name, ("dev",), suffix, text)
    with pytest.raises(UserError, match=words):
        list(find(tmp_path, None)[0].rows("train"))


@pytest.mark.parametrize(("name", "suffix"), [("SST-2", "tsv"), ("SST-2", "jsonl"), ("mine", "jsonl")])
def test_other_bytes_than_utf8_are_one_line(tmp_path: Path, name: str, suffix: str) -> None:
    lay(tmp_path / name, ("dev",), suffix, "")
    for split in ("train", "dev"):
        (tmp_path / name / f"{split}.{suffix}").write_bytes(b"sentence\tlabel\nna\xefve\t1\n")
    with pytest.raises(UserError, match=f"train.{suffix}: is no UTF-8 .invalid continuation byte.; convert it"):
        list(find(tmp_path, None)[0].rows("train"))


def test_nothing_stays_of_a_task_whose_file_is_refused(tmp_path: Path) -> None:
    lay(tmp_path / "glue" / "SST-2", ("dev",), "tsv", "sentence\tlabel\nthe sea\t1\n")
    (tmp_path / "glue" / "SST-2" / "dev.tsv").write_text("sentence\tlabel\nthe sea\t7\n")
    model = {
        "head": "masked_lm",
        "causal": False,
        "layers": 1,
        "width": 8,
        "heads": 1,
        "glu_width": 8,
        "vocab_size": 300,
    }
    config = validate({"model": model, "data": {"sequence_length": 8}, "train": {"steps": 1}}, "here")
    plan = Plan(tmp_path, config, Tokenizer.train(["the sea, the ship and the moon"] * 20, 280), tmp_path / "runs")
    with pytest.raises(UserError, match=r"dev\.tsv: line 2: label '7' is none of 0, 1"):
        encode(find(tmp_path / "glue", None)[0], plan)
    assert not list((tmp_path / "runs").rglob("data"))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        find(tmp_path / "none", None)
    with pytest.raises(UserError, match="unpack GLUE's archives there"):
        find(tmp_path, None)
    lay(tmp_path / "MNLI", ("dev_matched",), "tsv", "")
    with pytest.raises(UserError, match=r"no dev_mismatched.tsv or dev_mismatched.jsonl beside"):
        find(tmp_path, None)
    with pytest.raises(UserError, match=r"no folder of task 'mnlii'.*mnli"):
        find(tmp_path, ["MNLI-I"])
    lay(tmp_path / "mine", (), "tsv", "")
    with pytest.raises(UserError, match=r"needs a train.jsonl"):
        find(tmp_path, ["mine"])
    lay(tmp_path / "one", ("dev",), "jsonl", '{"sentence": "a", "label": "x"}\n')
    with pytest.raises(UserError, match="holds 1 classes of 'label'"):
        find(tmp_path, ["one"])


@pytest.mark.parametrize(("option", "value"), [("--epochs", "nan"), ("--epochs", "inf"), ("--dropout", "nan")])
def test_shares_and_passes_are_finite(option: str, value: str) -> None:
    result = CliRunner().invoke(main, ["glue", "nowhere", "--data", "nowhere", option, value])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {option} {value}: must be a finite number")


def ranks_of(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (1 + sum(other == value for other in values)) / 2 for value in values
    ]


def pearson(a: list[float], b: list[float]) -> float:
    x, y = np.array(a) - np.mean(a), np.array(b) - np.mean(b)
    return float((x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum()))


@pytest.mark.parametrize("guesses", [[1, 1, 0, 0, 1, 0, 1, 1], [0] * 8, [1] * 8, [0, 1] * 4])
def test_metrics_of_classes_by_their_definitions(guesses: list[int]) -> None:
    labels = [1, 0, 0, 1, 1, 0, 1, 0]
    pairs = list(zip(guesses, labels, strict=True))
    tp, fp, fn, tn = (pairs.count(case) for case in ((1, 1), (1, 0), (0, 1), (0, 0)))
    found = f1_and_accuracy(np.array(guesses), np.array(labels))
    assert found["accuracy"] == pytest.approx((tp + tn) / 8)
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    scale = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(np.array(guesses), np.array(labels))["matthews"] == pytest.approx(
        (tp * tn - fp * fn) / scale if scale else 0
    )


def test_correlations_by_their_definitions() -> None:
    guesses, labels = [0.3, 2.0, 2.0, 4.9, -1.0], [0.0, 3.0, 1.0, 5.0, 0.0]
    found = correlations(np.array(guesses), np.array(labels))
    assert found["pearson"] == pytest.approx(pearson(guesses, labels))
    assert found["spearman"] == pytest.approx(pearson(ranks_of(guesses), ranks_of(labels)))
    assert next(iter(found)) == "pearson"
    assert correlations(np.array([2.0, 2.0]), np.array([0.0, 5.0])) == {"pearson": 0.0, "spearman": 0.0}


def result(rate: float, seed: int, **sets: float) -> dict[str, Any]:
    return {"rate": rate, "seed": seed, "sets": {name: {"accuracy": value, "f1": 0.0} for name, value in sets.items()}}


def test_the_best_rate_is_that_of_the_best_mean_over_seeds() -> None:
    grid = [result(5e-5, 0, a=0.9, b=0.7), result(5e-5, 1, a=0.2, b=0.2)]  # the best run of all
    grid += [result(3e-5, 0, a=0.6, b=0.5), result(3e-5, 1, a=0.7, b=0.6)]
    found = summary(grid)
    assert found["rate"] == 3e-5 and found["score"] == pytest.approx(0.6)
    assert found["sets"]["a"]["accuracy"] == pytest.approx(0.65) and found["sets"]["b"]["accuracy"] == pytest.approx(
        0.55
    )
    assert found["deviation"] == pytest.approx(math.sqrt(2 * 0.05**2))
    assert found["by_rate"] == {"5e-05": pytest.approx(0.5), "3e-05": pytest.approx(0.6)}
    assert summary(grid[:1])["deviation"] is None


def test_the_average_of_the_papers_table() -> None:
    """Paper, table of GLUE: LightNet's 79.9 is the mean of nine figures, two of which are MNLI's."""
    scores = {"sst2": 92.9, "stsb": 86.3, "rte": 55.6, "qnli": 89.1, "qqp": 87.7, "mrpc": 88.5, "cola": 52.6}
    tasks: dict[str, Any] = {key: {"sets": {"dev": {"score": value, "other": 0}}} for key, value in scores.items()}
    assert average(tasks) is None
    tasks["mnli"] = {"sets": {"dev_matched": {"score": 83.3}, "dev_mismatched": {"score": 83.5}}}
    tasks["wnli"] = {"sets": {"dev": {"score": 0.0}}}
    assert round(average(tasks) or 0, 1) == 79.9


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Three sources of numbered words, in documents of unlike lengths."""
    import zstandard

    lines, word = [], 0
    for i in range(300):
        length = 3 + i % 40
        words = " ".join(f"w{n}" for n in range(word, word + length))
        word += length
        lines.append(json.dumps({"text": words, "meta": {"pile_set_name": "ABC"[i % 3]}}))
    (tmp_path / "text.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))
    return tmp_path / "text.jsonl.zst"


def test_passages_do_not_overlap_and_stay_in_their_split(text: Path, tmp_path: Path) -> None:
    assert write(text, tmp_path / "tasks", 60, 15) == {"train": 60, "dev": 15}
    (found,) = find(tmp_path / "tasks", None)
    assert found.key == "source" and found.task.classes == ("A", "B", "C")
    parts = {split: list(found.rows(split)) for split in ("train", "dev")}
    words = [word for rows in parts.values() for row in rows for word in row.first.split()]
    assert len(words) == len(set(words))
    assert all(12 <= len(row.first.split()) <= 24 for rows in parts.values() for row in rows)
    for label in range(3):
        last = [[int(row.first.split()[0][1:]) for row in rows if row.label == label] for rows in parts.values()]
        assert list(map(len, last)) == [20, 5] and max(last[0]) < min(last[1])
    write(text, tmp_path / "again", 60, 15)
    assert (tmp_path / "again/source/dev.jsonl").read_text() == (tmp_path / "tasks/source/dev.jsonl").read_text()
    with pytest.raises(UserError, match=r"A has \d+ passages for dev, 1000 are needed; give --dev less"):
        write(text, tmp_path / "more", 60, 3000)
