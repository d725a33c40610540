"""The nine tasks of GLUE (Wang et al., 2018; paper section 5.1): where their columns stand, their classes and their metrics.

Files are those of the public archives (tab-separated, without quoting) or JSON lines with the fields' usual names. A folder that
is none of the nine is a task of its own, of JSON lines with ``sentence`` or ``sentence1`` and ``sentence2``, and ``label``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lightnet_data.sentences import Row
from numpy.typing import NDArray

from lightnet_llm.errors import UserError, nearest

Figures = dict[str, float]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as in tables.
        columns: names in the header of its one or two sentences and its label; of CoLA, which has no header, their places.
        classes: spellings of its labels by number; None for a regression.
        metric: figures of guesses and labels; the first one is the task's score.
        sets: names of the held-out files, without suffix.
        fields: the same three (or two) in JSON lines.
    """

    name: str
    columns: tuple[str | int, ...]
    classes: tuple[str, ...] | None
    metric: Callable[[NDArray[Any], NDArray[Any]], Figures]
    fields: tuple[str, ...] = ("sentence1", "sentence2", "label")
    sets: tuple[str, ...] = ("dev",)


def accuracy(guesses: NDArray[Any], labels: NDArray[Any]) -> Figures:
    """Share of samples whose class is right."""
    return {"accuracy": float((guesses == labels).mean())}


def f1_and_accuracy(guesses: NDArray[Any], labels: NDArray[Any]) -> Figures:
    """F1 of class 1, and the share that is right."""
    from sklearn.metrics import f1_score

    return {"f1": float(f1_score(labels, guesses, zero_division=0.0)), **accuracy(guesses, labels)}


def matthews(guesses: NDArray[Any], labels: NDArray[Any]) -> Figures:
    """Matthews' correlation; 0 where one class alone was guessed."""
    from sklearn.metrics import matthews_corrcoef

    return {"matthews": float(matthews_corrcoef(labels, guesses)), **accuracy(guesses, labels)}


def correlations(guesses: NDArray[Any], labels: NDArray[Any]) -> Figures:
    """Pearson's and Spearman's correlation with the values; 0 where all guesses (or values) are equal."""
    from scipy.stats import pearsonr, spearmanr

    if len(labels) < 2 or np.ptp(guesses) == 0.0 or np.ptp(labels) == 0.0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(guesses, labels).statistic),
        "spearman": float(spearmanr(guesses, labels).statistic),
    }


_ENTAILED = ("not_entailment", "entailment")
_NLI = ("contradiction", "neutral", "entailment")
TASKS = {
    "mnli": Task(
        "MNLI",
        ("sentence1", "sentence2", "gold_label"),
        _NLI,
        accuracy,
        ("premise", "hypothesis", "label"),
        ("dev_matched", "dev_mismatched"),
    ),
    "sst2": Task("SST-2", ("sentence", "label"), ("0", "1"), accuracy, ("sentence", "label")),
    "stsb": Task("STS-B", ("sentence1", "sentence2", "score"), None, correlations),
    "rte": Task("RTE", ("sentence1", "sentence2", "label"), _ENTAILED, accuracy),
    "qnli": Task("QNLI", ("question", "sentence", "label"), _ENTAILED, accuracy, ("question", "sentence", "label")),
    "qqp": Task(
        "QQP",
        ("question1", "question2", "is_duplicate"),
        ("0", "1"),
        f1_and_accuracy,
        ("question1", "question2", "label"),
    ),
    "mrpc": Task("MRPC", ("#1 String", "#2 String", "Quality"), ("0", "1"), f1_and_accuracy),
    "cola": Task("CoLA", (3, 1), ("0", "1"), matthews, ("sentence", "label")),
    "wnli": Task("WNLI", ("sentence1", "sentence2", "label"), ("0", "1"), accuracy),
}
# Numbers of labels in JSON lines of the usual data sets, where they are not those of ``classes``.
NUMBERED = {
    "mnli": ("entailment", "neutral", "contradiction"),
    "rte": ("entailment", "not_entailment"),
    "qnli": ("entailment", "not_entailment"),
}


