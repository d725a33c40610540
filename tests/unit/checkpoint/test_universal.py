"""From native files of any cut to parts of any other: every value and moment arrives where it belongs."""

import math
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from hypothesis import given, settings
from hypothesis import strategies as st

from lightnet_llm.checkpoint import universal
from lightnet_llm.checkpoint.native import FP32, MOMENTS, OPTIMIZER_NAMES, STEP
from lightnet_llm.checkpoint.universal import UniversalForm
from lightnet_llm.checkpoint.weights import part_file, write_weights
from lightnet_llm.errors import UserError
from lightnet_llm.models.parameters import ParameterSpec, constant, shard, unshard

KEYS = (FP32, *MOMENTS)
Tensors = dict[str, dict[str, torch.Tensor]]  # name, key


def local_shape(spec: ParameterSpec, tensor: int, multiple: int) -> tuple[int, ...]:
    """What one tensor-parallel rank holds, padded to a multiple of ``multiple`` over all ranks."""
    shape = list(spec.shape)
    if spec.partition_dim is not None:
        unit = multiple * tensor
        shape[spec.partition_dim] = -(-shape[spec.partition_dim] // unit) * unit // tensor
    return tuple(shape)


def write_native(
    folder: Path, full: Tensors, specs: dict[str, ParameterSpec], sizes: dict[str, int], zero_stage: int
) -> dict[str, Any]:
    """A checkpoint as DeepSpeed and ``weights/`` lay it out; its manifest."""
    tensor, pipeline, data = sizes["tensor"], sizes["pipeline"], sizes["data"]
    engine = folder / "engine"
    engine.mkdir(parents=True)
    names = list(full)
    for stage in range(pipeline):
        mine = names[stage::pipeline]
        for rank in range(tensor):
            local = {
                name: {
                    key: shard(full[name][key], specs[name], local_shape(specs[name], tensor, 3), rank) for key in KEYS
                }
                for name in mine
            }
            joins = {name: {"dim": specs[name].partition_dim, "shape": list(specs[name].shape)} for name in mine}
            values = {name: local[name][FP32].contiguous().clone() for name in mine}
            write_weights(part_file(folder, stage, rank), values, joins, rank, tensor)
            model_rank = stage * tensor + rank
            if zero_stage == 0:
                state = {
                    index: {STEP: torch.tensor(5.0), **{key: local[name][key] for key in MOMENTS}}
                    for index, name in enumerate(mine)
                }
                saved = {"module": values, "optimizer": {"state": state}, OPTIMIZER_NAMES: mine}
                torch.save(saved, engine / f"mp_rank_{model_rank:02d}_model_states.pt")
                continue
            groups = [group for group in (mine[: len(mine) // 2], mine[len(mine) // 2 :]) if group]
            cut = _zero3 if zero_stage == 3 else _zero12
            for data_rank, content in enumerate(cut(local, groups, data)):
                path = engine / f"zero_pp_rank_{data_rank}_mp_rank_{model_rank:02d}_optim_states.pt"
                torch.save({"optimizer_state_dict": content}, path)
            if zero_stage == 3:
                shapes = [OrderedDict((name, local[name][FP32].shape) for name in group) for group in groups]
                torch.save(
                    {"param_shapes": shapes}, engine / f"zero_pp_rank_0_mp_rank_{model_rank:02d}_model_states.pt"
                )
    layout = {"tensor": tensor, "pipeline": pipeline, "data": data, "sequence": 1}
    return {"layout": layout, "zero_stage": zero_stage, "state": {"step": 5}}


def _zero12(local: Tensors, groups: list[list[str]], data: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"param_slice_mappings": [], "single_partition_of_fp32_groups": [], "base_optimizer_state": {"state": {}}}
        for _ in range(data)
    ]
    for index, group in enumerate(groups):
        total = sum(local[name][FP32].numel() for name in group)
        piece = -(-total // data)
        flat = {
            key: torch.nn.functional.pad(
                torch.cat([local[name][key].flatten() for name in group]), (0, piece * data - total)
            )
            for key in KEYS
        }
        for rank, content in enumerate(found):
            low, high, start = rank * piece, (rank + 1) * piece, 0
            mapping: OrderedDict[str, fragment_address] = OrderedDict()
            for name in group:
                end = start + local[name][FP32].numel()
                first, last = max(start, low), min(end, high)
                if first < last:
                    mapping[name] = fragment_address(numel=last - first, start=first - low)
                start = end
            content["param_slice_mappings"].append(mapping)
            content["single_partition_of_fp32_groups"].append(flat[FP32][low:high].clone())
            state = {STEP: torch.tensor(5.0), **{key: flat[key][low:high].clone() for key in MOMENTS}}
            content["base_optimizer_state"]["state"][index] = state
    return found


def _zero3(local: Tensors, groups: list[list[str]], data: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"fp32_flat_groups": [], "optimizer_state_dict": {"state": {}}} for _ in range(data)]
    for index, group in enumerate(groups):
        for rank, content in enumerate(found):
            flat = {}
            for key in KEYS:
                pieces = []
                for name in group:
                    values = local[name][key].flatten()
                    piece = -(-values.numel() // data)
                    pieces.append(
                        torch.nn.functional.pad(values, (0, piece * data - values.numel())).view(data, piece)[rank]
                    )
                flat[key] = torch.cat(pieces)
            content["fp32_flat_groups"].append(flat[FP32])
            state = {STEP: torch.tensor(5.0), **{key: flat[key] for key in MOMENTS}}
            content["optimizer_state_dict"]["state"][index] = state
    return found


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, ParameterSpec]:
    specs = {}
    for index in range(draw(st.integers(2, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
        specs[f"layers.{index}.weight"] = ParameterSpec(shape, constant(0.0), dim)
    return specs


@settings(max_examples=60, deadline=None)
@given(
    specs=parameters(),
    tensor=st.integers(1, 4),
    pipeline=st.integers(1, 2),
    data=st.integers(1, 5),
    zero_stage=st.sampled_from([0, 1, 2, 3]),
    after=st.integers(1, 4),
)
def test_every_value_arrives(
    specs: dict[str, ParameterSpec], tensor: int, pipeline: int, data: int, zero_stage: int, after: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    full = {name: {key: torch.rand(spec.shape, generator=generator) for key in KEYS} for name, spec in specs.items()}
    folder = Path(tempfile.mkdtemp())
    try:
        sizes = {"tensor": tensor, "pipeline": pipeline, "data": data}
        manifest = write_native(folder, full, specs, sizes, zero_stage)
        seen: list[tuple[int, int]] = []
        form = universal.make(folder, manifest, lambda done, total: seen.append((done, total)))
        assert seen[-1] == (len(specs), len(specs)) and universal.whole(folder) == form
        for name, spec in specs.items():
            shape = local_shape(spec, after, 2)
            for key in KEYS:
                parts = [UniversalForm(form, rank).part(name, key, spec, shape) for rank in range(after)]
                assert all(tuple(part.shape) == shape for part in parts)
                assert torch.equal(unshard(parts, spec.shape, spec.partition_dim), full[name][key])
                held = 1 if spec.partition_dim is not None else after
                assert math.isclose(
                    float(sum(p.sum() for p in parts)), held * float(full[name][key].sum()), rel_tol=1e-4
                )
            assert UniversalForm(form, 0).step(name) == 5.0
    finally:
        shutil.rmtree(folder)


SPECS = {f"layers.{index}.weight": ParameterSpec((4, 6), constant(0.0), 0) for index in range(4)}


def checkpoint(folder: Path, zero_stage: int) -> tuple[dict[str, Any], Path]:
    full = {name: {key: torch.rand(spec.shape) for key in KEYS} for name, spec in SPECS.items()}
    manifest = write_native(folder, full, SPECS, {"tensor": 1, "pipeline": 1, "data": 2}, zero_stage)
    return manifest, folder / "engine"


def nothing(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def test_a_missing_partition_is_named(tmp_path: Path) -> None:
    manifest, engine = checkpoint(tmp_path, 1)
    (engine / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UserError, match=r"ranks \[0\] for model rank 0, should be 0 to 1"):
        universal.make(tmp_path, manifest, nothing)
    assert universal.whole(tmp_path) is None


def test_stage_zero_without_names_is_refused_with_a_way_out(tmp_path: Path) -> None:
    manifest, engine = checkpoint(tmp_path, 0)
    path = engine / "mp_rank_00_model_states.pt"
    saved = torch.load(path)
    del saved[OPTIMIZER_NAMES]
    torch.save(saved, path)
    with pytest.raises(UserError, match="resume it once on its own layout"):
        universal.make(tmp_path, manifest, nothing)


def test_another_model_is_refused(tmp_path: Path) -> None:
    manifest, _ = checkpoint(tmp_path, 3)
    form = UniversalForm(universal.make(tmp_path, manifest, nothing), 0)
    with pytest.raises(UserError, match=r"is \[4, 6\], this model needs \[5, 6\]"):
        form.part("layers.0.weight", FP32, ParameterSpec((5, 6), constant(0.0), 0), (5, 6))
    with pytest.raises(UserError, match="another model"):
        form.part("layers.9.weight", FP32, SPECS["layers.0.weight"], (4, 6))


def test_what_a_killed_conversion_left_is_written_anew(tmp_path: Path) -> None:
    manifest, _ = checkpoint(tmp_path, 1)
    left = tmp_path / f".{universal.FOLDER}.partial" / "zero" / "stray"
    left.mkdir(parents=True)
    assert universal.whole(tmp_path) is None
    form = universal.make(tmp_path, manifest, nothing)
    assert sorted(path.name for path in (form / "zero").iterdir()) == list(SPECS)
    assert not left.exists()
