"""The training loop: one for every head, engine and layout."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightnet_data.errors import DataError

from ..config.run import RunConfig
from ..errors import UserError
from ..launch import times
from ..parallel.agreement import Agreement
from ..parallel.layout import Groups, prepare_backend
from ..parallel.legality import legal_layout
from . import data, evaluation, out_of_memory, time_budget, watchdog
from .bad_steps import Verdict, pick_suspects
from .engine import Engine, build_engine
from .metrics import MetricsWriter, flops_per_token, memory_bytes, parameters_here, peak_flops
from .profiling import Trace
from .progress import Progress
from .resume import resume
from .run_folder import RunFolder
from .saving import Saver
from .schedule import budget_of, learning_rate_factor
from .start import Start, prepare


class Trainer:
    """One run on all ranks. Built and driven by :func:`run`."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        groups: Groups,
        ranks: Agreement,
        device: torch.device,
        start: Start,
        progress: Progress,
    ):
        self.config, self.folder, self.groups, self.ranks, self.device = config, folder, groups, ranks, device
        self.start, self.state, self.first = start, start.state, start.state.step
        self.budget = budget_of(config, groups.layout.data)
        self.engine: Engine = build_engine(config, groups, device, start.weights, start.stages)
        self.engine.progress = self.progress = progress
        self.interrupted = False
        self.spans: dict[int, tuple[int, int]] = {}  # samples of the steps that were not judged yet
        self.metrics: MetricsWriter | None = None
        self.data_rank = groups.place["data"]
        self.validation = [
            data.ValidationSet(name, prefix, config, self.data_rank, groups.layout.data)
            for name, prefix in (data.validation_prefixes(config) if config.validation.interval else {}).items()
        ]
        self.saver = Saver(config, folder, groups, ranks, self.engine, start.identity, self._report_saved)
        # One rank of those that hold the same parameters speaks for them; one of those that read a sample, for it.
        self.speaks = groups.place["data"] == 0 and groups.place["sequence"] == 0
        self.reads = all(groups.place[axis] == 0 for axis in ("tensor", "sequence", "pipeline"))
        self.evaluation = (
            evaluation.Evaluation(config, groups, ranks, self.engine, folder.path)
            if config.evaluation.interval
            else None
        )
        if start.weights is not None:
            ranks.log(f"weights from {start.weights}")
        resume(self.engine, start, config.train.seed, ranks)
        self.engine.judge.restore(self.state.bad_steps)

    # One step --------------------------------------------------------------------------------------------------------
    def train(self) -> None:
        """Run until the budget, a stop request or ``train.stop_at_step``."""
        config, state, budget = self.config, self.state, self.budget
        end = min(budget.steps, config.train.stop_at_step or budget.steps)
        self.ranks.on_rank_zero(self._open_metrics)
        batches = data.training_batches(config, budget, self.data_rank, self.groups.layout.data, state.step)
        counts = self.groups.place["tensor"] == 0 and self.speaks
        parameters, saved = self.ranks.sum(parameters_here(self.engine.module) if counts else 0), state.step
        due: list[int] = []  # steps whose save is to be made
        recorded = config.logging.profile_steps if self.speaks else 0
        trace = Trace(self.folder.path / "profile", self.ranks.rank, recorded, state.step, end)
        window_start, window_tokens = time.perf_counter(), 0
        guard = self.engine.guard
        while state.step < end:
            step, batch, began = state.step, budget.batch_at(state.step), time.perf_counter()
            self.progress.begin("step", step + 1, batch)
            factor = learning_rate_factor(config.schedule, step, budget.steps)
            rate = self.engine.set_rate(config.rate_scale * factor)
            self.engine.measure_groups = self._due(step + 1, config.logging.groups_interval)
            loss = self._step(batches, step, batch)
            if step == self.first:
                times.current.mark("first_step")
            first = state.samples
            state.step, state.samples = step + 1, state.samples + batch
            state.tokens += batch * config.data.sequence_length
            window_tokens += batch * config.data.sequence_length
            self.spans[step] = (first, state.samples)
            if self._due(state.step, config.checkpoint.interval) or state.step == end:
                due.append(state.step)
            asked = self.metrics is not None and (self.metrics.problem is not None or self.folder.stop_requested)
            stop = self.ranks.any(self.interrupted or asked)
            self.saver.after_step(time.perf_counter() - began)
            reports = self._due(state.step, config.logging.interval) or self.engine.group_norms is not None
            # Otherwise a verdict is heard while the device works on the next step.
            verdict = guard.settle() if reports or due or stop or self.engine.judge.streak else guard.last
            # While steps are being skipped the weights are in doubt: they must not push older checkpoints out.
            saves = (bool(due) and verdict.reason is None) or state.step == end
            if reports or saves or stop:
                mean = float(self.engine.reduce_mean(loss)) if verdict.reason is None else verdict.loss
                seconds = time.perf_counter() - window_start
                self._report(mean, rate, first, window_tokens, seconds, parameters)
                window_start, window_tokens = time.perf_counter(), 0
            elif self.metrics is not None:
                self.metrics.advance()
            state.bad_steps = self.engine.judge.as_dict()
            for verdict in guard.judged():
                span = self.spans.pop(verdict.step)
                if verdict.reason is not None:
                    self._skipped(verdict, span, saved)
            self.progress.begin("bookkeeping")
            pause = time.perf_counter()
            if self._due(state.step, config.validation.interval) or (config.validation.interval and state.step == end):
                self.validate()
            if saves or stop:
                self.progress.begin("save")
                if verdict.reason is not None:
                    self.ranks.log("the last step was skipped: this save leaves all older checkpoints where they are")
                self.saver.save(state, due, verdict.reason is not None)
                saved, due = state.step, []
            # After the save: tasks take minutes, and who asks for a stop will not wait for them.
            evaluates = self._due(state.step, config.evaluation.interval) or state.step == end
            if self.evaluation and evaluates and not stop:
                self.evaluate(self.evaluation)
            trace.step()
            window_start += time.perf_counter() - pause
            if stop:
                if self.metrics is not None and self.metrics.problem is None:
                    self.ranks.log(f"stop requested: saved step {state.step}")
                break
        trace.close()
        self.progress.begin("save")
        self.saver.wait()
        self.progress.begin("end")
        self.ranks.on_rank_zero(self._end_metrics)
        if state.step == budget.steps:
            self.ranks.on_rank_zero(lambda: self.folder.mark_finished(state.step))

    def _open_metrics(self) -> None:
        self.metrics = MetricsWriter(self.folder.path, self.state.step, self.budget.steps)
        if self.state.step:
            self.metrics.event(self.state.step, "resumed")

    def _end_metrics(self) -> None:
        assert self.metrics is not None
        self.metrics.end(self.state.step, "finished" if self.state.step == self.budget.steps else "stopped")

    def _step(self, batches: Iterator[data.Batch], step: int, batch: int) -> torch.Tensor:
        try:
            return self.engine.train_step(batches, step, batch)
        except torch.OutOfMemoryError:
            pass  # the error's traceback holds the failed activations: they are free only after this block
        raise UserError(out_of_memory.advice(self.engine, self.budget))

    def _skipped(self, found: Verdict, span: tuple[int, int], saved: int) -> None:
        """Log a step that was skipped, and stop when there are too many in a row."""
        step, (first, end) = found.step + 1, span
        suspects = self.ranks.gather(found.suspects())
        worst = pick_suspects([pair for part in suspects for pair in part])
        self.ranks.log(f"skipped step {step}: {found.reason} (loss {found.loss:.4g}, gradient norm {found.norm:.4g})")
        self._note_skipped(found, span, worst)
        if found.streak >= self.config.bad_steps.in_a_row:
            older = f"train.init_from={self.folder.checkpoints} and " if saved else ""
            raise UserError(
                f"loss is {found.loss} and gradient norm {found.norm} at step {step} (samples {first} to {end - 1}): "
                f"{found.reason}, the {found.streak}th step in a row that is skipped (bad_steps.in_a_row); "
                f"nothing was saved since step {saved}: look at these samples, or start another run with "
                f"{older}a lower optimizer.learning_rate",
                shared=True,
            )

    def _note_skipped(self, found: Verdict, span: tuple[int, int], suspects: list[int]) -> None:
        if self.metrics is not None:
            values = {"loss": found.loss, "grad_norm": found.norm}
            self.metrics.event(
                found.step + 1, "skipped", reason=found.reason, found=values, samples=list(span), suspects=suspects
            )

    def note_unheard(self) -> None:
        """Events of skipped steps that an error of a later one kept from being told; no other rank is asked."""
        self.engine.guard.settle()
        for verdict in self.engine.guard.judged():
            if verdict.reason is not None and verdict.step in self.spans:
                self._note_skipped(verdict, self.spans[verdict.step], pick_suspects(verdict.suspects()))

    @staticmethod
    def _due(step: int, interval: int) -> bool:
        return interval > 0 and step % interval == 0

    def _report(self, loss: float, rate: float, first: int, tokens: int, seconds: float, parameters: int) -> None:
        norm = self.engine.gradient_norm()
        groups = self.engine.group_norms
        checksum = self.ranks.sum(self.engine.batch_checksum if self.reads else 0)
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
            "batch_checksum": checksum,
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
            means = self.engine.evaluate(held.batches(), held.micro_batches).tolist()
            if self.metrics is not None:
                self.metrics.write(self.state.step, {"validation": {held.name: held.report(means)}})

    def evaluate(self, tasks: evaluation.Evaluation) -> None:
        """Scores of the tasks; what fails is said, and training goes on."""
        began = time.perf_counter()
        scores, failed = tasks.run()
        if self.metrics is not None:
            evaluation.say(failed, self.state.step)
            seconds = round(time.perf_counter() - began, 3)
            self.metrics.write(self.state.step, {"evaluation": {**scores, "seconds": seconds}})
            for task, problem in failed.items():
                self.metrics.event(self.state.step, "evaluation failed", task=task, reason=problem)

    def _report_saved(self, step: int, figures: dict[str, Any]) -> None:
        if self.metrics is not None:
            self.metrics.write(self.state.step, {"checkpoint": figures})
            self.metrics.event(step, "saved")


