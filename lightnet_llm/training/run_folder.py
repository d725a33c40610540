"""A run's folder: what it records about itself, when it may be continued, how it is asked to stop."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml
from lightnet_data import manifest as manifests

from ..checkpoint.store import listed, write_text
from ..config import RunConfig, dump_config, validate
from ..errors import UserError

CONFIG, STOP, METRICS, FINISHED = "config.yaml", "stop", "metrics.jsonl", "finished.json"

# What may change when a run is resumed; all else decides the numbers the run produces. Sections end with a dot.
RESUMABLE = (
    "train.name",
    "train.output",
    "train.resume",
    "train.steps",
    "train.tokens",
    "train.stop_at_step",
    "train.micro_batch",
    "train.init_from",
    "parallel.",
    "data.workers",
    "data.validation",
    "validation.",
    "evaluation.",
    "checkpoint.",
    "logging.",
    "launch.",
    "bad_steps.",
    "watchdog.",
)


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _may_change(field: str) -> bool:
    return any(
        field == name or field.startswith(name if name.endswith(".") else name + ".") or field == name.rstrip(".")
        for name in RESUMABLE
    )


class RunFolder:
    """Paths and rules of one run folder, ``train.output / train.name``."""

    def __init__(self, config: RunConfig):
        assert config.train.name
        self.config = config
        self.path = Path(config.train.output) / config.train.name
        self.checkpoints = self.path / "checkpoints"
        self._lock: IO[str] | None = None

    @property
    def has_checkpoint(self) -> bool:
        """Whether anything could be resumed."""
        return bool(listed(self.checkpoints))

    def check(self) -> None:
        """Refuse, before any work, a start that would overwrite a run or a resume that would bend it.

        Raises:
            UserError: with the way out.
        """
        exists = self.has_checkpoint or (self.path / METRICS).exists()  # a start that failed before is no run
        resume = self.config.train.resume
        self._check_place()
        if exists and resume == "never":
            raise UserError(
                f"run folder {self.path} exists and is never overwritten; continue it with train.resume=auto, "
                "or start another with train.name=NAME"
            )
        if resume == "must" and not self.has_checkpoint:
            raise UserError(f"train.resume=must, but {self.checkpoints} holds no checkpoint; use train.resume=auto")
        if exists:
            self._check_same_run()

    def _check_place(self) -> None:
        place = next(x for x in (self.path, *self.path.parents) if x.exists())
        if not place.is_dir():
            raise UserError(f"train.output {self.config.train.output}: {place} is a file; choose another folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise UserError(
                f"train.output {self.config.train.output}: {place} may not be written to; choose another folder"
            )

    def _check_same_run(self) -> None:
        path = self.path / CONFIG
        if not path.is_file():
            raise UserError(
                f"{path} is missing, so {self.path} cannot be continued; start another with train.name=NAME"
            )
        try:
            kept = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(
                f"{path} cannot be read ({str(error).splitlines()[0]}); copy config.yaml of its newest checkpoint there, or "
                "start another run with train.name=NAME"
            ) from None
        before = _flat(validate(kept, str(path)).model_dump(mode="json"))
        now = _flat(self.config.model_dump(mode="json"))
        for field in sorted(set(before) | set(now)):
            if before.get(field) != now.get(field) and not _may_change(field):
                raise UserError(
                    f"{field} was {before.get(field)!r} in {path} and is {now.get(field)!r} now; a resumed run keeps it "
                    f"(free to change: {', '.join(RESUMABLE)})"
                )

    def lock(self) -> None:
        """Hold this folder until the process ends, so that two runs never write to it.

        Raises:
            UserError: another live run holds it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = (self.path / "lock").open("a+")
        except OSError as error:
            raise UserError(f"run folder {self.path}: {error.strerror}; choose another with train.output") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise UserError(
                f"{self.path} is in use by a run that is still going; stop it, or use train.name=NAME"
            ) from None
        except OSError:  # a file system without locks
            pass
        self._lock = handle

    def record(self, layout: dict[str, int], tokenizer: Path | None) -> None:
        """Write the resolved configuration, versions, command, git commit and diff. One process calls this."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / CONFIG, dump_config(self.config))
        names = (
            "lightnet-llm",
            "torch",
            "deepspeed",
            "megatron-core",
            "triton",
            "numpy",
            "sentencepiece",
            "tokenizers",
        )
        versions = {"python": platform.python_version()}
        for name in names:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        facts = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": sys.argv,
            "versions": versions,
            "layout": layout,
            "git": self._git(),
        }
        history = self.path / "environment.jsonl"  # one line a start, so that resumes are on record too
        with history.open("a") as file:
            file.write(json.dumps(facts) + "\n")
        if tokenizer is not None and not (self.path / tokenizer.name).exists():
            shutil.copyfile(tokenizer, self.path / tokenizer.name)
            facts = manifests.load(tokenizer.parent)  # names the end-of-document token, which a bare file may not
            manifests.save(self.path, {key: facts[key] for key in ("format", "format_version", "tokenizer")})

    def _git(self) -> dict[str, Any] | None:
        def git(*arguments: str) -> str:
            root = Path(__file__).resolve().parent
            command = ["git", "-C", str(root), *arguments]
            return subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout

        try:
            commit, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD")
        except (OSError, subprocess.CalledProcessError):
            return None
        name = f"source-{time.strftime('%Y%m%d-%H%M%S')}.diff"  # each start keeps its own
        if diff:
            (self.path / name).write_text(diff)
        return {"commit": commit, "diff": name if diff else None}

    # Stopping: a file, because it reaches every node of a run through the file system that holds the run folder and
    # needs no help from the launcher, which would exit 1 on SIGTERM and kill its ranks.
    def request_stop(self) -> None:
        """Ask the ranks to save and exit 0 after the step they are in."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / STOP).write_text(f"{os.getpid()}\n")

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for."""
        return (self.path / STOP).exists()

    def clear_stop(self) -> None:
        """Forget earlier requests."""
        (self.path / STOP).unlink(missing_ok=True)

    def finished_step(self) -> int | None:
        """The step at which this run reached its budget, if it did."""
        try:
            return int(json.loads((self.path / FINISHED).read_text())["step"])
        except (FileNotFoundError, ValueError):  # not there, or cut: its last checkpoint tells as much
            return None

    def mark_finished(self, step: int) -> None:
        """Record that the budget was reached."""
        facts = {"step": step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_text(self.path / FINISHED, json.dumps(facts))

    def clear_finished(self) -> None:
        """A run that goes on is not finished, wherever it stops next."""
        (self.path / FINISHED).unlink(missing_ok=True)
