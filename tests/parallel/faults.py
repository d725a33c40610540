"""Faults planted on purpose: a test that cannot see them proves nothing."""

from tests.parallel.evaluated import continue_in_evaluation, fail_task_on_rank_one, note_likelihoods
from tests.parallel.logits import dump_logits
from tests.parallel.shards import check_shards

# Planted like these, and most of them no faults.
__all__ = ["check_shards", "continue_in_evaluation", "dump_logits", "fail_task_on_rank_one", "note_likelihoods"]


def drop_row_reduction() -> None:
    """Tensor-parallel ranks keep their own partial sums."""
    from lightnet_llm.parallel import megatron

    def forward(self, input_):  # type: ignore[no-untyped-def]
        import torch

        return torch.nn.functional.linear(input_, self.weight)

    megatron.RowLinear.forward = forward  # type: ignore[method-assign]


def drop_input_gradient_sum() -> None:
    """The gradient of what enters column layers is not summed over ranks."""
    from lightnet_llm.parallel import megatron

    megatron.MegatronLayers.enter = lambda self, x: x  # type: ignore[method-assign]


def drop_state_merge() -> None:
    """Sequence-parallel ranks start every segment afresh."""
    from lightnet_llm.parallel import sequence

    sequence._Chain._spread = lambda self, row_state, like, target: like  # type: ignore[method-assign]
    sequence.serves = lambda state, place: False  # kernels merge elsewhere


def double_replicated_norm() -> None:
    """Every parameter claims to be split, so that replicated ones count once per rank in the gradient norm."""
    from lightnet_llm.models import parameters

    original = parameters.declare

    def declare(parameter, spec):  # type: ignore[no-untyped-def]
        original(parameter, spec)
        parameter.tensor_model_parallel = True
        return parameter

    from lightnet_llm.models import layers, lrpe, norms, tpe

    for module in (parameters, layers, lrpe, norms, tpe):
        module.declare = declare  # type: ignore[attr-defined]


def drop_shared_sum() -> None:
    """Ranks that share tokens keep their own gradients of the norms' weights."""
    from lightnet_llm.parallel import megatron

    megatron.MegatronLayers.sum_shared_gradients = lambda self, model: None  # type: ignore[method-assign]


def drop_shared_reduction() -> None:
    """Ranks that share tokens keep their own partial sums of them."""
    from lightnet_llm.parallel import megatron

    megatron.reduce_scatter_to_sequence_parallel_region = megatron.scatter_to_sequence_parallel_region


