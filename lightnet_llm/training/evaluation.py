"""Zero-shot tasks during training, on the live weights of any layout.

Where a rank holds all weights, the model that trains answers. Where it does not (tensor parallelism, pipeline stages,
ZeRO-3), every rank gathers them, a tensor at a time, into a copy that only infers. All ranks share the questions, and none
waits for another while it answers: what fails on one rank alone, such as its memory, can be told to the others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightnet_eval.ranks import Ranks
from torch import Tensor

from ..checkpoint import randomness
from ..checkpoint.weights import gathered
from ..config.run import RunConfig
from ..errors import UserError, nearest
from ..inference.load import Loaded, allocate, choose_dtype, find_tokenizer
from ..models import CausalLM
from ..models.parameters import shard, spec_of, unshard
from ..parallel.agreement import Agreement
from ..parallel.layout import Groups
from . import data
from .engine import Engine


def check(config: RunConfig) -> None:
    """Refuse, before any work, tasks that could never run.

    Raises:
        UserError: no lm-eval, no such task (in the offline folder, or of lm-eval), no tokenizer, or a model that predicts
            no next token.
    """
    if not config.evaluation.interval:
        return
    if config.model.head != "causal_lm" or not config.model.causal:
        raise UserError("evaluation.interval: tasks are for causal language models; set it to 0")
    try:
        import lm_eval  # noqa: F401
        from lightnet_eval.offline import files_of
    except ImportError:
        raise UserError("evaluation.tasks needs lm-eval; install it with: pip install 'lightnet-llm[eval]'") from None
    if data.check_tokenizer(config) is None:
        raise UserError(
            "evaluation.tasks needs a tokenizer beside the data (`lightnet prep` writes one); set interval 0"
        )
    if config.evaluation.offline is not None:
        files = files_of(config.evaluation.offline)
        for task in config.evaluation.tasks:
            if task not in files:
                hint = nearest(task, list(files)) or f"; it has {', '.join(sorted(files))}"
                raise UserError(f"evaluation.tasks: no {task}.*.jsonl in {config.evaluation.offline}{hint}")
        return
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    known = set(manager.all_tasks) - set(manager.all_tags)  # a tag stands for several tasks and has no score
    for task in config.evaluation.tasks:
        if task not in known:
            raise UserError(f"evaluation.tasks: lm-eval has no task or group {task}{nearest(task, sorted(known))}")


class Evaluation:
    """Answers tasks with the weights as they are; every rank has one and calls it at the same steps.

    Args:
        run: the run folder, which holds the tokenizer.
    """

    def __init__(self, config: RunConfig, groups: Groups, ranks: Agreement, engine: Engine, run: Path):
        self.config, self.groups, self.ranks, self.engine, self.run_folder = config, groups, ranks, engine, run
        self.tokenizer = find_tokenizer(run, config)
        self.dtype = choose_dtype(None, config, engine.device)
        layout = groups.layout
        trained = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self.live = layout.tensor == 1 and layout.pipeline == 1 and engine.zero_stage < 3 and trained == self.dtype
        self.share = Ranks(ranks.rank, layout.world, groups.control_group)
        names = ranks.gather([] if self.live else list(self._own()))
        self.owner = {name: rank for rank, held in reversed(list(enumerate(names))) for name in held}

    def run(self) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """Scores by task and metric, and in one line why, of tasks that failed; the same on every rank."""
        scores: dict[str, dict[str, float]] = {}
        failed: dict[str, str] = {}
        random = randomness.capture()  # lm-eval seeds every generator
        module = self.engine.module
        module.eval()
        try:
            self.engine.progress.begin("evaluation")
            model, problem = self._model()
            for task in self.config.evaluation.tasks if model is not None else []:
                assert model is not None
                self.engine.progress.begin("evaluation")
                found: dict[str, float] = {}
                try:
                    found = self._scores(model, task)
                except UserError as error:
                    problem = _line(error)
                except Exception as error:  # of a task's own code, of its data, of memory: training goes on
                    problem = f"{type(error).__name__}: {_line(error)}"
                parts = self.ranks.gather((found, problem))
                problem = next((why for _, why in parts if why), "")
                if problem:
                    failed[task], problem = problem, ""
                else:
                    scores[task] = parts[0][0]
            if problem:
                failed = dict.fromkeys(self.config.evaluation.tasks, problem)
        finally:
            module.train()
            randomness.restore(random)
        return scores, failed

    def _scores(self, model: CausalLM, task: str) -> dict[str, float]:
        """By metric, on rank 0."""
        from lightnet_eval.zero_shot import answer

        evaluation = self.config.evaluation
        found = answer(
            Loaded(model, self.config, self.tokenizer, self.run_folder),
            [task],
            offline=evaluation.offline,
            limit=evaluation.limit,
            ranks=self.share,
            quiet=True,
            progress=lambda _: self.engine.progress.begin("evaluation"),
        )
        return {
            name.removesuffix(",none"): float(value)
            for name, value in (found["results"][task].items() if found else ())
            if "," in name and isinstance(value, (int, float))
        }

    def _own(self) -> dict[str, Any]:
        """Parameters that this rank speaks for, under the plain model's names."""
        named = self.engine.module.named_parameters()
        return {name: p for name, p in named if not getattr(p, "ds_pipe_replicated", False)}

    def _model(self) -> tuple[CausalLM | None, str]:
        """What answers, or why it cannot be had, on every rank alike."""
        if self.live:
            return self.engine.module, ""
        model, problem = None, ""
        try:
            model = allocate(self.config, self.engine.device, self.dtype).eval().requires_grad_(False)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            problem = f"no memory for a copy of the weights ({_line(error)})"
        problem = next(filter(None, self.ranks.gather(problem)), "")
        if problem or model is None:
            return None, problem
        self._fill(model)
        return model, ""

    @torch.no_grad()
    def _fill(self, model: CausalLM) -> None:
        own, layout = self._own(), self.groups.layout
        narrow = self.config.train.precision == "bf16" and self.engine.zero_stage < 3
        for name, target in model.named_parameters():
            spec, full = spec_of(target), None
            if name in own:
                with gathered(own[name], self.engine.zero_stage):
                    full = self._joined(own[name], own[name].detach())
            if layout.pipeline > 1:
                if full is None:
                    dtype = torch.bfloat16 if narrow and not spec.keep_fp32 else torch.float32
                    full = torch.empty(spec.shape, dtype=dtype, device=self.engine.device)
                dist.broadcast(full, src=self.owner[name])
            assert full is not None
            target.copy_(shard(full, spec, tuple(target.shape), 0))

    def _joined(self, parameter: Any, local: Tensor) -> Tensor:
        """The full tensor, from those of tensor-parallel ranks."""
        spec, size = spec_of(parameter), self.groups.layout.tensor
        if spec.partition_dim is None or size == 1:
            return unshard([local], spec.shape, spec.partition_dim).contiguous()
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, local.contiguous(), group=self.groups.tensor_group)
        return unshard(parts, spec.shape, spec.partition_dim).contiguous()


def _line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no reason given").strip()


def say(failed: dict[str, str], step: int) -> None:
    """A line on stderr for each task that failed, above the progress bar."""
    from tqdm import tqdm

    for task, problem in failed.items():
        line = f"warning: evaluation.tasks {task} at step {step}: {problem}; training goes on"
        tqdm.write(line, file=sys.stderr)
