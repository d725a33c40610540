"""The planner's layouts, micro-batches and choice; its answers for programs; its refusals."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightnet_llm.config import load_config
from lightnet_llm.config.run import RunConfig
from lightnet_llm.errors import UserError
from lightnet_llm.models import CausalLM, count_parameters
from lightnet_llm.parallel.legality import Choice, choice_of, choices, problem
from lightnet_llm.plan import memory, planner, report, rows
from lightnet_llm.plan.hardware import Hardware, load_hardware
from lightnet_llm.plan.memory import Parts, with_choice
from lightnet_llm.plan.step_time import step_time
from lightnet_llm.plan.traffic import link_of, traffic
from tests.conftest import ROOT

MIB = 2**20


def card(mebibytes: float = 80 * 1024, **figures: Any) -> Hardware:
    """An H100 with so much memory for a run and nothing lost, and other figures as given."""
    found = load_hardware("h100")
    found.memory_bytes, found.context_bytes, found.fragmentation = int(mebibytes * MIB), 0, 0.0
    for name, value in figures.items():
        setattr(found, name, value)
    return found


def tiny(*overrides: str) -> RunConfig:
    return load_config(str(Path(__file__).with_name("tiny.yaml")), list(overrides))


def brute_force(config: RunConfig, world: int) -> set[Choice]:
    """Legal with any micro-batch that could be asked for."""
    found = set()
    for shared in ("true", "false"):
        for micro in range(1, config.train.global_batch + 1):
            changed = {"train": config.train.model_copy(update={"micro_batch": micro})}
            own = with_choice(
                config.model_copy(update=changed), choice_of(config), tensor_sequence_parallel=shared == "true"
            )
            found |= {choice for choice in choices(own, world) if problem(own, choice, world) is None}
    return {choice for choice in found if choice.tensor > 1 or not choice.tensor_sequence_parallel}


@pytest.mark.parametrize("gibibytes", [1.5, 6, 9, 14, 40])
@pytest.mark.parametrize("name", ["pile_150m", "pile_379m"])
def test_every_layout_is_run_in_its_best_way(name: str, gibibytes: float) -> None:
    """As found by looking at every micro-batch and way to compute again: the shortest of those with memory to spare, else
    of those that fit, else the one that needs least."""
    config = load_config(name, ["train.global_batch=48", "parallel.recompute_every=3"])
    hardware, ways = card(1024 * gibibytes), [0, 1, 3]
    parts = Parts(config)
    for choice, micros in planner.legal_choices(config, 8):
        held, samples = parts.of(choice, 8), 48 * choice.model // 8
        found = []
        for micro in micros:
            for every in ways:
                needed = rows.worst(held, micro, every, samples // micro, hardware)[1].total
                over, close = needed > hardware.memory_bytes, needed > (1 - rows.CLOSE) * hardware.memory_bytes
                seconds = step_time(held, micro, every, samples // micro, hardware).total
                found.append((over, close, needed if over else seconds, micro, every))
        best = min(found)
        assert rows.best_way(held, micros, ways, samples, hardware)[:2] == best[3:], choice


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.global_batch=12", "data.sequence_length=7"],
        ["train.precision=bf16", "train.batch_ramp=[{until_step: 3, batch: 6}]", "train.global_batch=9"],
        ["model.drop_path=0.1"],
        ["model.mixer=softmax", "model.lrpe=false", "parallel.tensor_sequence_parallel=true"],
    ],
)
def test_all_legal_layouts_and_no_other(overrides: list[str], world: int) -> None:
    config = tiny(*overrides)
    found = planner.find(config, world, card())
    listed = [row.choice for row in found.rows] if found else []
    assert len(listed) == len(set(listed))
    assert set(listed) == brute_force(config, world)


@pytest.mark.parametrize("name", ["pile_150m", "wikitext103", "wikitext103_no_share", "cramming"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    model = load_config(name, ["model.layers=2"])
    assert Parts(model).model_parameters == count_parameters(CausalLM(model.model))
    assert Parts(load_config("pile_2.9b")).model_parameters == 2_960_271_360  # model-spec 6


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("mebibytes", [2, 6, 40])
def test_one_more_than_the_largest_micro_batch_does_not_fit(world: int, mebibytes: int) -> None:
    config, limits = tiny("deepspeed.zero_optimization.reduce_bucket_size=1000"), card(mebibytes)
    found = planner.find(config, world, limits)
    assert found is not None
    parts, some = Parts(config), 0
    for row in found.rows:
        held = parts.of(row.choice, world)
        for every, largest in row.largest_micro_batch.items():
            sizes = [rows.worst(held, m, every, len(held), limits)[1].total for m in (max(largest, 1), largest + 1)]
            assert (sizes[0] <= limits.memory_bytes) == (largest > 0)
            assert sizes[1] > limits.memory_bytes
            some += largest > 0
        assert (row.refused is None) == (row.memory.total <= limits.memory_bytes)
    assert some or mebibytes < 6


def test_recomputation_and_cuts_save_memory() -> None:
    config, h100 = load_config("pile_1b"), load_hardware("h100")
    parts = Parts(config)
    plain = choice_of(config)

    def needed(choice: Choice, every: int = 0, micro: int = 10) -> int:
        return rows.worst(parts.of(choice, 16), micro, every, 4, h100)[1].total

    assert needed(plain, 1) < needed(plain)
    assert needed(Choice(2, 1, 1, 1, False)) < needed(plain)
    assert needed(Choice(2, 1, 1, 1, True)) < needed(Choice(2, 1, 1, 1, False))
    assert needed(Choice(1, 1, 2, 1, False)) < needed(plain)
    assert needed(Choice(1, 1, 1, 2, False), 1) < needed(plain, 1)
    assert needed(plain, 0, 11) > needed(plain)


def test_memory_of_a_measured_run() -> None:
    """benchmarks/LOG.md: pile_379m, 16,384 tokens, ZeRO-1 on one H100: 27.2 GB at the peak (packed documents)."""
    config = load_config("pile_379m")
    part = Parts(config).of(choice_of(config), 1)[0]
    assert part.memory(8, 0, 1, load_hardware("h100")).allocated == pytest.approx(27.2e9, rel=0.05)


@pytest.mark.parametrize(
    ("file", "least"),
    [("buckets-nvidia-h200-x2-2026-11-30", 12), ("layouts-nvidia-h200-x2-2026-11-30", 4),
     ("planner-measured-nvidia-h200-2026-11-29", 3), ("planner-measured-nvidia-h200-x2-2026-11-30", 7),
     ("planner-measured-nvidia-h200-x2-2026-11-29", 4)],
)  # fmt: skip
def test_memory_of_kept_runs(file: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every configuration that was measured, of whatever layout, ZeRO stage and size of buckets, on its worst rank."""
    module = benchmark(monkeypatch)
    kept = json.loads((ROOT / "benchmarks" / f"{file}.json").read_text())
    rows = list(kept["cases"].values()) if "cases" in kept else kept["rows"]
    rows = [row for row in rows if "failed" not in row["measured"]]
    assert len(rows) >= least
    for row in rows:
        if "case" in row:
            case = module.Case(**{**row["case"], "more": tuple(row["case"]["more"])})
        else:
            own = dict(one.split("=", 1) for one in row["overrides"])
            batch, micro = int(own["train.global_batch"]), int(own["train.micro_batch"])
            case = module.Case(row["name"].split()[0], row["ranks"], batch, micro, more=tuple(row["overrides"]))
        assert module.predict(case, None, "h200")["allocated_bytes"] == pytest.approx(
            max(row["measured"]["allocated_bytes"]), rel=0.035
        ), row


