"""Faults planted on purpose: a test that cannot see them proves nothing."""


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

    sequence._Chain._spread = lambda self, row_state, like: like  # type: ignore[method-assign]


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


def fail_save_on_rank_one() -> None:
    """The disk of one rank is full."""
    import os

    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    original = TorchCheckpointEngine.save

    def save(self, state_dict, path):  # type: ignore[no-untyped-def]
        if os.environ["RANK"] == "1":
            raise OSError(28, "No space left on device", str(path))
        return original(self, state_dict, path)

    TorchCheckpointEngine.save = save  # type: ignore[method-assign]