def key_of(name: str) -> str:
    """A task's key from any spelling: SST-2, sst_2, STS-B."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True)
class Found:
    """A task's files.

    Attributes:
        key: as on the command line.
        task: the task, with its classes.
        files: by split; ``train``, and the held-out sets.
        left_out: counts by split of lines without a label or with too few columns; filled while reading.
    """

    key: str
    task: Task
    files: dict[str, Path]
    left_out: dict[str, int] = field(default_factory=dict)

    def rows(self, split: str) -> Iterator[Row]:
        """The samples of a split, in the file's order."""
        path = self.files[split]
        self.left_out[split] = 0
        records = _json_lines(path) if path.suffix == ".jsonl" else _columns(path, self.task.columns)
        count = 0
        for number, record in records:
            texts, label = self._parts(record, path, number)
            if label is None:
                self.left_out[split] += 1
                continue
            count += 1
            yield Row(texts[0], texts[1] if len(texts) > 1 else None, label)
        if not count:
            raise UserError(f"{path}: holds no line with a label; is it a test set, or empty?")

    def _parts(self, record: Any, path: Path, number: int) -> tuple[list[str], float | None]:
        if isinstance(record, dict):
            fields = self.task.fields
            if fields[0] not in record and len(fields) == 3:
                fields = (*(name for name in ("sentence1", "sentence2", "sentence") if name in record), "label")
            missing = [name for name in fields if name not in record]
            if missing or len(fields) < 2:
                lacks = missing[0] if missing else "sentence"
                raise UserError(
                    f"{path}: line {number} has no field '{lacks}'; {self.key} needs {', '.join(self.task.fields)}"
                )
            values = [record[name] for name in fields]
            if None in values[:-1]:
                raise UserError(
                    f"{path}: line {number}: '{fields[values.index(None)]}' is null; give it a text, or remove the line"
                )
        elif record is None:
            return [], None
        else:
            values = list(record)
        texts, label = [str(value) for value in values[:-1]], values[-1]
        return texts, self._label(label, path, number)

    def _label(self, label: Any, path: Path, number: int) -> float | None:
        classes = self.task.classes
        if label in ("-", "", None):  # annotators did not agree
            return None
        if label == -1 and (classes is not None or self.key in TASKS):  # a test set
            return None
        if classes is None:
            try:
                value = float(label)
            except (TypeError, ValueError):
                value = math.nan
            if not math.isfinite(value):
                raise UserError(
                    f"{path}: line {number}: label {label!r} is no number, and {self.key} is a regression; correct it there"
                )
            return value
        spelling = str(label)
        if spelling in classes:
            return classes.index(spelling)
        numbered = NUMBERED.get(self.key, classes)
        if isinstance(label, int) and 0 <= label < len(numbered):
            return classes.index(numbered[label])
        raise UserError(f"{path}: line {number}: label {spelling!r} is none of {', '.join(classes)}; correct it there")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers from 1, and lines."""
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            yield from enumerate(file, 1)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: is no UTF-8 ({error.reason}); convert it") from None


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in _lines(path):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise UserError(f"{path}: line {number} is no JSON object; correct it there")
            yield number, record


def _columns(path: Path, columns: tuple[str | int, ...]) -> Iterator[tuple[int, list[str] | None]]:
    """The wanted columns of each line; None for a line with too few."""
    lines = _lines(path)
    places: list[int] = [int(column) for column in columns if isinstance(column, int)]
    if not places:
        header = next(lines, (1, ""))[1].rstrip("\r\n").split("\t")
        absent = [name for name in columns if name not in header]
        if absent:
            raise UserError(
                f"{path}: its header has no column '{absent[0]}' (it has {', '.join(header)}); is it this task's?"
            )
        places = [header.index(str(name)) for name in columns]
    for number, line in lines:
        cells = line.rstrip("\r\n").split("\t")
        yield number, [cells[place] for place in places] if len(cells) > max(places) else None


def find(folder: str | Path, wanted: list[str] | None) -> list[Found]:
    """The tasks in a folder of folders, in the order of the paper's table, then others by name.

    Args:
        wanted: spellings of tasks; None for all that are there.

    Raises:
        UserError: the folder or a task's file is missing, or a task is unknown.
    """
    root = Path(folder)
    if not root.is_dir():
        raise UserError(
            f"--data {root}: no such folder; give one with a folder of files for each task, such as {root}/CoLA"
        )
    places = {key_of(path.name): path for path in sorted(root.iterdir()) if path.is_dir() and _has(path, "train")}
    order = [*TASKS, *(key for key in places if key not in TASKS)]
    # An older archive's SNLI, say, is no task of GLUE, and of no form that one's own has.
    meant = [key for key in order if key in places and (key in TASKS or (places[key] / "train.jsonl").is_file())]
    keys = meant if wanted is None else [key_of(name) for name in wanted]
    for key in keys:
        if key not in places:
            hint = nearest(key, list(places)) or f"; there: {', '.join(places) or 'none'}"
            raise UserError(f"{root}: no folder of task '{key}' with a train.tsv or train.jsonl{hint}")
    if not keys:
        raise UserError(f"{root}: no folder in it has a train.tsv or train.jsonl; unpack GLUE's archives there")
    return [_find(key, places[key]) for key in sorted(set(keys), key=order.index)]


def _has(folder: Path, name: str) -> Path | None:
    return next((path for suffix in ("tsv", "jsonl") if (path := folder / f"{name}.{suffix}").is_file()), None)


def _find(key: str, folder: Path) -> Found:
    task = TASKS.get(key) or _own(key, folder)
    files = {"train": _has(folder, "train")}
    for name in task.sets:
        spellings = (name, name.replace("dev", "validation"))
        files[name] = next((path for spelling in spellings if (path := _has(folder, spelling))), None)
        if files[name] is None:
            raise UserError(
                f"{folder}: no {name}.tsv or {name}.jsonl beside {files['train']}; {task.name} is measured on it"
            )
    return Found(key, task, {name: path for name, path in files.items() if path is not None})


def _own(key: str, folder: Path) -> Task:
    """A task of the user's: its classes are all labels of its training file; numbers with a point make it a regression."""
    path = folder / "train.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: '{key}' is no task of GLUE, so it needs a train.jsonl (sentence, label)")
    labels = [record.get("label") for _, record in _json_lines(path)]
    if any(isinstance(label, float) for label in labels):
        return Task(key, (), None, correlations)
    classes = sorted({str(label) for label in labels if label not in (None, -1)})
    if len(classes) < 2:
        raise UserError(f"{path}: holds {len(classes)} classes of 'label'; a task needs two or more")
    return Task(key, (), tuple(classes), accuracy)
