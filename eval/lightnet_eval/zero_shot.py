"""Zero-shot tasks of lm-eval on a loaded model."""

from __future__ import annotations

import ast
import gc
import json
import logging
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightnet_llm.errors import UserError, nearest
from lightnet_llm.inference import Loaded

from .offline import write_tasks
from .published import TASKS, measured, table
from .ranks import Ranks

ALIASES = {"paper": TASKS}
ROWS_AT_ONCE = 256
SELDOM = 100_000  # objects between the garbage collector's rounds, in place of some hundred


def task_names(given: str) -> list[str]:
    """``a,b`` as a list; ``paper`` stands for the six tasks of the paper's table.

    Raises:
        UserError: no name.
    """
    names = [name for part in given.split(",") for name in ALIASES.get(part.strip(), (part.strip(),)) if name]
    if not names:
        raise UserError("--tasks: names no task; give for example --tasks paper or --tasks piqa,arc_easy")
    return list(dict.fromkeys(names))


def evaluate(loaded: Loaded, names: list[str], *, ranks: Ranks | None = None, **options: Any) -> dict[str, Any]:
    """lm-eval's results, on every rank; arguments and errors as of :func:`answer`."""
    ranks = ranks or Ranks()
    found: dict[str, Any] | None = ranks.first(answer(loaded, names, ranks=ranks, **options))
    assert found is not None
    return found


def answer(
    loaded: Loaded,
    names: list[str],
    *,
    offline: str | None = None,
    limit: int | None = None,
    ranks: Ranks | None = None,
    log_samples: bool = False,
    quiet: bool = False,
    **options: Any,
) -> dict[str, Any] | None:
    """lm-eval's results; lm-eval gives them on the first rank of a host alone, None elsewhere.

    Args:
        names: tasks or groups of lm-eval; with ``offline`` those of the folder.
        offline: folder of ``TASK.SPLIT.jsonl`` files; nothing is then asked of the network.
        limit: questions of each task at most.
        log_samples: keep every answer, under "samples".
        quiet: whether no progress bars are shown; ranks but the first show none.
        options: of ``LightNetLM``.

    Raises:
        UserError: no lm-eval, no such task, or no data for it.
    """
    if offline is not None:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when datasets is imported
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("lm-eval is not installed; install it with: pip install 'lightnet-llm[eval]'") from None
    from .language_model import LightNetLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it raises what it logs
    ranks = ranks or Ranks()
    quiet = quiet or bool(ranks.rank)
    model = LightNetLM(loaded=loaded, ranks=ranks, quiet=quiet, **options)
    with tempfile.TemporaryDirectory() as folder, _silent_requests(quiet), quick_harness():
        if offline is None:
            manager = TaskManager()
            _check_names(names, manager.all_tasks)
        else:
            write_tasks(offline, names, Path(folder))
            manager = TaskManager(include_path=folder, include_defaults=False)
        tasks: dict[str, Any] = {}

        def prepare() -> None:
            with ranks.first_alone():  # data sets are prepared on disk
                tasks.update(_load(manager, names, offline))

        ranks.share(prepare)
        try:
            with _wrong_labels_counted(model._warn):
                found = lm_eval.simple_evaluate(
                    model,
                    tasks=[tasks[name] for name in names] if offline is not None else names,
                    num_fewshot=0,  # some tasks have others
                    limit=limit,
                    task_manager=manager,
                    log_samples=log_samples,
                    bootstrap_iters=1000,
                )
        except Exception as error:
            if isinstance(error, UserError) or _in_model(error):
                raise
            where = "" if offline is None else f"--offline {offline}: "
            raise UserError(
                f"{where}{', '.join(names)}: a row does not fit its task ({_line(error)}); see docs/eval.md"
            ) from error
    return None if found is None else _plain(found)