def drop_masks_of_shards() -> None:
    """Dropout counts a rank's own tokens from 0."""
    from lightnet_llm.models.layers import PlainLayers
    from lightnet_llm.training import engine

    original = engine.Clock
    engine.Clock = lambda *arguments: original(*arguments[:4], PlainLayers.token_shard)  # type: ignore

    from lightnet_llm.models import dropout

    mask = dropout.DropoutKey.mask

    def local(self, place, shape, probability, channel_offset=0):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        first = replace(self, shard=(0, self.sample_ids.numel() * self.tokens // shape[:-1].numel()))
        return mask(first, place, shape, probability, channel_offset)

    dropout.DropoutKey.mask = local  # type: ignore[method-assign]


def cut_shared_activations() -> None:
    """DeepSpeed cuts over tensor-parallel ranks what passes between stages, as if all held the same."""
    from lightnet_llm.training import engine

    original = engine.deepspeed_config

    def forgetting(*arguments):  # type: ignore[no-untyped-def]
        return {key: value for key, value in original(*arguments).items() if key != "pipeline"}

    engine.deepspeed_config = forgetting


def slow_embedding() -> None:
    """Measured times in which the embedding takes as long as all the rest."""
    from lightnet_llm.parallel import stage_times

    original = stage_times.measure

    def measure(*arguments):  # type: ignore[no-untyped-def]
        first, *others = original(*arguments)
        assert first > 0 and min(others) > 0
        return [sum(others), *others]

    stage_times.measure = measure


def slow_ends() -> None:
    """Measured times in which embedding and head take as long as all the rest, each."""
    from lightnet_llm.parallel import stage_times

    original = stage_times.measure

    def measure(*arguments):  # type: ignore[no-untyped-def]
        between = original(*arguments)[1:-1]
        return [sum(between), *between, sum(between)]

    stage_times.measure = measure


def no_measure() -> None:
    """A run that measures its stages fails."""
    from lightnet_llm.parallel import stage_times

    def measure(*arguments):  # type: ignore[no-untyped-def]
        raise AssertionError("measured")

    stage_times.measure = measure


def _wrap_torch_save(before) -> None:  # type: ignore[no-untyped-def]
    import torch

    original = torch.save

    def save(content, path, *args, **kwargs):  # type: ignore[no-untyped-def]
        before(str(path))
        return original(content, path, *args, **kwargs)

    torch.save = save


def fail_save_on_rank_one() -> None:
    """The disk of one rank is full."""
    import os

    def before(path: str) -> None:
        if os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device", path)

    _wrap_torch_save(before)


def limit_files_on_rank_one() -> None:
    """The system itself refuses what rank 1 writes beyond 100 kB, in the middle of a file."""
    import os
    import resource

    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def limit_files() -> None:
    """The system itself refuses what any rank writes beyond 40 kB, in the middle of a file."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))


def fail_oddly_in_second_save() -> None:
    """A rank's writer stumbles over something that nobody foresaw."""
    import os

    def before(path: str) -> None:
        if os.environ["RANK"] == "1" and "step_00000006" in path:
            raise TypeError("cannot pickle this")

    _wrap_torch_save(before)


def lose_files_of_rank_one() -> None:
    """Rank 1 writes to a folder of its own host."""
    import os
    from pathlib import Path

    import torch

    original = torch.save

    def save(content, path, *args, **kwargs):  # type: ignore[no-untyped-def]
        if os.environ["RANK"] == "1" and "step_00000006" in str(path):
            from lightnet_llm.checkpoint import store

            store.sync = lambda path: None
            path = Path(str(path).replace("/checkpoints/", "/elsewhere/"))
            path.parent.mkdir(parents=True, exist_ok=True)
        return original(content, path, *args, **kwargs)

    torch.save = save


def write_slowly() -> None:
    """A save's first file waits until training has taken two more steps, or a second where training waits for it."""
    import time

    from lightnet_llm.training.engine import Engine

    original, taken = Engine.train_step, [0]

    def train_step(self, *args):  # type: ignore[no-untyped-def]
        loss = original(self, *args)
        taken[0] += 1
        return loss

    def before(path: str) -> None:
        until, deadline = taken[0] + 2, time.time() + (1 if "/engine/" in path else 0)
        while taken[0] < until and time.time() < deadline:
            time.sleep(0.01)

    Engine.train_step = train_step  # type: ignore[method-assign]
    _wrap_torch_save(before)


def write_slowly_without_copy() -> None:
    """An asynchronous save writes tensors that training goes on changing."""
    from lightnet_llm.training import saving

    write_slowly()
    saving.clone_tensors_for_torch_save = lambda content: content


def fail_second_save_on_rank_one() -> None:
    """The disk of one rank fills up between two saves."""
    import os

    def before(path: str) -> None:
        if os.environ["RANK"] == "1" and "step_00000006" in path:
            raise OSError(28, "No space left on device", path)

    _wrap_torch_save(before)


def fill_disk_of_metrics() -> None:
    """The disk is full in the middle of the fourth line of metrics.jsonl, and has room again for checkpoints."""
    from lightnet_llm.training import metrics

    class Full:
        def __init__(self, file) -> None:  # type: ignore[no-untyped-def]
            self.file, self.lines = file, 0

        def write(self, line: bytes) -> int:
            self.lines += 1
            return self.file.write(line if self.lines < 4 else line[:9])  # type: ignore[no-any-return]

        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            return getattr(self.file, name)

    original = metrics.MetricsWriter.__init__

    def begin(self, *arguments) -> None:  # type: ignore[no-untyped-def]
        original(self, *arguments)
        self.file = Full(self.file)

    metrics.MetricsWriter.__init__ = begin  # type: ignore[method-assign]


def die_in_second_save() -> None:
    """Every rank is killed while it writes its last file of the second checkpoint."""
    import os
    import signal

    def before(path: str) -> None:
        if "step_00000006" in path and "/random/" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    _wrap_torch_save(before)


def die_while_converting() -> None:
    """The process that makes the universal form is killed midway."""
    import os
    import signal

    def before(path: str) -> None:
        if "layers.2" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    _wrap_torch_save(before)


def rank_one_on_another_host() -> None:
    """Rank 1 is the first of a host that does not see what rank 0 makes."""
    import os

    from lightnet_llm.checkpoint import universal

    if os.environ["RANK"] == "1":
        os.environ["LOCAL_RANK"] = "0"
        universal.FOLDER = "universal_of_host_one"


def forget_moments() -> None:
    """A move that starts the optimiser afresh."""
    from lightnet_llm.checkpoint.universal import UniversalForm

    original = UniversalForm.part

    def part(self, name, key, spec, local_shape):  # type: ignore[no-untyped-def]
        found = original(self, name, key, spec, local_shape)
        return found if key == "fp32" else found * 0

    UniversalForm.part = part  # type: ignore[method-assign]


def shift_tensor_parts() -> None:
    """A move that gives each tensor-parallel rank its neighbour's columns."""
    from lightnet_llm.checkpoint import restore

    original = restore.UniversalForm.__init__

    def shifted(self, folder, tensor_rank):  # type: ignore[no-untyped-def]
        original(self, folder, 1 - tensor_rank)

    restore.UniversalForm.__init__ = shifted  # type: ignore[method-assign]


def draw_from_global_generators() -> None:
    """The reported loss takes part of every generator of the process, as some user's code might."""
    import random

    import numpy as np
    import torch

    from lightnet_llm.training.engine import Engine

    original = Engine.train_step

    def train_step(self, *args):  # type: ignore[no-untyped-def]
        return original(self, *args) + float(torch.rand(())) + random.random() + float(np.random.rand())

    Engine.train_step = train_step  # type: ignore[method-assign]


def _on(rank: int, step: int, act) -> None:  # type: ignore[no-untyped-def]
    """Call ``act`` on one rank when it reads its first micro-batch of update number ``step``."""
    import os

    from lightnet_llm.training import engine

    original = engine.Engine._read

    def read(self, batches):  # type: ignore[no-untyped-def]
        if int(os.environ["RANK"]) == rank and self.clock.step == step and not self.samples_read:
            act()
        return original(self, batches)

    engine.Engine._read = read  # type: ignore[method-assign]


def _scale_loss(factor: float, steps: tuple[int, ...], rank: int | None) -> None:
    """Multiply the loss of some updates, of all ranks or of one."""
    import os

    from lightnet_llm.parallel import pipeline
    from lightnet_llm.training import engine

    for owner in (pipeline.PipelinedCausalLM, engine.Engine):
        original = owner._loss

        def loss(self, *batch, original=original):  # type: ignore[no-untyped-def]
            value = original(self, *batch)
            here = rank is None or int(os.environ["RANK"]) == rank
            return value * factor if here and self.clock.step in steps else value

        owner._loss = loss  # type: ignore[method-assign]


def nan_on_rank_one() -> None:
    """The batch of update 5 gives a loss that is no number, on rank 1 alone."""
    _scale_loss(float("nan"), (5,), 1)


def nan_everywhere() -> None:
    """The same on all ranks."""
    _scale_loss(float("nan"), (5,), None)


def nan_at_first() -> None:
    """The very first two updates are bad, on rank 1 alone."""
    _scale_loss(float("nan"), (0, 1), 1)


def nan_for_ever() -> None:
    """From update 5 on, rank 1 has bad batches."""
    _scale_loss(float("nan"), tuple(range(5, 100)), 1)


def infinite_gradient_on_rank_one() -> None:
    """The loss is finite, a gradient is not."""
    import os

    from lightnet_llm.training import engine

    original = engine.Engine._loss

    def loss(self, batch):  # type: ignore[no-untyped-def]
        value = original(self, batch)
        if os.environ["RANK"] == "1" and self.clock.step == 5:
            value.register_hook(lambda gradient: gradient * float("inf"))
        return value

    engine.Engine._loss = loss  # type: ignore[method-assign]


def spike() -> None:
    """The loss of update 12 is three times what it should be."""
    _scale_loss(3.0, (12,), None)


def update_left_out() -> None:
    """What skipping means: the batches of update 5 are read, and nothing else is done."""
    import torch

    from lightnet_llm.training import engine

    original = engine.Engine.train_step

    def train_step(self, batches, step, global_batch):  # type: ignore[no-untyped-def]
        if step != 5:
            return original(self, batches, step, global_batch)
        self._begin(step)
        for _ in range(self.engine.gradient_accumulation_steps()):
            self._read(batches)
        return torch.tensor(float("nan"))

    engine.Engine.train_step = train_step  # type: ignore[method-assign]


def kill_rank_one() -> None:
    """Rank 1 is killed with -9 at update 7."""
    import os
    import signal

    _on(1, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))


def hang_rank_one() -> None:
    """Rank 1 never comes back from reading its data at update 7."""
    import time

    _on(1, 7, lambda: time.sleep(1000))


def freeze_rank_one() -> None:
    """Rank 1 is stopped at update 7: no thread of it runs any more, and it takes no signal but SIGKILL."""
    import os
    import signal

    _on(1, 7, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def freeze_rank_zero() -> None:
    """The same on the rank that holds the store."""
    import os
    import signal

    _on(0, 7, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def terminate_rank_one() -> None:
    """A scheduler sends SIGTERM to one rank at update 7."""
    import os
    import signal

    _on(1, 7, lambda: os.kill(os.getpid(), signal.SIGTERM))


def crash_rank_one() -> None:
    """A bug raises on rank 1 at update 7."""

    def act() -> None:
        raise ValueError("a bug on one rank")

    _on(1, 7, act)


def hide_one_or_nine() -> None:
    """No fault: samples hide one token and nine in turn, and every fifth none."""
    from lightnet_data import masking

    original = masking.Masking.__call__

    def masks(self, tokens, position):  # type: ignore[no-untyped-def]
        import numpy as np

        inputs, labels = original(self, tokens, position)
        left = np.flatnonzero(labels != masking.IGNORED)[: (1, 9, 1, 9, 0)[position % 5]]
        few = np.full_like(labels, masking.IGNORED)
        few[left] = labels[left]
        return inputs, few

    masking.Masking.__call__ = masks  # type: ignore[method-assign]


def take_means_of_means() -> None:
    """Every micro-batch weighs alike, however many labels it has."""
    from lightnet_llm.parallel.pipeline import Clock

    Clock.weight = property(lambda self: self.loss_weight * 6.4)  # type: ignore[assignment, method-assign]


def hide_nothing() -> None:
    """Samples without a label."""
    from lightnet_data import masking

    def masks(self, tokens, position):  # type: ignore[no-untyped-def]
        return tokens, tokens * 0 + masking.IGNORED

    masking.Masking.__call__ = masks  # type: ignore[method-assign]


def pass_ahead() -> None:
    """What compiles a step's kernels before it runs here, too, where a launch is a call of PyTorch; it must have gradients."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch
    from lightnet_kernels import ahead

    from lightnet_llm.training import engine

    ahead.GPU = "cpu"
    ahead.unsupported_device = lambda *_: None
    ahead.kernels = lambda _: SimpleNamespace(compile_only=lambda _: nullcontext())
    calls, grad = [], torch.autograd.grad

    def counted(*arguments, **options):  # type: ignore[no-untyped-def]
        found = grad(*arguments, **options)
        calls.append(sum(x is not None for x in found))
        return found

    torch.autograd.grad = counted
    whole = engine.Engine.train_step

    def train_step(self, *arguments):  # type: ignore[no-untyped-def]
        loss = whole(self, *arguments)
        assert len(calls) == 1 and calls[0] > 20, calls
        return loss

    engine.Engine.train_step = train_step  # type: ignore[method-assign]
