"""What a run folder says about its run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError

NUMBERS = ("time", "tokens")  # of a line, beside its step
LARGEST = 1e18  # no step, time or count comes near


@dataclass
class Run:
    """One run, as its folder tells it.

    Attributes:
        name: of the run, unique among the runs of a page.
        path: its folder.
        steps: lines of metrics.jsonl about training steps, ordered by step.
        validations: (step, {name: {loss, perplexity, bits_per_byte}}), ordered by step.
        evaluations: (step, {task: {metric: score}}), ordered by step.
        saves: what each checkpoint cost, as training writes it.
        events: lines about resumes, saves and stops, as they happened.
        config: resolved configuration, and its text.
        environments: one entry a start: versions, command, commit.
        heldout: result of ``lightnet eval --output RUN/heldout.json``, when there is one.
        sample: text of RUN/sample.txt, when there is one.
        pictures: names and contents of RUN/*.png, such as of lightnet sample and of confusion matrices.
        damaged: lines of metrics.jsonl that are no JSON objects, or hold what is not of its type.
    """

    name: str
    path: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[tuple[int, dict[str, dict[str, float]]]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, dict[str, float]]]] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    environments: list[dict[str, Any]] = field(default_factory=list)
    heldout: dict[str, Any] | None = None
    sample: str | None = None
    pictures: list[tuple[str, bytes]] = field(default_factory=list)
    damaged: int = 0

    def section(self, name: str) -> dict[str, Any]:
        """A section of the configuration, empty where it has none."""
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a field of the step lines, where it is a number."""
        rows = [(row["step"], row[name]) for row in self.steps if is_number(row.get(name))]
        return [step for step, _ in rows], [value for _, value in rows]

    def tokens_at(self) -> dict[int, float]:
        """Tokens trained on by each step that was written down."""
        return {row["step"]: row["tokens"] for row in self.steps if is_number(row.get("tokens"))}

    def validation_series(self, metric: str) -> dict[str, tuple[list[float], list[float]]]:
        """Steps and values of ``loss``, ``perplexity`` or ``bits_per_byte`` for each validation set."""
        return _by_name(self.validations, metric)

    def evaluation_series(self, metric: str) -> dict[str, tuple[list[float], list[float]]]:
        """Steps and values of a metric of lm-eval for each task that has it."""
        return _by_name(self.evaluations, metric)

    def metrics(self) -> list[str]:
        """Metrics of the tasks that were answered, standard errors left out."""
        scores = [scores for _, tasks in self.evaluations for scores in tasks.values() if isinstance(scores, dict)]
        return list(dict.fromkeys(name for found in scores for name in found if not name.endswith("_stderr")))


def _by_name(rows: list[tuple[int, Any]], metric: str) -> dict[str, tuple[list[float], list[float]]]:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for step, named in rows:
        for name, values in named.items():
            if isinstance(values, dict) and is_number(values.get(metric)):
                steps, numbers = found.setdefault(name, ([], []))
                steps.append(step)
                numbers.append(values[metric])
    return found


def is_number(value: Any) -> bool:
    """Whether a field holds a value: what is not finite is written as null."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fits(row: dict[str, Any]) -> bool:
    """Whether what is computed with has its type; all but the step may also be null, or not be there."""
    norms, numbers = row.get("norms"), [row[key] for key in NUMBERS if row.get(key) is not None]
    kinds = [of for of in norms.values() if of is not None] if isinstance(norms, dict) else []
    return (
        is_number(row.get("step"))
        and all(is_number(value) and abs(value) < LARGEST for value in (row["step"], *numbers))
        and (row.get("loss") is None or is_number(row["loss"]))
        and (norms is None or isinstance(norms, dict))
        and all(isinstance(of, dict) for of in kinds)
    )


def _counts(heldout: dict[str, Any]) -> bool:
    """Whether what the page shows of held-out text has its type."""
    return isinstance(heldout.get("baselines") or {}, dict) and all(
        is_number(heldout.get(key, 0)) for key in ("documents", "bytes", "tokens")
    )


def read_run(path: str | Path) -> Run:
    """Read a run folder.

    Raises:
        UserError: it is no run folder, or one of its files cannot be read.
    """
    folder = Path(path)
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{folder}: holds no metrics.jsonl; name a run folder, as `lightnet train` writes under runs/")
    run = Run(folder.resolve().name, folder)
    sets: dict[int, dict[str, dict[str, float]]] = {}
    tasks: dict[int, dict[str, dict[str, float]]] = {}
    for row in _json_lines(metrics, run):
        if not _fits(row):
            run.damaged += 1
        elif "event" in row:
            run.events.append(row)
        elif isinstance(row.get("validation"), dict):
            sets.setdefault(row["step"], {}).update(row["validation"])
        elif isinstance(row.get("evaluation"), dict):
            tasks.setdefault(row["step"], {}).update(row["evaluation"])
        elif isinstance(row.get("checkpoint"), dict):
            run.saves.append(row["checkpoint"])
        elif "loss" in row:
            run.steps.append(row)
    run.steps = sorted({row["step"]: row for row in run.steps}.values(), key=lambda row: row["step"])
    run.validations, run.evaluations = sorted(sets.items()), sorted(tasks.items())
    run.config_text = _text(folder / "config.yaml") or ""
    try:
        config = yaml.safe_load(run.config_text)
    except yaml.YAMLError:
        config = None
    run.config = config if isinstance(config, dict) else {}
    if (folder / "environment.jsonl").is_file():
        run.environments = list(_json_lines(folder / "environment.jsonl", run))
    run.sample = _text(folder / "sample.txt")
    pictures = [(path.stem, _bytes(path)) for path in sorted(folder.glob("*.png"))]
    run.pictures = [(name, data) for name, data in pictures if data is not None]
    heldout = _text(folder / "heldout.json")
    if heldout is not None:
        try:
            run.heldout = json.loads(heldout)
        except ValueError as error:
            raise UserError(f"{folder / 'heldout.json'}: not JSON ({error}); write it with lightnet eval") from None
        if not isinstance(run.heldout, dict) or not _counts(run.heldout):
            raise UserError(f"{folder / 'heldout.json'}: not a result of lightnet eval --output; write it again")
    return run


def _text(path: Path) -> str | None:
    found = _bytes(path)
    return None if found is None else found.decode("utf-8", errors="replace")


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); mend its permissions") from None


def _json_lines(path: Path, run: Run) -> list[dict[str, Any]]:
    rows = []
    for line in (_text(path) or "").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None  # cut by a kill, or being written
        if isinstance(row, dict):
            rows.append(row)
        else:
            run.damaged += 1
    return rows


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found.update(flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return found