def test_the_recommendation_can_be_run() -> None:
    for name, world in (("pile_150m", 8), ("pile_2.9b", 4), ("cramming", 2)):
        config = load_config(name)
        found = planner.plan(config, world, load_hardware("h100"))
        row = found.recommended
        assert row.refused is None
        assert row.time.total <= planner.ALIKE * min(other.time.total for other in found.fitting)
        run = load_config(name, found.overrides(row))
        assert problem(run, choice_of(run), world) is None
        assert choice_of(run) == row.choice
        assert run.train.global_batch == row.micro_batch * row.accumulation * row.data
        assert found.reason().count("\n") == 0
        assert found.reason().endswith(".")


def test_what_barely_fits_is_not_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction that is off by a few per cent must not end a run; where nothing else fits, that is said."""
    config, card = load_config("pile_1b", ["train.global_batch=34"]), load_hardware("h100")

    def alone() -> planner.Plan:
        found = planner.find(config, 1, card, wanted=lambda choice: choice.zero_stage == 1)
        assert found is not None
        return found

    held = Parts(config).of(choice_of(config), 1)
    assert 0.95 * card.memory_bytes < rows.worst(held, 17, 0, 2, card)[1].total <= card.memory_bytes
    row = alone().recommended
    assert row.micro_batch == 2 and not row.close and "with 5 % of the memory to spare" in alone().reason()
    card.memory_bytes = int(1.01 * rows.worst(held, 1, 1, 34, card)[1].total)
    assert alone().recommended.close and "try it before you trust it" in alone().reason()
    card = load_hardware("h100")
    monkeypatch.setattr(rows, "CLOSE", 0.0)
    assert alone().recommended.micro_batch == 17


def test_a_budget_of_hours() -> None:
    config = load_config("pile_150m", ["train.tokens=null", "train.hours=12"])
    found = planner.find(config, 2, load_hardware("h100"), wanted=lambda choice: choice.model == 1)
    assert found is not None and found.hours == 12
    row = found.recommended
    assert found.days(row) == 0.5 and report.cost(found, row, 2.0) == 12 * 2 * 2
    assert found.tokens(row) == pytest.approx(12 * 3600 * found.tokens_per_second(row))
    text = "\n".join(report.lines(found, price=2.0))
    assert ", 12 hours, on 2 x h100" in text and f"in 12 hours: {found.tokens(row):,} tokens" in text
    given = planner.find(
        load_config("pile_150m", ["train.hours=12", "train.tokens=null", "train.steps=10"]), 2, found.hardware
    )
    assert given is not None and given.hours is None and given.tokens(given.rows[0]) == 10 * 208 * 2048


def test_the_command_starts_so_many_cards() -> None:
    config, card = load_config("pile_150m", ["train.global_batch=192"]), load_hardware("h100")
    several = ["lightnet launch", "launch.nodes=3 launch.gpus_per_node=8"]
    for world, parts in ((2, ["lightnet train", "--gpus 2"]), (24, several)):
        found = planner.find(config, world, card, wanted=lambda choice: choice.model == 1)
        assert found is not None
        told = report.command(found, found.recommended, ["pile_150m", "train.global_batch=192"])
        assert all(part in told for part in parts) and " train.global_batch=192 " in told, told


def test_cards_without_nvlink_do_not_claim_it(tmp_path: Path) -> None:
    """Nor once they are calibrated, with a rate of their own."""
    assert load_hardware("l40s").nvlink.name == "PCIe" and load_hardware("h100").nvlink.name == "NVLink"
    rate = {"value": 2e10, "unit": "bytes a GPU sends per second", "source": "measured", "card": "NVIDIA L40S",
            "date": "2026-11-28", "assumed": False}  # fmt: skip
    card = {"card": "NVIDIA L40S", "peak": "L40S", "like": "l40s", "figures": {"nvlink_bytes_s": rate}}
    (tmp_path / "own.json").write_text(json.dumps({"format": 1, "cards": {"l40s": card}}))
    own = load_hardware("l40s", tmp_path / "own.json").nvlink
    assert (own.name, own.bytes_s) == ("PCIe", 2e10)


def test_refusals_name_the_limit() -> None:
    config = load_config("pile_2.9b")
    alone = planner.plan(config, 1, load_hardware("a100-40"))
    wanted = r"no layout .* 1 x a100-40.*GiB a card, which has 39\.4 GiB.*--gpus 2"
    assert re.search(wanted, str(alone.none_fits))
    with pytest.raises(UserError, match=wanted):
        _ = alone.recommended
    found = planner.plan(load_config("pile_2.9b", ["model.layers=48"]), 2, load_hardware("a100-40"))
    refused = [row for row in found.rows if row.refused]
    assert refused
    assert all("which has 39.4 GiB" in str(row.refused) and "peak in" in str(row.refused) for row in refused)


def test_bytes_by_hand() -> None:
    """Data parallelism in bf16: parts of fp32 sums, then new weights. Tensor parallelism: four sums a block."""
    config, h100 = load_config("pile_150m", ["model.tpe=false", "model.lrpe=false"]), load_hardware("h100")
    parts = Parts(config)
    count = parts.of(Choice(1, 1, 1, 1, False), 1)[0].trained
    moved = traffic(parts.of(Choice(1, 1, 1, 1, False), 4)[0], 26, 0, 2, h100)
    assert [(one.axis, one.bytes) for one in moved] == [("data", 3 * (2 * count) * 3 // 4)]
    sums = traffic(parts.of(Choice(2, 1, 1, 1, False), 2)[0], 26, 0, 1, h100)[0]
    tokens, width = 26 * 2048, 768
    whole = 2 * tokens * width
    assert sums.bytes == 15 * (4 * whole + 2 * tokens * 64) + 2 * whole + 12 * tokens
    again = traffic(parts.of(Choice(2, 1, 1, 1, False), 2)[0], 26, 1, 1, h100)[0]
    assert again.bytes - sums.bytes == 15 * 2 * whole
    stages = parts.of(Choice(1, 3, 1, 1, False), 3)
    sent = [traffic(part, 26, 0, 4, h100)[0] for part in stages]
    assert [one.bytes for one in sent] == [4 * whole, 8 * whole, 4 * whole]


def test_bytes_of_stage_3() -> None:
    """Blocks in bf16 and the rest in fp32, gathered and reduced; again for the backward pass where they do not stay."""
    h100, choice = load_hardware("h100"), Choice(1, 1, 1, 3, False)
    for overrides, again in (([], 0), (["deepspeed.zero_optimization.stage3_max_live_parameters=0"], 14)):
        overrides = [*overrides, "deepspeed.zero_optimization.stage3_max_reuse_distance=1"] if again else overrides
        config = load_config("pile_150m", ["parallel.zero_stage=3", *overrides])
        part = Parts(config).of(choice, 4)[0]
        block = 768 * (4 * 768 + 3 * config.model.glu_width) + 2 * 64 * 768
        rest = part.trained - 15 * block
        assert 50_304 * 768 < rest < 55_000 * 768
        moved = traffic(part, 2, 0, 3, h100)[0]
        assert moved.bytes == 3 * (2 * ((2 * 15 * block + 4 * rest) * 3 // 4) + 2 * again * block * 3 // 4)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("every", [0, 1])
def test_load_slows_computation_alone(stage: int, every: int) -> None:
    config = load_config("pile_379m", [f"parallel.zero_stage={stage}"])
    parts = Parts(config).of(choice_of(config), 4)
    plain, held = (
        step_time(parts, 8, every, 2, card(sustained=factor, host_block_s=0.0, host_stage_3_s=0.0))
        for factor in (1.0, 1.25)
    )
    for part in ("products", "scan", "elementwise", "loss", "recompute", "waiting", "bubble"):
        assert held.computation()[part] == pytest.approx(1.25 * plain.computation()[part])
    assert (held.optimizer, held.communication) == (plain.optimizer, plain.communication)
    assert held.products > 0 and (held.recompute > 0) == (every > 0)


def test_stage_3_waits_for_its_own_host() -> None:
    """A block's time of the host with hooks and without; where the device is slower, nothing waits."""
    for stage, seconds in ((1, 0.1), (2, 0.1), (3, 0.2)):
        config = load_config("pile_150m", [f"parallel.zero_stage={stage}"])
        held = Parts(config).of(choice_of(config), 2)
        slow = step_time(held, 1, 0, 3, card(host_block_s=0.1, host_stage_3_s=0.2))
        device = slow.products + slow.scan + slow.elementwise + slow.loss
        assert device + slow.waiting == pytest.approx(3 * 15 * seconds)
        assert step_time(held, 8, 0, 3, card(host_block_s=1e-5, host_stage_3_s=1e-5)).waiting == 0.0


