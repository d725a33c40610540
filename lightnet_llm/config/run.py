"""Everything about a run that is not the architecture: data, optimisation, layout, files."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..errors import nearest
from .base import Section
from .images import AugmentationConfig, DiffusionConfig
from .launch import LaunchConfig
from .masking import MaskingConfig
from .model import ModelConfig


class SourceConfig(Section):
    """One source of a mixture."""

    path: str = Field(description="Folder written by `lightnet prep`, or its URL.")
    split: str = Field(default="train", description="Split to read.")
    subset: str | None = Field(default=None, description="Which output of a folder prepared with `--by-subset`.")
    weight: float = Field(ge=0, description="Share of the training tokens, of the sum of weights.")


class MixtureStage(Section):
    """Other weights from some point of a run on."""

    from_tokens: int = Field(gt=0, description="Training tokens after which the weights hold.")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        description="Weight of each source; one that is not named has 0."
    )


class DataConfig(Section):
    """Where tokens come from. A folder written by ``lightnet prep`` holds train, validation and tokenizer."""

    path: str | None = Field(
        default=None, description="Folder written by `lightnet prep`, or the URL of one with packed samples."
    )
    mixture: dict[str, SourceConfig] = Field(
        default_factory=dict,
        description="Instead of `path`: name to `{path, weight, split: train, subset: null}`; weights are shares of the "
        "training tokens.",
    )
    stages: list[MixtureStage] = Field(
        default_factory=list,
        description="Weights that change during a run, ascending: `{from_tokens, weights}`; each source goes on where it "
        "stands, one that is not named has weight 0.",
    )
    validation: dict[str, str] = Field(
        default_factory=dict,
        description="Further named validation sets: name to prepared folder (its held-out split) or .bin/.idx prefix.",
    )
    sequence_length: int = Field(
        default=2048,
        gt=0,
        description="Tokens per sample; longer documents are cut. Of images it follows from `model.image`.",
    )
    workers: int = Field(default=0, ge=0, description="Loader processes per rank; 0 loads in the training process.")

    @model_validator(mode="after")
    def _mixture(self) -> "DataConfig":
        if not self.mixture:
            if self.stages:
                raise ValueError("stages change the weights of a mixture, and there is none; give `mixture`")
            return self
        if self.path is not None:
            raise ValueError("path and mixture are both set; a mixture names its own folders: leave one of them out")
        if not any(source.weight for source in self.mixture.values()):
            raise ValueError("all weights of mixture are 0; give one source more")
        before = 0
        for stage in self.stages:
            unknown = [name for name in stage.weights if name not in self.mixture]
            if unknown:
                hint = nearest(unknown[0], list(self.mixture)) or f"; its sources: {', '.join(self.mixture)}"
                raise ValueError(f"stages name a source '{unknown[0]}' that mixture has not{hint}")
            if not any(stage.weights.values()):
                raise ValueError(f"all weights from token {stage.from_tokens} on are 0; give one source more")
            if stage.from_tokens - before < self.sequence_length:
                raise ValueError(
                    f"a stage from token {before} ends at {stage.from_tokens}, before a sample of {self.sequence_length}; "
                    "stages must be in order and a sample long"
                )
            before = stage.from_tokens
        return self


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; norms, biases, theta and TPE are never decayed."""

    learning_rate: float = Field(default=3e-4, gt=0, description="Peak learning rate.")
    rate_batch: int | None = Field(
        default=None,
        gt=0,
        description="Samples an update that learning_rate is meant for: it is multiplied by train.global_batch / this "
        "(DeiT: 512); null: by nothing.",
    )
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="Adam's beta1 and beta2.")
    eps: float = Field(default=1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled weight decay on matrices.")
    clip: float = Field(default=1.0, ge=0, description="Global gradient-norm clip; 0 turns clipping off.")

    @model_validator(mode="after")
    def _betas(self) -> "OptimizerConfig":
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must lie in [0, 1)")
        return self


class ScheduleConfig(Section):
    """Learning rate as a function of the step alone, so that a resumed run follows the same curve."""

    kind: Literal["cosine", "inverse_sqrt", "constant", "wsd", "triangle"] = Field(
        default="cosine",
        description="Shape after warm-up. wsd: warm-up, stable, linear decay. triangle: linear up and down.",
    )
    warmup_steps: int = Field(default=2000, ge=0, description="Linear warm-up steps.")
    final_ratio: float = Field(default=0.1, ge=0, le=1, description="Last rate as a share of the peak.")
    decay_share: float = Field(
        default=0.1, gt=0, le=1, description="wsd: share of the steps after warm-up spent decaying, at the end."
    )
    peak_share: float = Field(default=0.5, gt=0, lt=1, description="triangle: share of the steps before the peak.")


class BatchRampPoint(Section):
    """One stair of the batch ramp."""

    until_step: int = Field(gt=0, description="Steps before this one use `batch`.")
    batch: int = Field(gt=0, description="Samples per step on this stair.")


class TrainConfig(Section):
    """The loop: batch, budget, precision, restarts."""

    name: str | None = Field(default=None, description="Run name; null takes the configuration's file name.")
    output: str = Field(default="runs", description="Folder that holds run folders.")
    seed: int = Field(default=1234, ge=0, description="Seed of initialisation, sample order and dropout.")
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16", description="bf16 computes in bf16 with fp32 master weights and fp32 gradient accumulation."
    )
    global_batch: int = Field(default=64, gt=0, description="Samples per optimiser step over all ranks.")
    micro_batch: int = Field(default=4, gt=0, description="Samples per forward pass and data-parallel rank.")
    batch_ramp: list[BatchRampPoint] = Field(
        default_factory=list, description="Smaller batches for the first steps; after the last stair, global_batch."
    )
    steps: int | None = Field(default=None, gt=0, description="Optimiser steps of the run (or give tokens).")
    tokens: int | None = Field(default=None, gt=0, description="Token budget; rounded up to whole steps.")
    hours: float | None = Field(
        default=None,
        gt=0,
        description="Time budget: a trial at the first start finds how many steps fit, the run folder keeps them, and every "
        "resume takes them from there. `steps` beside it wins.",
    )
    stop_at_step: int | None = Field(
        default=None, gt=0, description="Save and stop after this step although the budget is larger (for trials)."
    )
    resume: Literal["auto", "never", "must"] = Field(
        default="never", description="auto: continue the run folder if it holds a checkpoint; must: refuse otherwise."
    )
    init_from: str | None = Field(default=None, description="Checkpoint whose weights (only) start this run.")
    ema: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay of an exponential average of the weights that is kept beside them, such as 0.999; null for none.",
    )

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str | None) -> str | None:
        if name is not None and (name in ("", ".", "..") or "/" in name):
            raise ValueError(f"'{name}' is not the name of one folder; train.output says where it lies")
        return name

    @model_validator(mode="after")
    def _budget(self) -> "TrainConfig":
        if self.steps is not None and self.tokens is not None:
            raise ValueError("steps and tokens are both set; keep one (null the other)")
        if self.hours is not None and self.tokens is not None:
            raise ValueError("tokens and hours are both set; keep one (null the other)")
        if self.steps is None and self.tokens is None and self.hours is None:
            raise ValueError("no budget: set steps, tokens or hours")
        previous = 0
        for point in self.batch_ramp:
            if point.until_step <= previous:
                raise ValueError(f"batch_ramp: until_step {point.until_step} must be above {previous}")
            previous = point.until_step
        return self