def run(config: RunConfig, launched: bool = False) -> int:
    """Train ``config`` on this rank of a started job; returns the step reached.

    Args:
        launched: whether ``lightnet train`` started this job and may ask it to stop.

    Raises:
        UserError: with one line for the user; ``shared`` on it when every rank raises the same.
    """
    device = prepare_backend()
    layout = legal_layout(config, dist.get_world_size())
    groups = Groups(layout)
    ranks = Agreement(groups.control_group)
    folder = RunFolder(config)
    ranks.on_rank_zero(lambda: evaluation.check(config))
    config = time_budget.fixed(config, folder, groups, device, ranks)
    folder.config = config
    start = ranks.on_rank_zero(lambda: prepare(config, folder, layout, launched))
    if start.finished is not None:
        ranks.log(
            f"{folder.path} is finished at step {start.finished}; a larger train.steps or train.tokens continues it"
        )
        return start.finished
    ranks.on_rank_zero(folder.clear_finished)
    started = ranks.on_rank_zero(lambda: time.strftime("%Y%m%d-%H%M%S"))
    watch = watchdog.Watchdog(config.watchdog, folder.path / "hangs" / started, ranks.rank, layout.world)
    watchdog.current = watch
    times.current.mark("checks")
    trainer = Trainer(config, folder, groups, ranks, device, start, watch.progress)
    times.current.mark("engine")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(trainer, "interrupted", True))
    try:
        trainer.train()
    except (UserError, DataError) as error:
        with contextlib.suppress(Exception):  # what went wrong counts, not what it leads to
            trainer.note_unheard()
        if getattr(error, "shared", False):  # all ranks are here: a checkpoint that is being written is worth finishing
            watch.progress.begin("save")  # it may take longer than a step
            trainer.saver.wait()
        raise
    finally:  # an error message starts on a line of its own, below the progress bar
        if trainer.metrics is not None:
            trainer.metrics.close()
    ranks.on_rank_zero(folder.clear_stop)
    watch.leave()
    return trainer.state.step