@pytest.mark.parametrize(
    ("more", "seconds"),
    [
        (["parallel.tensor=2"], 0.3),
        (["parallel.tensor=2", "parallel.tensor_sequence_parallel=true"], 0.35),
        (["parallel.sequence=2"], 0.2),
        (["parallel.tensor=2", "parallel.sequence=2"], 0.4),
        (["parallel.sequence=2", "parallel.zero_stage=3"], 0.6),
    ],
)
def test_parallel_blocks_need_more_of_the_host(more: list[str], seconds: float) -> None:
    config = load_config("pile_150m", more)
    held = Parts(config).of(choice_of(config), 4)
    times = {"block": 0.1, "stage_3": 0.5, "tensor": 0.3, "shared": 0.35, "sequence": 0.2}
    slow = card(**{f"host_{name}_s": value for name, value in times.items()})
    found = step_time(held, 1, 0, 3, slow)
    assert found.products + found.scan + found.elementwise + found.loss + found.waiting == pytest.approx(45 * seconds)


def test_only_a_step_that_waits_counts_the_host() -> None:
    slow, found = card(host_step_s=1.0), {}
    for name, more in {"bf16": [], "fp32": ["train.precision=fp32"], "zero2": ["parallel.zero_stage=2"]}.items():
        config = load_config("pile_150m", more)
        found[name] = step_time(Parts(config).of(choice_of(config), 2), 1, 0, 1, slow).optimizer
        if name == "bf16":
            part = Parts(config).of(choice_of(config), 2)[0]
            twice = step_time([part], 1, 0, 2, slow).optimizer - found[name]
            assert found[name] == pytest.approx((42 / 2 + 6) * part.trained / slow.copy_bytes_s)
            assert twice == pytest.approx(10 * part.trained / slow.copy_bytes_s)
    assert found["bf16"] < 0.1 and found["fp32"] == found["zero2"] == 1.0


