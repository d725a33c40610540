"""One fine-tuning run of GLUE's grid: its data, its configuration, its training, its figures."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightnet_data import sentences
from lightnet_data.tokenizer import Tokenizer

from lightnet_llm.checkpoint.store import resolve, write_text
from lightnet_llm.config import RunConfig
from lightnet_llm.errors import UserError
from lightnet_llm.inference.load import find_tokenizer, load_model_of_head, read_config
from lightnet_llm.launch.command import environment_for
from lightnet_llm.launch.hosts import free_port
from lightnet_llm.models import SequenceClassifier
from lightnet_llm.parallel.clock import Clock
from lightnet_llm.training.sentence_task import SentenceTask

from .glue_tasks import Found

RATES = (5e-5, 4e-5, 3e-5, 2e-5)  # paper section 5.1


@dataclass(frozen=True)
class Plan:
    """What all runs have in common.

    Attributes:
        checkpoint: folder of the weights to start from.
        config: of the run that trained them.
        tokenizer: theirs.
        output: folder of all runs.
        rates, seeds: the grid.
        epochs, batch, dropout: of fine-tuning.
        scratch: start from initial values instead of the checkpoint's weights.
    """

    checkpoint: Path
    config: RunConfig
    tokenizer: Tokenizer
    output: Path
    rates: tuple[float, ...] = RATES
    seeds: int = 1
    epochs: float = 5.0
    batch: int = 16
    dropout: float = 0.1
    scratch: bool = False

    def as_dict(self) -> dict[str, Any]:
        """What a result depends on beside the data, for JSON."""
        given = {"epochs": self.epochs, "batch": self.batch, "dropout": self.dropout, "scratch": self.scratch}
        return {"checkpoint": str(self.checkpoint), "tokenizer": self.tokenizer.fingerprint, **given}


def plan_of(checkpoint: str | Path, output: Path, **fields: Any) -> Plan:
    """The plan for a run folder or checkpoint of a masked language model.

    Raises:
        UserError: it holds another model, or its tokenizer is not to be found.
    """
    if not Path(checkpoint).exists():
        raise UserError(f"{checkpoint}: no such checkpoint; name a run folder or a folder such as .../step_00000100")
    folder = resolve(Path(checkpoint), lambda line: print(f"warning: {line}", file=sys.stderr))
    config = read_config(folder)
    if config.model.head not in ("masked_lm", "sequence_classifier"):
        raise UserError(f"{folder}: holds a {config.model.head}; fine-tuning starts from a run of head: masked_lm")
    tokenizer = find_tokenizer(folder, config)
    if tokenizer is None:
        raise UserError(f"{folder}: its run folder holds no tokenizer; copy the one of its training data there")
    return Plan(folder, config, tokenizer, output, **fields)


def encode(found: Found, plan: Plan) -> tuple[Path, dict[str, Any]]:
    """The task's samples as a folder that training reads; made once.

    Raises:
        UserError, DataError: a file is not the task's, or an earlier folder was made otherwise.
    """
    folder, length = plan.output / found.key / "data", plan.config.data.sequence_length
    made = {
        "tokenizer": plan.tokenizer.fingerprint,
        "files": {k: [str(p), p.stat().st_size] for k, p in found.files.items()},
    }
    stamp = folder / "source.json"
    if stamp.is_file():
        if json.loads(stamp.read_text()) != made:
            raise UserError(f"{folder}: was made of other files or with another tokenizer; choose another --runs")
        return folder, sentences.load(folder)
    rows = {k: found.rows(k) for k in found.files}
    try:
        facts = sentences.write(folder, rows, plan.tokenizer, length, found.task.classes)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    write_text(stamp, json.dumps(made))
    for split, count in found.left_out.items():
        if count:
            print(
                f"{found.files[split]}: {count} lines without a label or with too few columns left out", file=sys.stderr
            )
    return folder, facts


def run_config(plan: Plan, data: Path, facts: dict[str, Any], rate: float, seed: int) -> dict[str, Any]:
    """The configuration of one run; what the paper leaves open is the Cramming recipe's: batch 16, a tenth of warm-up, cosine."""
    classes = facts["classes"]
    samples = facts["splits"]["train"]["samples"]
    batch = min(plan.batch, samples)
    steps = math.ceil(samples * plan.epochs / batch)
    epoch = max(1, math.ceil(samples / batch))
    model = plan.config.model.model_dump(mode="json", exclude_unset=True)
    head = {"head": "sequence_classifier", "classes": 1 if classes is None else len(classes), "dropout": plan.dropout}
    held_out = max(split["samples"] for name, split in facts["splits"].items() if name != "train")
    return {
        "model": {**model, **head},
        "data": {"path": str(data), "sequence_length": plan.config.data.sequence_length},
        "train": {
            "name": f"rate{rate:g}_seed{seed}",
            "output": str(data.parent),
            "seed": seed,
            "precision": plan.config.train.precision if torch.cuda.is_available() else "fp32",
            "global_batch": batch,
            "micro_batch": batch,
            "steps": steps,
            "resume": "auto",
            "init_from": None if plan.scratch else str(plan.checkpoint),
        },
        "optimizer": {"learning_rate": rate, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.0, "clip": 1.0},
        "schedule": {"kind": "cosine", "warmup_steps": math.ceil(steps / 10), "final_ratio": 0.0},
        "validation": {"interval": epoch, "samples": held_out},
        "checkpoint": {"interval": epoch, "keep_last": 1},
    }