def _in_model(error: Exception) -> bool:
    """Whether it came up while requests were answered, and not in lm-eval's tasks."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(Path(frame.filename).name == "language_model.py" for frame in frames)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _wrong_labels_counted(warn: Callable[[str], Any]) -> Iterator[None]:
    """lm-eval's warning for each row whose label is none of its choices, as it is in splits without labels, in one line."""
    log, rows = logging.getLogger("lm_eval.api.task"), []

    def counted(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith("Label index"):
            rows.append(1)
        return record.levelno >= logging.ERROR

    log.addFilter(counted)
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.removeFilter(counted)
        log.setLevel(logging.NOTSET)
    if rows:
        warn(f"{len(rows)} questions have a label that is none of their choices, and count as answered wrong")


@contextmanager
def _silent_requests(quiet: bool) -> Iterator[None]:
    """lm-eval shows a bar while it builds a task's requests, and asks git, which complains outside a repository; it has no
    options against these."""
    from lm_eval import evaluator
    from lm_eval.api import task

    shown, commit = task.tqdm, evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = lambda: None
    task.tqdm = partial(shown, disable=True) if quiet else shown
    try:
        yield
    finally:
        task.tqdm, evaluator.get_git_commit_hash = shown, commit


@contextmanager
def quick_harness() -> Iterator[None]:
    """What lm-eval does around a model takes longer than a small model itself. Here, with the same results, templates are
    compiled once, the numbers they give are parsed once, rows of data sets are decoded many at a time, its report on the
    machine (0.8 s of waiting for other programs) is made meanwhile, and the garbage collector, which walks through all
    requests again and again, comes seldom."""
    from datasets import Dataset
    from lm_eval.api import task
    from lm_eval.utils import env
    from torch.utils import collect_env

    compile_one, rows, report, often = (
        env.from_string,
        Dataset.__iter__,
        collect_env.get_pretty_env_info,
        gc.get_threshold(),
    )
    parsed = lru_cache(maxsize=1024)(ast.literal_eval)

    def compiled(text: str) -> Any:
        template = compile_one(text)
        template.globals = dict(template.globals)  # a chain of mappings, of which each rendering makes a dictionary
        return template

    def decoded(data: Any) -> Iterator[dict[str, Any]]:
        if data.format["type"] is not None or not data.column_names:
            yield from rows(data)
            return
        for batch in data.iter(ROWS_AT_ONCE):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    with ThreadPoolExecutor(1) as pool:
        env.from_string = lru_cache(maxsize=1024)(compiled)
        task.ast = SimpleNamespace(literal_eval=lambda text: (parsed if text.isdigit() else ast.literal_eval)(text))
        Dataset.__iter__ = decoded
        collect_env.get_pretty_env_info = pool.submit(report).result
        gc.set_threshold(SELDOM, *often[1:])
        try:
            yield
        finally:
            env.from_string, task.ast, Dataset.__iter__, collect_env.get_pretty_env_info = (
                compile_one,
                ast,
                rows,
                report,
            )
            gc.set_threshold(*often)


def _check_names(names: list[str], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise UserError(f"task '{name}': lm-eval has none of that name{nearest(name, known)}")


def _load(manager: Any, names: list[str], offline: str | None) -> dict[str, Any]:
    """Tasks with their data."""
    try:
        return dict(manager.load(names)["tasks"])
    except UserError:
        raise
    except Exception as error:  # of datasets, of the hub, of a task's own code: anything
        told = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        line = _line(told)
        if offline is not None:
            raise UserError(
                f"--offline {offline}: {', '.join(names)}: cannot be read ({line}); see docs/eval.md"
            ) from None
        raise UserError(
            f"{', '.join(names)}: the data cannot be had ({line}); give a folder with --offline, say of `make eval-data`"
        ) from None


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """As JSON would read it."""
    from lm_eval.utils import handle_non_serializable

    plain: dict[str, Any] = json.loads(json.dumps(found, default=handle_non_serializable))
    return plain


def summary(found: dict[str, Any], parameters: int, tokens: int | None) -> str:
    """All metrics by task, and the paper's table where one of its tasks was measured."""
    lines = []
    for task, metrics in found["results"].items():
        count = found.get("n-samples", {}).get(task, {}).get("effective")
        values = []
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if not isinstance(value, (int, float)) or metric.endswith("_stderr") or not kind:
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            error = f" ± {error:.4f}" if isinstance(error, (int, float)) else ""
            values.append(f"{metric} {value:.4f}{error}")
        lines.append(f"  {task}: {', '.join(values)}" + (f" ({count:,} questions)" if count else ""))
    if any(task in found["results"] for task in TASKS):
        lines += ["", table(measured(found["results"], parameters, tokens))]
    return "\n".join(lines)