def test_links() -> None:
    h100 = load_hardware("h100")
    choice = Choice(2, 2, 2, 1, False)
    assert [link_of(choice, axis, 2, h100).name for axis in ("tensor", "sequence", "data", "pipeline")] == [
        "NVLink", "NVLink", "NVLink", "InfiniBand",
    ]  # fmt: skip
    three = Choice(1, 1, 3, 1, False)  # of which some lie on two hosts of eight, whose link is one port
    assert [link_of(three, "sequence", data, h100).name for data in (2, 8)] == ["NVLink", "InfiniBand"]
    assert link_of(three, "sequence", 8, h100).bytes_s == h100.infiniband.bytes_s
    assert link_of(three, "data", 8, h100).bytes_s == min(8 * h100.infiniband.bytes_s, h100.nvlink.bytes_s)


def test_hosts_are_those_of_the_command() -> None:
    h100, config = load_hardware("H100"), load_config("pile_1b", ["launch.nodes=4", "launch.gpus_per_node=4"])
    assert [planner.per_host(config, world, h100) for world in (2, 4, 6, 13, 16)] == [4, 4, 3, 1, 4]
    found = planner.plan(config, 16, h100)
    assert found.hardware.per_node == 4
    given = ("pile_1b", "launch.nodes=4", "launch.gpus_per_node=4")
    assert report.command(found, found.recommended, given).count("launch.gpus_per_node=4") == 1