class Trainings:
    """Training runs in processes of their own, and how all of them are asked to stop."""

    def __init__(self) -> None:
        self.stopping = False
        self._running: list[subprocess.Popen[bytes]] = []

    def stop(self) -> None:
        """Have those that run save and end, and no other begin."""
        self.stopping = True
        for process in list(self._running):
            process.terminate()

    def run(self, config: dict[str, Any], device: int | None) -> None:
        """One run, from its checkpoint where it has one.

        Args:
            device: number of the GPU that it has for itself; None leaves it the first, or the CPU.

        Raises:
            UserError: it failed; its own words are in ``RUN/output.txt``.
            KeyboardInterrupt: it was asked to stop, and has saved.
        """
        folder = Path(config["train"]["output"], config["train"]["name"])
        folder.mkdir(parents=True, exist_ok=True)
        given = folder.parent / f"{folder.name}.yaml"
        write_text(given, yaml.safe_dump(config, sort_keys=False))
        environment = {**environment_for(1), "MASTER_PORT": str(free_port())}
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(device)
        command = [sys.executable, "-m", "lightnet_llm.training.main", "--config", str(given)]
        if self.stopping:
            raise KeyboardInterrupt
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self._running.append(process)
            code = process.wait()
            self._running.remove(process)
        if self.stopping or (code == 0 and not (folder / "finished.json").is_file()):
            self.stopping = True
            raise KeyboardInterrupt
        if code:
            said = [x for x in (folder / "output.txt").read_text(errors="replace").splitlines() if x.strip()]
            errors = [line for line in said if line.startswith("error:")]
            last = (errors or said or ["nothing said"])[-1]
            raise UserError(f"{folder}: training ended with code {code} ({last}); see output.txt there")


@torch.no_grad()
def predict(folder: Path, location: str) -> torch.Tensor:
    """Classes int64 [n] or values fp32 [n] of a split's samples, in stored order, by a run's newest checkpoint."""
    model, config, _ = load_model_of_head(folder, SequenceClassifier, "sequence_classifier", None, None, "trained")
    task, clock = SentenceTask(config), Clock(0)
    samples, device = task.held_out(location), model.embedding.weight.device
    order = sorted(range(len(samples)), key=lambda i: len(samples[i]["input_ids"]))  # little padding
    found: dict[int, torch.Tensor] = {}
    for first in range(0, len(order), 64):
        part = order[first : first + 64]
        batch = task.to_device(task.collate([samples[i] for i in part]), device)
        logits = task.logits(model, batch, clock).float().cpu()
        found.update(zip(part, logits[:, 0] if task.regression else logits.argmax(1), strict=True))
    return torch.stack([found[i] for i in range(len(order))])


def measure(folder: Path, found: Found, data: Path) -> dict[str, Any]:
    """Figures of a finished run by held-out set; of classes also how often each was taken for which."""
    results: dict[str, Any] = {"sets": {}, "confusion": {}}
    for split in (name for name in found.files if name != "train"):
        guesses = predict(folder, f"{data}/{split}").numpy()
        labels = sentences.Sentences(f"{data}/{split}", 1 << 30, shuffle=False).labels
        results["sets"][split] = found.task.metric(guesses, labels)
        if found.task.classes is not None:
            count = len(found.task.classes)
            pairs = torch.from_numpy(labels).long() * count + torch.from_numpy(guesses)
            results["confusion"][split] = torch.bincount(pairs, minlength=count * count).view(count, count).tolist()
    return results
