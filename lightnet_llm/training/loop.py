"""The training loop: one for every head, engine and layout."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import store
from ..checkpoint.weights import save_weights
from ..config.run import RunConfig
from ..errors import UserError
from ..models.parameters import spec_of
from ..parallel.agreement import Agreement
from ..parallel.layout import Groups, Layout, layout_for, prepare_backend
from . import data, out_of_memory
from .engine import Engine, build_engine
from .metrics import MetricsWriter, flops_per_token, memory_bytes, peak_flops
from .run_folder import RunFolder
from .schedule import budget_of, learning_rate_factor
from .state import RunState


class Trainer:
    """One run on all ranks. Built and driven by :func:`run`."""

    def __init__(self, config: RunConfig, folder: RunFolder, groups: Groups, ranks: Agreement, device: torch.device):
        self.config, self.folder, self.groups, self.ranks, self.device = config, folder, groups, ranks, device
        self.rank = ranks.rank
        self.budget = budget_of(config, groups.layout.data)
        self.engine: Engine = build_engine(config, groups, device, self._initial_weights(config))
        self.state = RunState()
        self.interrupted = False
        self.metrics: MetricsWriter | None = None
        self.data_rank = groups.place["data"]
        self.validation = [
            data.ValidationSet(name, prefix, config, self.data_rank, groups.layout.data)
            for name, prefix in data.validation_prefixes(config).items()
        ]
        # One rank of those that hold the same parameters speaks for them.
        self.speaks = groups.place["data"] == 0 and groups.place["sequence"] == 0

    def _initial_weights(self, config: RunConfig) -> Path | None:
        """The checkpoint that ``train.init_from`` names, unless there is a run to resume."""
        if config.train.init_from is None or (config.train.resume != "never" and self.folder.has_checkpoint):
            return None
        given = Path(config.train.init_from)
        path = Path(self.ranks.on_rank_zero(lambda: str(store.resolve(given, self.warn))))
        self.ranks.log(f"weights from {path}")
        return path

    # Start -----------------------------------------------------------------------------------------------------------
    def restore(self) -> None:
        """Resume from the newest whole checkpoint, or start from ``train.init_from``, or afresh."""
        found = None
        if self.config.train.resume != "never":
            found = self.ranks.on_rank_zero(lambda: store.newest_whole(self.folder.checkpoints, self.warn))
        if found is not None:
            path, manifest = found
            if manifest["layout"] != self.groups.layout.as_dict() or manifest["zero_stage"] != self.engine.zero_stage:
                raise UserError(
                    f"{path} was written by layout {manifest['layout']} with ZeRO {manifest['zero_stage']}; resuming on "
                    f"{self.groups.layout.as_dict()} with ZeRO {self.engine.zero_stage} is not available yet"
                )
            self.engine.load(path)
            self.state = RunState.from_dict(manifest["state"])
            self.ranks.log(f"resumed {path} at step {self.state.step}")
        elif self.config.train.resume == "must":
            raise UserError(f"train.resume=must, but no whole checkpoint is left in {self.folder.checkpoints}")

    def warn(self, message: str) -> None:
        """A warning, on screen and in the metrics file."""
        print(f"warning: {message}", file=sys.stderr, flush=True)

    # One step --------------------------------------------------------------------------------------------------------
    def train(self) -> None:
        """Run until the budget, a stop request or ``train.stop_at_step``."""
        config, state, budget = self.config, self.state, self.budget
        end = min(budget.steps, config.train.stop_at_step or budget.steps)
        if self.rank == 0:
            self.metrics = MetricsWriter(self.folder.path, state.step, budget.steps)
            if state.step:
                self.metrics.event(state.step, "resumed")
        batches = data.training_batches(config, budget, self.data_rank, self.groups.layout.data, state.step)
        parameters, saved = self._count(), state.step
        window_start, window_tokens = time.perf_counter(), 0
        while state.step < end:
            step, batch = state.step, budget.batch_at(state.step)
            rate = self.engine.set_rate(learning_rate_factor(config.schedule, step, budget.steps))
            self.engine.measure_groups = self._due(step + 1, config.logging.groups_interval)
            try:
                loss = self.engine.train_step(batches, step, batch)
            except torch.OutOfMemoryError:
                raise UserError(out_of_memory.advice(self.engine, self.engine.last_batch)) from None
            first = state.samples
            state.step, state.samples = step + 1, state.samples + batch
            state.tokens += batch * config.data.sequence_length
            window_tokens += batch * config.data.sequence_length
            if self._due(state.step, config.logging.interval) or state.step == end:
                mean = float(self.engine.reduce_mean(loss))
                seconds = time.perf_counter() - window_start
                self._report(mean, rate, first, window_tokens, seconds, parameters)
                window_start, window_tokens = time.perf_counter(), 0
                if not torch.isfinite(torch.tensor(mean)):
                    raise UserError(
                        f"loss is {mean} at step {state.step} (samples {first} to {state.samples - 1}); "
                        f"the last checkpoint is step {saved}: resume with a lower rate or look at these samples"
                    )
            elif self.metrics is not None:
                self.metrics.advance()
            pause = time.perf_counter()
            if self._due(state.step, config.validation.interval) or (config.validation.interval and state.step == end):
                self.validate()
            if self._due(state.step, config.checkpoint.interval):
                self.save()
                saved = state.step
            window_start += time.perf_counter() - pause
            if self.ranks.any(self.interrupted or (self.rank == 0 and self.folder.stop_requested)):
                self.ranks.log(f"stop requested: saving step {state.step}")
                break
        if saved != state.step:
            self.save()
        if state.step == budget.steps:
            self.ranks.on_rank_zero(lambda: self.folder.mark_finished(state.step))
        if self.metrics is not None:
            self.metrics.event(state.step, "finished" if state.step == budget.steps else "stopped")

    @staticmethod
    def _due(step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    def _count(self) -> int:
        """Parameters of the whole model, padding not counted."""
        local = sum(
            torch.Size(spec_of(p).shape).numel()
            for p in self.engine.module.parameters()
            if not getattr(p, "ds_pipe_replicated", False)
        )
        return self.ranks.sum(local if self.groups.place["tensor"] == 0 and self.speaks else 0)

    def _report(self, loss: float, rate: float, first: int, tokens: int, seconds: float, parameters: int) -> None:
        norm = self.engine.gradient_norm()
        groups = self.engine.group_norms
        if self.metrics is None:
            return
        speed = tokens / seconds if seconds > 0 else 0.0
        peak = peak_flops()
        values: dict[str, Any] = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate,
            "tokens": self.state.tokens,
            "samples": [first, self.state.samples],
            "tokens_per_second": round(speed, 1),
            "memory_bytes": memory_bytes(),
            "mfu": None,
        }
        if peak:
            flops = flops_per_token(self.config.model, parameters) * speed
            values["mfu"] = round(flops / (peak * self.groups.layout.world), 4)
        if groups is not None:
            values["norms"] = groups
        self.metrics.write(self.state.step, values)
        self.metrics.advance(loss, speed)

    def validate(self) -> None:
        """Loss on every validation set."""
        for held in self.validation:
            mean = float(self.engine.evaluate(held.batches(), held.micro_batches))
            if self.metrics is not None:
                self.metrics.write(self.state.step, {"validation": {held.name: held.report(mean)}})

    # Saving ----------------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write a checkpoint on all ranks; it appears whole or not at all."""
        root, step = self.folder.checkpoints, self.state.step
        folder = Path(self.ranks.on_rank_zero(lambda: str(store.begin(root, step))))
        problem = None
        try:
            self.engine.save(folder, self.state.as_dict())
            save_weights(
                self.engine.module,
                folder,
                stage=self.groups.place["pipeline"],
                tensor_rank=self.groups.place["tensor"],
                tensor_size=self.groups.layout.tensor,
                zero_stage=self.engine.zero_stage,
                writes=self.speaks,
            )
        except (OSError, RuntimeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if self.ranks.any(problem is not None):
            free = shutil.disk_usage(root).free / 2**20
            raise UserError(
                f"checkpoint of step {step} could not be written ({problem or 'on another rank'}; {free:.0f} MiB free in "
                f"{root}); older ones are intact"
            )

        def finish() -> None:
            (folder / "config.yaml").write_bytes((self.folder.path / "config.yaml").read_bytes())
            facts = {
                "format": 1,
                "state": self.state.as_dict(),
                "layout": self.groups.layout.as_dict(),
                "zero_stage": self.engine.zero_stage,
            }
            store.commit(root, step, facts)
            store.prune(root, self.config.checkpoint.keep_last, self.config.checkpoint.keep_every)

        self.ranks.on_rank_zero(finish)
        if self.metrics is not None:
            self.metrics.event(step, "saved")


def run(config: RunConfig) -> int:
    """Train ``config`` on this rank of a started job; returns the step reached.

    Raises:
        UserError: on every rank alike, with one line for the user.
    """
    device = prepare_backend()
    layout: Layout = layout_for(config.parallel, dist.get_world_size())
    groups = Groups(layout)
    folder = RunFolder(config)
    ranks = Agreement(groups.control_group)

    def prepare() -> int | None:
        folder.check()
        tokenizer = data.check_tokenizer(config)
        data.validation_prefixes(config)
        budget = budget_of(config, layout.data)
        done = folder.finished_step() if config.train.resume != "never" else None
        if done is not None and done >= budget.steps:
            return done
        folder.record(layout.as_dict(), tokenizer)
        if "LIGHTNET_LAUNCHED" not in os.environ:
            folder.clear_stop()
        return None

    done = ranks.on_rank_zero(prepare)
    if done is not None:
        ranks.log(f"{folder.path} is finished at step {done}; a larger train.steps or train.tokens continues it")
        return done
    trainer = Trainer(config, folder, groups, ranks, device)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(trainer, "interrupted", True))
    trainer.restore()
    try:
        trainer.train()
    finally:  # an error message starts on a line of its own, below the progress bar
        if trainer.metrics is not None:
            trainer.metrics.close()
    ranks.on_rank_zero(folder.clear_stop)
    return trainer.state.step