class ParallelConfig(Section):
    """How ranks share the model. Data-parallel size follows from the number of ranks.

    Which sizes go together depends on that number, too: see :mod:`lightnet_llm.parallel.legality`.
    """

    tensor: int = Field(default=1, gt=0, description="Tensor-parallel size (TP).")
    pipeline: int = Field(default=1, gt=0, description="Pipeline-parallel size (PP).")
    sequence: int = Field(
        default=1,
        gt=0,
        description="Sequence-parallel size (SP); a length that it does not divide is padded at the end.",
    )
    sequence_exchange: Literal["auto", "all_gather", "prefix"] = Field(
        default="auto",
        description="How sequence-parallel ranks exchange states: all to all, or from rank to rank in blocks of heads; "
        "auto gathers up to 8 ranks.",
    )
    sequence_exchange_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Dtype of states (but not of maxima and normalisers) and their gradients in flight."
    )
    tensor_sequence_parallel: bool = Field(
        default=False,
        description="Tensor-parallel ranks share the tokens of norms, residual stream and dropout, which need the less "
        "memory for it; changes nothing with tensor: 1.",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(default=1, description="DeepSpeed ZeRO stage.")
    recompute_every: int = Field(
        default=0, ge=0, description="Activation checkpointing of every n-th block: 1 all, 2 every other, 0 none."
    )
    pipeline_partition: Literal["parameters", "time", "uniform"] = Field(
        default="parameters",
        description="What pipeline stages have alike, as far as whole blocks allow: parameters, time (measured at the start; "
        "a resumed run keeps its stages), or blocks.",
    )


class ValidationConfig(Section):
    """Loss on held-out data during training."""

    interval: int = Field(default=1000, ge=0, description="Steps between validations; 0 turns them off.")
    samples: int = Field(default=256, gt=0, description="Samples of each validation set, at most.")


class EvaluationConfig(Section):
    """Zero-shot tasks of lm-eval during training, on the weights as they are."""

    interval: int = Field(default=0, ge=0, description="Steps between evaluations; 0 turns them off.")
    tasks: list[str] = Field(default_factory=list, description="Names of lm-eval's tasks, such as `[piqa, sciq]`.")
    limit: int | None = Field(default=None, gt=0, description="Questions of each task, at most; null for all.")
    offline: str | None = Field(
        default=None, description="Folder of `TASK.SPLIT.jsonl` files (`make eval-data`); null asks the network."
    )

    @model_validator(mode="after")
    def _named(self) -> "EvaluationConfig":
        if self.interval and not self.tasks:
            raise ValueError("interval is set and tasks names none; give tasks: [piqa], say")
        return self


class CheckpointConfig(Section):
    """When to save and what to keep."""

    interval: int = Field(default=1000, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    keep_last: int = Field(default=3, ge=1, description="Newest checkpoints kept.")
    keep_every: int = Field(
        default=0,
        ge=0,
        description="Checkpoints that were due at multiples of this step are kept for ever; skipped steps may put one off.",
    )
    asynchronous: bool = Field(
        default=False,
        alias="async",
        description="Write checkpoints from a copy in host memory while training goes on; needs that memory on every host.",
    )


class LoggingConfig(Section):
    """What the run writes about itself."""

    interval: int = Field(default=10, gt=0, description="Steps between lines of metrics.jsonl and TensorBoard.")
    groups_interval: int = Field(
        default=0, ge=0, description="Steps between per-group gradient and weight norms; 0 turns them off."
    )
    profile_steps: int = Field(
        default=0,
        ge=0,
        description="Record so many steps, from the seventh of a start on, with torch's profiler into RUN/profile/: a trace "
        "for ui.perfetto.dev from one rank of each part of the model; 0: none.",
    )


class BadStepsConfig(Section):
    """Updates that are skipped on all ranks alike; one whose loss or gradient norm is not finite always is."""

    deviations: float = Field(
        default=0.0,
        ge=0,
        description="Skip a step whose loss or log gradient norm lies this many robust deviations above the median of the "
        "recent ones; 0 skips only what is not finite.",
    )
    window: int = Field(default=128, ge=8, description="Steps that count as recent; skipped ones are left out.")
    after: int = Field(default=32, ge=4, description="Steps to have seen before deviations are judged.")
    in_a_row: int = Field(default=5, ge=1, description="The run stops at this many skipped steps in a row.")

    @model_validator(mode="after")
    def _seen(self) -> "BadStepsConfig":
        if self.after > self.window:
            raise ValueError(f"after {self.after} is more than window {self.window}; no step would ever be judged")
        return self


class WatchdogConfig(Section):
    """When a run that makes no progress is ended; what its ranks were doing is written to the run folder."""

    step_seconds: float | None = Field(
        default=None,
        ge=0,
        description="Longest time for one step; null: 45 s or five times the slowest of the last 50, whichever is "
        "more; 0 turns the watchdog off.",
    )
    other_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Longest time for a start, the first three steps of a start (which compile), a save, or one "
        "micro-batch of a validation (a whole one with pipeline stages).",
    )
    silent_seconds: float = Field(
        default=25.0, gt=0, description="A rank without a sign of life for so long, while others wait, counts as gone."
    )


class RunConfig(Section):
    """One run: one YAML file."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    masking: MaskingConfig = Field(default_factory=MaskingConfig)
    augmentation: AugmentationConfig = Field(default_factory=AugmentationConfig)
    diffusion: DiffusionConfig = Field(default_factory=DiffusionConfig)
    train: TrainConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    bad_steps: BadStepsConfig = Field(default_factory=BadStepsConfig)
    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="Passed through to DeepSpeed for what is not modelled here."
    )

    @property
    def rate_scale(self) -> float:
        """What the learning rate is multiplied by, see ``optimizer.rate_batch``."""
        given = self.optimizer.rate_batch
        return 1.0 if given is None else self.train.global_batch / given

    @model_validator(mode="after")
    def _sentences(self) -> "RunConfig":
        given = self.parallel
        if self.model.head == "sequence_classifier":
            if given.tensor_sequence_parallel:
                raise ValueError(
                    "parallel.tensor_sequence_parallel splits rows of one length, sentences have many; leave it out"
                )
            if given.pipeline_partition == "time":
                raise ValueError(
                    "parallel.pipeline_partition: time measures language models; use parameters or uniform"
                )
            if self.data.mixture:
                raise ValueError("data.mixture is of text; give head: sequence_classifier one folder as data.path")
        return self

    @model_validator(mode="after")
    def _images(self) -> "RunConfig":
        image = self.model.image
        if image is None:
            return self
        tokens = image.tokens + self.model.prefix
        if "sequence_length" in self.data.model_fields_set and self.data.sequence_length != tokens:
            raise ValueError(f"data.sequence_length of these images is {tokens}; leave it out")
        self.data.sequence_length = tokens
        for name in ("mean", "std"):
            count = len(getattr(self.augmentation, name))
            if self.model.head == "classifier" and count not in (1, image.channels):
                raise ValueError(
                    f"augmentation.{name} has {count} values for {image.channels} channels; give as many or one"
                )
        if self.model.head == "denoiser" and (given := self.augmentation.of_classifiers()):
            raise ValueError(f"augmentation.{given[0]} is of head: classifier, a denoiser has none; leave it out")
        if self.data.mixture:
            raise ValueError(f"data.mixture is of text; give head: {self.model.head} one folder as data.path")
        if self.parallel.pipeline_partition == "time":
            raise ValueError("parallel.pipeline_partition: time measures language models; use parameters or uniform")
        return self
