"""Ranks and groups: the one module that knows them.

Order, fastest first: tensor, sequence, data, pipeline. megatron-core's groups and DeepSpeed's topology are both built
here and asserted to agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UserError
from .sequence import SequencePlace


@dataclass(frozen=True)
class Layout:
    """Sizes of the four axes; their product is the number of ranks."""

    tensor: int
    pipeline: int
    sequence: int
    data: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.sequence * self.data

    def as_dict(self) -> dict[str, int]:
        """Plain mapping, for JSON and checkpoints."""
        return {**asdict(self), "world": self.world}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on each axis."""
        place = {}
        for axis in ("tensor", "sequence", "data", "pipeline"):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return place


class Groups:
    """Process groups of one layout, also DeepSpeed's ``mpu`` for its plain engine.

    The sequence axis is folded into DeepSpeed's data axis; with sequence size 1 the two are the same.
    """

    def __init__(self, layout: Layout):
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
        from megatron.core import parallel_state

        if dist.get_world_size() != layout.world:
            raise UserError(f"layout needs {layout.world} ranks, but {dist.get_world_size()} were started", shared=True)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                context_parallel_size=layout.sequence,
            )
        self.layout = layout
        self.rank = dist.get_rank()
        self.place = layout.coordinates(self.rank)
        self.tensor_group: Any = parallel_state.get_tensor_model_parallel_group()
        self.data_group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.model_group: Any = parallel_state.get_model_parallel_group()
        self.data_size = layout.data * layout.sequence
        sequence_group: Any = parallel_state.get_context_parallel_group()
        sequence = SequencePlace(self.place["sequence"], layout.sequence, sequence_group)
        self.sequence = sequence if layout.sequence > 1 else None
        self.topology = PipeModelDataParallelTopology(
            num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=self.data_size
        )
        self._assert_agreement(parallel_state, ProcessTopology)
        # Decisions (stop, save) are agreed on the CPU, so that they never wait for the device.
        self.control_group: Any = dist.new_group(backend="gloo") if torch.cuda.is_available() else dist.group.WORLD

    def _assert_agreement(self, parallel_state: Any, topology_class: Any) -> None:
        coordinate = self.topology.get_coord(self.rank)
        assert isinstance(self.topology, topology_class)
        ours = (self.place["pipeline"], self.place["data"] * self.layout.sequence + self.place["sequence"])
        assert (coordinate.pipe, coordinate.data) == ours, (coordinate, self.place)
        assert coordinate.model == self.place["tensor"] == parallel_state.get_tensor_model_parallel_rank()
        assert coordinate.pipe == parallel_state.get_pipeline_model_parallel_rank()
        members = self.topology.get_axis_comm_lists("model")
        mine = next((m for m in members if self.rank in m), [self.rank])
        assert mine == dist.get_process_group_ranks(self.tensor_group)

    # DeepSpeed's mpu interface.
    def get_model_parallel_group(self) -> Any:
        """Ranks that hold parts of one model replica."""
        return self.model_group

    def get_model_parallel_rank(self) -> int:
        """This rank within its model replica."""
        return dist.get_rank(self.model_group)

    def get_model_parallel_world_size(self) -> int:
        """Ranks of one model replica."""
        return dist.get_world_size(self.model_group)

    def get_data_parallel_group(self) -> Any:
        """Ranks that hold the same part of the model."""
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        """This rank among those that hold the same part."""
        return dist.get_rank(self.data_group)

    def get_data_parallel_world_size(self) -> int:
        """How many ranks hold the same part."""
        return self.data_size


def prepare_backend() -> torch.device:
    """Start torch.distributed under DeepSpeed and return this rank's device (CUDA where present, else CPU).

    Raises:
        UserError: another program listens where ranks would meet.
    """
    import os

    import deepspeed

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        _meet("nccl")
        return device
    # Without a GPU: megatron-core asks CUDA for a device to put buffers on, and DeepSpeed would compile a
    # shared-memory op for over a minute before its first collective.
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _meet("gloo")
    return cpu


def _meet(backend: str) -> None:
    import os

    import deepspeed

    try:
        deepspeed.init_distributed(backend)
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ.get("MASTER_PORT")
        raise UserError(
            f"port {port} of this host is taken by another program; choose another by deepspeed's --master_port "
            "(`lightnet train` finds one itself)"
        ) from None
