"""The DeepSpeed configuration that follows from ours."""

from __future__ import annotations

from typing import Any

from ..errors import UserError
from .run import RunConfig

# Fields we set ourselves; giving them in the pass-through would let two sources disagree.
_OWNED = {
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch and train.micro_batch",
    "gradient_clipping": "optimizer.clip",
    "optimizer": "optimizer",
    "scheduler": "schedule",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "data_types": "train.precision",
    "torch_autocast": "train.precision",
    "zero_optimization.stage": "parallel.zero_stage",
}
# What DeepSpeed would have done to gradients that bf16 runs average by themselves (training/bf16.py).
_AVERAGES = ("gradient_allreduce_op", "communication_data_type", "prescale_gradients", "gradient_predivide_factor")
# Stage 3 gathers and frees a block as a whole: a hook at each of its modules costs the host more than a card computes in it.
GATHERED_TOGETHER = ("lightnet_llm.models.block.Block",)
PREFETCHED = 50_000_000  # elements that DeepSpeed gathers ahead of use
NO_CLIP = 1e30  # large enough never to act; DeepSpeed computes the gradient norm only where it clips
COPIED_AT_ONCE = 2**24  # numbers of bf16 gradients that wait to be copied to the fp32 buffer together: 32 MiB


def effective_zero_stage(config: RunConfig) -> int:
    """DeepSpeed has no fp32 gradient accumulation for bf16 at stage 0: there, stage 1 does the same arithmetic."""
    stage = config.parallel.zero_stage
    return 1 if stage == 0 and config.train.precision == "bf16" else stage


def deepspeed_config(config: RunConfig, data_parallel: int, sequence_parallel: int = 1) -> dict[str, Any]:
    """Everything DeepSpeed is told.

    Args:
        config: the run.
        data_parallel: ranks that read different samples.
        sequence_parallel: ranks that share each sample; DeepSpeed is told that data = data x sequence.

    Raises:
        UserError: the pass-through sets a field that belongs to a section of ours.
    """
    zero = config.deepspeed.get("zero_optimization")
    if zero is not None and not isinstance(zero, dict):
        raise UserError(
            f"deepspeed.zero_optimization: {zero!r} is no mapping; name a field of it, such as "
            "deepspeed.zero_optimization.reduce_bucket_size=50000000"
        )
    given = [*config.deepspeed, *(f"zero_optimization.{key}" for key in (zero if isinstance(zero, dict) else {}))]
    for key in given:
        if key in _OWNED:
            raise UserError(f"deepspeed.{key} is derived; set {_OWNED[key]} instead")
        if key in _AVERAGES and config.train.precision == "bf16" and effective_zero_stage(config) == 1:
            raise UserError(
                f"deepspeed.{key} has no effect in bf16 at ZeRO 0 and 1, which average gradients in fp32; remove it"
            )
    micro = config.train.micro_batch
    batch = config.train.global_batch
    derived: dict[str, Any] = {
        "train_batch_size": batch * sequence_parallel,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": batch // (micro * data_parallel),
        "gradient_clipping": config.optimizer.clip or NO_CLIP,
        "steps_per_print": 1_000_000_000,
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},  # they wait for the device in every micro-batch
        "zero_optimization": {
            "stage": effective_zero_stage(config),
            "reduce_bucket_size": 50_000_000,
            "allgather_bucket_size": 50_000_000,
        },
    }
    if effective_zero_stage(config) == 3:
        derived["zero_optimization"] |= {
            "leaf_module": {"classes": [*GATHERED_TOGETHER]},
            "stage3_prefetch_bucket_size": max(PREFETCHED, block_elements(config)),  # the next block, none of it late
        }
    if config.parallel.tensor_sequence_parallel or config.model.head == "sequence_classifier":
        # DeepSpeed would cut what passes between stages over tensor-parallel ranks, as if all held the same, and always
        # of the first micro-batch's shape.
        derived["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    if config.train.precision == "bf16" and effective_zero_stage(config) == 3:
        # Stage 3 keeps all parameters in one buffer of one dtype, but theta and TPE must stay fp32: there the
        # parameters are fp32 and autocast computes (and gathers, for the modules named) in bf16.
        derived["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [
                "torch.nn.Linear",
                "lightnet_llm.parallel.megatron.ColumnLinear",
                "lightnet_llm.parallel.megatron.RowLinear",
            ],
        }
    elif config.train.precision == "bf16":
        # A gradient joins the fp32 sum as soon as it is there: the host does that while the card is at the next block, and
        # bf16 gradients of the whole model never lie beside it.
        derived["bf16"] = {"enabled": True, "immediate_grad_update": True}
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(derived, config.deepspeed)


def block_elements(config: RunConfig) -> int:
    """Parameters of a block's products on one rank, which are all but some thousands."""
    model = config.model
    features, ranks = model.heads * model.head_width, model.gate_rank
    ranks += model.decay_rank if model.decay == "independent" else 0
    split = model.width * (4 * features + 3 * model.glu_width) + ranks * features
    return split // config.parallel.tensor + ranks * model.width


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