def test_a_ring_over_hosts_has_all_ports() -> None:
    h100 = load_hardware("h100")
    port = h100.infiniband.bytes_s
    assert link_of(Choice(1, 1, 1, 1, False), "data", 16, h100).bytes_s == min(8 * port, h100.nvlink.bytes_s)
    assert link_of(Choice(4, 1, 1, 1, False), "data", 4, h100).bytes_s == 2 * port
    assert link_of(Choice(8, 1, 1, 1, False), "data", 4, h100).bytes_s == port
    assert link_of(Choice(2, 2, 1, 1, False), "pipeline", 8, h100).bytes_s == port


def test_step_time_adds_up() -> None:
    config, h100 = load_config("pile_1b"), card(host_block_s=0.0, host_step_s=0.0)
    parts = Parts(config)
    one = step_time(parts.of(Choice(1, 1, 1, 1, False), 1), 10, 0, 16, h100)
    assert one.total == pytest.approx(sum(one.computation().values()))
    assert one.waiting == one.bubble == 0.0
    assert not one.communication
    again = step_time(parts.of(Choice(1, 1, 1, 1, False), 1), 10, 1, 16, h100)
    assert 0.25 * one.products < again.recompute < 0.5 * one.products
    staged = step_time(parts.of(Choice(1, 2, 1, 1, False), 2), 10, 0, 16, h100)
    rounds = staged.products + staged.scan + staged.elementwise + staged.loss
    assert staged.bubble == pytest.approx(rounds / 16)
    slow = step_time(parts.of(Choice(1, 1, 1, 1, False), 1), 1, 0, 1, card(host_block_s=1.0))
    assert slow.waiting > 17.0


def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/planner.py."""
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("planner_benchmark", folder / "planner.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "planner_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_the_benchmarks_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten and more, three of them predicted before they are run, all legal and within a card."""
    module = benchmark(monkeypatch)
    assert len(module.CASES) >= 10
    assert sum(case.committed for case in module.CASES.values()) == 7
    for name, case in module.CASES.items():
        predicted = module.predict(case, None, "h100")
        assert predicted["total_bytes"] < 80e9, name
        assert predicted["step_seconds"] < 2, name


def test_a_stage_like_an_earlier_one_is_not_worked_out_again() -> None:
    """Nor is anything lost: what stages hold and keep is the most of all of them."""
    config = load_config("pile_1b", ["parallel.pipeline=6", "train.global_batch=12", "train.micro_batch=1"])
    held, h100 = Parts(config).of(choice_of(config), 12), load_hardware("h100")
    few = memory.distinct(held)
    assert len(few) < len(held) == 6
    for micro, every, accumulation in ((1, 0, 6), (4, 1, 2), (2, 0, 1)):
        whole = [part.memory(micro, every, accumulation, h100).total for part in held]
        assert rows.worst(held, micro, every, accumulation, h100)[1].total == max(whole)
        assert rows.worst(held, micro, every, accumulation, h100)[0] == whole.index(max(whole))
